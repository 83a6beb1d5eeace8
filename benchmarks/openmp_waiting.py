"""Decode rate under each way of waiting at OpenMP's barriers ÷ that of `active`, idle and with a busy core.

SmolLM2, greedy, 128 tokens, 2 threads, the engine without a worker around it. Each measurement is a fresh process,
since the library reads its settings once; the ways take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks.decode_rate import busy_core
from benchmarks.figures import Figure

WAYS = {
    "active": {"OMP_WAIT_POLICY": "active"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 2000 (default)": {},
    "spin 20000": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000"},
}
TOKENS = 128
MEASURE = """
import sys, time
from infervisor import default_model
from infervisor.protocol.generation import Limits, Sampling
from infervisor.protocol.messages import Submit
from infervisor.worker.engines.llama.engine import LlamaEngine

engine = LlamaEngine()
engine.load(str(default_model()), {"threads": 2}, lambda phase, fraction: None)
sampling = Sampling(temperature=0).to_wire()
submit = Submit(1, "Once upon a time", None, sampling, 1, None, True, Limits().to_wire(), 1, ())
engine.open(0, submit, lambda function: function())
stamps = []
while len(stamps) < int(sys.argv[1]):
    outcomes = engine.step([0])
    if outcomes and hasattr(outcomes[0], "token"):
        stamps.append(time.monotonic())
print((len(stamps) - 1) / (stamps[-1] - stamps[0]))
"""


def rate(settings: dict[str, str]) -> float:
    """Return tokens/s of one fresh process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))} | settings
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(TOKENS)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    return float(done.stdout)


def ratios(rounds: int) -> dict[str, list[float]]:
    """Return each way's rate ÷ that of `active` in the same round."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        rates = {name: rate(settings) for name, settings in WAYS.items()}
        for name, value in rates.items():
            found[name].append(value / rates["active"])
    return found


def measure(quick: bool) -> list[Figure]:
    """Measure each way, idle and beside a busy core."""
    rounds = 2 if quick else 7
    idle = ratios(rounds)
    with busy_core():
        busy = ratios(rounds)
    figures: list[Figure] = []
    for where, found in (("idle", idle), ("one core busy", busy)):
        for name, values in found.items():
            if name != "active":
                figures.append(
                    Figure(
                        f"openmp_{name.split(' (')[0].replace(' ', '_')}_{where.split()[0]}",
                        f"decode rate, OpenMP threads that wait: {name} ÷ active ({where})",
                        round(statistics.median(values), 3),
                        "ratio",
                        rounds,
                        low=round(min(values), 3),
                        high=round(max(values), 3),
                    )
                )
    return figures
