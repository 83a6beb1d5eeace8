"""The shared memory in which workers keep snapshots of running requests: one piece for each supervisor.

Owns the descriptor and who has which area; never looks inside. Workers come and go, what they wrote stays.
Memory is used where it has been written, and given back when a request is over. Runs in the event loop's thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from infervisor.protocol.errors import LocalProtocolError

SMALLEST_AREA_BYTES = 64 << 10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass(frozen=True, slots=True)
class Area:
    """A request's part of the memory; travels in `submit` as [offset, size_bytes]."""

    offset: int
    size_bytes: int


class SnapshotMemory:
    """Sparse memory divided into equal areas. Make it with `create`."""

    def __init__(self, fd: int, max_bytes: int, keep_areas: int = 0) -> None:
        self.fd = fd
        self._max_bytes = max_bytes
        self._keep_areas = keep_areas
        self._area_bytes = 0
        self._free: list[Area] = []
        """The one to be given out next stands last."""
        self._taken: set[Area] = set()
        self._kept: list[Area] = []
        """Free areas whose memory is kept, oldest first."""
        self._closed = False

    @classmethod
    def create(cls, max_bytes: int, keep_areas: int = 0) -> SnapshotMemory | None:
        """Return memory of at most `max_bytes`, all unused; None where the system has none of this kind.

        keep_areas: how many free areas may keep their memory, which spares the next requests from asking the system
        for theirs: on some machines that takes as long as ten snapshots.
        """
        try:
            fd = os.memfd_create("infervisor-snapshots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(fd, max_bytes)
            # A file that shrinks under a mapping kills who touches it: no worker can do that to another.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except (OSError, OverflowError, ValueError):
            os.close(fd)
            return None
        return cls(fd, max_bytes, keep_areas)

    def divide(self, areas: int) -> None:
        """Cut the memory into `areas` equal areas, or as many as there is room for. Only the first call counts."""
        if self._area_bytes or self._closed:
            return
        count = max(1, min(areas, self._max_bytes // SMALLEST_AREA_BYTES))
        self._area_bytes = self._max_bytes // count // mmap.PAGESIZE * mmap.PAGESIZE
        if self._area_bytes < SMALLEST_AREA_BYTES:
            return
        self._free = [Area(index * self._area_bytes, self._area_bytes) for index in reversed(range(count))]

    def take(self) -> Area | None:
        """Return a free area, the one freed last if there is one; None if there is none (left)."""
        if not self._free:
            return None
        area = self._free.pop()
        self._taken.add(area)
        if area in self._kept:
            self._kept.remove(area)
            self._forget(area)
        return area

    def free(self, area: Area) -> None:
        """Take an area back when its request has been released, and give its memory back. None after `close`.

        Raises `LocalProtocolError` for an area that isn't taken.
        """
        if self._closed:
            return
        if area not in self._taken:
            raise LocalProtocolError(f"{area} is freed, but nobody has it")
        self._taken.remove(area)
        self._free.append(area)
        self._kept.append(area)
        while len(self._kept) > self._keep_areas:
            self._punch(self._kept.pop(0))

    def trim(self) -> None:
        """Give back what free areas have kept."""
        while self._kept:
            self._punch(self._kept.pop())

    def used_bytes(self) -> int:
        """Return how much memory is in use; 0 after `close`."""
        try:
            return 0 if self._closed else os.fstat(self.fd).st_blocks * 512
        except OSError:
            # Race "it is closed while another thread asks".
            return 0

    def close(self) -> None:
        """Close the descriptor; the memory goes when no worker has it any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._free.clear()
            self._kept.clear()
            os.close(self.fd)

    def _forget(self, area: Area) -> None:
        """See to it that no request goes on from what another one left: both buffers begin with what they hold."""
        for start in (area.offset, area.offset + area.size_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE):
            self._punch(Area(start, mmap.PAGESIZE))

    def _punch(self, area: Area) -> None:
        # Where the system can't, the memory stays in use until the area is written again: no harm but its size.
        with contextlib.suppress(OSError):
            _fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, area.offset, area.size_bytes)


def _fallocate(fd: int, mode: int, offset: int, size_bytes: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is None:
        raise OSError("this system has no fallocate")
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if function(fd, mode, offset, size_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
