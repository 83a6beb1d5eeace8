"""What the two ends of the sandbox say to each other: the setup, one request and one reply per job, a death.

Owns the frames (4-byte big-endian length, then msgpack) and the limits of a job; does nothing but read and
write sockets. Used by the worker's threads and by the sandbox process and its children.
"""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

NEEDS_TEMPLATE, NEEDS_VOCABULARY = b"t", b"g"
"""The byte that carries a job's socket: what must be ready before the job's own process starts."""
MAX_FRAME_BYTES = 300 << 20
"""A rendered template, the largest of all, has at most 64 Mi characters of four bytes, and its markers."""
_LENGTH = struct.Struct(">I")
_DEATH = struct.Struct(">8siB")
_DEATH_MARK = b"\xc1it died"  # msgpack never uses the byte C1
ENDED, MEMORY, OVERDUE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one job may take: seconds of computing, seconds by the clock, bytes beside what was there before.

    yield_s: after so long a job gives way to whoever computes tokens.
    """

    cpu_s: int = 2
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    yield_s: float = 0.1


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Setup:
    """What a sandbox process knows for life. template: None if the model has none."""

    model_path: str
    template: str | None
    origin: str
    bos: str
    eos: str
    spellings: Sequence[str]
    limits: Limits = LIMITS

    def to_wire(self) -> dict[str, Any]:
        """Return the plain mapping that travels."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Setup:
        """Rebuild from `to_wire`."""
        return cls(**{**wire, "limits": Limits(**wire["limits"])})


@dataclass(frozen=True, slots=True)
class Death:
    """A job's process ended without a reply. code: exit code, or the negative signal. cause: see the constants."""

    code: int
    cause: int = ENDED

    @property
    def by_clock(self) -> bool:
        """Whether another time it might have been fast enough."""
        return self.cause == OVERDUE

    @property
    def from_outside(self) -> bool:
        """Whether somebody ended it whom no job can be blamed for."""
        return self.cause == ENDED and -self.code in (
            signal.SIGKILL,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGQUIT,
        )

    def told(self, limits: Limits) -> str:
        """Return what became of the job, as a phrase that follows what it was about."""
        if self.cause == MEMORY:
            return f"needs more than {limits.memory_bytes >> 20} MiB of memory"
        if self.cause == OVERDUE:
            return f"isn't done after {limits.wall_s:g} s"
        if self.code == -signal.SIGXCPU:
            return f"takes more than {limits.cpu_s} s of computing"
        if self.code < 0:
            return f"crashes with {signal.Signals(-self.code).name}"
        return f"ends the process with exit code {self.code}"

    def to_bytes(self) -> bytes:
        """Return what the sandbox process writes where the reply should have been, or after a piece of it."""
        return _DEATH.pack(_DEATH_MARK, self.code, self.cause)

    @classmethod
    def at_end_of(cls, received: bytes) -> Death | None:
        """Return the death that `received` ends with, or None if nobody was left to tell of one."""
        mark, code, cause = _DEATH.unpack(received[-_DEATH.size :].rjust(_DEATH.size))
        return cls(code, cause) if mark == _DEATH_MARK else None


class Incomplete(Exception):
    """The other end closed before a whole frame came. `received` is what did."""

    def __init__(self, received: bytes) -> None:
        super().__init__(f"{len(received)} bytes, then the end")
        self.received = received


def packed(value: Any) -> bytes:
    """Return the frame of a plain value. Raises TypeError, ValueError or OverflowError for what can't travel."""
    # A lone surrogate must reach the place that refuses it by name.
    # msgpack's annotation allows None, which only its streaming packer returns.
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")  # pyright: ignore
    return _LENGTH.pack(len(body)) + body


def read_value(from_: socket.socket, deadline_s: float | None = None) -> Any:
    """Return the value of the next frame. deadline_s: on the monotonic clock; None waits.

    Raises `Incomplete`, TimeoutError, OSError; ValueError if the frame is no frame.
    """
    head = _read(from_, _LENGTH.size, b"", deadline_s)
    size = _LENGTH.unpack(head)[0]
    if head == _DEATH_MARK[: _LENGTH.size]:
        raise Incomplete(head + _read(from_, _DEATH.size - len(head), head, deadline_s))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    body = _read(from_, size, head, deadline_s)
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)


def _read(from_: socket.socket, size: int, before: bytes, deadline_s: float | None) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        if deadline_s is not None:
            from_.settimeout(max(deadline_s - time.monotonic(), 0.001))
        piece = from_.recv(min(size - len(pieces), 1 << 20))
        if not piece:
            raise Incomplete(before + bytes(pieces))
        pieces += piece
    return bytes(pieces)


def write_frame(to: socket.socket, frame: bytes, deadline_s: float | None = None) -> None:
    """Write all of `frame`. Raises TimeoutError, OSError."""
    view = memoryview(frame)
    while view:
        if deadline_s is not None:
            to.settimeout(max(deadline_s - time.monotonic(), 0.001))
        view = view[to.send(view) :]
