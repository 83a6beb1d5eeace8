"""The order of interruptions: what the first, second and third do, and to what."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from infervisor import EndReason
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.cli.interrupts import Interrupts


class Left(Exception):
    """The process would have ended here."""


class FakeStream:
    """Records what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cancel(self, reason: EndReason) -> None:
        self.asked.append(reason.value)

    def kill(self) -> None:
        self.asked.append("kill")


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Interrupts:
    """Interrupts whose last resort is an exception."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    return Interrupts(lambda line: None)


def _guard(interrupts: Interrupts) -> tuple[FakeStream, anyio.CancelScope]:
    stream: Any = FakeStream()
    work = anyio.CancelScope()
    interrupts.guard(work, streams=[stream])
    return stream, work


pytestmark = pytest.mark.anyio


async def test_ctrl_c_cancels_then_kills_then_leaves(interrupts: Interrupts) -> None:
    stream, work = _guard(interrupts)
    interrupts._take(signal.SIGINT)
    assert stream.asked == ["cancelled"]
    assert work.cancel_called
    interrupts._take(signal.SIGINT)
    assert stream.asked == ["cancelled", "kill"]
    with pytest.raises(Left, match="130"):
        interrupts._take(signal.SIGINT)


async def test_without_a_request_the_second_ctrl_c_leaves(interrupts: Interrupts) -> None:
    work = anyio.CancelScope()
    interrupts.guard(work)
    interrupts._take(signal.SIGINT)
    assert work.cancel_called
    with pytest.raises(Left, match="130"):
        interrupts._take(signal.SIGINT)


async def test_while_leaving_the_first_ctrl_c_leaves_at_once(interrupts: Interrupts) -> None:
    stream, work = _guard(interrupts)
    interrupts.leaving()
    with pytest.raises(Left, match="130"):
        interrupts._take(signal.SIGINT)
    assert stream.asked == []
    assert not work.cancel_called


async def test_sigterm_cancels_and_never_kills_however_often(interrupts: Interrupts) -> None:
    stream, work = _guard(interrupts)
    for _ in range(5):
        interrupts._take(signal.SIGTERM)
    assert stream.asked == ["cancelled"]
    assert work.cancel_called
    assert interrupts.code is ExitCode.TERMINATED


async def test_the_first_interruption_names_the_exit_code(interrupts: Interrupts) -> None:
    stream, _ = _guard(interrupts)
    interrupts.reader_gone()
    interrupts._take(signal.SIGTERM)
    assert interrupts.code is ExitCode.READER_GONE
    assert stream.asked == ["client_disconnected"]


async def test_what_came_before_a_guard_stops_what_it_guards(interrupts: Interrupts) -> None:
    interrupts._take(signal.SIGINT)
    stream, work = _guard(interrupts)
    assert stream.asked == ["cancelled"]
    assert work.cancel_called
