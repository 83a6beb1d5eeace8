"""One request's area in the shared memory: two buffers, each with a header that says what lies behind it.

Owns the layout, and the rule by which a torn or foreign snapshot is never used. Knows nothing of engines: it is
given functions that write and read. No I/O but memory, no clock; the work loop's thread runs it.

A header is taken away before the data behind it are touched and written after them, in this order at whatever
moment the process dies. Its checksum covers the header itself: a half-written one. The hash of the tokens ties
the data to one sequence, that of the fingerprint to one model and its settings. The data have no sum, which
would take ten times as long as writing them: that they are whole follows from the order. Memory that a crash
scribbled over isn't noticed here.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAGIC = b"infrvKV1"
_FIELDS = struct.Struct("<8sQ16sQQ16s")
_SUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _SUM.size
DATA_OFFSET = 128
"""Where data begin in a buffer: the header's size, rounded up so that copying is aligned."""
ALIGNMENT = 4096
MIN_BYTES = 2 * ALIGNMENT

Write = Callable[[memoryview], int]
Read = Callable[[memoryview, int], bool]


def hash_of(data: bytes) -> bytes:
    """Return the 16 bytes that stand for `data` in a header."""
    return hashlib.blake2b(data, digest_size=16).digest()


def hash_of_tokens(tokens: Sequence[int]) -> bytes:
    """Return the 16 bytes that stand for these tokens in a header."""
    return hash_of(array("Q", tokens).tobytes())


@dataclass(frozen=True, slots=True)
class Header:
    """What a buffer holds. generation: the larger one is newer."""

    generation: int
    fingerprint_hash: bytes
    tokens: int
    data_bytes: int
    token_hash: bytes

    def pack(self) -> bytes:
        """Return it as it lies in memory."""
        fields = _FIELDS.pack(
            MAGIC, self.generation, self.fingerprint_hash, self.tokens, self.data_bytes, self.token_hash
        )
        return fields + _SUM.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> Header | None:
        """Return the header in the first bytes of `packed`, or None if there isn't a whole one."""
        if len(packed) < HEADER_BYTES:
            return None
        fields = packed[: _FIELDS.size]
        if _SUM.unpack_from(packed, _FIELDS.size)[0] != zlib.crc32(fields):
            return None
        magic, *values = _FIELDS.unpack(fields)
        return cls(*values) if magic == MAGIC else None


class Area:
    """Two buffers in one piece of memory."""

    def __init__(self, memory: memoryview, fingerprint_hash: bytes) -> None:
        """Take `memory` as it is: empty, or as another process left it. Raises `ValueError` if it is too small."""
        if len(memory) < MIN_BYTES:
            raise ValueError(f"an area needs at least {MIN_BYTES} bytes and has {len(memory)}")
        self._memory = memory
        self._fingerprint_hash = fingerprint_hash
        half = len(memory) // 2 // ALIGNMENT * ALIGNMENT
        self.starts = (0, half)
        """Where the two buffers begin."""
        self.capacity_bytes = half - DATA_OFFSET
        self._best: int | None = None
        """The buffer that must not be overwritten: the newest snapshot of this sequence, or none."""
        self._generation = max((header.generation for _, header in self._headers()), default=0)

    @property
    def next_buffer(self) -> int:
        """Which buffer the next snapshot goes to: never the newest one."""
        return 1 - self._best if self._best is not None else 0

    def restore(self, tokens: Sequence[int], read: Read) -> int:
        """Give the newest snapshot of a beginning of `tokens` to `read(data, how many tokens)`.

        Returns how many tokens were restored; 0 if there is none or none could be read.
        """
        for buffer, header in sorted(self._headers(), key=lambda found: -found[1].generation):
            if not self._is_usable(header, tokens):
                continue
            # Race "the snapshot kills who reads it": without its header nobody tries it again.
            self._write_header(buffer, bytes(HEADER_BYTES))
            with self._data(buffer, header.data_bytes) as data:
                good = read(data, header.tokens)
            if good:
                self._write_header(buffer, header.pack())
                self._best = buffer
                return header.tokens
        return 0

    def save(self, tokens: Sequence[int], write: Write) -> int:
        """Let `write(memory)` save the state after `tokens` in the older buffer.

        Returns how many bytes it wrote, as it says; 0 if there is no new snapshot.
        """
        buffer = self.next_buffer
        # Race "killed while writing": without a header this buffer is nothing, and the other one is still whole.
        self._write_header(buffer, bytes(HEADER_BYTES))
        with self._data(buffer, self.capacity_bytes) as data:
            written = write(data)
        if not 0 < written <= self.capacity_bytes:
            return 0
        self._generation += 1
        header = Header(
            self._generation, self._fingerprint_hash, len(tokens), written, hash_of_tokens(tokens)
        )
        self._write_header(buffer, header.pack())
        self._best = buffer
        return written

    def _is_usable(self, header: Header, tokens: Sequence[int]) -> bool:
        return (
            header.fingerprint_hash == self._fingerprint_hash
            and 0 < header.tokens <= len(tokens)
            and 0 < header.data_bytes <= self.capacity_bytes
            and header.token_hash == hash_of_tokens(tokens[: header.tokens])
        )

    def _headers(self) -> list[tuple[int, Header]]:
        found = [
            (buffer, Header.unpack(bytes(self._memory[start : start + HEADER_BYTES])))
            for buffer, start in enumerate(self.starts)
        ]
        return [(buffer, header) for buffer, header in found if header is not None]

    def _write_header(self, buffer: int, packed: bytes) -> None:
        start = self.starts[buffer]
        self._memory[start : start + HEADER_BYTES] = packed

    def _data(self, buffer: int, size_bytes: int) -> memoryview:
        start = self.starts[buffer] + DATA_OFFSET
        return self._memory[start : start + size_bytes]
