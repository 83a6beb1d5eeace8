"""Which signal means what, and when: the table of the service's end."""

from __future__ import annotations

import signal

import pytest

from infervisor.supervisor.http_api.service.drain import (
    Act,
    Ending,
    Phase,
    on_failure,
    on_idle,
    on_signal,
    on_time,
)

GRACE_NS = 30_000
SERVING = Ending()


def ended(*numbers: int, now_ns: int = 100, grace_ns: int = GRACE_NS) -> tuple[Ending, list[Act | None]]:
    state, acts = SERVING, []
    for number in numbers:
        state, act = on_signal(state, number, now_ns, grace_ns)
        acts.append(act)
    return state, acts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_the_second_cancels_the_third_leaves(number: int) -> None:
    state, acts = ended(number)
    assert (state, acts) == (Ending(Phase.DRAINING, 1, 100 + GRACE_NS), [Act.BEGIN_DRAIN])
    state, acts = ended(number, number)
    assert (state, acts[1]) == (Ending(Phase.CANCELLING, 2), Act.CANCEL)
    assert ended(number, number, number)[1][2] is Act.LEAVE


def test_the_two_signals_count_together() -> None:
    assert ended(signal.SIGTERM, signal.SIGINT)[1] == [Act.BEGIN_DRAIN, Act.CANCEL]


def test_without_a_grace_the_first_signal_cancels() -> None:
    assert ended(signal.SIGTERM, grace_ns=0) == (Ending(Phase.CANCELLING, 1), [Act.CANCEL])


def test_a_drain_ends_when_nothing_is_left_or_the_grace_is_over() -> None:
    draining, _ = ended(signal.SIGTERM)
    assert on_idle(draining) == (Ending(Phase.CANCELLING, 1), Act.CANCEL)
    assert on_time(draining, 100 + GRACE_NS - 1) == (draining, None)
    assert on_time(draining, 100 + GRACE_NS) == (Ending(Phase.CANCELLING, 1), Act.CANCEL)


def test_what_comes_after_the_cancel_cancels_no_second_time() -> None:
    cancelling, _ = ended(signal.SIGTERM, signal.SIGTERM)
    assert on_idle(cancelling) == (cancelling, None)
    assert on_time(cancelling, 1 << 60) == (cancelling, None)
    assert on_failure(cancelling) == (cancelling, None)
    # The grace was over before the second signal: it has nothing to hurry.
    after_grace, _ = on_time(ended(signal.SIGTERM)[0], 1 << 60)
    hurried, act = on_signal(after_grace, signal.SIGTERM, 1 << 60, GRACE_NS)
    assert (hurried.asked, act) == (2, None)
    assert on_signal(hurried, signal.SIGTERM, 1 << 60, GRACE_NS)[1] is Act.LEAVE


def test_time_and_silence_mean_nothing_while_it_serves() -> None:
    assert on_idle(SERVING) == (SERVING, None)
    assert on_time(SERVING, 1 << 60) == (SERVING, None)


def test_a_model_that_cannot_be_loaded_ends_it_without_a_drain() -> None:
    assert on_failure(SERVING) == (Ending(Phase.CANCELLING), Act.CANCEL)
    draining, _ = ended(signal.SIGTERM)
    assert on_failure(draining) == (Ending(Phase.CANCELLING, 1), Act.CANCEL)


def test_hangup_recycles_while_it_serves_and_never_ends_it() -> None:
    assert ended(signal.SIGHUP) == (SERVING, [Act.RECYCLE])
    assert ended(signal.SIGTERM, signal.SIGHUP, signal.SIGHUP)[1] == [Act.BEGIN_DRAIN, None, None]
    assert ended(signal.SIGUSR1) == (SERVING, [None])
