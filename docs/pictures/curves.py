"""Draw what a step budget trades: python docs/pictures/curves.py

step_budget.svg shows the curve in benchmarks/results.json (company_gap, as benchmarks/company.py measured it): how
much longer the gaps of a running stream are while a long prompt is read beside it, against how much longer that
prompt takes. Plain SVG text; a test compares it with the results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks/results.json"
PICTURE = HERE / "step_budget.svg"
COMMAND = "python docs/pictures/curves.py"

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 728, 28, 372
LABEL_HEIGHT, LETTER_WIDTH = 15, 6.6

STYLE = """
  text { font: 500 12px "Helvetica Neue", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .tick, .axis { fill: #59636e; } .tick { font-weight: 400; font-size: 11px; }
  .x { text-anchor: middle; } .y { text-anchor: end; }
  .ground { fill: #ffffff; }
  .grid { stroke: #d8dee4; } .frame { fill: none; stroke: #8c959f; }
  .wanted { fill: #e2f5e6; } .promise { fill: #23813c; }
  .curve { fill: none; stroke: #3b6fc9; stroke-width: 2; }
  .point { fill: #3b6fc9; } .chosen { fill: #c4432b; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .tick, .axis { fill: #9da7b1; }
    .ground { fill: #161b22; }
    .grid { stroke: #30363d; } .frame { stroke: #6e7781; }
    .wanted { fill: #16331f; } .promise { fill: #4fbf6b; }
    .curve { stroke: #6ea2f5; } .point { fill: #6ea2f5; } .chosen { fill: #f0806a; }
  }
"""


class Scale:
    """Where a pair of ratios stands: gaps along a logarithmic axis, the prompt's time along a linear one."""

    def __init__(self, gaps: Sequence[float], prefills: Sequence[float]) -> None:
        self._first = math.floor(math.log2(min(gaps)))
        self._last = max(self._first + 1, math.ceil(math.log2(max(gaps))))
        self._low = min(1.0, math.floor(min(prefills) * 4) / 4)
        self._high = max(self._low + 0.5, math.ceil(max(prefills) * 4) / 4)

    def x(self, gap: float) -> float:
        """Return the place of a gap's ratio, at most at the right edge."""
        share = (math.log2(gap) - self._first) / (self._last - self._first)
        return LEFT + min(1.0, max(0.0, share)) * (RIGHT - LEFT)

    def y(self, prefill: float) -> float:
        """Return the place of the prompt's ratio."""
        share = (prefill - self._low) / (self._high - self._low)
        return BOTTOM - min(1.0, max(0.0, share)) * (BOTTOM - TOP)

    @property
    def x_ticks(self) -> list[float]:
        """Powers of two."""
        return [2.0**power for power in range(self._first, self._last + 1)]

    @property
    def y_ticks(self) -> list[float]:
        """Quarters, or whole numbers if that were too many lines."""
        step = next(step for step in (0.25, 0.5, 1.0, 2.0, 5.0, 1e9) if (self._high - self._low) / step <= 8)
        return [self._low + step * number for number in range(int((self._high - self._low) / step) + 1)]


def curve(results: Mapping[str, Any]) -> tuple[list[dict[str, Any]], tuple[float, float]]:
    """Return the points, and the most that was wanted of both ratios. Raises SystemExit if nothing was measured."""
    figures = {figure["name"]: figure for found in results.values() for figure in found["figures"]}
    if "company_gap" not in figures:
        raise SystemExit(f"{RESULTS} has no curve: run `make bench BENCH=company`")
    gap, prefill = figures["company_gap"], figures["company_prefill"]
    return gap["details"]["curve"], (gap["wanted"][1], prefill["wanted"][1])


def picture(points: Sequence[Mapping[str, Any]], wanted: tuple[float, float]) -> str:
    """Return the SVG: one point for each budget, the default marked, and the corner that was wanted."""
    scale = Scale(
        [*(point["gap"] for point in points), wanted[0]], [*(point["prefill"] for point in points), wanted[1]]
    )
    right, top = scale.x(wanted[0]), scale.y(wanted[1])
    lines = [
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<rect class="wanted" x="{LEFT}" y="{top:.1f}" width="{right - LEFT:.1f}" height="{BOTTOM - top:.1f}"/>',
        f'<text class="promise" x="{LEFT + 8}" y="{BOTTOM - 10}">wanted: ≤ {wanted[0]:g} ×, '
        f"≤ {wanted[1]:g} ×</text>",
    ]
    for gap in scale.x_ticks:
        x = scale.x(gap)
        lines += [
            f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}"/>',
            f'<text class="tick x" x="{x:.1f}" y="{BOTTOM + 18}">{gap:g} ×</text>',
        ]
    for prefill in scale.y_ticks:
        y = scale.y(prefill)
        lines += [
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>',
            f'<text class="tick y" x="{LEFT - 8}" y="{y + 4:.1f}">{prefill:g} ×</text>',
        ]
    lines += [
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>',
        f'<text class="axis x" x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 46}">'
        "gap of a running stream while a long prompt is read, p95 ÷ alone</text>",
        f'<text class="axis x" transform="translate(26 {(TOP + BOTTOM) / 2:g}) rotate(-90)">'
        "time to first token of that prompt ÷ alone</text>",
    ]
    # The default is a point of the same kind, but no budget: it isn't part of the line.
    budgets = sorted(
        (point for point in points if point["step_budget_ms"] is not None), key=lambda p: p["step_budget_ms"]
    )
    way = " ".join(f"{scale.x(point['gap']):.1f},{scale.y(point['prefill']):.1f}" for point in budgets)
    lines.append(f'<polyline class="curve" points="{way}"/>')
    taken: list[tuple[float, float, float, float]] = []
    for point in sorted(points, key=lambda point: point["step_budget_ms"] is not None):
        lines += _point(scale.x(point["gap"]), scale.y(point["prefill"]), point["step_budget_ms"], taken)
    title = "What a step budget trades: gaps of running streams against the time that a long prompt takes"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img">',
            f"<!-- Drawn by {COMMAND} from benchmarks/results.json -->",
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            *lines,
            "</svg>",
            "",
        ]
    )


def _point(
    x: float, y: float, budget_ms: float | None, taken: list[tuple[float, float, float, float]]
) -> list[str]:
    """Return a point and its label, where that covers no other; note the place that it takes."""
    label = "default" if budget_ms is None else f"{budget_ms:g} ms"
    width = len(label) * LETTER_WIDTH
    boxes = [
        (left, middle - LABEL_HEIGHT / 2, left + width, middle + LABEL_HEIGHT / 2)
        for distance in (12, 28, 44)
        for left, middle in (
            (x + 9, y - distance), (x - 9 - width, y + distance),
            (x + 9, y + distance), (x - 9 - width, y - distance),
        )
    ]  # fmt: skip
    free = [box for box in boxes if not any(_cover(box, other) for other in taken) and box[2] < RIGHT]
    box = (free or boxes)[0]
    taken += [box, (x - 5, y - 5, x + 5, y + 5)]
    kind = "chosen" if budget_ms is None else "point"
    return [
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{5.5 if budget_ms is None else 4.5}"/>',
        f'<text class="{kind if budget_ms is None else "label"}" x="{box[0]:.1f}" y="{box[3] - 3.5:.1f}">'
        f"{label}</text>",
    ]


def _cover(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


if __name__ == "__main__":
    PICTURE.write_text(picture(*curve(json.loads(RESULTS.read_text()))))
