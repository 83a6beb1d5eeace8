"""Four streams of one worker together ÷ one alone, and ÷ llama.cpp's own server with four. SmolLM2, greedy.

Each answer has 128 tokens after a short prompt of its own. The rate is that of all answers together, from the
first request to the last token of the last one, as the reader has it: through the public API, or over the server's
HTTP stream, both read by one event loop in this process. Slots, threads and context are the same, and no prompt is
cached. The server runs twice: as it is installed, and with OpenMP threads that wait for each other as briefly as
our worker's do, which is faster where other processes want the cores. All sides stay loaded and take turns, so that
only one of them computes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from benchmarks.figures import Figure, ratio
from benchmarks.native_server import NativeServer, check_installed, native_server
from benchmarks.streams import fresh_text, in_turn, rate_of, read_all
from infervisor import Supervisor, default_model
from infervisor.worker.engines.llama.library import SPIN_COUNT

SLOTS = 4
TOKENS = 128
THREADS = 2
CONTEXT = 1024
PROMPT_TOKENS = 12
BRIEFLY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": SPIN_COUNT}


async def _rates(
    server: NativeServer, brief: NativeServer, rounds: int, tokens: int
) -> list[tuple[float, ...]]:
    """Return tokens/s a round: one of our streams and four; one of the server's and four; four of the other's."""
    options = {"n_ctx": CONTEXT, "threads": THREADS, "prefix_reuse": False}
    async with Supervisor(default_model(), slots=SLOTS, options=options) as supervisor:

        def side(read: Callable[[str, int], Awaitable[int]], count: int) -> Callable[[], Awaitable[float]]:
            def measured() -> Awaitable[float]:
                prompts = [fresh_text(PROMPT_TOKENS) for _ in range(count)]
                return rate_of(lambda prompt: read(prompt, tokens), prompts, tokens)

            return measured

        ours = partial(read_all, supervisor)
        sides = [
            side(ours, 1), side(ours, SLOTS), side(server.read_all, 1), side(server.read_all, SLOTS),
            side(brief.read_all, SLOTS),
        ]  # fmt: skip
        return await in_turn(sides, rounds)


def measure(quick: bool) -> list[Figure]:
    """Measure all five in turn."""
    random.seed(1)
    version = check_installed()
    rounds, tokens = (2, TOKENS // 8) if quick else (6, TOKENS)
    start = partial(native_server, default_model(), slots=SLOTS, context=CONTEXT, threads=THREADS)
    with start() as server, start(env=BRIEFLY) as brief:
        measured = anyio.run(_rates, server, brief, rounds, tokens)
    both = f"{SLOTS} streams through the Python API ÷ {SLOTS} HTTP streams of llama.cpp's own server"
    return [
        ratio(
            "streams_vs_one", f"{SLOTS} streams together ÷ 1 stream, tokens/s",
            [(four, one) for one, four, *_ in measured], ("≥", 1.6),
        ),
        ratio(
            "streams_vs_native", f"{both}, tokens/s",
            [(four, native) for _, four, _, native, _ in measured], ("≥", 0.95), xllamacpp=version,
        ),
        ratio(
            "streams_vs_native_brief", f"{both} whose threads wait as ours do, tokens/s",
            [(four, native) for _, four, *_, native in measured], ("≥", 0.95), xllamacpp=version,
        ),
        ratio(
            "stream_vs_native", "1 stream of ours ÷ 1 of the server as it is installed, tokens/s",
            [(one, native) for one, _, native, *_ in measured], None, xllamacpp=version,
        ),
        ratio(
            "native_streams_vs_one", f"that server: {SLOTS} streams together ÷ 1 stream, tokens/s",
            [(four, one) for _, _, one, four, _ in measured], None, xllamacpp=version,
        ),
    ]  # fmt: skip
