"""Latency of a token: from the worker's stamp before it sends to the moment at which the reader has it.

Both clocks are the same one (monotonic, one host). The worker stamps a frame when its step is over; the stamp is
taken where the parent reads the frame. SmolLM2, and the scripted engine at a token every 5 ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from benchmarks.figures import Figure, spread
from infervisor import Supervisor, default_model
from infervisor.protocol.messages import Tokens
from infervisor.supervisor.attempt import Attempt

PACE_S = 0.005


@contextmanager
def _worker_stamps() -> Iterator[dict[int, int]]:
    stamps: dict[int, int] = {}
    on_tokens = Attempt.on_tokens

    def stamping(attempt: Attempt, message: Tokens, now: int) -> None:
        for offset in range(len(message.tokens)):
            stamps[message.index + offset] = message.t_ns
        on_tokens(attempt, message, now)

    Attempt.on_tokens = stamping  # type: ignore[method-assign]
    try:
        yield stamps
    finally:
        Attempt.on_tokens = on_tokens  # type: ignore[method-assign]


async def latencies_us(tokens: int, model: str | None, settings: dict[str, Any]) -> list[float]:
    """Return one latency in µs for each chunk: from the stamp of the last token in it."""
    found: list[float] = []
    async with Supervisor(model, **settings) as supervisor:
        for _ in range(-(-tokens // 500)):
            with _worker_stamps() as stamps:
                options = {"temperature": 0, "ignore_eos": True, "max_tokens": min(tokens, 500)}
                async with supervisor.stream("Once upon a time", **options) as stream:  # type: ignore[arg-type]
                    async for chunk in stream:
                        now = time.monotonic_ns()
                        found.append((now - stamps[chunk.index + len(chunk.token_ids) - 1]) / 1000)
    return found


def measure(quick: bool) -> list[Figure]:
    """Measure on the real model and at a steady pace."""
    tokens = 500 if quick else 4000
    sides = {
        "smollm2": (
            str(default_model()),
            {"options": {"n_ctx": 4096, "threads": 2}},
            "SmolLM2, 2 threads on 2 cores",
        ),
        "smollm2_one_thread": (
            str(default_model()),
            {"options": {"n_ctx": 4096, "threads": 1}},
            "SmolLM2, 1 thread",
        ),
        "scripted": (
            None,
            {"engine": "scripted", "options": {"pace_s": PACE_S}},
            "scripted, a token every 5 ms",
        ),
    }
    figures: list[Figure] = []
    for name, (model, settings, where) in sides.items():
        found = anyio.run(latencies_us, tokens, model, settings)
        told = spread(found)
        for key, wanted in (("p50", 150.0), ("p99", 1000.0)):
            figures.append(
                Figure(
                    f"latency_{name}_{key}",
                    f"a token, worker's send → reader has it, {key} ({where})",
                    round(told[key], 1),
                    "µs",
                    len(found),
                    None if name == "smollm2_one_thread" else ("≤", wanted),
                    details=told,
                )
            )
    return figures
