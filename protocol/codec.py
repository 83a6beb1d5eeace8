"""Bytes to messages and back. Pure: feed it any split of the stream, it returns whole messages.

A frame is a 4-byte big-endian length and that many bytes of one msgpack array. A frame to the worker has
at most 16 MiB, one from it 1 MiB; what declares more is refused before a byte of it is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from infervisor.protocol.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError
from infervisor.protocol.messages import FROM_WORKER, TO_WORKER, Message
from infervisor.protocol.quoting import quoted

MAX_TO_WORKER_BYTES = 16 << 20
MAX_FROM_WORKER_BYTES = 1 << 20
LENGTH_BYTES = 4
_LENGTH = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """Return the frame of `message`: length and payload in one piece, so that a write can't interleave.

    Raises `LocalProtocolError` if it can't be packed or is over the limit of its direction; nothing was sent.
    """
    limit = MAX_TO_WORKER_BYTES if message.name in TO_WORKER else MAX_FROM_WORKER_BYTES
    try:
        # msgpack's annotation allows None, which only its streaming packer returns.
        payload: bytes = msgpack.packb(message.to_wire(), use_bin_type=True)  # pyright: ignore
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{message.name} can't be packed: {error}") from error
    if len(payload) > limit:
        raise LocalProtocolError(f"{message.name} takes {len(payload)} bytes; a frame holds at most {limit}")
    return _LENGTH.pack(len(payload)) + payload


class Decoder:
    """Turns a byte stream into messages. One decoder a pipe; after an error it stays broken."""

    __slots__ = ("_broken", "_buffer", "_known", "_limit", "_most")

    def __init__(self, known: Mapping[str, type[Message]], limit_bytes: int) -> None:
        self._known = known
        self._limit = limit_bytes
        # A declared length reserves memory before its entries are seen: bound it well below the frame's size.
        self._most = limit_bytes >> 4
        self._buffer = bytearray()
        self._broken = False

    @classmethod
    def to_worker(cls) -> Decoder:
        """Return the decoder that the worker reads control with."""
        return cls(TO_WORKER, MAX_TO_WORKER_BYTES)

    @classmethod
    def from_worker(cls) -> Decoder:
        """Return the decoder that the parent reads frames with."""
        return cls(FROM_WORKER, MAX_FROM_WORKER_BYTES)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an unfinished frame: above 0 at end of stream means that the last frame was torn."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes, oldest first.

        Raises `RemoteProtocolError` (`FrameTooLarge` among them) for the first bad frame, with the messages
        before it in its attribute `before`: they were said while the other end could still be trusted.
        """
        if self._broken:
            raise RemoteProtocolError("the stream broke before; nothing after that can be read")
        kept = self._buffer
        kept += data
        # Nearly always nothing was left over: then the data is read where it is.
        buffer = data if len(kept) == len(data) else kept
        available = len(buffer)
        messages: list[Message] = []
        at = 0
        try:
            while available - at >= LENGTH_BYTES:
                (size,) = _LENGTH.unpack_from(buffer, at)
                if size > self._limit:
                    raise FrameTooLarge(f"a frame declares {size} bytes; at most {self._limit} are allowed")
                end = at + LENGTH_BYTES + size
                if available < end:
                    break
                messages.append(self._message(buffer[at + LENGTH_BYTES : end]))
                at = end
        except RemoteProtocolError as error:
            self._broken = True
            self._buffer = bytearray()
            error.before = messages
            raise
        del kept[:at]
        return messages

    def _message(self, payload: bytes | bytearray) -> Message:
        try:
            wire: Any = msgpack.unpackb(
                payload, strict_map_key=False, max_array_len=self._most, max_map_len=self._most
            )
        except Exception as error:  # msgpack raises many kinds for malformed bytes; all mean the same here
            message = f"a frame of {len(payload)} bytes isn't msgpack: {quoted(error, 100)}"
            raise RemoteProtocolError(message) from error
        if not isinstance(wire, list) or not wire or not isinstance(wire[0], str):
            raise RemoteProtocolError(f"a frame must be an array that begins with a name, not {quoted(wire)}")
        cls = self._known.get(wire[0])
        if cls is None:
            raise RemoteProtocolError(f"unknown message {quoted(wire[0])}")
        return cls.from_wire(wire[1:])
