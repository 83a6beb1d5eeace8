"""What fuzzing the parent's side found, one test for each finding."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from infervisor import EndReason
from infervisor.protocol import field_checks
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.output_ring import MAX_LINE_BYTES, MAX_LINES, OutputRing
from tests.fuzz.grammar import serving
from tests.fuzz.parent_side import KINDS, ParentSide, harness
from tests.fuzz.script import Do, Step, step

MIB = 1 << 20


@pytest.fixture
def one() -> Iterator[Any]:
    with harness() as one:
        yield one


def proper(kind: str, which: int = 0, count: int = 0) -> Step:
    return step(Do.PROPER, KINDS.index(kind), which, count)


def frame(*wire: object) -> Step:
    return Step(Do.FRAME, msgpack.packb(wire))


def ran(one: Any, *steps: Step, window: int = 2) -> ParentSide:
    with one() as side:
        side.run([*serving(window - 1, 0), *steps])
        side.conclude()
    return side


def empty_arrays() -> bytes:
    """Return a value of 200,000 empty arrays in as many bytes: what costs most for its size, 13 MB once decoded."""
    return b"\xdc\x00\x03" + (b"\xdc\xff\xff" + b"\x90" * 65535) * 3


# --- streams that hung ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 32])
def test_a_stream_that_nobody_reads_times_out_though_one_frame_filled_its_window(
    one: Any, window: int
) -> None:
    tokens = [[number, "word", None] for number in range(window)]
    side = ran(one, frame("tokens", 1, 1, 0, tokens), window=window)
    assert side.streams[0].request.state.reason is EndReason.CONSUMER_TIMEOUT


def test_an_end_after_a_long_pause_without_a_release_doesnt_keep_the_place_for_ever(one: Any) -> None:
    # 102 s without credit, so that the watch over the worker has gone to sleep; then a second stream waits.
    side = ran(one, proper("tokens", 0, 1), step(Do.WAIT, 0, 4), proper("ended"), step(Do.OPEN))
    assert DeathCause.UNRESPONSIVE in side.causes
    assert side.streams[0].request.state.reason is EndReason.STOP


# --- lies that were believed or shown ------------------------------------------------------------


def test_a_failure_to_load_that_a_loaded_worker_tells_while_it_is_killed_is_not_believed(one: Any) -> None:
    side = ran(one, step(Do.HOLD), frame("failed", 1, "model_load", "boo", "", True), step(Do.KILL))
    assert side.causes[0] is DeathCause.CANCEL_KILL
    assert "boo" not in side.messages[0]


@pytest.mark.parametrize("extra", [5, None, "threads", [1]])
def test_facts_that_are_looked_into_are_maps(one: Any, extra: object) -> None:
    # The command line looks up what stands in `extra`, and called the lie an error of its own.
    with one() as side:
        side.run([proper("hello"), frame("ready", 1, "f", {"slots": 1, "context_tokens": 9, "extra": extra})])
    [error] = side.errors
    assert "extra" in str(error)


@pytest.mark.parametrize("name", ["\x1b[2J\u202e", "x" * 100_000], ids=["control characters", "long"])
def test_an_unknown_count_is_named_briefly_and_without_control_characters(one: Any, name: str) -> None:
    side = ran(one, frame("ended", 1, 1, "stop", "", {name: 1}, None))
    [error] = side.errors
    assert str(error).startswith("ended.usage: ")
    assert len(side.messages[0]) < 500
    assert side.messages[0].isprintable()


# --- what piled up -------------------------------------------------------------------------------


def test_credit_for_a_worker_that_reads_nothing_and_says_tokens_without_text_doesnt_pile_up(one: Any) -> None:
    with one() as side:
        side.run([*serving(0, 0), step(Do.JAM)])
        for index in range(2_000):
            side.send_frame(msgpack.packb(["tokens", 1, 1, index, [[5, "", None]]]))
        side.check()
        side.conclude()
    assert side.causes[0] is not DeathCause.PROTOCOL_ERROR


def test_tokens_without_text_and_without_end_are_a_protocol_error(one: Any) -> None:
    with one() as side:
        side.run(serving(0, 0))
        # As if a million had come.
        side.streams[0].request._ids.extend(range(1 << 20))
        side.send_frame(msgpack.packb(["tokens", 1, 1, 0, [[5, "", None]]]))
        side._settle()
    assert side.causes == [DeathCause.PROTOCOL_ERROR]


def test_a_refused_frame_is_not_kept_by_its_error(one: Any) -> None:
    with one() as side:
        side.run(serving(0, 0))
        tracemalloc.start()
        try:
            side.run([])
            before, _ = tracemalloc.get_traced_memory()
            side.send_frame(b"\x95\xa6tokens\x01" + empty_arrays() + b"\x00\x00")
            side._settle()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert side.causes == [DeathCause.PROTOCOL_ERROR]
        assert side.streams[0].request.make_error is not None
        assert peak - before > 10 * MIB
        assert after - before < 3 * MIB


# --- what took too long --------------------------------------------------------------------------


def test_many_empty_arrays_in_one_frame_are_checked_without_a_call_for_each(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    is_shallow = field_checks.is_shallow

    def counted(*arguments: Any) -> bool:
        nonlocal calls
        calls += 1
        return is_shallow(*arguments)

    monkeypatch.setattr(field_checks, "is_shallow", counted)
    with one() as side:
        side.run(serving(0, 0))
        side.send_frame(b"\x95\xa6tokens\x01\x01\x00\x91\x93\x05\xa1a" + empty_arrays())
    # The time varies with the machine; what took it doesn't.
    assert 0 < calls < 1000


def test_a_flood_of_empty_lines_of_output_is_cheap() -> None:
    ring, began = OutputRing(), time.thread_time()
    for _ in range(64):
        ring.feed(b"\n" * (1 << 16))
    # The thread's own time, 3 s before.
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("lines", [MAX_LINES - 1, MAX_LINES, MAX_LINES + 1, 3 * MAX_LINES])
@pytest.mark.parametrize(
    "begun", [b"", b"begun ", b"y" * (MAX_LINE_BYTES + 1)], ids=["none", "short", "clipped"]
)
def test_many_lines_at_once_are_kept_as_if_they_had_come_one_by_one(lines: int, begun: bytes) -> None:
    at_once, singly = OutputRing(), OutputRing()
    data = b"".join(b"line %d\n" % number for number in range(lines)) + b"rest"
    at_once.feed(begun)
    at_once.feed(data)
    singly.feed(begun)
    for at in range(len(data)):
        singly.feed(data[at : at + 1])
    assert at_once.tail(10_000) == singly.tail(10_000)
