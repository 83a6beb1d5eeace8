"""Decode rate of `supervise run` ÷ that of llama-cpp-python's own streaming completion, each in a fresh process.

SmolLM2, greedy, 128 tokens, 2 threads, the same raw prompt. The rate is (tokens − 1) ÷ (last − first token), as
each side's reader sees it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.paired import pairs, ratio, tell
from infervisor import default_model

PROMPT = "Once upon a time there was a small village by the sea, where"
TOKENS = 128
IN_PROCESS = """
import sys, time, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=4096, n_threads=2, n_threads_batch=2, verbose=False)
stamps = []
for _ in model.create_completion(sys.argv[2], max_tokens=int(sys.argv[3]), temperature=0, stream=True):
    stamps.append(time.monotonic_ns())
# The last chunk carries only the finish reason.
stamps = stamps[: int(sys.argv[3])]
print((len(stamps) - 1) / ((stamps[-1] - stamps[0]) / 1e9))
"""


def supervised() -> float:
    """Return tokens/s of `supervise run`, from the stamps of its JSON lines."""
    done = subprocess.run(
        [
            sys.executable, "-m", "infervisor.supervisor.cli", "run", "--json", "--raw",
            "--max-tokens", str(TOKENS), "--temperature", "0", "--ctx", "4096", "--threads", "2",
            str(default_model()), PROMPT,
        ],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    report = next(line for line in map(json.loads, done.stdout.splitlines()) if line["type"] == "report")
    assert report["usage"]["completion_tokens"] == TOKENS, report
    return float(report["figures"]["tokens_per_s"])


def in_process() -> float:
    """Return tokens/s of `Llama.create_completion(stream=True)`."""
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(default_model()), PROMPT, str(TOKENS)],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return float(done.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    count = parser.parse_args().pairs
    tell(
        "supervise run ÷ create_completion(stream=True), tokens/s",
        ratio(pairs(supervised, in_process, count)),
    )
