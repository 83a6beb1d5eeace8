"""The worker's ends of the pipes, driven in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.codec import Decoder
from infervisor.protocol.errors import LocalProtocolError
from infervisor.protocol.messages import Beat, Cancel, Log, Message, Tokens
from infervisor.worker.inbox import Inbox
from infervisor.worker.outbox import LOG_BURST, Outbox
from infervisor.worker.signals import UrgentPipe

PATIENCE_S = 20.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def read_messages(fd: int) -> list[Message]:
    return Decoder.from_worker().feed(os.read(fd, 1 << 20))


def test_a_frame_larger_than_the_pipe_arrives_whole(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    sent = Tokens(1, 2, 0, [[3, "x" * 700_000, None]])
    received: list[Message] = []

    def read() -> None:
        decoder = Decoder.from_worker()
        while not received:
            received.extend(decoder.feed(os.read(reading, 4096)))

    thread = threading.Thread(target=read)
    thread.start()
    Outbox(writing).send(sent)
    thread.join(PATIENCE_S)
    assert [message.to_wire() for message in received] == [sent.to_wire()]


def test_what_cannot_be_encoded_writes_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    outbox = Outbox(writing)
    with pytest.raises(LocalProtocolError):
        outbox.send(Tokens(1, 2, 0, [[3, "x", [object()]]]))
    outbox.send(Tokens(1, 2, 0, [[3, "fine", None]]))
    assert [m.tokens[0][1] for m in read_messages(reading) if isinstance(m, Tokens)] == ["fine"]


def test_too_many_logs_are_dropped_and_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**12
    monkeypatch.setattr("infervisor.worker.outbox.time.monotonic_ns", lambda: now_ns)
    reading, writing = pipe
    outbox = Outbox(writing)
    for number in range(LOG_BURST + 5):
        outbox.log("info", f"line {number}")
    now_ns += 200_000_000
    outbox.log("info", "later \ud83d")
    logs = [m for m in read_messages(reading) if isinstance(m, Log)]
    assert len(logs) == LOG_BURST + 1
    assert (logs[-1].text, logs[-1].dropped) == ("later \\ud83d", 5)
    assert {log.dropped for log in logs[:-1]} == {0}


def test_beats_are_spaced(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**12
    monkeypatch.setattr("infervisor.worker.outbox.time.monotonic_ns", lambda: now_ns)
    reading, writing = pipe
    outbox = Outbox(writing)
    assert outbox.beat_due_in_s() == 0
    outbox.beat(3, {"decode": 5}, 1, 2)
    assert outbox.beat_due_in_s() == pytest.approx(0.1)
    now_ns += 100_000_000
    assert outbox.beat_due_in_s() == 0
    beat = read_messages(reading)[0]
    assert isinstance(beat, Beat)
    assert (beat.steps, dict(beat.longest_ns), beat.active, beat.waiting) == (3, {"decode": 5}, 1, 2)


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=20), st.data())
def test_urgent_ids_survive_any_cut(ids: list[int], data: st.DataObject) -> None:
    stream = b"".join(i.to_bytes(8, "big") for i in ids)
    reading, writing = os.pipe()
    try:
        pipe = UrgentPipe(reading)
        got = pipe.drain()
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            os.write(writing, stream[:size])
            stream = stream[size:]
            got += pipe.drain()
        assert got == ids
    finally:
        os.close(reading)
        os.close(writing)


def test_the_inbox_wakes_its_taker_and_keeps_the_order() -> None:
    inbox = Inbox()
    taken: list[Message] = []

    def take() -> None:
        while len(taken) < 3:
            inbox.wait()
            taken.extend(inbox.take())

    thread = threading.Thread(target=take)
    thread.start()
    for attempt_id in (1, 2, 3):
        inbox.put(Cancel(attempt_id))
    thread.join(PATIENCE_S)
    assert [message.to_wire() for message in taken] == [["cancel", 1], ["cancel", 2], ["cancel", 3]]
    assert inbox.take() == []
    inbox.wait(timeout_s=0)  # nothing there: returns all the same
