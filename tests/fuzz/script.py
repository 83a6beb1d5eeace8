"""What one run of the fuzz harness does: steps of a worker, its caller and the clock, as bytes and back.

A step is one byte for what is done, two for the length of what follows, and that. Every byte string is a script:
what is cut or unknown is left out, so that a fuzzer can change anything.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

HEADER_BYTES = 3
MAX_PAYLOAD_BYTES = (1 << 16) - 1


class Do(enum.IntEnum):
    """What a step does. The payload's bytes are small numbers, unless it says otherwise."""

    PROPER = 0
    """The worker sends a frame as the protocol wants it: kind, attempt, count."""
    BUT = 1
    """The same with one field changed: kind, attempt, count, field, then the value as msgpack."""
    FRAME = 2
    """The worker sends the payload as a frame with the right length."""
    RAW = 3
    """The worker sends the payload's bytes as they are."""
    STRETCH = 4
    """Like `FRAME`, with every text and array in it made longer, in units of 250 times: the first byte."""
    AGAIN = 5
    """The worker repeats the last frame: times in units of 4."""
    HOLD = 6
    """From now on (or no more) frames gather in the pipe before the parent reads them."""
    OUTPUT = 7
    """The worker prints the payload."""
    HEAR = 8
    """The worker reads its control pipe."""
    CLOSE = 9
    """The worker closes its frames and lives on."""
    EXIT = 10
    """The worker exits: code, or minus the signal if that is above 128."""
    LINGER = 11
    """From now on (or no more) what is killed takes time to die."""
    OPEN = 12
    """The caller starts a stream: window − 1, and what with: tight deadlines, log-probabilities, tools (bits)."""
    TAKE = 13
    """The caller reads: stream, chunks."""
    CANCEL = 14
    """The caller cancels: stream."""
    KILL = 15
    """The caller cancels with the last rung: stream."""
    WAIT = 16
    """Time passes: units of 100 ms, and of 25.6 s."""
    STALL = 17
    """The parent's loop stands still: units of 100 ms."""
    REPLACE = 18
    """The caller asks for another worker."""
    SHUT = 19
    """The supervisor closes."""
    JAM = 20
    """The control pipe is full, until the worker reads it."""
    EMBED = 21
    """The caller wants embeddings: texts − 1."""
    ASK = 22
    """The caller asks what computes nothing: which kind."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `number(i)` reads its payload as small numbers, 0 where it ends."""

    do: Do
    payload: bytes = b""

    def number(self, at: int) -> int:
        """Return the byte at this place, or 0."""
        return self.payload[at] if at < len(self.payload) else 0

    def to_bytes(self) -> bytes:
        """Return what `steps_of` reads."""
        payload = self.payload[:MAX_PAYLOAD_BYTES]
        return bytes([self.do]) + len(payload).to_bytes(2, "big") + payload


def step(do: Do, *numbers: int) -> Step:
    """Return a step with small numbers."""
    return Step(do, bytes(numbers))


def steps_of(data: bytes) -> Iterator[Step]:
    """Yield the steps of any byte string."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        size = int.from_bytes(data[at + 1 : at + HEADER_BYTES], "big")
        payload = data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        yield Step(Do(data[at] % len(Do)), payload)
        at += HEADER_BYTES + size


def bytes_of(steps: Iterable[Step]) -> bytes:
    """Return the script of these steps."""
    return b"".join(each.to_bytes() for each in steps)
