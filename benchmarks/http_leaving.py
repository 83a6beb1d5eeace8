"""A client leaves: how long until the worker's CPU is quiet, seen from outside. SmolLM2 behind `supervise serve`.

And the same with llama.cpp's own server. Each prompt begins differently, so that none is in a cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from urllib.parse import urlsplit

import psutil

from benchmarks.figures import Figure, percentile, spread
from benchmarks.native_server import check_installed, native_server
from benchmarks.service import Service, quiet_after, serving
from infervisor import default_model

PREFILL_TOKENS = 2000
OPTIONS = ("--ctx", "4096", "--threads", "2")


def _prompt(tokens: int) -> str:
    return f"{random.randrange(1 << 30)} " + "word " * tokens


def _chat(prompt: str, *, stream: bool) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "stream": stream, "temperature": 0, "ignore_eos": True, "max_tokens": 1000,
    }  # fmt: skip


async def in_prefill(service: Service, count: int) -> list[float]:
    """Leave at a random moment of a long prefill, every second time an answer that isn't streamed."""
    pid = await service.worker_pid()
    taken: list[float] = []
    for turn in range(count):
        answer = await service.ask(_chat(_prompt(PREFILL_TOKENS), stream=turn % 2 == 0))
        await asyncio.sleep(random.uniform(0.3, 1.5))
        (entry,) = [e for e in (await service.get("/api/requests"))["requests"] if not e["finished"]]
        assert entry["phase"] == "prefill", entry
        left = time.monotonic()
        answer.leave()
        taken.append(await quiet_after(pid, left, 60))
    return taken


async def in_decode(service: Service, count: int) -> list[float]:
    """Leave at a random moment of decoding."""
    pid = await service.worker_pid()
    taken: list[float] = []
    for _ in range(count):
        answer = await service.ask(_chat(_prompt(5), stream=True))
        await answer.read(random.randint(3, 20))
        left = time.monotonic()
        answer.leave()
        taken.append(await quiet_after(pid, left, 60))
    return taken


async def native_in_prefill(address: str, pid: int, count: int) -> list[float]:
    """The same with llama.cpp's server."""
    url = urlsplit(address)
    taken: list[float] = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        body = json.dumps({"prompt": _prompt(PREFILL_TOKENS), "n_predict": 1000, "stream": True}).encode()
        writer.write(
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        await asyncio.sleep(random.uniform(0.3, 1.5))
        left = time.monotonic()
        writer.transport.abort()
        taken.append(await quiet_after(pid, left, 120))
    return taken


def measure(quick: bool) -> list[Figure]:
    """Return the figures."""
    check_installed()
    count, peers = (2, 1) if quick else (30, 3)
    with serving("--log-level", "warning", *OPTIONS) as service:
        prefill = asyncio.run(in_prefill(service, count))
        decode = asyncio.run(in_decode(service, count))
    with native_server(default_model(), slots=1, context=4096, threads=2) as server:
        host, port = server.address
        (pid,) = (
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN"
        )
        native = asyncio.run(native_in_prefill(f"http://{host}:{port}", pid, peers))
    return [
        Figure(
            "http_leave_prefill",
            f"a client leaves in a {PREFILL_TOKENS:,}-token prefill → the worker's CPU is quiet, p99",
            round(percentile(prefill, 99), 3), "s", count, ("≤", 0.25), details=spread(prefill),
        ),
        Figure(
            "http_leave_prefill_native", "the same with llama.cpp's own server, the longest",
            round(max(native), 3), "s", peers, details=spread(native),
        ),
        Figure(
            "http_leave_decode", "a client leaves while decoding → the worker's CPU is quiet, p99",
            round(percentile(decode, 99), 3), "s", count, ("≤", 0.1), details=spread(decode),
        ),
    ]  # fmt: skip
