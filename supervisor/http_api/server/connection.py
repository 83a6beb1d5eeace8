"""One connection of the server: uvicorn's protocol on h11, with bounds on what a client may hold.

Owns the connection's clocks and what happens outside of a request: a head that doesn't come, is too large or is
no HTTP; too many connections; bytes beyond the request; the client's leaving. uvicorn owns the request itself.
Runs in the event loop's thread.

A client has left when its side of the connection has ended, even if it only closed the writing half: no client
of the field does that and reads on, and what it asked costs computing time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from infervisor.supervisor.http_api.errors import HttpRefused, error_body, error_headers, kind_of
from infervisor.supervisor.http_api.guards.envelope import ANSWER_HEADERS, new_request_id
from infervisor.supervisor.http_api.server.bounded_transport import BoundedTransport, tune

_log = logging.getLogger("infervisor.http.connection")
_log.setLevel(logging.ERROR)  # each malformed request of a stranger would be a line otherwise
_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one client, and all together, may hold of the server."""

    max_connections: int = 1024
    max_refused: int = 64
    """Connections beyond the limit that get an answer; any more are reset."""
    header_timeout_s: float = 10.0
    """From a connection's start, or a request's first byte, to the end of its head."""
    keep_alive_s: float = 75.0
    """How long a connection stays without a request."""
    max_head_bytes: int = 64 << 10
    max_early_bytes: int = 64 << 10
    """What may come before the answer to the last request is complete."""
    unread_s: float = 30.0
    """How long a finished answer may lie without a byte of it being taken."""
    linger_s: float = 1.0
    linger_bytes: int = 4 << 20
    """How long, and how much, a refused client may go on sending before its connection is reset."""


class _Flow(FlowControl):
    """Hold back a body that nobody reads; never reading itself, since only reading tells that a client left."""

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection) -> None:
        super().__init__(transport)
        self._conn = conn

    def pause_reading(self) -> None:
        if self._conn.their_state is h11.SEND_BODY:
            super().pause_reading()


class Connection(H11Protocol):
    """A connection that no client can hold for longer, or fill with more, than its limits say."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        # What the application calls for a client that takes nothing: a close would wait for it.
        super().__init__(config, server_state, {**app_state, "abort_connection": self.abort}, _loop)
        self.logger = _log
        self.access_log = False
        self._limits = limits
        self._clock: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._dropped_bytes = 0
        self._reader_clock: asyncio.TimerHandle | None = None
        """Runs while output waits to be read."""

    # --- the connection's life -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request, unless too many connections are open."""
        super().connection_made(transport)
        tune(transport)
        self.flow = _Flow(transport, self.conn)
        bounded = BoundedTransport(transport, self._limits.unread_s, self.loop)
        self.transport = cast(asyncio.Transport, bounded)
        excess = len(self.connections) - self._limits.max_connections
        if excess > self._limits.max_refused:
            transport.abort()
        elif excess > 0:
            message = f"All {self._limits.max_connections} connections are taken. Try again soon."
            self._refuse(HttpRefused("too_many_requests", message))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request, and forget the clocks."""
        cast(BoundedTransport, self.transport).forget()
        super().connection_lost(exc)
        if self._reader_clock is not None:
            self._reader_clock.cancel()
            self._reader_clock = None
        self._stop_clock()
        self._unset_keepalive_if_required()

    def eof_received(self) -> None:
        """Take the end of the client's sending for its leaving: at once, also with answers unsent."""
        if self._is_serving() and not self._is_refused:
            self.abort()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Note that the client is behind."""
        super().pause_writing()
        if self._reader_clock is None:
            self._reader_clock = self.loop.call_later(self._limits.unread_s, self._unread)

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        super().resume_writing()
        if self._reader_clock is not None:
            self._reader_clock.cancel()
            self._reader_clock = None

    def _unread(self) -> None:
        """Cut off who has asked more, and doesn't read the answer before it: the next one can't even begin."""
        self._reader_clock = self.loop.call_later(self._limits.unread_s, self._unread)
        if self._is_serving() and not self.cycle.response_started:
            self.abort()

    def abort(self) -> None:
        """End the connection now, with what is unsent. The running request sees that its client is gone."""
        self._leave_cycle()
        self.transport.abort()

    def shutdown(self) -> None:
        """Close when the running request is answered; at once without one."""
        if self._is_serving():
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    # --- reading ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the bounds of what may come now."""
        if self._is_refused or self.conn.their_state is h11.MUST_CLOSE:  # nothing that is of use can follow
            self._dropped_bytes += len(data)
            bound = self._limits.linger_bytes if self._is_refused else self._limits.max_early_bytes
            if self._dropped_bytes > bound:
                self.abort()
            return
        super().data_received(data)
        if self._is_serving() and not self.cycle.more_body:
            early, _ = self.conn.trailing_data
            if len(early) > self._limits.max_early_bytes:
                self.abort()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. uvicorn calls this while it handles the error of h11."""
        error = sys.exception()
        reason = str(error)[:200] if isinstance(error, h11.RemoteProtocolError) else msg
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(
                HttpRefused("headers_too_large", "The request's head is too large. Send a smaller one.")
            )
        else:
            self._refuse(HttpRefused("invalid_http", f"This is no well-formed request of HTTP/1.1: {reason}"))

    def _should_upgrade(self) -> bool:
        return False  # the service has no websockets; the request is served as if nothing had been asked

    # --- what clients are not given --------------------------------------------------------------

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _leave_cycle(self) -> None:
        if self._is_serving():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.flow.resume_writing()

    def _refuse(self, error: HttpRefused) -> None:
        """Answer in the place of the application, and end the connection soon."""
        if self._is_serving() and self.cycle.response_started:
            self.abort()  # half an answer stands there already; another one would look like its rest
            return
        self._leave_cycle()
        self._is_refused = True
        self._stop_clock()
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            # Closing while the client still sends would reset the connection, and it would never read why.
            self.transport.write_eof()
            self._clock = self.loop.call_later(self._limits.linger_s, self.transport.abort)
        else:
            self.transport.close()

    # --- the clock of a request's head -----------------------------------------------------------

    def _watch(self) -> None:
        if self._is_refused or self._is_serving() or self.transport.is_closing():
            if not self._is_refused:
                self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(self._limits.header_timeout_s, self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"The request's head was not complete after {self._limits.header_timeout_s:g} s."
            self._refuse(HttpRefused("request_timeout", message))
        else:
            self.transport.close()


def _answer(error: HttpRefused) -> bytes:
    status = kind_of(error).status
    body = json.dumps(error_body(error)).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        "X-Request-Id": new_request_id(),
        "Cache-Control": "no-store",
        **ANSWER_HEADERS,
        **error_headers(error),
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
