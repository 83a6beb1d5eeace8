"""llama.cpp's own server, from the wheel `xllamacpp`, in a process of its own: a peer to measure against.

Its HTTP stream is read the cheapest way that still yields what a client needs: lines of a socket, each event's JSON
parsed, all streams in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

SERVER = """
import sys, xllamacpp
path, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
settings = xllamacpp.CommonParams()
settings.model.path = path
settings.n_parallel = slots
settings.n_ctx = slots * context  # it is divided among the slots
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
settings.cache_prompt = False
settings.cache_ram_mib = 0
settings.verbosity = 0
server = xllamacpp.Server(settings)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def check_installed() -> str:
    """Return the version of the wheel. Raises SystemExit that says how to get it."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise SystemExit(
            "this benchmark measures against llama.cpp's own server: python -m pip install -e '.[bench]'"
        )
    return metadata.version("xllamacpp")


class NativeServer:
    """A server that listens. address: host and port on loopback."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    async def read_all(self, prompt: str, tokens: int) -> int:
        """Read a greedy answer of exactly so many tokens; return when the last of them arrived, monotonic ns."""
        body = json.dumps(
            {
                "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "cache_prompt": False,
            }
        ).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(
                b"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            # The server writes each event as one chunk of the body, and JSON has no line breaks: the lines of
            # the socket that aren't events frame them.
            async for line in reader:
                if line.startswith(b"data: "):
                    # The last event comes with the last token, and counts a half character that no other has.
                    last_ns = time.monotonic_ns()
                    event = json.loads(line[6:])
                    if event["stop"]:
                        break
            else:
                raise RuntimeError("the native server's stream broke off")
        finally:
            writer.close()
        told = event["timings"]
        if told["predicted_n"] != tokens or told["cache_n"]:
            raise RuntimeError(f"not {tokens} tokens, or a cached prompt: {told}")
        return last_ns


@contextlib.contextmanager
def native_server(
    model: Path, *, slots: int, context: int, threads: int, env: Mapping[str, str] | None = None
) -> Iterator[NativeServer]:
    """Yield a server with so many tokens of context in each slot, and end it afterwards.

    env: variables for it, beside those of this process.
    """
    command = [sys.executable, "-c", SERVER, str(model), str(slots), str(context), str(threads)]
    # What it says goes nowhere; how it ended is told.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **(env or {})},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            while line and not line.startswith("http://"):
                line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the native server ended with code {process.wait()}")
            address = urlsplit(line.strip())
            assert address.hostname is not None
            assert address.port is not None
            yield NativeServer((address.hostname, address.port))
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
