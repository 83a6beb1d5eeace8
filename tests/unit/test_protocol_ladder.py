"""The cancel ladder: every rung in its order, none early, none skipped."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.ladder import Ladder, Rung, Stage

MS = 1_000_000
RUNGS = (Rung(Stage.IN_BAND), Rung(Stage.SIGNAL, 500 * MS, 2.0), Rung(Stage.KILL, 3000 * MS, 8.0))


def test_the_clock_starts_at_the_cancel() -> None:
    ladder = Ladder(RUNGS, since_ns=1000 * MS)
    assert ladder.stage is None
    assert ladder.due_ns(0) == 1000 * MS
    assert ladder.climb(1000 * MS - 1, 0) == (ladder, None)
    ladder, stage = ladder.climb(1300 * MS, 0)
    assert stage is ladder.stage is Stage.IN_BAND
    assert ladder.due_ns(0) == 1500 * MS  # half a second from the cancel, however late the message went out


def test_the_kill_has_its_own_grace_from_the_signal() -> None:
    ladder, _ = Ladder(RUNGS, since_ns=0).climb(0, 0)
    ladder, stage = ladder.climb(900 * MS, 0)
    assert stage is Stage.SIGNAL
    assert ladder.due_ns(0) == 3900 * MS
    assert ladder.climb(3900 * MS - 1, 0) == (ladder, None)
    ladder, stage = ladder.climb(3900 * MS, 0)
    assert stage is ladder.stage is Stage.KILL
    assert ladder.due_ns(0) is None
    assert ladder.climb(1 << 62, 0) == (ladder, None)


@pytest.mark.parametrize(
    ("longest_ms", "signal_ms", "kill_ms"),
    [(0, 500, 3000), (250, 500, 3000), (251, 502, 3000), (1000, 2000, 8000)],
)
def test_a_grace_is_its_floor_or_a_multiple_of_the_longest_step(
    longest_ms: int, signal_ms: int, kill_ms: int
) -> None:
    assert RUNGS[0].grace_ns(longest_ms * MS) == 0
    assert RUNGS[1].grace_ns(longest_ms * MS) == signal_ms * MS
    assert RUNGS[2].grace_ns(longest_ms * MS) == kill_ms * MS


def test_a_longer_step_seen_meanwhile_puts_off_the_next_rung() -> None:
    ladder, _ = Ladder(RUNGS, since_ns=0).climb(0, 0)
    assert ladder.climb(500 * MS, 1000 * MS) == (ladder, None)
    assert ladder.climb(2000 * MS, 1000 * MS)[1] is Stage.SIGNAL


def test_a_ladder_is_a_value() -> None:
    for value, attribute in ((RUNGS[0], "floor_ns"), (Ladder(RUNGS, since_ns=0), "taken")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, attribute, 1)


def test_a_very_late_call_takes_one_rung() -> None:
    late = 1 << 60
    ladder, stage = Ladder(RUNGS, since_ns=0).climb(late, 0)
    assert stage is Stage.IN_BAND
    ladder, stage = ladder.climb(late, 0)
    assert stage is Stage.SIGNAL
    assert ladder.climb(late, 0) == (ladder, None)


@pytest.mark.parametrize("taken", range(4))
def test_the_top_can_be_taken_from_every_rung_but_itself(taken: int) -> None:
    ladder = Ladder(RUNGS, since_ns=0, taken=taken)
    top, stage = ladder.top(77)
    assert top.stage is Stage.KILL
    assert top.due_ns(0) is None
    assert stage is (None if taken == 3 else Stage.KILL)
    assert top.since_ns == (0 if taken == 3 else 77)
    assert top.top(78) == (top, None)
    assert top.climb(1 << 62, 0) == (top, None)


def test_a_ladder_without_rungs_is_at_its_top() -> None:
    ladder = Ladder((), since_ns=0)
    assert ladder.climb(5, 0) == ladder.top(5) == (ladder, None)
    assert ladder.due_ns(0) is None


RUNG = st.builds(Rung, st.sampled_from(Stage), st.integers(0, 50), st.sampled_from([0.0, 0.5, 2.0, 8.0]))


@settings(max_examples=80, deadline=None)
@given(
    rungs=st.lists(RUNG, max_size=4),
    since=st.integers(0, 10),
    calls=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.booleans()), max_size=25),
)
def test_any_calls_at_any_times(rungs: list[Rung], since: int, calls: list[tuple[int, int, bool]]) -> None:
    ladder, now = Ladder(rungs, since), since
    taken_at: list[int] = []
    for wait, longest, to_the_top in calls:
        now += wait
        before = ladder
        if to_the_top and wait == 0:
            ladder, stage = ladder.top(now)
            assert stage is (rungs[-1].stage if len(taken_at) < len(rungs) else None)
            taken_at += [now] * (len(rungs) - len(taken_at))
        else:
            ladder, stage = ladder.climb(now, longest)
            done = len(taken_at)
            counts_from = since if done < 2 else taken_at[-1]
            if done < len(rungs) and now >= counts_from + rungs[done].grace_ns(longest):
                assert stage is rungs[done].stage
                taken_at.append(now)
            else:
                assert stage is None
                assert ladder is before
        assert ladder.taken == len(taken_at)
        assert ladder.stage is (rungs[len(taken_at) - 1].stage if taken_at else None)
