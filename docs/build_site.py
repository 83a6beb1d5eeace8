"""Build the documents as a site: python docs/build_site.py [--to FOLDER]

Stages the Markdown files of the project in a temporary folder, each in its place, so that links between them are
the same there as in the checkout. A link to a source file leads to a page that shows it, a link to a folder to a
page that lists it. Then mkdocs builds build/site (mkdocs.yml); every warning is an error. Needs the extra `docs`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build/site"
LANGUAGES = {".py": "python", ".c": "c", ".toml": "toml", ".md": "markdown"}
PICTURES = {".svg", ".png", ".jpg", ".gif", ".webp"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```)", flags=re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Return the Markdown files of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


class Stage:
    """The folder that mkdocs reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pages: set[Path] = set()

    def fill(self) -> None:
        """Write every document and every page that one of them links to."""
        for document in documents():
            self._write(document.relative_to(ROOT), self.relinked(document.parent, document.read_text()))
        shutil.copy(ROOT / "docs/site.css", self.folder / "docs")
        self._folder_page(ROOT / "docs/adr")

    def relinked(self, folder: Path, text: str) -> str:
        """Return Markdown whose links to sources and folders lead to their pages."""
        parts = FENCE.split(text)
        parts[::2] = [
            LINK.sub(lambda link: link[1] + self._target(folder, link[2]) + link[3], part)
            for part in parts[::2]
        ]
        return "".join(parts)

    def _target(self, folder: Path, link: str) -> str:
        place, hash_, anchor = link.partition("#")
        if "://" in link or not place:
            return link
        path = (folder / place).resolve()
        if path.is_dir():
            page = self._folder_page(path)
        elif path.suffix == ".md":
            return link
        elif path.suffix in PICTURES:
            copy = self.folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            return link
        else:
            page = self._source_page(path)
        return os.path.relpath(page, folder.relative_to(ROOT)) + hash_ + anchor

    def _source_page(self, path: Path) -> Path:
        name = path.relative_to(ROOT)
        page = name.with_name(f"{name.name}.md")
        if page not in self._pages:
            self._write(page, f"# {_literal(str(name))}\n\n{_code(path)}")
        return page

    def _folder_page(self, path: Path) -> Path:
        name = path.relative_to(ROOT)
        page = name / "README.md"
        if page in self._pages or (ROOT / page).exists():
            return page
        self._pages.add(page)
        lines = []
        for entry in sorted(path.iterdir()):
            if entry.suffix == ".md":
                title = entry.read_text().partition("\n")[0].removeprefix("# ")
                lines.append(f"- [{title}]({entry.name})")
            elif entry.suffix == ".py":
                lines.append(
                    f"- [{_literal(entry.name)}]({self._source_page(entry).name}): {_summary(entry)}"
                )
        self._write(page, f"# {_literal(str(name))}\n\n" + "\n".join(lines) + "\n")
        return page

    def _write(self, page: Path, text: str) -> None:
        self._pages.add(page)
        target = self.folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _literal(name: str) -> str:
    return name.replace("_", r"\_")


def _summary(path: Path) -> str:
    found = re.match(r'"""(.*)', path.read_text())
    return found[1].removesuffix('"""') if found else ""


def _code(path: Path) -> str:
    return f"````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


def build(site: Path) -> int:
    """Stage, build into `site`, and return mkdocs' exit code."""
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        Stage(Path(folder)).fill()
        # Not --quiet, which would keep --strict from seeing warnings. The variable keeps the theme from advertising
        # its successor, which would drown what matters.
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(site)],
            cwd=ROOT,
            env={**os.environ, "DOCUMENTS": folder, "NO_MKDOCS_2_WARNING": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documents as a site.")
    parser.add_argument("--to", type=Path, default=SITE, help="the folder of the site: build/site")
    arguments = parser.parse_args()
    code = build(arguments.to.resolve())
    if code == 0:
        site = arguments.to.resolve()
        print(f"docs: {site / 'index.html'}; with search and all links: python3 -m http.server -d {site}")
    sys.exit(code)
