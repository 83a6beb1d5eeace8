"""What 1,000 waiting requests cost the parent, and how soon one whose caller leaves is out of the queue.

In a process of its own: a request holds the only worker, and 1,000 tasks wait in their first read, as those of an
application do, each with a prompt of its own of 200 characters. Then all of them leave, one by one in random order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.figures import Figure, percentile

WAITING = """
import json, random, sys, time, anyio, psutil
from infervisor import Supervisor
COUNT = int(sys.argv[1])
async def main():
    random.seed(1)
    rss = psutil.Process().memory_info
    scopes = []
    async def wait(number):
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            async with supervisor.stream(f"{number:08}" * 25) as stream:
                await stream.__anext__()
    async with Supervisor(engine="scripted", max_queue=COUNT) as supervisor:
        depth = lambda: supervisor.status().queue_depth
        await supervisor.generate("x", max_tokens=8)
        async with supervisor.stream("holds the worker", window=8) as holder:
            await holder.__anext__()
            await anyio.sleep(1)
            before = rss().rss
            async with anyio.create_task_group() as tasks:
                for number in range(COUNT):
                    tasks.start_soon(wait, number)
                while depth() < COUNT:
                    await anyio.sleep(0.01)
                await anyio.sleep(1)
                more = rss().rss - before
                random.shuffle(scopes)
                leaving = []
                for number, scope in enumerate(scopes):
                    asked = time.perf_counter_ns()
                    scope.cancel()
                    while depth() == COUNT - number:
                        await anyio.lowlevel.checkpoint()
                    leaving.append((time.perf_counter_ns() - asked) / 1e6)
            assert depth() == 0
    print(json.dumps({"more": more, "leaving": leaving}))
anyio.run(main)
"""


def _told(count: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", WAITING, str(count)], check=True, capture_output=True, text=True, timeout=120
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def measure(quick: bool) -> list[Figure]:
    """Measure a few fresh processes; the largest counts."""
    count = 1000
    runs = [_told(count) for _ in range(1 if quick else 5)]
    more = [run["more"] / 1e6 for run in runs]
    leaving = [latency for run in runs for latency in run["leaving"]]
    return [
        Figure(
            "waiting_memory", f"{count:,} waiting requests: memory of the parent more",
            round(max(more), 1), "MB", len(runs), ("≤", 20.0), details={"runs": [round(one, 2) for one in more]},
        ),
        Figure(
            "waiting_leave_p99", "the caller of one of them leaves → it is out of the queue, p99",
            round(percentile(leaving, 99), 2), "ms", len(leaving), ("≤", 10.0),
            details={"p50": round(percentile(leaving, 50), 3), "max": round(max(leaving), 2)},
        ),
    ]  # fmt: skip
