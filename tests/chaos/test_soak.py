"""A short soak in every run of the tests, and a checker that sees what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infervisor import Chunk, EndReason
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.timeline import Timeline
from infervisor.supervisor.events import BreakerOpened, RequestReleased, RequestResumed, WorkerExited
from infervisor.supervisor.report import Report, Usage
from infervisor.supervisor.resume import Resume
from tests.chaos.clients import CANCELS, Client
from tests.chaos.invariants import Asked, Exact, Got, History, violations
from tests.chaos.questions import Scripted, count
from tests.chaos.soak import DEATHS_OF_POISON, Load, Outcome, main

MAX_RESUMES = 3
TOKENS = 4
RESUME = Resume(DeathCause.CRASHED, 1, 2, 0, lost_ns=1, resumed_ns=5)


def test_a_quick_soak_finds_nothing(anyio_backend: str) -> None:
    assert main(["--quick", "--seed", "1", "--backend", anyio_backend]) == 0


# --- the checker -----------------------------------------------------------------------------------------


def story(reason: EndReason = EndReason.LENGTH, tokens: int = TOKENS, **changes: Any) -> Report:
    """Return the report of a request that ended so."""
    timeline = Timeline(queued_ns=0, ended_ns=9, released_ns=9)
    usage = Usage(completion_tokens=tokens, computed_tokens=tokens)
    given = {"stage": None, "seed": 1, "window": 8, "worker_pid": 1, "resumes": (RESUME,), **changes}
    return Report(7, reason, timeline, usage, **given)


def read(tokens: int = TOKENS, code: str | None = None) -> Got:
    """Return what a reader has after so many tokens."""
    got = Got(code=code)
    for index in range(tokens):
        got.take(Chunk(f"w{index} ", index, (index,), 0))
    return got


def judge(
    asked: Asked | None = None, got: Got | None = None, report: Report | None = None, alone: int = 0
) -> list[str]:
    """Return what the checker says of an answer that is right but for what is given."""
    history = History()
    history.released.add(7)
    history.alone[7] = alone
    return violations(
        asked or Asked(1, "whole", count(TOKENS)), got or read(), report or story(), history, MAX_RESUMES
    )


def test_a_right_answer_is_right() -> None:
    assert judge() == []


def test_ends_that_are_allowed_are() -> None:
    cancels = Asked(1, "cancel", count(TOKENS), frozenset([EndReason.CANCELLED]))
    assert judge(cancels, read(2), story(EndReason.CANCELLED, 2)) == []
    fails = Asked(1, "fail", count(TOKENS), resumes=False)
    crashed = story(EndReason.WORKER_CRASHED, 2, resumes=())
    assert judge(fails, read(2, "worker_crashed"), crashed) == []
    tired = story(EndReason.WORKER_CRASHED, 2, resumes=(RESUME,) * MAX_RESUMES)
    assert judge(None, read(2, "worker_crashed"), tired) == []
    poison = Asked(1, "poison", count(TOKENS), poison=True)
    assert judge(poison, read(2, "poisoned"), story(EndReason.POISONED, 2), alone=2) == []
    leaves = Asked(1, "leave", count(TOKENS), reads_all=False)
    assert judge(leaves, read(2)) == []


def _twice() -> Got:
    got = read(2)
    got.take(Chunk("w1 ", 1, (1,), 0))
    return got


def _missing() -> Got:
    got = read(1)
    got.take(Chunk("w2 ", 2, (2,), 0))
    return got


def _other() -> Got:
    got = read(3)
    got.take(Chunk("w3 ", 3, (9,), 0))
    return got


WRONG: dict[str, tuple[Callable[[], list[str]], str]] = {
    "a token twice": (lambda: judge(got=_twice()), "came twice"),
    "a token missing": (lambda: judge(got=_missing()), "isn't the number of tokens before it"),
    "another token": (lambda: judge(got=_other()), "another one in its place"),
    "another text": (
        lambda: judge(Asked(1, "whole", Exact("w0 w1 x", (0, 1, 2, 3), EndReason.LENGTH))),
        "isn't a beginning",
    ),
    "a cut answer": (lambda: judge(got=read(3)), "its text is cut"),
    "wrong usage": (lambda: judge(report=story(tokens=3)), "usage"),
    "an error after a natural end": (lambda: judge(got=read(code="worker_crashed")), "got the error"),
    "another error than the end": (
        lambda: judge(
            Asked(1, "fail", count(TOKENS), resumes=False),
            read(2, "engine_error"),
            story(EndReason.WORKER_CRASHED, resumes=()),
        ),
        "its reader got engine_error",
    ),
    "an end that nobody caused": (
        lambda: judge(got=read(2), report=story(EndReason.CANCELLED)),
        "it ended as cancelled",
    ),
    "given up too early": (
        lambda: judge(got=read(2, "worker_crashed"), report=story(EndReason.WORKER_CRASHED)),
        "it ended as worker_crashed",
    ),
    "poisoned without being alone": (
        lambda: judge(got=read(2, "poisoned"), report=story(EndReason.POISONED), alone=1),
        "it ended as poisoned",
    ),
    "poison that is answered": (
        lambda: judge(Asked(1, "poison", count(TOKENS), poison=True)),
        "it ended as length",
    ),
    "resumed against its will": (
        lambda: judge(Asked(1, "fail", count(TOKENS), resumes=False)),
        "against its caller's will",
    ),
    "lost between resumes": (
        lambda: judge(report=story(resumes=(RESUME, replace(RESUME, delivered_tokens=1)))),
        "went lost between resumes",
    ),
    "a pause without an end": (
        lambda: judge(report=story(resumes=(replace(RESUME, resumed_ns=None),))),
        "a pause has no end",
    ),
    "not released": (
        lambda: judge(report=replace(story(), timeline=Timeline(queued_ns=0, ended_ns=9))),
        "isn't released",
    ),
    "its release not told": (
        lambda: violations(Asked(1, "whole", count(TOKENS)), read(), story(), History(), MAX_RESUMES),
        "wasn't told",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    found, said = WRONG[name]
    assert any(said in message for message in found()), found()


def test_events_that_may_not_come_are_found() -> None:
    exited = WorkerExited(5, DeathCause.CRASHED, "", "", "", (), 0.0)
    events = [
        (exited, "never started"),
        (BreakerOpened("why", 1.0), "the breaker opened: why"),
        (RequestResumed(1, 2, replace(RESUME, resumed_ns=None)), "a pause that isn't over"),
    ]
    for event, said in events:
        history = History()
        history(event)
        assert any(said in message for message in history.wrong)
    history = History()
    for _ in range(2):
        history(RequestReleased(story()))
    assert history.wrong == ["request 7 was released twice"]


def test_what_is_left_over_is_found() -> None:
    outcome = Outcome("x", requests=2, before_bytes=1, after_bytes=10 << 20)
    outcome.history.released.add(7)
    outcome.history.alive[5] = True
    wrong = " ".join(outcome.totals())
    assert "2 requests were accepted, 1 released" in wrong
    assert "[5]" in wrong
    assert "grew by 10.5 MB" in wrong


def test_deaths_that_nobody_caused_are_found() -> None:
    outcome = Outcome("x")
    outcome.caused["crashed"] = 2
    outcome.kinds["poison"] = 1
    outcome.history.deaths.update(crashed=2 + DEATHS_OF_POISON)
    assert outcome.totals() == []
    outcome.history.deaths.update(crashed=1, protocol_error=1)
    assert outcome.totals() == [
        "7 workers went as crashed, and 6 of that were caused",
        "1 workers went as protocol_error, and 0 of that were caused",
    ]


def test_a_client_is_drawn_from_its_number_alone() -> None:
    speaker = Scripted(1, [])
    first = [Client.drawn("s", number, speaker, 0.3, poison=False).asked for number in range(200)]
    assert first == [Client.drawn("s", number, speaker, 0.3, poison=False).asked for number in range(200)]
    assert first != [Client.drawn("t", number, speaker, 0.3, poison=False).asked for number in range(200)]
    share = sum(asked.kind in CANCELS for asked in first) / len(first)
    assert 0.2 < share < 0.4


def test_deaths_are_spread_over_the_requests_and_none_is_left_for_the_last_moment() -> None:
    load = Load(requests=1000, deaths=100, cancels=0)
    assert [load.deaths_by(share) for share in (0.0, 0.475, 0.95, 1.0)] == [0, 50, 100, 100]
