"""How long a reader waits for the next token when its stream's worker is gone: from the signal to that token.

SmolLM2 at about 1,500 tokens of context, killed with SIGKILL at a random moment of decoding: with a standby and
snapshots, without the standby, without snapshots; and a worker that SIGSTOP has stopped, which the watchdog has to
find first. The scripted engine shows what the parent's part of it is.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from typing import Any

import anyio

from benchmarks.figures import Figure, percentile
from benchmarks.restart import alone_s
from benchmarks.workers import NO_BACKOFF, NO_LIMIT, Interruption, Workers, interrupt, read_tokens
from infervisor import Liveness, Snapshots, Supervisor, default_model

OPTIONS = {"n_ctx": 4096, "threads": 2}
PROMPT = "word " * 1400
KILLS_PER_STREAM = 6
"""So that the context stays near 1,500 tokens, and not every death costs the reading of a prompt before it."""
AMONG_TOKENS = (10, 60)
"""A death comes after so many tokens since the stream was fluent again: a random moment between snapshots."""
PAUSE_MS = 200.0
SCRIPTED_PAUSE_MS = 100.0
LIVENESS = Liveness(hang_after_s=2, unmeasured_s=2)


async def of_the_model(
    count: int, number: int = signal.SIGKILL, alone: list[float] | None = None, **settings: Any
) -> list[Interruption]:
    """Return so many interruptions at about 1,500 tokens; measure into `alone` what a start costs, in turn."""
    found: list[Interruption] = []
    workers = Workers()
    async with Supervisor(
        default_model(), options=OPTIONS, restart=NO_BACKOFF, max_resumes=NO_LIMIT, on_crash="resume",
        on_event=workers, **settings,
    ) as supervisor:  # fmt: skip
        while len(found) < count:
            async with supervisor.stream(PROMPT, temperature=0, ignore_eos=True, window=8) as stream:
                for _ in range(min(KILLS_PER_STREAM, count - len(found))):
                    await read_tokens(stream, 1)
                    # Meanwhile nobody reads, and so nobody computes: the standby loads undisturbed.
                    await workers.wait_for(1 + settings["standby"])
                    if alone is not None:
                        alone.append(await anyio.to_thread.run_sync(alone_s))
                    await read_tokens(stream, random.randint(*AMONG_TOKENS))
                    found.append(await interrupt(stream, number))
                assert stream.report.usage.prompt_tokens >= 1400, stream.report.usage
    return found


async def scripted(count: int) -> list[Interruption]:
    """Return so many interruptions of one stream of the scripted engine, a token every 5 ms."""
    found: list[Interruption] = []
    workers = Workers()
    async with Supervisor(
        engine="scripted", options={"pace_s": 0.005}, restart=NO_BACKOFF, max_resumes=NO_LIMIT,
        on_crash="resume", standby=1, snapshots=Snapshots(), on_event=workers,
    ) as supervisor:  # fmt: skip
        async with supervisor.stream("x", window=8) as stream:
            while len(found) < count:
                await workers.wait_for(2)
                await read_tokens(stream, random.randint(*AMONG_TOKENS))
                found.append(await interrupt(stream, signal.SIGKILL))
    return found


def told(
    name: str, what: str, found: Sequence[Interruption], wanted_ms: float | None, **details: Any
) -> list[Figure]:
    """Return the median and p95 of the pauses; the wish is of p95."""
    pauses = [one.pause_ms for one in found]
    again = [one.again_tokens for one in found]
    details = {
        "p50": round(percentile(pauses, 50), 1),
        "p95": round(percentile(pauses, 95), 1),
        "max": round(max(pauses), 1),
        "again_tokens": {"p50": percentile(again, 50), "max": max(again)},
        "restored": sum(one.resume.restored_tokens > 0 for one in found),
        "causes": sorted({str(one.resume.cause) for one in found}),
        **details,
    }
    return [
        Figure(
            f"{name}_{key}", f"{what}, {key}", details[key], "ms", len(found),
            ("≤", round(wanted_ms)) if wanted_ms is not None and key == "p95" else None,
            details=details if key == "p95" else {},
        )
        for key in ("p50", "p95", "max")
    ]  # fmt: skip


def measure(quick: bool) -> list[Figure]:
    """Measure each way of going on."""
    random.seed(1)
    rounds, few = (3, 2) if quick else (30, 4)
    at = "at 1,500 tokens of context"
    alone: list[float] = []

    async def all_of_them() -> list[Figure]:
        swift = await of_the_model(rounds, standby=1, snapshots=Snapshots())
        cold = await of_the_model(few, alone=alone, standby=0, snapshots=Snapshots())
        again = await of_the_model(few, standby=1, snapshots=None)
        stopped = await of_the_model(few, signal.SIGSTOP, standby=1, snapshots=Snapshots(), liveness=LIVENESS)
        start_ms = percentile(alone, 95) * 1000
        found_ms = (LIVENESS.hang_after_s + LIVENESS.dump_s) * 1000
        return [
            *told("resume", f"`kill -9` {at} → next token (standby, snapshots)", swift, PAUSE_MS),
            *told(
                "resume_cold", f"the same without a standby (a start alone: {start_ms:.0f} ms)", cold,
                PAUSE_MS + start_ms, alone_ms=[round(seconds * 1000) for seconds in alone],
            ),
            *told("resume_reread", "the same with a standby, without snapshots", again, None),
            *told(
                "resume_stopped",
                f"SIGSTOP {at} → next token, watchdog {LIVENESS.hang_after_s:g} s and "
                f"{LIVENESS.dump_s:g} s for the stacks",
                stopped, found_ms + PAUSE_MS,
            ),
            *told(
                "resume_scripted", "`kill -9` → next token, scripted at 5 ms a token (standby)",
                await scripted(rounds), SCRIPTED_PAUSE_MS,
            ),
        ]  # fmt: skip

    return anyio.run(all_of_them)
