"""Crash → ready without backoff, against spawn + import + load of the same model measured alone. SmolLM2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import anyio

from benchmarks.figures import Figure, ratio
from infervisor import RestartPolicy, Supervisor, default_model
from infervisor.supervisor.events import Event, WorkerBecameReady

ALONE = """
import sys
from infervisor.worker.engines.llama.engine import LlamaEngine
engine = LlamaEngine()
engine.load(sys.argv[1], {"n_ctx": 4096, "threads": 2}, lambda phase, fraction: None)
print("loaded", flush=True)
sys.stdin.read()
"""


def alone_s() -> float:
    """Return seconds from the spawn of a process until it has imported the library and loaded the model."""
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", ALONE, str(default_model())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"loaded\n"
        seconds = time.monotonic() - started
        process.kill()
    return seconds


async def in_turn(rounds: int) -> list[tuple[float, float]]:
    """Return (crash → ready, alone) in seconds, measured in turn."""
    news = anyio.Event()
    pid = 0

    def on_event(event: Event) -> None:
        nonlocal pid
        if isinstance(event, WorkerBecameReady):
            pid = event.pid
            news.set()

    pairs: list[tuple[float, float]] = []
    restart = RestartPolicy(max_restarts=10_000, backoff_initial_s=0, backoff_max_s=0)
    options = {"n_ctx": 4096, "threads": 2}
    async with Supervisor(default_model(), options=options, restart=restart, on_event=on_event) as supervisor:
        for turn in range(rounds + 1):
            await supervisor.generate("warm", max_tokens=2)
            news = anyio.Event()
            started = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            with anyio.fail_after(60):
                await news.wait()
            crashed = time.monotonic() - started
            alone = await anyio.to_thread.run_sync(alone_s)
            if turn:  # the first round warms both up
                pairs.append((crashed, alone))
    return pairs


def measure(quick: bool) -> list[Figure]:
    """Measure both in turn."""
    pairs = anyio.run(in_turn, 3 if quick else 11)
    return [
        ratio(
            "restart_vs_load",
            "crash → ready, without backoff ÷ spawn + import + load of the same engine alone",
            pairs, ("≤", 1.3), unit_of_first_and_second="s",
        )
    ]  # fmt: skip
