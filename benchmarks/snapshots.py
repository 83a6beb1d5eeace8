"""What KV snapshots cost: tokens/s with them ÷ without, at about 1,500 tokens of context and at a short one.

SmolLM2, greedy, 2 threads. Both sides hold a stream of the same prompt open and take turns to read a block of it;
who isn't read computes nothing beyond its window. The rate is that of a block as its reader sees it, after the
tokens that had been computed ahead of it.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack

import anyio

from benchmarks.figures import Figure, ratio
from benchmarks.workers import read_tokens, snapshots_taken
from infervisor import Snapshots, Stream, Supervisor, default_model

OPTIONS = {"n_ctx": 4096, "threads": 2}
WINDOW = 8
BLOCK_TOKENS = 128
BLOCKS = 4
"""Of one pair of streams: the context grows by about 550 tokens meanwhile."""
PROMPTS = {"1,500 tokens of context": "word " * 1250, "a short context": "Once upon a time"}


async def block_rate(stream: Stream) -> float:
    """Return tokens/s of the next block."""
    await read_tokens(stream, WINDOW + 1)
    started, tokens = time.perf_counter(), 0
    while tokens < BLOCK_TOKENS:
        tokens += len((await stream.__anext__()).token_ids)
    return tokens / (time.perf_counter() - started)


async def in_turn(
    sides: tuple[Supervisor, Supervisor], prompt: str, pairs: int
) -> tuple[list[tuple[float, float]], list[int]]:
    """Return pairs of rates, with and without, and how many snapshots each stream's worker took."""
    found: list[tuple[float, float]] = []
    taken: list[int] = []
    while len(found) < pairs:
        async with AsyncExitStack() as stack:
            streams: list[Stream] = []
            for supervisor in sides:
                stream = supervisor.stream(prompt, temperature=0, ignore_eos=True, window=WINDOW)
                streams.append(await stack.enter_async_context(stream))
                await read_tokens(stream, 1)  # its prompt is read before the other one begins with its own
            for _ in range(min(BLOCKS, pairs - len(found))):
                rates = [0.0, 0.0]
                first = len(found) % 2
                for index in (first, 1 - first):
                    rates[index] = await block_rate(streams[index])
                found.append((rates[0], rates[1]))
            taken.append(snapshots_taken(sides[0], streams[0]))
    return found, taken


def measure(quick: bool) -> list[Figure]:
    """Measure both contexts in turn."""
    pairs = 2 if quick else 16

    async def both() -> list[Figure]:
        figures: list[Figure] = []
        async with (
            Supervisor(default_model(), options=OPTIONS, snapshots=Snapshots()) as with_them,
            Supervisor(default_model(), options=OPTIONS, snapshots=None) as without,
        ):
            for where, prompt in PROMPTS.items():
                rates, taken = await in_turn((with_them, without), prompt, pairs)
                per_stream = statistics.median(taken)
                name = "long" if "1,500" in where else "short"
                figures.append(
                    ratio(
                        f"snapshots_{name}",
                        f"decode rate with snapshots ÷ without, at {where} ({per_stream:g} taken a stream)",
                        rates, ("≥", 0.98), taken=taken,
                    )
                )  # fmt: skip
        return figures

    return anyio.run(both)
