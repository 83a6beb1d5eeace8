"""A server of an ASGI application in the test's own loop, and requests to it byte by byte."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infervisor.supervisor.http_api.server.server import ConnectionLimits, HttpServer, open_sockets

WITHIN_S = 20.0


@dataclass
class Reply:
    """What came back: the first answer on the connection, and the bytes behind it."""

    raw: bytes
    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, raw: bytes) -> Reply:
        """Return the parts of an answer with a Content-Length, in chunks, or up to the connection's end."""
        head, found, rest = raw.partition(b"\r\n\r\n")
        assert found, f"no whole head: {raw!r}"
        first, *lines = head.decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/1.1 "), first
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "content-length" in headers:
            rest = rest[: int(headers["content-length"])]
        return cls(raw, int(first.split()[1]), headers, rest)

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's shape."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return str(error["code"])


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def until(self, end: bytes) -> bytes:
        """Return everything up to and with `end`."""
        return await asyncio.wait_for(self.reader.readuntil(end), WITHIN_S)

    async def rest(self) -> bytes:
        """Return everything until the server ends the connection, by a reset as well."""
        raw = bytearray()
        try:
            async with asyncio.timeout(WITHIN_S):
                while data := await self.reader.read(1 << 16):
                    raw += data
        except ConnectionError:
            pass
        return bytes(raw)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            pass


@dataclass
class Served:
    """A running server."""

    server: HttpServer
    port: int | None
    path: Path | None
    tls: ssl.SSLContext | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """Yield a connection; it is closed at the end."""
        if self.path is not None:
            client = Client(*await asyncio.open_unix_connection(self.path, limit=1 << 20))
        else:
            tls = {} if self.tls is None else {"ssl": self.tls, "server_hostname": "localhost"}
            client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20, **tls))
        try:
            yield client
        finally:
            await client.close()

    async def exchange(self, raw: bytes) -> Reply:
        """Send bytes on a connection of their own and return the answer, read to the connection's end.

        A request that leaves the connection open makes this wait: send `Connection: close` with it.
        """
        async with self.connect() as client:
            try:
                await client.send(raw)
            except ConnectionError:
                pass  # refused in the middle of it: the answer lies there
            return Reply.of(await client.rest())


@asynccontextmanager
async def served(
    app: Any,
    *,
    path: Path | None = None,
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
    stop_grace_s: float = 0.0,
    **limits: Any,
) -> AsyncIterator[Served]:
    """Yield a server of this application on a free port, or on a Unix socket. `tls`: its context, the client's."""
    listening = open_sockets() if path is None else open_sockets(None, unix_socket=path)
    server = HttpServer(app, listening, limits=ConnectionLimits(**limits), tls=tls and tls[0])
    running = asyncio.create_task(server.serve())
    await asyncio.wait_for(server.accepting.wait(), WITHIN_S)
    try:
        yield Served(server, listening.port, path, tls and tls[1])
    finally:
        server.stop(stop_grace_s)
        await asyncio.wait_for(running, WITHIN_S)


def request(
    path: str, body: bytes | None = None, *headers: bytes, method: str | None = None, close: bool = True
) -> bytes:
    """Return a request's bytes; with a body it is a POST of JSON."""
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1".encode(), b"Host: localhost"]
    if body is not None:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    if close:
        lines.append(b"Connection: close")
    return b"\r\n".join([*lines, *headers, b"", body or b""])
