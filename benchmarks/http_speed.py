"""What HTTP costs: tokens/s and time to first token through `supervise serve` ÷ through the Python API, in turn.

SmolLM2, greedy, the same prompts. Each side has a process of its own; the client of the service is a third one.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

from benchmarks.figures import Figure, ratio, take_turns
from benchmarks.service import Service, serving
from infervisor import default_model

TOKENS = 128
QUESTION = "Tell me a story about the sea."

SIDE = """
import asyncio, sys, time
from infervisor import Supervisor
async def main():
    options = {"n_ctx": 4096, "threads": 2, "slots": 4}
    async with Supervisor(sys.argv[1], options=options) as supervisor:
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        async def one():
            began, first = time.monotonic(), None
            chat = [{"role": "user", "content": sys.argv[2]}]
            asked = {"max_tokens": int(sys.argv[3]), "temperature": 0.0, "ignore_eos": True}
            async with supervisor.stream(messages=chat, **asked) as stream:
                async for chunk in stream:
                    first = first or time.monotonic()
            return first - began
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            began = time.monotonic()
            firsts = await asyncio.gather(*(one() for _ in range(int(line))))
            print(time.monotonic() - began, min(firsts), flush=True)
asyncio.run(main())
"""


async def _over_http(service: Service, streams: int) -> tuple[float, float]:
    """Return seconds until all answers are whole, and until the first token of one."""

    async def one() -> float:
        began = time.monotonic()
        answer = await service.ask(
            {
                "messages": [{"role": "user", "content": QUESTION}],
                "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS,
            }
        )  # fmt: skip
        await answer.read()
        await answer.close()
        return answer.stamps[0] - began

    began = time.monotonic()
    firsts = await asyncio.gather(*(one() for _ in range(streams)))
    return time.monotonic() - began, min(firsts)


def _in_python(pipes: tuple[IO[str], IO[str]], streams: int) -> tuple[float, float]:
    """The same through the API."""
    to, from_ = pipes
    to.write(f"{streams}\n")
    to.flush()
    seconds, first = map(float, from_.readline().split())
    return seconds, first


def measure(quick: bool) -> list[Figure]:
    """Return the figures."""
    rounds = 2 if quick else 12
    command = [sys.executable, "-c", SIDE, str(default_model()), QUESTION, str(TOKENS)]
    figures: list[Figure] = []
    with (
        serving("--log-level", "warning", "--ctx", "4096", "--threads", "2", "--slots", "4") as service,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as side,
    ):
        assert side.stdin is not None
        assert side.stdout is not None
        pipes = (side.stdin, side.stdout)
        side.stdout.readline()
        firsts: tuple[list[float], list[float]] = ([], [])

        def http(streams: int) -> Callable[[], float]:
            def run() -> float:
                seconds, first = asyncio.run(_over_http(service, streams))
                if streams == 1:
                    firsts[0].append(first)
                return streams * TOKENS / seconds

            return run

        def python(streams: int) -> Callable[[], float]:
            def run() -> float:
                seconds, first = _in_python(pipes, streams)
                if streams == 1:
                    firsts[1].append(first)
                return streams * TOKENS / seconds

            return run

        for streams in (1, 4):
            pairs = [(a, b) for a, b in take_turns([http(streams), python(streams)], rounds)]
            name = "1 stream" if streams == 1 else f"{streams} streams"
            figures.append(
                ratio(
                    f"http_speed_{streams}",
                    f"{name} over HTTP ÷ through the Python API, tokens/s",
                    pairs,
                    ("≥", 0.95),
                )
            )
        side.stdin.close()
    # Without the first of each, which is the warm-up and reads the prompt.
    added = statistics.median(firsts[0][1:]) - statistics.median(firsts[1][1:])
    details = {
        "http_ms": round(statistics.median(firsts[0][1:]) * 1000, 2),
        "python_ms": round(statistics.median(firsts[1][1:]) * 1000, 2),
    }
    told = "time to first token that HTTP adds, medians compared"
    figures.append(
        Figure("http_ttft", told, round(added * 1000, 2), "ms", rounds, ("≤", 10.0), details=details)
    )
    return figures
