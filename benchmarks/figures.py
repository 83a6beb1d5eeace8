"""A measured figure, what was wanted of it, and how pairs become one."""

from __future__ import annotations

import math
import operator
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    what: a sentence that stands alone. unit: "ratio", "ms", "%" … low and high: quartiles of a ratio, or None.
    wanted: ("≥" or "≤", number), or None if nothing was promised. details: whatever else is worth keeping.
    """

    name: str
    what: str
    value: float
    unit: str
    count: int
    wanted: tuple[str, float] | None = None
    low: float | None = None
    high: float | None = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_met(self) -> bool | None:
        """Whether it is as wanted; None if nothing was."""
        if self.wanted is None:
            return None
        sign, number = self.wanted
        return bool({"≥": operator.ge, "≤": operator.le}[sign](self.value, number))


def take_turns(sides: Sequence[Callable[[], float]], rounds: int) -> list[tuple[float, ...]]:
    """Measure all sides once a round, after one warm-up of each; every round begins with another one."""
    for side in sides:
        side()
    measured: list[tuple[float, ...]] = []
    for turn in range(rounds):
        values: dict[int, float] = {}
        for step in range(len(sides)):
            index = (turn + step) % len(sides)
            values[index] = sides[index]()
        measured.append(tuple(values[index] for index in range(len(sides))))
    return measured


def ratio(
    name: str,
    what: str,
    pairs: Sequence[tuple[float, float]],
    wanted: tuple[str, float] | None,
    **details: Any,
) -> Figure:
    """Return the median of first ÷ second, with quartiles and both medians."""
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {
        "first": round(statistics.median(a for a, _ in pairs), 4),
        "second": round(statistics.median(b for _, b in pairs), 4),
    }
    return Figure(
        name,
        what,
        round(middle, 3),
        "ratio",
        len(pairs),
        wanted,
        round(low, 3),
        round(high, 3),
        {**medians, **details},
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99 and the maximum."""
    return {
        "p50": round(percentile(values, 50), 4),
        "p90": round(percentile(values, 90), 4),
        "p99": round(percentile(values, 99), 4),
        "max": round(max(values), 4),
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "llama-cpp-python": metadata.version("llama-cpp-python"),
        "anyio": metadata.version("anyio"),
        "msgpack": metadata.version("msgpack"),
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
