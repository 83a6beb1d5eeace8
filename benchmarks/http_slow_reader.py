"""A client stops reading an endless answer for half a minute: what service and worker do meanwhile, and afterwards.

The scripted engine says "w0 w1 w2 …" as fast as it is let, so that a lost token is seen; SmolLM2 is what computes.
It is asked on a Unix socket: over TCP the client's own kernel takes what comes slowly for minutes, until its limit.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.figures import Figure
from benchmarks.service import Service, cpu_s, serving

STILL_S = 0.5
"""So long nothing may come before the buffers count as full."""


def _memory_bytes(*pids: int) -> int:
    """Return what processes have in memory, shared pages divided among those that share them."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)


async def stop_reading(service: Service, stop_s: float, more: int) -> dict[str, float]:
    """Read a little, stop, look, go on."""
    worker = await service.worker_pid()
    answer = await service.ask(
        {
            "messages": [{"role": "user", "content": "Count."}],
            "stream": True, "temperature": 0, "ignore_eos": True,
        }
    )  # fmt: skip
    await answer.read(5)
    stopped = time.monotonic()
    tokens, still_since = -1, stopped
    # It pauses now and then while the buffers of both ends fill, and for good when they are full.
    while time.monotonic() - still_since < STILL_S:
        (entry,) = (await service.get("/api/requests"))["requests"][:1]
        if entry["choices"][0]["report"]["tokens"] != tokens or entry["phase"] != "paused":
            tokens, still_since = entry["choices"][0]["report"]["tokens"], time.monotonic()
        await asyncio.sleep(0.05)
    paused = time.monotonic()
    before, cpu = (_memory_bytes(service.pid), _memory_bytes(worker)), cpu_s(worker)
    await asyncio.sleep(stop_s)
    share = (cpu_s(worker) - cpu) / (time.monotonic() - paused)
    after = (_memory_bytes(service.pid), _memory_bytes(worker))
    (entry,) = (await service.get("/api/requests"))["requests"][:1]
    assert entry["phase"] == "paused", entry["phase"]
    await answer.read(more)
    answer.leave()
    text = "".join(answer.pieces)
    if text.startswith("w0 "):
        words = text.split()
        # The last piece may hold a part of a word.
        assert words[:-1] == [f"w{number}" for number in range(len(words) - 1)], "tokens were lost"
    return {
        "share_percent": round(share * 100, 2),
        "service_mb": round((after[0] - before[0]) / 1e6, 2),
        "worker_mb": round((after[1] - before[1]) / 1e6, 2),
        "paused_after_s": round(still_since - stopped, 2),
        "tokens_ahead": tokens - 5,
    }


def measure(quick: bool) -> list[Figure]:
    """Return the figures."""
    stop_s, more = (2.0, 2000) if quick else (30.0, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        quiet = ("--log-level", "warning")
        with serving(*quiet, "--engine", "scripted", "-o", "pace_s=0.0001") as service:
            tcp = asyncio.run(stop_reading(service, stop_s, more))
        path = Path(folder) / "socket"
        with serving(*quiet, "--engine", "scripted", "-o", "pace_s=0.0001", unix_socket=path) as service:
            unix = asyncio.run(stop_reading(service, stop_s, more))
        with serving(*quiet, "--ctx", "8192", "--threads", "2", unix_socket=path) as service:
            model = asyncio.run(stop_reading(service, stop_s, 50 if quick else 1000))
    runs = {"tcp": tcp, "unix_socket": unix, "smollm2_unix_socket": model}
    most_mb = max(abs(run[side]) for run in runs.values() for side in ("service_mb", "worker_mb"))
    most_share = max(run["share_percent"] for run in runs.values())
    return [
        Figure(
            "http_stopped_memory", f"a client stops reading for {stop_s:g} s: memory of service or worker, most",
            most_mb, "MB", len(runs), ("≤", 5.0), details=runs,
        ),
        Figure(
            "http_stopped_cpu", "the same: the worker's share of a core, once the buffers are full, most",
            most_share, "%", len(runs), ("≤", 5.0), details=runs,
        ),
    ]  # fmt: skip
