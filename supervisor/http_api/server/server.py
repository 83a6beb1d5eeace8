"""The HTTP server: uvicorn, told to leave signals, logs and life spans to those who own them.

Owns the acceptors and the connections. Opens no sockets (`listening.py`) and knows nothing of models. Runs in
the event loop of whoever calls `serve`; asyncio alone, as uvicorn does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from socket import socket
from ssl import SSLContext
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import Server

from infervisor.supervisor.http_api.server.connection import Connection, ConnectionLimits
from infervisor.supervisor.http_api.server.listening import BACKLOG, Listening, open_sockets, tls_context

__all__ = ["ConnectionLimits", "HttpServer", "Listening", "open_sockets", "tls_context"]

TLS_HANDSHAKE_S = 10.0
TLS_CLOSE_S = 5.0
SPARE_DESCRIPTORS = 128
"""Kept free of connections: for workers, their pipes, and files."""
LAST_WORDS_S = 1.0


class HttpServer:
    """Serve an ASGI application on open sockets until `stop()`."""

    def __init__(
        self,
        app: ASGIApp,
        listening: Listening,
        *,
        limits: ConnectionLimits | None = None,
        tls: SSLContext | None = None,
    ) -> None:
        self._server = _Server(app, _affordable(limits or ConnectionLimits()), tls)
        self._listening = listening

    @property
    def accepting(self) -> asyncio.Event:
        """Set when connections are taken."""
        return self._server.accepting

    @property
    def open_connections(self) -> int:
        """How many connections there are, idle ones included."""
        return len(self._server.server_state.connections)

    async def serve(self) -> None:
        """Serve until `stop()`; then end the connections, and close the sockets.

        Cancelling it ends all connections at once.
        """
        try:
            await self._server.serve(self._listening.sockets)
        finally:
            self._server.abandon()
            self._listening.close()

    def unsent_bytes(self) -> int:
        """Return how much of answers clients haven't taken yet, beyond what the system holds for them."""
        return self._server.unsent_bytes()

    def stop(self, grace_s: float = 5.0) -> None:
        """Take no more connections; running requests have `grace_s` to be answered, then they are cut off.

        May be called again, with less.
        """
        self._server.stop(grace_s)


class _Server(Server):
    def __init__(self, app: ASGIApp, limits: ConnectionLimits, tls: SSLContext | None) -> None:
        for name in ("uvicorn.error", "uvicorn.access"):
            if logging.getLogger(name).level == logging.NOTSET:  # nobody wants to hear more of it
                logging.getLogger(name).setLevel(logging.WARNING)
        config = Config(
            cast(Any, app),
            http=cast(Any, partial(Connection, limits=limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # who sends a forged X-Forwarded-For would be somebody else
            server_header=False,
            timeout_keep_alive=cast(Any, limits.keep_alive_s),
            h11_max_incomplete_event_size=limits.max_head_bytes,
        )
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._tls = tls
        self._stopping = asyncio.Event()
        self._deadline: float | None = None
        self.servers: list[asyncio.base_events.Server] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process that runs the server."""
        yield

    def unsent_bytes(self) -> int:
        return sum(
            connection.transport.get_write_buffer_size()
            for connection in self.server_state.connections
            if not connection.transport.is_closing()
        )

    def stop(self, grace_s: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + grace_s
        self.should_exit = True
        self._stopping.set()

    def abandon(self) -> None:
        """Let go of everything that is still open, without waiting."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            cast(Connection, connection).abort()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        loop = asyncio.get_running_loop()

        def connected() -> asyncio.Protocol:
            protocol = self.config.http_protocol_class
            return protocol(config=self.config, server_state=self.server_state, app_state={}, _loop=loop)  # type: ignore[call-arg]

        tls_options: dict[str, Any] = {}
        if self._tls is not None:
            tls_options = {
                "ssl": self._tls,
                "ssl_handshake_timeout": TLS_HANDSHAKE_S,
                "ssl_shutdown_timeout": TLS_CLOSE_S,
            }
        for sock in sockets or []:
            server = await loop.create_server(connected, sock=sock, backlog=BACKLOG, **tls_options)
            self.servers.append(server)
        self.started = True
        self.accepting.set()

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):  # it keeps the time for the Date header
            tick += 10
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._until_quiet()
        self.abandon()
        tasks = set(self.server_state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LAST_WORDS_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=LAST_WORDS_S)

    async def _until_quiet(self) -> None:
        """Wait for the running requests, as long as the grace lasts; `stop` may shorten it meanwhile."""
        loop = asyncio.get_running_loop()
        state = self.server_state
        while (state.tasks or state.connections) and loop.time() < (self._deadline or 0):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # uvicorn's sets tell nobody when they are empty


def _affordable(limits: ConnectionLimits) -> ConnectionLimits:
    """Return the limits with as many connections as the process has descriptors for.

    Without a descriptor nothing can be accepted, not even to refuse it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    affordable = max(16, soft - SPARE_DESCRIPTORS - limits.max_refused)
    if affordable >= limits.max_connections:
        return limits
    logging.getLogger("infervisor.http").warning(
        "at most %d connections instead of %d: the process may open %d files (ulimit -n)",
        affordable,
        limits.max_connections,
        soft,
    )
    return replace(limits, max_connections=affordable)
