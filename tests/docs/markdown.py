"""Read Markdown as far as the tests of the documents need it: code blocks, tables, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced code block. line: where its first line of code is."""

    language: str
    text: str
    line: int


def documents() -> list[Path]:
    """Return every Markdown file of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks(path: Path, language: str | None = None) -> list[Block]:
    """Return the code blocks of a file, all or those of one language."""
    found: list[Block] = []
    inside: list[str] | None = None
    name, start = "", 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            name, start, inside = line[3:].strip(), number + 1, []
        else:
            found.append(Block(name, "\n".join(inside) + "\n", start))
            inside = None
    assert inside is None, f"{path.name}: the code block at line {start} isn't closed"
    return [block for block in found if language is None or block.language == language]


def table(path: Path, first_header: str) -> list[list[str]]:
    """Return the rows, as lists of cells, of all tables whose first header is this one."""
    rows: list[list[str]] = []
    header: str | None = None
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = cells[0]
        elif header == first_header and not set(line) <= set("|-: "):
            rows.append(cells)
    assert rows, f"{path.name} has no table that begins with {first_header!r}"
    return rows


def code_names(cell: str) -> list[str]:
    """Return what stands in backquotes in a table's cell."""
    return re.findall(r"`([^`]+)`", cell)


def links(path: Path) -> list[str]:
    """Return the targets of all links outside code blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a file."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
