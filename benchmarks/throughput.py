"""Tokens per second that the way from worker to reader can carry, against `multiprocessing.Queue`.

The scripted engine computes nothing, so what is measured is engine contract, frames, pipe, checks, credit, buffer
and iterator. The other side is a process that puts the same tuples (index, text, None) into a queue, with as many
places as the window or without a limit, and a loop that gets them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.queues import Queue
from typing import Any

from benchmarks.figures import Figure, ratio, take_turns
from infervisor import Supervisor

WINDOW = 256
STEP_TOKENS = 32


def through_supervisor(tokens: int, step_tokens: int) -> float:
    """Return tokens/s from the first to the last, as the reader sees them."""

    async def main() -> float:
        options = {"step_tokens": step_tokens}
        async with Supervisor(engine="scripted", options=options, window=WINDOW) as supervisor:
            async with supervisor.stream("x", max_tokens=tokens) as stream:
                count, started = 0, 0.0
                async for _ in stream:
                    started = started or time.perf_counter()
                    count += 1
            assert count == tokens
            return (count - 1) / (time.perf_counter() - started)

    return asyncio.run(main())


def _put(queue: Queue[Any], tokens: int) -> None:
    for index in range(tokens):
        queue.put((index, f"w{index} ", None))


def through_queue(tokens: int, size: int) -> float:
    """Return tuples/s from the first to the last, as the reader sees them."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Any] = context.Queue(size)
    process = context.Process(target=_put, args=(queue, tokens))
    process.start()
    queue.get()
    started = time.perf_counter()
    for _ in range(tokens - 1):
        queue.get()
    seconds = time.perf_counter() - started
    process.join()
    return (tokens - 1) / seconds


def measure(quick: bool) -> list[Figure]:
    """Measure all four in turn."""
    rounds, tokens = (3, 20_000) if quick else (15, 100_000)
    measured = take_turns(
        [
            lambda: through_supervisor(tokens, STEP_TOKENS),
            lambda: through_supervisor(tokens, 1),
            lambda: through_queue(tokens, 0),
            lambda: through_queue(tokens, WINDOW),
        ],
        rounds,
    )
    what = f"scripted tokens/s through the public API (window {WINDOW}, {{}}) ÷ `multiprocessing.Queue`{{}}"
    several, single = f"{STEP_TOKENS} tokens a step", "1 token a step"
    bounded = f" of {WINDOW} places"
    return [
        ratio("throughput_vs_queue", what.format(several, ""), [(a, c) for a, _, c, _ in measured], ("≥", 1.0)),
        ratio(
            "throughput_vs_bounded_queue",
            what.format(several, bounded), [(a, d) for a, _, _, d in measured], ("≥", 1.0),
        ),
        ratio("throughput_single_vs_queue", what.format(single, ""), [(b, c) for _, b, c, _ in measured], None),
    ]  # fmt: skip
