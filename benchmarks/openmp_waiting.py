"""Decode rate under each way of waiting at OpenMP's barriers ÷ that of `active`, idle and with a busy core.

SmolLM2, greedy, 128 tokens, 2 threads, the engine without a worker around it. Each measurement is a fresh process,
since the library reads its settings once; the ways take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from benchmarks.paired import tell

WAYS = {
    "active": {"OMP_WAIT_POLICY": "active"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 600 (default)": {},
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
        check=True, capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    return float(done.stdout)


def measure(rounds: int) -> dict[str, float]:
    """Return the median of each way's rate ÷ that of `active` in the same round."""
    ratios: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        rates = {name: rate(settings) for name, settings in WAYS.items()}
        for name, value in rates.items():
            ratios[name].append(value / rates["active"])
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    idle = measure(rounds)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        try:
            busy = measure(rounds)
        finally:
            burner.kill()
    tell("decode rate by way of waiting ÷ active", {"idle": idle, "one core busy": busy})
