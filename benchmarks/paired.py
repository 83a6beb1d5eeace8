"""Two things measured in turn in one run, and what is told of them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any


def pairs(first: Callable[[], float], second: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Measure both `count` times in turn, each time in the other order, after one warm-up of each."""
    first()
    second()
    measured: list[tuple[float, float]] = []
    for index in range(count):
        if index % 2:
            b = second()
            a = first()
        else:
            a = first()
            b = second()
        measured.append((a, b))
    return measured


def ratio(measured: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the median of first ÷ second, its quartiles, and both medians."""
    ratios = sorted(a / b for a, b in measured)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio_median": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "first_median": round(statistics.median(a for a, _ in measured), 4),
        "second_median": round(statistics.median(b for _, b in measured), 4),
        "pairs": len(measured),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, p99 (nearest rank) and maximum."""
    ordered = sorted(values)
    rank = min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[rank],
        "max": ordered[-1],
        "count": len(ordered),
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "llama-cpp-python": metadata.version("llama-cpp-python"),
        "load_before": os.getloadavg()[0],
    }


def tell(name: str, figures: dict[str, Any]) -> None:
    """Print one benchmark's result as JSON."""
    json.dump({"benchmark": name, "machine": machine(), **figures}, sys.stdout, indent=2)
    print()
