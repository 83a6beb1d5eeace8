"""`supervise serve` as a process of its own, and the cheapest client of its streams: for benchmarks over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

CHAT = "/v1/chat/completions"
QUIET_WINDOW_S = 0.05
QUIET_SHARE, BUSY_SHARE = 0.02, 0.1
LOOK_S = 0.005


class Service:
    """A service that is ready. pid: of its process; port on loopback, or the path of a Unix socket."""

    def __init__(self, pid: int, port: int | None, path: str | None) -> None:
        self.pid = pid
        self._port = port
        self._path = path

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection whose reader takes no more than it is asked for."""
        # A small buffer, so that a reader that stops leaves the rest with the system.
        if self._path is not None:
            return await asyncio.open_unix_connection(self._path, limit=1024)
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1024)

    async def ask(self, body: dict[str, Any], path: str = CHAT) -> Answer:
        """Send a request; the answer is read afterwards."""
        reader, writer = await self.connect()
        raw = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Infervisor-Report: off\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        await writer.drain()
        return Answer(reader, writer)

    async def get(self, path: str) -> Any:
        """Return JSON."""
        reader, writer = await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        raw = await reader.read()
        writer.close()
        return json.loads(raw.partition(b"\r\n\r\n")[2])

    async def worker_pid(self) -> int:
        """Return the worker's."""
        (model,) = (await self.get("/api/worker"))["models"]
        pid: int = model["workers"][0]["pid"]
        return pid


class Answer:
    """A streamed answer. pieces: the texts so far; stamps: when each came, monotonic seconds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.pieces: list[str] = []
        self.stamps: list[float] = []

    async def read(self, pieces: int | None = None) -> bool:
        """Read so many pieces more, or all; return whether the answer goes on. Raises if it breaks off."""
        wanted = None if pieces is None else len(self.pieces) + pieces
        while wanted is None or len(self.pieces) < wanted:
            line = await self._reader.readline()
            if not line:
                raise RuntimeError(f"the stream broke off after {len(self.pieces)} pieces")
            # An event is one chunk of the body: the lines that frame it are no events.
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return False
            text = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if text:
                self.pieces.append(text)
                self.stamps.append(time.monotonic())
        return True

    def leave(self) -> None:
        """Close the connection, as a program does that ends."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close it in order."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@contextlib.contextmanager
def serving(*arguments: str, unix_socket: Path | None = None) -> Iterator[Service]:
    """Yield a service that is ready, and end it afterwards."""
    place = ["--port", "0"] if unix_socket is None else ["--unix-socket", str(unix_socket)]
    command = [sys.executable, "-m", "infervisor.supervisor.cli", "serve", *place, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        # Its log must not fill the pipe.
        log = threading.Thread(target=process.stderr.read, daemon=True)
        try:
            port = None
            for line in process.stderr:
                if " serves " in line:
                    found = re.search(r"127\.0\.0\.1:(\d+) serves", line)
                    port = int(found[1]) if found else None
                    break
            else:
                raise RuntimeError(f"the service ended with code {process.wait()}")
            log.start()
            yield Service(process.pid, port, None if unix_socket is None else str(unix_socket))
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
            if log.ident is not None:
                log.join()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    return sum(_cpu_by_thread_s(pid).values())


def _cpu_by_thread_s(pid: int) -> dict[str, float]:
    """Return the CPU time of each thread: exact where the system tells it, otherwise of all in hundredths."""
    times: dict[str, float] = {}
    for schedule in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            times[schedule.parent.name] = int(schedule.read_text().split()[0]) / 1e9
    return times or {"all": sum(psutil.Process(pid).cpu_times()[:2])}


def _spent_s(before: dict[str, float], after: dict[str, float]) -> float:
    """Return what threads computed in between; one that has ended takes its time with it."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


async def check_busy(pid: int) -> None:
    """Raise RuntimeError unless the process computes: its falling quiet would mean nothing."""
    before = _cpu_by_thread_s(pid)
    await asyncio.sleep(QUIET_WINDOW_S)
    if _spent_s(before, _cpu_by_thread_s(pid)) < BUSY_SHARE * QUIET_WINDOW_S:
        raise RuntimeError(f"process {pid} computes nothing before its client leaves")


async def quiet_after(pid: int, since_s: float, within_s: float) -> float:
    """Return the seconds from `since_s` until the process computes nothing, seen from outside.

    Nothing: at most 2 % of a core over the 50 ms that follow. Raises if that takes longer than within_s.
    """
    seen: deque[tuple[float, dict[str, float]]] = deque()
    while True:
        now = time.monotonic()
        seen.append((now, _cpu_by_thread_s(pid)))
        while seen[-1][0] - seen[0][0] >= QUIET_WINDOW_S:
            (began, before), (ended, after) = seen[0], seen[-1]
            if _spent_s(before, after) <= QUIET_SHARE * (ended - began):
                return max(0.0, began - since_s)
            seen.popleft()
        if now - since_s > within_s:
            raise RuntimeError(f"process {pid} still computes after {within_s} s")
        await asyncio.sleep(LOOK_S)
