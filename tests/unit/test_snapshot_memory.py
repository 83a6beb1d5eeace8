"""The parent's shared memory: equal areas, given out and given back, with what they use."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from infervisor.protocol.errors import LocalProtocolError
from infervisor.supervisor.snapshot_memory import SMALLEST_AREA_BYTES, Area, SnapshotMemory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


def create(max_bytes: int = 8 * MIB, keep_areas: int = 0) -> SnapshotMemory:
    made = SnapshotMemory.create(max_bytes, keep_areas)
    assert made is not None
    return made


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    made = create()
    yield made
    made.close()


def fill(memory: SnapshotMemory, area: Area, size_bytes: int | None = None) -> None:
    os.pwrite(memory.fd, b"x" * (size_bytes or area.size_bytes), area.offset)


def test_areas_are_equal_aligned_apart_and_inside(memory: SnapshotMemory) -> None:
    memory.divide(3)
    areas = [memory.take() for _ in range(3)]
    assert memory.take() is None
    assert all(area is not None for area in areas)
    found = sorted((area.offset, area.size_bytes) for area in areas if area is not None)
    assert len({size for _, size in found}) == 1
    end = 0
    for offset, size in found:
        assert offset >= end
        assert offset % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        end = offset + size
    assert 8 * MIB - 3 * mmap.PAGESIZE < end <= 8 * MIB
    for offset, size in found:
        mmap.mmap(memory.fd, size, offset=offset).close()


def test_before_it_is_divided_there_is_nothing_to_take_and_later_numbers_change_nothing(
    memory: SnapshotMemory,
) -> None:
    assert memory.take() is None
    memory.divide(2)
    memory.divide(8)
    assert memory.take() == Area(0, 4 * MIB)
    assert memory.take() == Area(4 * MIB, 4 * MIB)
    assert memory.take() is None


def test_areas_are_never_smaller_than_makes_sense() -> None:
    memory = create(4 * SMALLEST_AREA_BYTES)
    memory.divide(1000)
    taken = [memory.take() for _ in range(5)]
    assert [area is not None for area in taken] == [True] * 4 + [False]
    memory.close()
    tiny = create(SMALLEST_AREA_BYTES - 1)
    tiny.divide(1)
    assert tiny.take() is None
    tiny.close()


def test_untouched_areas_cost_nothing_and_a_freed_one_gives_its_memory_back(memory: SnapshotMemory) -> None:
    memory.divide(4)
    assert memory.used_bytes() == 0
    first, second = memory.take(), memory.take()
    assert first is not None
    assert second is not None
    fill(memory, first)
    fill(memory, second, 1 * MIB)
    assert memory.used_bytes() == 3 * MIB
    memory.free(first)
    assert memory.used_bytes() == 1 * MIB
    assert os.pread(memory.fd, 4, first.offset) == bytes(4), "what was there can't be read any more"
    assert os.pread(memory.fd, 4, second.offset) == b"xxxx"
    memory.free(second)
    assert memory.used_bytes() == 0


def test_the_area_freed_last_is_taken_first(memory: SnapshotMemory) -> None:
    memory.divide(4)
    areas = [memory.take() for _ in range(4)]
    for index in (1, 3, 0):
        memory.free(areas[index] or pytest.fail("no area"))
    assert [memory.take() for _ in range(3)] == [areas[0], areas[3], areas[1]]


def test_some_free_areas_may_keep_their_memory_until_it_is_trimmed() -> None:
    memory = create(keep_areas=1)
    memory.divide(4)
    areas = [memory.take() or pytest.fail("no area") for _ in range(3)]
    for area in areas:
        fill(memory, area, 1 * MIB)
    for area in areas:
        memory.free(area)
    assert memory.used_bytes() == 1 * MIB
    assert os.pread(memory.fd, 1, areas[2].offset) == b"x", "the one freed last is kept"
    assert memory.take() == areas[2]
    memory.trim()
    # What says what it holds is gone, so that no request goes on from another one's.
    assert 1 * MIB - 2 * mmap.PAGESIZE <= memory.used_bytes() < 1 * MIB, "it isn't free any more"
    memory.free(areas[2])
    memory.trim()
    assert memory.used_bytes() == 0
    memory.close()


def test_what_is_not_taken_cannot_be_freed(memory: SnapshotMemory) -> None:
    memory.divide(2)
    area = memory.take()
    assert area is not None
    memory.free(area)
    with pytest.raises(LocalProtocolError, match="nobody has it"):
        memory.free(area)
    with pytest.raises(LocalProtocolError):
        memory.free(Area(4096, 4096))


def test_a_mapping_sees_the_hole() -> None:
    memory = create()
    memory.divide(2)
    area = memory.take()
    assert area is not None
    with mmap.mmap(memory.fd, area.size_bytes, offset=area.offset) as mapped:
        mapped[:5] = b"hello"
        memory.free(area)
        assert mapped[:5] == bytes(5)
        assert memory.used_bytes() <= mmap.PAGESIZE
    memory.close()


def test_a_worker_cannot_shrink_or_grow_it(memory: SnapshotMemory) -> None:
    for size in (0, 16 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)


def test_the_descriptor_is_not_inherited_and_goes_with_close() -> None:
    memory = create()
    fd = memory.fd
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    memory.divide(1)
    area = memory.take()
    assert area is not None
    memory.close()
    with pytest.raises(OSError, match="Bad file") as caught:
        os.fstat(fd)
    assert caught.value.errno == errno.EBADF
    memory.close()
    memory.free(area)
    memory.divide(2)
    assert memory.take() is None
    assert memory.used_bytes() == 0


def test_where_there_is_no_such_memory_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/dev/fd"))
    assert SnapshotMemory.create(-1) is None
    assert SnapshotMemory.create(1 << 80) is None
    assert set(os.listdir("/dev/fd")) == before
    monkeypatch.delattr(os, "memfd_create")
    assert SnapshotMemory.create(MIB) is None
