"""`worker.preparing`: requests on their way to a slot, in threads of their own."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.messages import Submit
from infervisor.worker.preparing import Prepared, Preparing
from tests.helpers.raw_worker import submit

PATIENCE_S = 20.0


class Bench:
    """A preparing with a function of the test's, and what came out of it."""

    def __init__(self, prepare: Any) -> None:
        self.out: queue.Queue[Prepared] = queue.Queue()
        self.preparing = Preparing(prepare, self.out.put)

    def next(self) -> Prepared:
        return self.out.get(timeout=PATIENCE_S)


def test_what_prepare_returns_comes_out_with_its_id() -> None:
    bench = Bench(lambda given: f"prompt of {given.id}")
    bench.preparing.start(submit(7))
    assert bench.next() == Prepared(7, "prompt of 7")


@pytest.mark.parametrize("error", [InvalidRequest("no", "prompt"), MemoryError(), KeyError("x")])
def test_what_prepare_raises_comes_out_too(error: Exception) -> None:
    def prepare(_given: Submit) -> None:
        raise error

    bench = Bench(prepare)
    bench.preparing.start(submit(7))
    assert bench.next() == Prepared(7, error=error)


def test_one_that_wants_to_end_its_thread_is_heard_of_too() -> None:
    def prepare(_given: Submit) -> None:
        raise SystemExit("enough")

    bench = Bench(prepare)
    bench.preparing.start(submit(7))
    prepared = bench.next()
    assert prepared.id == 7
    assert "SystemExit: enough" in str(prepared.error)
    assert bench.preparing.wait_idle(PATIENCE_S)


def test_where_no_thread_can_be_started_the_request_ends_and_the_next_one_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(lambda given: given.id)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        bench.preparing.start(submit(7))
    assert "can't start new thread" in str(bench.next().error)
    assert bench.preparing.wait_idle(0.0)
    bench.preparing.start(submit(8))
    assert bench.next() == Prepared(8, 8)


def test_one_that_takes_long_keeps_no_other_waiting() -> None:
    go = threading.Event()

    def prepare(given: Submit) -> int:
        if given.id == 1:
            assert go.wait(PATIENCE_S)
        return given.id

    bench = Bench(prepare)
    bench.preparing.start(submit(1))
    bench.preparing.start(submit(2))
    assert bench.next().id == 2
    assert not bench.preparing.wait_idle(0.0)
    go.set()
    assert bench.next().id == 1
    assert bench.preparing.wait_idle(PATIENCE_S)


def test_idle_waits_for_the_last_one() -> None:
    running, go = threading.Event(), threading.Event()

    def prepare(_given: Submit) -> None:
        running.set()
        assert go.wait(PATIENCE_S)

    bench = Bench(prepare)
    bench.preparing.start(submit(1))
    assert running.wait(PATIENCE_S)
    threading.Timer(0.05, go.set).start()
    assert bench.preparing.wait_idle(PATIENCE_S)
    assert go.is_set()
