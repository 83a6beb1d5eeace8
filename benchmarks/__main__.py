"""Run the benchmarks in turn, print a table, write JSON: `python -m benchmarks [NAME…] [--quick] [--json PATH]`.

Wants a machine with nothing else to do. Without names all of them run; with names, the other figures in the JSON
file stay as they are. A quick run shows that it works, and writes nothing unless it is told where.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import Figure, machine

NAMES = (
    "decode_rate",
    "throughput",
    "latency",
    "cancel",
    "restart",
    "resume",
    "snapshots",
    "exactness",
    "waiting",
    "idle_and_paused",
    "openmp_waiting",
    "profile_tokens",
    "batching",
    "prefix",
    "company",
    "same_texts",
    "logprobs",
    "http_leaving",
    "http_speed",
    "http_slow_reader",
)
RESULTS = Path(__file__).parent / "results.json"


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Which: {', '.join(NAMES)}.")] = None,
    quick: Annotated[bool, typer.Option(help="Few rounds: shows that it runs, measures nothing.")] = False,
    to: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Measure, print, and write."""
    for name in names or ():
        if name not in NAMES:
            raise typer.BadParameter(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    to = RESULTS if to is None and not quick else to
    kept: dict[str, Any] = json.loads(to.read_text()) if names and to is not None and to.exists() else {}
    for name in names or NAMES:
        load, started = os.getloadavg()[0], time.monotonic()
        figures: list[Figure] = importlib.import_module(f"benchmarks.{name}").measure(quick)
        kept[name] = {
            "machine": machine(),
            "quick": quick,
            "date": time.strftime("%Y-%m-%d"),
            "load_before": round(load, 2),
            "seconds": round(time.monotonic() - started),
            "figures": [{**asdict(figure), "is_met": figure.is_met} for figure in figures],
        }
        typer.echo(f"== {name}: {time.monotonic() - started:.0f} s, load before {load:.2f}")
        for figure in figures:
            typer.echo(_line(figure))
        if to is not None:
            ordered = {known: kept[known] for known in NAMES if known in kept}
            to.write_text(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n")


def _line(figure: Figure) -> str:
    spread = "" if figure.low is None else f" ({figure.low:g} to {figure.high:g})"
    wanted = "" if figure.wanted is None else f", wanted {figure.wanted[0]} {figure.wanted[1]:g}"
    mark = {True: "ok  ", False: "MISS", None: "    "}[figure.is_met]
    return f"  {mark} {figure.value:g} {figure.unit}{spread}{wanted}: {figure.what} [{figure.count}]"


if __name__ == "__main__":
    typer.run(main)
