"""A worker never outlives its supervisor's process, whatever it is doing when that dies."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.host_process import host
from tests.helpers.waiting import wait_gone

PARENT = """
import sys
import anyio
from infervisor import Supervisor

FAULTS = {
    "loading": [{"at": "warm_up", "kind": "hang"}],
    "loading with the lock": [{"at": "warm_up", "kind": "hang_gil"}],
    "hanging": [{"at": "decode", "after": 1, "kind": "hang"}],
    "hanging with the lock": [{"at": "decode", "after": 1, "kind": "hang_gil"}],
    "deaf": [{"at": "decode", "kind": "block_reader"}],
}

async def main(backend, state):
    options = {"pace_s": 0.005, "prefill_tokens_per_s": 20, "faults": FAULTS.get(state, [])}
    loading = state.startswith("loading")
    async with Supervisor(engine="scripted", options=options, wait_until_ready=not loading) as supervisor:
        worker = supervisor._dispatcher.slot.worker
        prompt = "word " * 1000 if state == "prefilling" else "hello"
        if state == "idle":
            print(worker.pid, flush=True)
            await anyio.sleep_forever()
        if loading:
            while "at warm_up" not in worker.link.output.tail():
                await anyio.sleep(0.005)
            print(worker.pid, flush=True)
            await anyio.sleep_forever()
        async with supervisor.stream(prompt, window=1 if state == "paused" else 64) as stream:
            if state == "prefilling":
                while stream.report.timeline.started_ns is None:
                    await anyio.sleep(0.005)
            else:
                await anext(stream)
            while state.startswith("hanging") and "at decode" not in worker.link.output.tail():
                await anyio.sleep(0.005)
            while state == "paused" and stream.report.timeline.tokens < 2:
                await anyio.sleep(0.005)
            print(worker.pid, flush=True)
            await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:], backend=sys.argv[1])
"""
STATES = [
    "idle", "loading", "loading with the lock", "prefilling", "decoding", "paused", "hanging",
    "hanging with the lock", "deaf",
]  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_the_worker_is_gone_when_its_parent_is_killed(anyio_backend: str, state: str) -> None:
    with host(PARENT, anyio_backend, state, flags=()) as parent:
        worker = int(parent.line())
        parent.signal(signal.SIGKILL)
        wait_gone(worker, within_s=2)
