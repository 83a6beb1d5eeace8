"""What lies in an area, what is used of it, and what never is."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infervisor.worker.snapshot_area import (
    DATA_OFFSET,
    HEADER_BYTES,
    MIN_BYTES,
    Area,
    Header,
    hash_of,
    hash_of_tokens,
)

MODEL, OTHER = hash_of(b"a model"), hash_of(b"another")
SIZE = 4 * 4096
HALF = SIZE // 2


def state_of(tokens: Sequence[int]) -> bytes:
    """Return what stands for the memory after these tokens."""
    return repr(list(tokens)).encode()


def save(memory: bytearray, tokens: Sequence[int], fingerprint: bytes = MODEL) -> int:
    area = Area(memoryview(memory), fingerprint)
    # As a worker does that goes on from what is there.
    area.restore(tokens, lambda data, count: True)
    return write(area, tokens)


def write(area: Area, tokens: Sequence[int]) -> int:
    state = state_of(tokens)

    def put(data: memoryview) -> int:
        data[: len(state)] = state
        return len(state)

    return area.save(tokens, put)


def restored(memory: bytearray, tokens: Sequence[int], fingerprint: bytes = MODEL) -> int:
    """Restore in a new process; what it gets must be the state after as many tokens as it says."""

    def check(data: memoryview, count: int) -> bool:
        assert bytes(data) == state_of(tokens[:count])
        return True

    return Area(memoryview(memory), fingerprint).restore(tokens, check)


def test_the_newest_snapshot_of_a_beginning_is_used() -> None:
    memory = bytearray(SIZE)
    tokens = list(range(40))
    assert restored(memory, tokens) == 0, "nothing was written yet"
    for count in (10, 20, 30):
        assert save(memory, tokens[:count]) > 0
        assert restored(memory, tokens) == count
    assert restored(memory, tokens[:30]) == 30, "all of it is a beginning, too"
    assert restored(memory, tokens[:29]) == 20, "the newest is too long, the one before isn't"
    assert restored(memory, tokens[:19]) == 0


def test_tokens_that_differ_are_another_sequence() -> None:
    memory = bytearray(SIZE)
    tokens = list(range(40))
    save(memory, tokens[:20])
    assert restored(memory, [*tokens[:19], 99, *tokens[20:]]) == 0
    assert restored(memory, [*tokens[:20], 99]) == 20


def test_another_models_snapshots_are_not_used() -> None:
    memory = bytearray(SIZE)
    save(memory, [1, 2, 3])
    assert restored(memory, [1, 2, 3], OTHER) == 0
    assert restored(memory, [1, 2, 3]) == 3


def test_the_best_one_is_never_overwritten() -> None:
    area = Area(memoryview(memory := bytearray(SIZE)), MODEL)
    for count in range(1, 9):
        before = area.next_buffer
        write(area, range(count))
        assert area.next_buffer != before
        assert restored(memory, range(20)) == count


def test_a_foreign_snapshot_is_overwritten_before_ones_own() -> None:
    memory = bytearray(SIZE)
    first = Area(memoryview(memory), MODEL)
    write(first, range(10))
    write(first, range(50, 60))  # newer, of another sequence
    area = Area(memoryview(memory), MODEL)
    assert area.restore(range(20), lambda data, count: True) == 10
    assert area.save(range(12), lambda data: 0) == 0
    assert restored(memory, range(20)) == 10
    assert restored(memory, range(50, 70)) == 0


def test_generations_go_on_in_the_next_process() -> None:
    memory = bytearray(SIZE)
    for count in range(1, 8):
        save(memory, range(count))
        assert restored(memory, range(20)) == count


def test_a_failed_write_costs_the_older_one_alone() -> None:
    memory = bytearray(SIZE)
    area = Area(memoryview(memory), MODEL)
    write(area, range(10))
    write(area, range(20))
    assert area.save(range(30), lambda data: 0) == 0
    assert restored(memory, range(40)) == 20
    with pytest.raises(OSError, match="lost"):
        area.save(range(30), _fail)
    assert restored(memory, range(40)) == 20


def _fail(data: memoryview) -> int:
    data[:5] = b"torn!"
    raise OSError("lost")


def test_what_cannot_be_read_is_not_tried_again_but_the_other_one_is() -> None:
    memory = bytearray(SIZE)
    for count in (10, 20):
        save(memory, range(count))
    tried: list[int] = []

    def refuse_the_newest(data: memoryview, count: int) -> bool:
        tried.append(count)
        return count == 10

    assert Area(memoryview(memory), MODEL).restore(range(30), refuse_the_newest) == 10
    assert tried == [20, 10]
    assert restored(memory, range(30)) == 10


def test_a_snapshot_that_kills_its_reader_kills_only_one() -> None:
    memory = bytearray(SIZE)
    save(memory, range(10))

    def die(data: memoryview, count: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Area(memoryview(memory), MODEL).restore(range(30), die)
    assert restored(memory, range(30)) == 0


@pytest.mark.parametrize("whole", range(HEADER_BYTES))
def test_a_header_torn_at_any_byte_is_none(whole: int) -> None:
    memory = bytearray(SIZE)
    save(memory, range(10))
    save(memory, range(20))
    # The newer one lies in the second buffer: written up to `whole` bytes over what was there before.
    for before in (bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES):
        torn = bytearray(memory)
        torn[HALF + whole : HALF + HEADER_BYTES] = before[whole:]
        assert torn != memory
        assert restored(torn, range(30)) == 10


def test_a_header_torn_over_an_older_one_is_none() -> None:
    # Not as it is written, since the older one is taken away first; the checksum would see it all the same.
    memory = bytearray(SIZE)
    save(memory, range(10))
    old = bytes(memory[:HEADER_BYTES])
    save(memory, range(20))
    save(memory, range(25))
    new = bytes(memory[:HEADER_BYTES])
    for whole in range(HEADER_BYTES):
        torn = bytearray(memory)
        torn[:HEADER_BYTES] = new[:whole] + old[whole:]
        if bytes(torn[:HEADER_BYTES]) not in (old, new):
            assert restored(torn, range(30)) == 20


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_flipped_bit_in_a_header_makes_it_none(byte: int) -> None:
    memory = bytearray(SIZE)
    save(memory, range(10))
    memory[byte] ^= 1 << random.Random(byte).randrange(8)
    assert restored(memory, range(30)) == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(min_size=0, max_size=400), st.integers(0, SIZE - 400))
def test_garbage_is_never_used(garbage: bytes, at: int) -> None:
    memory = bytearray(SIZE)
    memory[at : at + len(garbage)] = garbage
    assert restored(memory, range(30)) == 0


@pytest.mark.parametrize(
    "header",
    [
        Header(1, MODEL, 0, 10, hash_of_tokens([])),
        Header(1, MODEL, 10, 0, hash_of_tokens(range(10))),
        Header(1, MODEL, 10, HALF - DATA_OFFSET + 1, hash_of_tokens(range(10))),
        Header(1, MODEL, 10, (1 << 64) - 1, hash_of_tokens(range(10))),
        Header(1, MODEL, 1 << 40, 10, hash_of_tokens(range(10))),
        Header(1, MODEL, 10, 10, hash_of_tokens(range(11))),
    ],
)
def test_a_whole_header_with_senseless_numbers_is_not_used(header: Header) -> None:
    memory = bytearray(SIZE)
    memory[:HEADER_BYTES] = header.pack()
    assert Header.unpack(header.pack()) == header
    assert restored(memory, range(30)) == 0


def test_another_magic_is_none() -> None:
    packed = bytearray(Header(1, MODEL, 10, 10, hash_of_tokens(range(10))).pack())
    packed[:8] = b"infrvKV0"
    packed[-4:] = zlib.crc32(packed[:-4]).to_bytes(4, "little")
    assert Header.unpack(bytes(packed)) is None
    assert Header.unpack(b"") is None


def test_an_area_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        Area(memoryview(bytearray(MIN_BYTES - 1)), MODEL)


def test_a_writer_gets_the_rest_of_its_buffer_and_no_byte_more() -> None:
    area = Area(memoryview(bytearray(SIZE)), MODEL)
    assert area.capacity_bytes == HALF - DATA_OFFSET
    sizes: list[int] = []
    area.save(range(3), lambda data: sizes.append(len(data)) or len(data))  # type: ignore[func-returns-value]
    assert sizes == [area.capacity_bytes]
    assert area.save(range(3), lambda data: len(data) + 1) == 0, "a writer that claims more has no snapshot"
