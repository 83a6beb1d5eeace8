"""What a supervisor and a standby cost while idle, and what a worker does while nobody reads. SmolLM2."""

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

STANDBY = """
import sys, time, anyio, psutil
from benchmarks.workers import Workers
from infervisor import Supervisor
def mb(*pids):
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 1e6
async def served(standby, seconds):
    workers = Workers()
    options = {"n_ctx": 4096, "threads": 2}
    async with Supervisor(sys.argv[1], options=options, standby=standby, on_event=workers) as supervisor:
        await workers.wait_for(1 + standby)
        answer = await supervisor.generate("Hello", max_tokens=64, ignore_eos=True)
        await anyio.sleep(1)
        if not standby:
            return 0.0, mb(*workers.ready)
        idle, = (pid for pid in workers.ready if pid != answer.report.worker_pid)
        process = psutil.Process(idle)
        before = sum(process.cpu_times()[:2]); started = time.monotonic()
        await anyio.sleep(seconds)
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
        return share, mb(*workers.ready)
async def main():
    _, one = await served(0, 0)
    share, both = await served(1, float(sys.argv[2]))
    print(share * 100, one, both)
anyio.run(main)
"""


def _run(program: str, seconds: float) -> tuple[float, ...]:
    done = subprocess.run(
        [sys.executable, "-c", program, str(default_model()), str(seconds)],
        check=True, capture_output=True, text=True, timeout=seconds + 120,
    )  # fmt: skip
    return tuple(float(value) for value in done.stdout.split())


def measure(quick: bool) -> list[Figure]:
    """Measure over 30 s each."""
    seconds = 5.0 if quick else 30.0
    idle_percent, rss = _run(IDLE, seconds)
    worker_percent, ahead = _run(PAUSED, seconds)
    standby_percent, one_mb, both_mb = _run(STANDBY, seconds)
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
        Figure(
            "idle_standby_cpu", "a standby, loaded and idle: share of a core",
            round(standby_percent, 3), "%", 1, ("≤", 1.0), details=over,
        ),
        Figure(
            "standby_memory",
            f"memory (PSS) that a standby adds to the {one_mb:.0f} MB of a worker with 4,096 tokens of context",
            round(both_mb - one_mb, 1), "MB", 1, details={"one_mb": round(one_mb, 1), "both_mb": round(both_mb, 1)},
        ),
    ]  # fmt: skip
