"""What HTTP costs: tokens/s and time to first token through `supervise serve` ÷ through the Python API, in turn.

SmolLM2, greedy, the same prompts. Each side has a process of its own; the client of the service is a third one.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from functools import partial

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.service import Service, serving
from infervisor import default_model

TOKENS, FEW_TOKENS = 128, 4
QUESTION = "Tell me a story about the sea."

SIDE = """
import asyncio, sys, time
from infervisor import Supervisor
async def main():
    options = {"n_ctx": 4096, "threads": 2, "slots": 4}
    async with Supervisor(sys.argv[1], options=options) as supervisor:
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        async def one(tokens):
            began, first = time.monotonic(), None
            chat = [{"role": "user", "content": sys.argv[2]}]
            asked = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
            async with supervisor.stream(messages=chat, **asked) as stream:
                async for chunk in stream:
                    first = first or time.monotonic()
            return first - began
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            streams, tokens = map(int, line.split())
            began = time.monotonic()
            firsts = await asyncio.gather(*(one(tokens) for _ in range(streams)))
            print(time.monotonic() - began, min(firsts), flush=True)
asyncio.run(main())
"""


async def _over_http(service: Service, streams: int, tokens: int) -> tuple[float, float]:
    """Return seconds until all answers are whole, and until the first token of one."""

    async def one() -> float:
        began = time.monotonic()
        answer = await service.ask(
            {
                "messages": [{"role": "user", "content": QUESTION}],
                "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": tokens,
            }
        )  # fmt: skip
        await answer.read()
        await answer.close()
        return answer.stamps[0] - began

    began = time.monotonic()
    firsts = await asyncio.gather(*(one() for _ in range(streams)))
    return time.monotonic() - began, min(firsts)


class _InPython:
    """The same through the API, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self._from.readline()

    def ask(self, streams: int, tokens: int) -> tuple[float, float]:
        self._to.write(f"{streams} {tokens}\n")
        self._to.flush()
        seconds, first = map(float, self._from.readline().split())
        return seconds, first

    def end(self) -> None:
        self._to.close()


def measure(quick: bool) -> list[Figure]:
    """Return the figures."""
    rounds, looks = (2, 3) if quick else (12, 40)
    command = [sys.executable, "-c", SIDE, str(default_model()), QUESTION]
    figures: list[Figure] = []
    with (
        serving("--log-level", "warning", "--ctx", "4096", "--threads", "2", "--slots", "4") as service,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        side = _InPython(process)

        def http_rate(streams: int) -> float:
            return streams * TOKENS / asyncio.run(_over_http(service, streams, TOKENS))[0]

        def python_rate(streams: int) -> float:
            return streams * TOKENS / side.ask(streams, TOKENS)[0]

        def http_first() -> float:
            return asyncio.run(_over_http(service, 1, FEW_TOKENS))[1]

        def python_first() -> float:
            return side.ask(1, FEW_TOKENS)[1]

        for streams in (1, 4):
            pairs = take_turns([partial(http_rate, streams), partial(python_rate, streams)], rounds)
            name = "1 stream" if streams == 1 else f"{streams} streams"
            figures.append(
                ratio(
                    f"http_speed_{streams}",
                    f"{name} over HTTP ÷ through the Python API, tokens/s",
                    [(http, python) for http, python in pairs],
                    ("≥", 0.95),
                )
            )
        # The warm-up of each reads the prompt: what is compared begins with a decode.
        firsts = take_turns([http_first, python_first], looks)
        side.end()
    added_ms = [(http - python) * 1000 for http, python in firsts]
    low, middle, high = statistics.quantiles(added_ms, n=4)
    figures.append(
        Figure(
            "http_ttft", "time to first token that HTTP adds, connecting included, p50 of pairs",
            round(middle, 2), "ms", looks, ("≤", 10.0), round(low, 2), round(high, 2),
            details={
                "http_ms": round(statistics.median(http for http, _ in firsts) * 1000, 2),
                "python_ms": round(statistics.median(python for _, python in firsts) * 1000, 2),
            },
        )
    )  # fmt: skip
    return figures
