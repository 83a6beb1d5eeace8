"""Draw the four life cycles as pictures: python docs/pictures/diagrams.py

They come from the tables in protocol/machines, row by row. Each picture holds the source that it was drawn from
as a comment, so that a test can tell, without Graphviz, whether it is still the right one. Drawing needs the
program `dot` (on Debian and Ubuntu: the package graphviz).
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from infervisor.protocol.machines.attempt import ATTEMPT
from infervisor.protocol.machines.process import PROCESS
from infervisor.protocol.machines.request import REQUEST
from infervisor.protocol.machines.slot import SLOT
from infervisor.protocol.machines.table import Table

HERE = Path(__file__).parent
TABLES: tuple[Table[Any], ...] = (REQUEST, ATTEMPT, PROCESS, SLOT)
COMMAND = "python docs/pictures/diagrams.py"
MANY = 3
"""From so many phases on, an event that leads from every phase to the same one is drawn once."""

STYLE = """
  .graph > polygon { fill: #ffffff; stroke: none; }
  text { fill: #1f2328; font-family: "Helvetica Neue", Helvetica, Arial, sans-serif; }
  text[font-size="10.00"] { fill: #59636e; }
  .node path, .node polygon, .node ellipse { fill: #eaf2ff; stroke: #3b6fc9; }
  .start path { fill: #e2f5e6; stroke: #2c8a45; }
  .final path { fill: #ececf0; stroke: #6e7781; stroke-width: 2; }
  .any path { fill: none; stroke: #8c959f; stroke-dasharray: 3,3; }
  .edge path { stroke: #57606a; }
  .edge polygon { fill: #57606a; stroke: #57606a; }
  @media (prefers-color-scheme: dark) {
    .graph > polygon { fill: #161b22; }
    text { fill: #e6edf3; }
    text[font-size="10.00"] { fill: #9da7b1; }
    .node path, .node polygon, .node ellipse { fill: #1b2a44; stroke: #6ea2f5; }
    .start path { fill: #16331f; stroke: #4fbf6b; }
    .final path { fill: #2b3038; stroke: #9da7b1; }
    .any path { fill: none; }
    .edge path { stroke: #9da7b1; }
    .edge polygon { fill: #9da7b1; stroke: #9da7b1; }
  }
"""


def state_diagram(table: Table[Any]) -> str:
    """Return the DOT source of a life cycle. Rows that keep the phase stand in its box."""
    phases = list(dict.fromkeys(phase for phase, _ in table.rows))
    phases.sort(key=list(type(phases[0])).index)
    kept: dict[str, list[str]] = {phase: [] for phase in phases}
    sources: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (phase, event), row in table.rows.items():
        if row.to == (phase,):
            kept[phase].append(event.__name__)
            continue
        for to in row.to:
            sources[event.__name__, to].append(phase)
    leaving = {phase for froms in sources.values() for phase in froms}
    unseen = {to for _, to in sources} - set(phases)
    phases += [phase for phase in type(phases[0]) if phase in unseen]  # a last phase may have no rows
    lines = [
        f'digraph "{table.name}" {{',
        "  graph [rankdir=TB, nodesep=0.5, ranksep=0.5, pad=0.3];",
        '  node [shape=box, style=rounded, fontname="Helvetica", fontsize=14, margin="0.2,0.1"];',
        '  edge [fontname="Helvetica", fontsize=12, arrowsize=0.8];',
    ]
    for phase in phases:
        kind = "start" if phase == phases[0] else "phase" if phase in leaving else "final"
        label = f"<b>{phase}</b>"
        if names := kept.get(phase):
            label += f'<br/><font point-size="10">unchanged by {_wrapped(names)}</font>'
        lines.append(f'  {phase} [class="{kind}", label=<{label}>];')
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    everywhere: dict[str, list[str]] = defaultdict(list)
    for (event, to), froms in sources.items():
        if len(froms) >= MANY and set(froms) == leaving - {to}:
            everywhere[to].append(event)
        else:
            for phase in froms:
                edges[phase, to].append(event)
    for to, events in everywhere.items():
        is_alone = not any(end == to for _, end in edges)
        lines.append(f'  any_{to} [class="any", label=<<font point-size="10">any phase before</font>>];')
        edges[f"any_{to}", to] = events
        if is_alone:
            # Nothing else holds it in its place, below the phase that comes before it.
            lines.append(f"  {phases[phases.index(to) - 1]} -> {to} [style=invis];")
    for (phase, to), events in edges.items():
        label = "\\n".join(events)
        lines.append(f'  {phase} -> {to} [label="  {label}  "];')
    return "\n".join([*lines, "}", ""])


def _wrapped(names: list[str]) -> str:
    rows = [", ".join(names[at : at + 2]) for at in range(0, len(names), 2)]
    return ",<br/>".join(rows)


def embedded_source(svg: str) -> str | None:
    """Return the source that a picture was drawn from, or None if it doesn't say."""
    found = re.search(rf"<!-- Drawn by {re.escape(COMMAND)} from:\n(.*?)-->", svg, flags=re.DOTALL)
    return found and found[1]


def picture(source: str) -> str:
    """Return the SVG of a DOT source: on its own ground, so that it can be read on a light page and a dark one."""
    assert "--" not in source, "two hyphens can't stand in a comment of an SVG"
    drawn = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True, check=True).stdout
    drawn = re.sub(r"<!--.*?-->\n?", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!DOCTYPE.*?>\n?", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r' font-family="[^"]*"', "", drawn)
    drawn = re.sub(r'<g id="[^"]*" class="node.*?</g>', _centred, drawn, flags=re.DOTALL)
    head, svg, rest = drawn.partition("<svg")
    opening, end, body = rest.partition(">")
    comment = f"<!-- Drawn by {COMMAND} from:\n{source}-->\n"
    return f"{head}{comment}{svg}{opening}{end}\n<style>{STYLE}</style>{body}"


def _centred(node: re.Match[str]) -> str:
    # The reader's font is not the one that Graphviz measured: lines of text begin where that would begin.
    shape = re.search(r' (?:d|points)="([^"]*)"', node[0])
    if shape is None:
        return node[0]
    xs = [float(x) for x in re.findall(r"(-?[\d.]+),", shape[1])]
    centre = (min(xs) + max(xs)) / 2
    return re.sub(r'text-anchor="start" x="[^"]*"', f'text-anchor="middle" x="{centre:g}"', node[0])


if __name__ == "__main__":
    for table in TABLES:
        (HERE / f"{table.name}.svg").write_text(picture(state_diagram(table)))
