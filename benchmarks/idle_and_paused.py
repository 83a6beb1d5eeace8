"""What a supervisor costs while nothing happens, and what a worker does while nobody reads. SmolLM2."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.figures import Figure
from infervisor import default_model

IDLE = """
import sys, time, anyio, psutil
from infervisor import Supervisor
async def main():
    async with Supervisor(sys.argv[1], options={"n_ctx": 4096, "threads": 2}) as supervisor:
        await supervisor.generate("Hello", max_tokens=8)
        await anyio.sleep(1)
        me = psutil.Process()
        before = sum(me.cpu_times()[:2]); started = time.monotonic()
        await anyio.sleep(float(sys.argv[2]))
        share = (sum(me.cpu_times()[:2]) - before) / (time.monotonic() - started)
        print(share * 100, me.memory_info().rss)
anyio.run(main)
"""

PAUSED = """
import sys, time, anyio, psutil
from infervisor import Supervisor
WINDOW = 8
async def main():
    options = {"n_ctx": 4096, "threads": 2}
    async with Supervisor(sys.argv[1], options=options, window=WINDOW) as supervisor:
        worker = psutil.Process(supervisor.status().worker_pid)
        ahead = taken = 0
        async with supervisor.stream("Once upon a time", temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                taken += len(chunk.token_ids)
                if taken == 1:
                    await anyio.sleep(1)
                    before = sum(worker.cpu_times()[:2]); started = time.monotonic()
                if time.monotonic() - started > float(sys.argv[2]):
                    break
                await anyio.sleep(1)
                # What has arrived is what was computed: by now the worker stands still.
                ahead = max(ahead, stream.report.timeline.tokens - taken)
            share = (sum(worker.cpu_times()[:2]) - before) / (time.monotonic() - started)
        counted = stream.report.usage.computed_tokens - taken
        print(share * 100, max(ahead, counted))
anyio.run(main)
"""


def _run(program: str, seconds: float) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", program, str(default_model()), str(seconds)],
        check=True, capture_output=True, text=True, timeout=seconds + 120,
    )  # fmt: skip
    first, second = done.stdout.split()
    return float(first), float(second)


def measure(quick: bool) -> list[Figure]:
    """Measure over 30 s each."""
    seconds = 5.0 if quick else 30.0
    idle_percent, rss = _run(IDLE, seconds)
    worker_percent, ahead = _run(PAUSED, seconds)
    over = {"seconds": seconds}
    return [
        Figure(
            "idle_parent_cpu", "parent, idle with a loaded worker: share of a core",
            round(idle_percent, 3), "%", 1, ("≤", 1.0), details=over,
        ),
        Figure(
            "idle_parent_rss", "parent, idle with a loaded worker: resident memory, Python included",
            round(rss / 1e6, 1), "MB", 1, ("≤", 80.0),
        ),
        Figure(
            "paused_ahead", "endless generation, reader at 1 token/s, window 8: most tokens computed ahead",
            ahead, "tokens", 1, ("≤", 8.0), details=over,
        ),
        Figure(
            "paused_worker_cpu", "the same: the worker's share of a core",
            round(worker_percent, 2), "%", 1, ("≤", 5.0), details=over,
        ),
    ]  # fmt: skip
