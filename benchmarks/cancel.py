"""Release latency of a cancel on each rung of the ladder: from the caller's cancel until the slot is free.

SmolLM2 for what a working model needs, the scripted engine for what goes wrong. Graces are the defaults.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter

import anyio

from benchmarks.figures import Figure, percentile, spread
from infervisor import Report, RestartPolicy, Supervisor, default_model
from infervisor.supervisor.events import Event, WorkerBecameReady
from infervisor.supervisor.settings import Escalation

OPTIONS = {"n_ctx": 4096, "threads": 2}
PREFILL_TOKENS = 2000


def _latency_ms(report: Report) -> float:
    assert report.timeline.release_s is not None, report
    return report.timeline.release_s * 1000


async def in_decode(count: int) -> list[Figure]:
    """Cancel at a random moment of decoding; the bound is one step and 10 ms."""
    latencies: list[float] = []
    steps: list[float] = []
    stages: Counter[str] = Counter()
    async with Supervisor(default_model(), options=OPTIONS) as supervisor:
        while len(latencies) < count:
            async with supervisor.stream("Once upon a time", temperature=0, ignore_eos=True) as stream:
                after = random.randint(3, 12)
                async for chunk in stream:
                    if chunk.index >= after:
                        break
                await anyio.sleep(random.uniform(0, 0.02))
            report = stream.report
            latencies.append(_latency_ms(report))
            assert report.timeline.tpot_s is not None
            steps.append(report.timeline.tpot_s * 1000)
            stages[str(report.stage)] += 1
    step_ms = percentile(steps, 50)
    return [
        Figure(
            "cancel_decode_p99", f"cancel → released while decoding, p99 (a step: {step_ms:.1f} ms)",
            round(percentile(latencies, 99), 2), "ms", count, ("≤", round(step_ms + 10, 1)),
            details={**spread(latencies), "step_ms": round(step_ms, 2), "stages": dict(stages)},
        )
    ]  # fmt: skip


async def in_prefill(count: int) -> list[Figure]:
    """Cancel at a random moment of a long prefill."""
    latencies: list[float] = []
    stages: Counter[str] = Counter()
    async with Supervisor(default_model(), options=OPTIONS) as supervisor:
        prompt = "word " * PREFILL_TOKENS
        while len(latencies) < count:
            async with supervisor.stream(prompt, max_tokens=1, temperature=0) as stream:
                await anyio.sleep(random.uniform(0.05, 1.5))
            report = stream.report
            if report.timeline.first_token_ns is None:
                assert report.usage.prompt_tokens >= PREFILL_TOKENS, report.usage
                latencies.append(_latency_ms(report))
                stages[str(report.stage)] += 1
    return [
        Figure(
            "cancel_prefill_p99", f"cancel → released inside a {PREFILL_TOKENS:,}-token prefill, p99",
            round(percentile(latencies, 99), 2), "ms", count, ("≤", 100.0),
            details={**spread(latencies), "stages": dict(stages)},
        )
    ]  # fmt: skip


class _Ready:
    """Waits for the n-th worker to be ready."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._news = anyio.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerBecameReady):
            self.pids.append(event.pid)
            self._news.set()

    async def wait(self, count: int) -> int:
        with anyio.fail_after(60):
            while len(self.pids) < count:
                self._news = anyio.Event()
                await self._news.wait()
        return self.pids[count - 1]


RESTART = RestartPolicy(max_restarts=10_000, backoff_initial_s=0, backoff_max_s=0)


async def by_signal(count: int) -> list[Figure]:
    """The thread that reads control is blocked on purpose: only the signal is heard."""
    over: list[float] = []
    grace_ms = Escalation().signal_after_s * 1000
    faults = [{"at": "decode", "after": 2, "kind": "block_reader"}]
    ready = _Ready()
    options = {"pace_s": 0.01, "faults": faults}
    async with Supervisor(engine="scripted", options=options, restart=RESTART, on_event=ready) as supervisor:
        for turn in range(count):
            await ready.wait(turn + 1)
            async with supervisor.stream("x") as stream:
                async for chunk in stream:
                    if chunk.index >= 4:
                        break
            assert stream.report.stage == "signal", stream.report
            over.append(_latency_ms(stream.report) - grace_ms)
    return [
        Figure(
            "cancel_signal_over_grace_max", f"signal stage (reader blocked), beyond {grace_ms:.0f} ms: the longest",
            round(max(over), 2), "ms", count, ("≤", 50.0), details=spread(over),
        )
    ]  # fmt: skip


async def by_kill(count: int) -> list[Figure]:
    """The worker is stopped by SIGSTOP: only the kill helps, and it counts until the process is collected."""
    over: list[float] = []
    escalation = Escalation()
    graces_ms = (escalation.signal_after_s + escalation.kill_after_s) * 1000
    ready = _Ready()
    async with Supervisor(
        engine="scripted", options={"pace_s": 0.01}, restart=RESTART, on_event=ready
    ) as supervisor:
        for turn in range(count):
            pid = await ready.wait(turn + 1)
            async with supervisor.stream("x") as stream:
                async for _ in stream:
                    os.kill(pid, signal.SIGSTOP)
                    break
            assert stream.report.stage == "kill", stream.report
            over.append(_latency_ms(stream.report) - graces_ms)
    return [
        Figure(
            "cancel_kill_over_graces_max",
            f"kill stage (SIGSTOPped worker) until collected, beyond {graces_ms:.0f} ms: the longest",
            round(max(over), 2), "ms", count, ("≤", 100.0), details=spread(over),
        )
    ]  # fmt: skip


def measure(quick: bool) -> list[Figure]:
    """Measure each rung."""
    random.seed(1)
    few = 10 if quick else 200
    figures = anyio.run(in_decode, few) + anyio.run(in_prefill, few)
    return figures + anyio.run(by_signal, 3 if quick else 20) + anyio.run(by_kill, 2 if quick else 10)
