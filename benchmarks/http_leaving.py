"""A client leaves: how long until the worker's CPU is quiet, seen from outside. SmolLM2 behind `supervise serve`.

And the same with llama.cpp's own server and with llama-cpp-python's. Each prompt begins differently: it is in no
cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import psutil

from benchmarks import native_server, python_server
from benchmarks.figures import Figure, percentile, spread
from benchmarks.service import Service, check_busy, quiet_after, serving
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
        await check_busy(pid)
        (entry,) = [e for e in (await service.get("/api/requests"))["requests"] if not e["finished"]]
        assert entry["phase"] == "prefill", entry
        left = time.monotonic()
        answer.leave()
        taken.append(await quiet_after(pid, left, 60))
        report = (await service.get(f"/api/requests/{entry['id']}"))["choices"][0]["report"]
        assert report["end_reason"] == "client_disconnected", report
        assert report["usage"]["prompt_tokens"] >= PREFILL_TOKENS, report
        assert report["time_points_ns"]["first_token"] is None, report
    return taken


async def in_decode(service: Service, count: int) -> list[float]:
    """Leave at a random moment of decoding."""
    pid = await service.worker_pid()
    taken: list[float] = []
    for _ in range(count):
        answer = await service.ask(_chat(_prompt(5), stream=True))
        await answer.read(3)
        # It is read to the last moment: what a reader that stops leaves behind is no decoding.
        reading = asyncio.ensure_future(answer.read())
        await check_busy(pid)
        await asyncio.sleep(random.uniform(0, 0.1))
        left = time.monotonic()
        answer.leave()
        taken.append(await quiet_after(pid, left, 60))
        await asyncio.gather(reading, return_exceptions=True)
    return taken


async def peer_in_prefill(port: int, pid: int, path: str, body: dict[str, object], count: int) -> list[float]:
    """The same with a server that isn't ours. body: without its prompt."""
    taken: list[float] = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = json.dumps({**body, "prompt": _prompt(PREFILL_TOKENS), "stream": True}).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        await asyncio.sleep(random.uniform(0.3, 1.5))
        await check_busy(pid)
        left = time.monotonic()
        writer.transport.abort()
        taken.append(await quiet_after(pid, left, 120))
    return taken


def _of_native_server(count: int) -> list[float]:
    with native_server.native_server(default_model(), slots=1, context=4096, threads=2) as server:
        _, port = server.address
        (pid,) = (
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN"
        )
        return asyncio.run(peer_in_prefill(port, pid, "/completion", {"n_predict": 1000}, count))


def _of_python_server(count: int) -> list[float]:
    with python_server.python_server(default_model(), context=4096, threads=2) as server:
        body: dict[str, object] = {"max_tokens": 1000}
        return asyncio.run(peer_in_prefill(server.port, server.pid, "/v1/completions", body, count))


def measure(quick: bool) -> list[Figure]:
    """Return the figures."""
    native_server.check_installed()
    python_server.check_installed()
    random.seed(1)
    count, peers = (2, 1) if quick else (30, 3)
    with serving("--log-level", "warning", *OPTIONS) as service:
        prefill = asyncio.run(in_prefill(service, count))
        decode = asyncio.run(in_decode(service, count))
    native, python = _of_native_server(peers), _of_python_server(peers)
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
            "http_leave_prefill_python", "the same with llama-cpp-python's server, the longest",
            round(max(python), 3), "s", peers, details=spread(python),
        ),
        Figure(
            "http_leave_decode", "a client leaves while decoding → the worker's CPU is quiet, p99",
            round(percentile(decode, 99), 3), "s", count, ("≤", 0.1), details=spread(decode),
        ),
    ]  # fmt: skip
