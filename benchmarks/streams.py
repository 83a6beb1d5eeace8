"""Streams of one supervisor read side by side, sides that take turns in one event loop, and fresh prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from infervisor import Supervisor

WORDS = (
    "river stone house garden winter summer letter morning evening window table paper light water mountain village "
    "school teacher doctor farmer bread butter silver golden yellow purple little bigger walked talked looked "
    "found under above before after behind between never always often again people children animal horse bird fish "
    "tree flower forest island ocean boat train road bridge city country family mother father sister brother "
    "friend story music picture colour number question answer reason moment minute hour week month "
    "year world earth moon"
).split()
"""Each is one token of SmolLM2, with the space before it."""


def fresh_text(tokens: int) -> str:
    """Return a text of about so many tokens that nobody has read before, from the first word on."""
    return " ".join(random.choices(WORDS, k=tokens))


def check_length(prompt_tokens: int, wanted: int) -> None:
    """Raise RuntimeError if a prompt isn't as long as the figure says: at most a twentieth away."""
    if abs(prompt_tokens - wanted) > wanted / 20:
        raise RuntimeError(
            f"the prompt has {prompt_tokens} tokens instead of {wanted}: are WORDS single tokens?"
        )


async def read_all(supervisor: Supervisor, prompt: str, tokens: int) -> int:
    """Read a greedy answer of exactly so many tokens; return when the last of them arrived, in monotonic ns."""
    async with supervisor.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
        async for _ in stream:
            pass
    # Not from the chunks: a last token that is half a character is in none.
    report = stream.report
    if report.usage.completion_tokens != tokens or report.timeline.last_token_ns is None:
        raise RuntimeError(f"{report.usage.completion_tokens} tokens instead of {tokens}: {report}")
    return report.timeline.last_token_ns


async def rate_of(read: Callable[[str], Awaitable[int]], prompts: Sequence[str], tokens: int) -> float:
    """Return tokens/s of all answers together, from the first request to the last token of the last answer.

    read: asks for one answer of `tokens` tokens, and returns when its last one arrived, in monotonic ns.
    """
    lasts: list[int] = []

    async def one(prompt: str) -> None:
        lasts.append(await read(prompt))

    started_ns = time.monotonic_ns()
    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(one, prompt)
    return len(prompts) * tokens / ((max(lasts) - started_ns) / 1e9)


async def in_turn(sides: Sequence[Callable[[], Awaitable[float]]], rounds: int) -> list[tuple[float, ...]]:
    """Measure all sides once a round as `take_turns` does, one at a time, in this event loop."""
    for side in sides:
        await side()
    measured: list[tuple[float, ...]] = []
    for turn in range(rounds):
        values: dict[int, float] = {}
        for step in range(len(sides)):
            index = (turn + step) % len(sides)
            values[index] = await sides[index]()
        measured.append(tuple(values[index] for index in range(len(sides))))
    return measured
