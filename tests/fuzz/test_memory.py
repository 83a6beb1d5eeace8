"""What a worker says is forgotten: floods leave nothing, buffers hold the window, and one frame is bounded."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from infervisor.protocol.machines.process import DeathCause
from tests.fuzz.grammar import serving
from tests.fuzz.parent_side import KINDS, ParentSide, harness
from tests.fuzz.script import Do, step

KIB, MIB = 1 << 10, 1 << 20
ONCE, FLOOD = 300, 3000
MOST_FOR_A_BYTE = 80
"""Every byte of a frame can be an empty array, which takes 64 in memory; beside it lie the frame's own bytes."""
NEST_BYTES = 80 * MIB
"""Arrays that declare their entries and don't hold them: the longest one, as often as msgpack nests."""

FLOODS: dict[str, Callable[[int], list[Any]]] = {
    "beats": lambda number: ["beat", number, number, {"prefill": number, f"phase {number}": 1}, 1, 0],
    "logs": lambda number: ["log", number, f"level {number}", "line\n" * 50, number],
    "tokens without text": lambda number: ["tokens", number, 1, 2 * number, [[5, "", None], [6, "", [{}]]]],
    "progress": lambda number: ["progress", number, f"phase {number}", 0.5],
}


@pytest.fixture
def one() -> Iterator[Any]:
    with harness() as one:
        yield one


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Return the bytes that are allocated now."""
    tracemalloc.start()

    def now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    yield now
    tracemalloc.stop()


def send(side: ParentSide, wire: list[Any]) -> None:
    side.send_frame(msgpack.packb(wire))
    side.said.clear()


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_leaves_nothing(one: Any, kind: str, traced: Callable[[], int]) -> None:
    with one() as side:
        side.run(serving(1, 0)[: 1 if kind == "progress" else None])
        for number in range(ONCE):
            send(side, FLOODS[kind](number))
        before = traced()
        for number in range(ONCE, FLOOD):
            send(side, FLOODS[kind](number))
        grown = traced() - before
        assert not side.causes
        assert side.worker is not None
        assert side.worker.state.cause is None
    # The ids of tokens without text are what the next chunk stands for: 8 bytes each. A frame that was kept would
    # take 300 or more.
    assert grown < 128 * KIB, f"{grown} bytes for {FLOOD - ONCE} frames"


@pytest.mark.parametrize("window", [1, 16, 256])
def test_what_lies_unread_is_the_window(one: Any, window: int, traced: Callable[[], int]) -> None:
    text = "x" * 4000
    with one() as side:
        side.run(serving(window - 1, 0))
        before = traced()
        for index in range(window):
            send(side, ["tokens", 1, 1, index, [[index, text, None]]])
        assert traced() - before < window * (len(text) + KIB) + 64 * KIB
        assert side.worker is not None
        # One more than the window is refused, and not kept.
        send(side, ["tokens", 1, 1, window, [[0, text, None]]])
        side._settle()
        assert side.causes == [DeathCause.PROTOCOL_ERROR]
        side.conclude()
        assert "".join(side.streams[0].text) == text * window


WORST = {
    "empty arrays": lambda: b"\x95\xa6tokens\x01\x01\x00\x91\x93\x05\xa1a\xdc\xff\xff" + b"\x90" * 65535,
    "arrays that declare more than they hold": lambda: b"\xdc\xff\xff" * 1000,
    "all unprintable": lambda: msgpack.packb(["log", 1, "info", "\x1b" * 65535, 0]),
    "a text in the wrong place": lambda: msgpack.packb(["log", 1, b"\xff" * 65535, "", 0]),
}


@pytest.mark.parametrize("kind", WORST)
def test_no_frame_takes_more_than_its_share(one: Any, kind: str, traced: Callable[[], int]) -> None:
    payload = WORST[kind]()
    with one() as side:
        side.run(serving(1, 0))
        before = traced()
        tracemalloc.reset_peak()
        side.send_frame(payload)
        side._settle()
        peak = tracemalloc.get_traced_memory()[1]
    assert peak - before < max(MOST_FOR_A_BYTE * len(payload), NEST_BYTES * ("declare" in kind))


def test_the_clock_and_the_process_of_the_supervisor_are_real_again() -> None:
    import time

    from infervisor.supervisor import worker
    from infervisor.supervisor.process import WorkerProcess

    with harness() as one, one() as side:
        side.run([step(Do.PROPER, KINDS.index("hello"))])
        assert worker.time is side.clock  # type: ignore[comparison-overlap]
    assert worker.time is time
    assert worker.WorkerProcess is WorkerProcess
