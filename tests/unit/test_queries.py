"""Queries at both ends: what a worker owes, and answers in a thread of its own."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from infervisor.protocol.arrays import pack_ids
from infervisor.protocol.codec import MAX_FROM_WORKER_BYTES, Decoder, encode
from infervisor.protocol.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    RemoteProtocolError,
    WorkerDied,
)
from infervisor.protocol.messages import Answered, Message, Query
from infervisor.supervisor.link import Link
from infervisor.supervisor.queries import MAX_UNANSWERED, MAX_UNANSWERED_BYTES, OpenQueries
from infervisor.worker.engine import Engine
from infervisor.worker.outbox import Outbox
from infervisor.worker.queries import Queries

# --- the parent's end ------------------------------------------------------------------------------


class Control:
    """A link that keeps what it is given. waiting: the ids that haven't left yet."""

    def __init__(self) -> None:
        self.sent: list[Query] = []
        self.waiting: set[int] = set()
        self.size = 0

    def send(self, message: Message) -> int:
        assert isinstance(message, Query)
        self.sent.append(message)
        return self.size or len(encode(message))

    def withdraw(self, message_id: int, name: str) -> bool:
        assert name == "query"
        return message_id in self.waiting


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def queries(control: Control) -> OpenQueries:
    return OpenQueries(cast(Link, control))


def answered(query_id: int, value: object = None, error: Mapping[str, Any] | None = None) -> Answered:
    return Answered(1, query_id, value, error)


@pytest.mark.anyio
async def test_an_answer_goes_to_its_query(queries: OpenQueries, control: Control) -> None:
    first, second = (queries.ask("tokenize", {"text": text}, str.upper) for text in "ab")
    assert [query.arguments for query in control.sent] == [{"text": "a"}, {"text": "b"}]
    queries.on_answered(answered(second.id, "later"))
    assert (second.value, second.settled.is_set(), first.settled.is_set()) == ("LATER", True, False)
    assert len(queries) == 1
    with pytest.raises(RemoteProtocolError, match="isn't open"):
        queries.on_answered(answered(second.id, "again"))


@pytest.mark.anyio
async def test_errors_become_the_caller_s(queries: OpenQueries) -> None:
    refused = queries.ask("tokenize", {}, str)
    queries.on_answered(
        answered(refused.id, None, {"code": "invalid_request", "message": "no", "field": "text"})
    )
    assert isinstance(refused.error, InvalidRequest)
    assert (str(refused.error), refused.error.field) == ("no", "text")
    failed = queries.ask("tokenize", {}, str)
    queries.on_answered(
        answered(failed.id, None, {"code": "engine_error", "message": "oh", "detail": "trace"})
    )
    assert isinstance(failed.error, EngineError)
    assert (str(failed.error), failed.error.detail) == ("oh", "trace")
    odd = queries.ask("tokenize", {}, str)
    queries.on_answered(answered(odd.id, None, {"field": 7, "code": 3}))
    assert isinstance(odd.error, EngineError)


@pytest.mark.anyio
async def test_what_cant_be_read_stays_open_and_is_lost_with_the_worker(queries: OpenQueries) -> None:
    def read(value: Any) -> Any:
        raise RemoteProtocolError("not that")

    query = queries.ask("tokenize", {}, read)
    with pytest.raises(RemoteProtocolError, match="not that"):
        queries.on_answered(answered(query.id, 5))
    with pytest.raises(RemoteProtocolError, match="both"):
        queries.on_answered(answered(query.id, 5, {}))
    assert not query.settled.is_set()
    queries.lose(lambda: WorkerDied("gone"))
    assert query.settled.is_set()
    assert query.lost is not None
    assert str(query.lost()) == "gone"
    assert len(queries) == 0


@pytest.mark.anyio
async def test_one_that_was_given_up_may_be_answered_late_but_not_twice(
    queries: OpenQueries, control: Control
) -> None:
    query = queries.ask("tokenize", {}, str)
    queries.give_up(query)
    queries.give_up(query)
    assert len(queries) == 1
    queries.on_answered(answered(query.id, "late"))
    assert len(queries) == 0
    with pytest.raises(RemoteProtocolError):
        queries.on_answered(answered(query.id, "twice"))
    unsent = queries.ask("tokenize", {}, str)
    control.waiting.add(unsent.id)
    queries.give_up(unsent)
    assert len(queries) == 0
    with pytest.raises(RemoteProtocolError):
        queries.on_answered(answered(unsent.id, "never asked"))


@pytest.mark.anyio
async def test_what_one_worker_owes_is_bounded(queries: OpenQueries, control: Control) -> None:
    asked = [queries.ask("count", {}, int) for _ in range(MAX_UNANSWERED)]
    for query in asked:
        queries.give_up(query)
    with pytest.raises(Overloaded, match=str(MAX_UNANSWERED)):
        queries.ask("count", {}, int)
    for query in asked:
        queries.on_answered(answered(query.id, 1))
    control.size = MAX_UNANSWERED_BYTES // 2 + 1
    large = [queries.ask("count", {}, int) for _ in range(2)]
    with pytest.raises(Overloaded, match="bytes"):
        queries.ask("count", {}, int)
    queries.on_answered(answered(large[0].id, 1))
    queries.ask("count", {}, int)


# --- the worker's end ------------------------------------------------------------------------------


class Answers:
    """An engine that only answers: `echo` its arguments, `wait` until it may, `fail`, `refuse`, `long`."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.is_in = threading.Event()
        self.threads: set[str] = set()

    def answer(self, kind: str, arguments: Mapping[str, Any]) -> Any:
        self.threads.add(threading.current_thread().name)
        match kind:
            case "echo":
                return arguments["value"]
            case "wait":
                self.is_in.set()
                assert self.may_go.wait(20)
                return "waited"
            case "refuse":
                raise InvalidRequest("not this \udc80", "text")
            case "long":
                return bytes(MAX_FROM_WORKER_BYTES)
        raise KeyError(kind)


class Pipe:
    """The parent's end of the frames pipe."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self._decoder = Decoder.from_worker()
        self._messages: list[Message] = []

    def next(self) -> Answered:
        while not self._messages:
            self._messages += self._decoder.feed(os.read(self.read_fd, 1 << 16))
        message = self._messages.pop(0)
        assert isinstance(message, Answered)
        return message

    def is_silent(self) -> bool:
        return not self._messages and not select.select([self.read_fd], [], [], 0)[0]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.read_fd)
    os.close(made.write_fd)


@pytest.fixture
def engine() -> Iterator[Answers]:
    made = Answers()
    yield made
    made.may_go.set()


@pytest.fixture
def asked(engine: Answers, pipe: Pipe) -> Iterator[Queries]:
    made = Queries(cast(Engine, engine), Outbox(pipe.write_fd))
    yield made
    engine.may_go.set()
    assert made.close(20)


def test_queries_are_answered_in_order_in_one_thread(asked: Queries, engine: Answers, pipe: Pipe) -> None:
    for number in range(50):
        asked.take(Query(number, "echo", {"value": pack_ids([number])}))
    found = [pipe.next() for _ in range(50)]
    assert [(one.id, one.value, one.error) for one in found] == [(n, pack_ids([n]), None) for n in range(50)]
    assert engine.threads == {"queries"}


def test_failures_are_answers_too(asked: Queries, pipe: Pipe) -> None:
    for number, kind in enumerate(("refuse", "what", "long", "echo")):
        asked.take(Query(number, kind, {"value": b"still here"}))
    refused, failed, long, echo = (pipe.next() for _ in range(4))
    assert refused.error == {
        "code": "invalid_request",
        "message": "not this \\udc80",
        "field": "text",
        "detail": "",
    }
    assert failed.error is not None
    assert failed.error["code"] == "engine_error"
    assert "KeyError: 'what'" in failed.error["message"]
    assert "Traceback" in failed.error["detail"]
    assert long.error is not None
    assert (long.error["code"], long.value) == ("invalid_request", None)
    assert "parts" in long.error["message"]
    assert echo.value == b"still here"


def test_an_engine_that_answers_nothing_says_so(pipe: Pipe) -> None:
    asked = Queries(cast(Engine, object()), Outbox(pipe.write_fd))
    asked.take(Query(1, "count", {}))
    error = pipe.next().error
    assert error is not None
    assert "answers no queries" in error["message"]
    assert asked.close(20)


def test_closing_waits_for_the_one_that_runs_and_drops_the_rest(
    asked: Queries, engine: Answers, pipe: Pipe
) -> None:
    asked.take(Query(1, "wait", {}))
    asked.take(Query(2, "echo", {"value": 1}))
    assert engine.is_in.wait(20)
    assert not asked.close(0)
    engine.may_go.set()
    assert asked.close(20)
    asked.take(Query(3, "echo", {"value": 1}))
    assert asked.close(0)
    assert pipe.is_silent()


def test_closing_what_was_never_asked(asked: Queries) -> None:
    assert asked.close(0)


def test_frames_of_two_threads_dont_mix(pipe: Pipe) -> None:
    outbox = Outbox(pipe.write_fd)
    large = bytes(300_000)  # several times what the pipe holds

    def send(first: int) -> None:
        for number in range(first, first + 8):
            outbox.send(Answered(1, number, large, None))

    threads = [threading.Thread(target=send, args=(first,), daemon=True) for first in (0, 100)]
    for thread in threads:
        thread.start()
    found = [pipe.next() for _ in range(16)]
    assert sorted(one.id for one in found) == [*range(8), *range(100, 108)]
    assert all(one.value == large for one in found)
    for thread in threads:
        thread.join(20)
