"""Put the figures of results.json into the documents: `python -m benchmarks.publish`.

They go between `<!-- figures:begin BLOCK -->` and `<!-- figures:end -->`, so that no number is ever typed by hand.
"""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.__main__ import NAMES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
DOCUMENTS = ("README.md", "docs/cancellation.md", "docs/benchmarks.md")
BLOCKS: dict[str, tuple[str, ...]] = {
    "headline": (
        "decode_vs_in_process", "decode_vs_bare_loop", "cancel_decode_p99", "cancel_prefill_p99",
        "cancel_kill_over_graces_max", "restart_vs_load", "paused_ahead", "paused_worker_cpu", "idle_parent_rss",
        "streams_vs_one", "streams_vs_native", "company_gap", "company_prefill", "second_turn",
        "http_leave_prefill", "http_leave_decode", "http_speed_1", "http_speed_4", "http_ttft",
    ),
    "cancellation": (
        "cancel_decode_p99", "cancel_prefill_p99", "cancel_signal_over_grace_max", "cancel_kill_over_graces_max",
    ),
    "all": (),
    "survival": (),
    "streams": (),
    "service": (),
    "profile": ("profile_parent", "profile_worker"),
}  # fmt: skip
"""Which figures a block shows; none named means all of the benchmarks in `WHOLE`."""
WHOLE: dict[str, tuple[str, ...]] = {
    "all": NAMES,
    "survival": ("resume", "snapshots", "exactness", "waiting"),
    "streams": ("batching", "prefix", "company", "same_texts", "logprobs"),
    "service": ("http_leaving", "http_speed", "http_slow_reader"),
}
MARKED = re.compile(r"(<!-- figures:begin (\w+) -->\n).*?(<!-- figures:end -->)", re.DOTALL)


def figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all figures in the order of the file."""
    return [figure for benchmark in results.values() for figure in benchmark["figures"]]


def block(name: str, results: dict[str, Any]) -> str:
    """Return the table of a block. Raises KeyError for a block or a figure that doesn't exist."""
    by_name = {figure["name"]: figure for figure in figures(results)}
    whole = {benchmark: results[benchmark] for benchmark in WHOLE.get(name, ()) if benchmark in results}
    chosen = [by_name[wanted] for wanted in BLOCKS[name]] or figures(whole)
    rows = [f"| {figure['what']} | {_value(figure)} | {_wanted(figure)} |" for figure in chosen]
    shown = {figure["name"] for figure in chosen}
    sources = {
        name: benchmark["machine"]
        for name, benchmark in results.items()
        if any(figure["name"] in shown for figure in benchmark["figures"])
    }
    where = (
        f"{_machines(sources)}; SmolLM2 135M, greedy, 128 tokens, 2 threads unless it says otherwise. Ratios are "
        "medians of pairs measured in turn, with quartiles."
    )
    return "\n".join(["", "| what | measured | wanted |", "|---|---|---|", *rows, "", where, "", ""])


def _machines(sources: dict[str, Any]) -> str:
    """Return on which machine the benchmarks ran, told apart if there were several."""
    by_machine: dict[str, list[str]] = {}
    for name, machine in sources.items():
        told = (
            f"{machine['cpu']}, {machine['cores']} virtual cores, {machine['system']}, Python {machine['python']}, "
            f"llama-cpp-python {machine['llama-cpp-python']}"
        )
        by_machine.setdefault(told, []).append(name)
    if len(by_machine) == 1:
        return next(iter(by_machine))
    return "; ".join(f"{told} ({', '.join(names)})" for told, names in by_machine.items())


def _value(figure: dict[str, Any]) -> str:
    unit = "" if figure["unit"] == "ratio" else f" {figure['unit']}"
    spread = "" if figure["low"] is None else f" ({figure['low']:.2f} – {figure['high']:.2f})"
    value = f"{figure['value']:.2f}" if figure["unit"] == "ratio" else f"{figure['value']:g}"
    return f"{value}{unit}{spread}"


def _wanted(figure: dict[str, Any]) -> str:
    if figure["wanted"] is None:
        return "–"
    sign, number = figure["wanted"]
    number = f"{number:.2f}" if figure["unit"] == "ratio" else f"{number:g} {figure['unit']}"
    return f"{sign} {number}" + ("" if figure["is_met"] else ", **missed**")


def profile(results: dict[str, Any]) -> str:
    """Return the functions that take most of a token's time, parent and worker side by side."""
    by_name = {figure["name"]: figure for figure in figures(results)}
    sides = [by_name[name] for name in BLOCKS["profile"]]
    heads = [f"{figure['what']}: {_value(figure)}" for figure in sides]
    columns = [
        [f"{share:g} % `{name}`" for name, share in figure["details"]["own_time_percent"].items()]
        for figure in sides
    ]
    rows = [f"| {left} | {right} |" for left, right in zip_longest(*columns, fillvalue="")]
    return "\n".join(["", f"| {' | '.join(heads)} |", "|---|---|", *rows, "", ""])


def published(text: str, results: dict[str, Any]) -> str:
    """Return a document with its blocks filled."""

    def filled(found: re.Match[str]) -> str:
        made = profile(results) if found[2] == "profile" else block(found[2], results)
        return found[1] + made + found[3]

    return MARKED.sub(filled, text)


def check(results: dict[str, Any]) -> None:
    """Raise SystemExit if a benchmark is missing or was only tried."""
    for name in NAMES:
        if name not in results or results[name]["quick"]:
            raise SystemExit(
                f"{RESULTS} has no figures of {name!r} to publish: run `make bench BENCH={name}`"
            )


if __name__ == "__main__":
    told = json.loads(RESULTS.read_text())
    check(told)
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(published(path.read_text(), told))
