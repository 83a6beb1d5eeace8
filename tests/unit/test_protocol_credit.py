"""Credit with its two real ends wired back to back, messages late, repeated and out of order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infervisor.protocol.credit import MAX_WINDOW_TOKENS, Grant, Window
from infervisor.protocol.errors import FlowControlError, LocalProtocolError


class BackToBack(RuleBasedStateMachine):
    """A worker's `Grant` and a reader's `Window`; tokens keep their order, credit frames need not."""

    @initialize(window=st.sampled_from([1, 2, 3, 4, 7, 64]))
    def connect(self, window: int) -> None:
        self.window = Window(window)
        self.grant = Grant(self.window.limit)
        self.tokens: list[int] = []  # computed, on their way
        self.credits: list[int] = []  # every limit ever sent; any may arrive at any time, and again
        self.frames = 0

    @precondition(lambda self: self.grant.may_compute)
    @rule(most=st.integers(1, 8))
    def compute(self, most: int) -> None:
        for _ in range(most):
            if self.grant.may_compute:
                self.tokens.append(self.grant.spend())

    @precondition(lambda self: not self.grant.may_compute)
    @rule()
    def compute_without_credit(self) -> None:
        before = self.grant.computed
        with pytest.raises(LocalProtocolError):
            self.grant.spend()
        assert self.grant.computed == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def deliver_tokens(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.tokens)))
        self.window.receive(self.tokens[0], count)
        del self.tokens[:count]

    @precondition(lambda self: self.window.buffered)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self._take(data.draw(st.integers(1, self.window.buffered)))

    def _take(self, count: int) -> None:
        before = self.window.limit
        limit = self.window.take(count)
        if limit is None:
            assert self.window.limit == before
            return
        assert limit == self.window.limit == self.window.taken + self.window.window
        assert limit - before >= max(1, self.window.window // 2)
        self.credits.append(limit)
        self.frames += 1

    @precondition(lambda self: self.credits)
    @rule(data=st.data())
    def deliver_some_credit(self, data: st.DataObject) -> None:
        before = self.grant.limit
        limit = data.draw(st.sampled_from(self.credits))
        self.grant.raise_to(limit)
        assert self.grant.limit == max(before, limit)

    @invariant()
    def nothing_outruns_its_credit(self) -> None:
        window, grant = self.window, self.grant
        assert window.taken <= window.received <= grant.computed <= grant.limit <= window.limit
        assert window.limit <= window.taken + window.window
        assert 0 <= window.buffered <= window.window
        assert window.buffered + len(self.tokens) <= window.window
        assert window.worker_may_compute == (window.received < window.limit)

    @invariant()
    def credit_frames_are_batched(self) -> None:
        assert self.frames <= self.window.taken / max(1, self.window.window // 2)

    def teardown(self) -> None:
        """A reader that keeps taking always gets more: no state that can be reached is a dead end."""
        if not hasattr(self, "window"):
            return
        goal = self.grant.computed + 3 * self.window.window
        for _ in range(20 * self.window.window):
            if self.tokens:
                self.window.receive(self.tokens[0], len(self.tokens))
                self.tokens.clear()
            while self.window.buffered:
                self._take(1)
            if self.credits:
                self.grant.raise_to(self.credits[-1])
            self.nothing_outruns_its_credit()
            if self.grant.computed >= goal:
                return
            assert self.grant.may_compute, "deadlock: nothing in flight, nothing buffered, no credit"
            self.tokens.append(self.grant.spend())
        pytest.fail("no progress")


TestBackToBack = BackToBack.TestCase
TestBackToBack.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("window", "limits"),
    [
        (1, [2, 3, 4, 5, 6, 7, 8, 9]),
        (2, [3, 4, 5, 6, 7, 8, 9, 10]),
        (3, [4, 5, 6, 7, 8, 9, 10, 11]),
        (4, [None, 6, None, 8, None, 10, None, 12]),
        (5, [None, 7, None, 9, None, 11, None, 13]),
        (8, [None, None, None, 12, None, None, None, 16]),
    ],
)
def test_a_reader_that_takes_one_by_one_sends_a_limit_every_half_window(
    window: int, limits: list[int | None]
) -> None:
    end = Window(window)
    assert end.limit == window
    sent = []
    for index in range(8):
        end.receive(index, 1)
        sent.append(end.take())
    assert sent == limits


def test_a_reader_that_stops_costs_one_window() -> None:
    end, grant = Window(5), Grant(5)
    while grant.may_compute:
        end.receive(grant.spend(), 1)
    assert (grant.computed, end.buffered, end.worker_may_compute) == (5, 5, False)


def test_the_largest_window_can_be_filled_and_emptied() -> None:
    end = Window(MAX_WINDOW_TOKENS)
    end.receive(0, 1 << 20)
    assert not end.worker_may_compute
    assert end.take(1 << 20) == 1 << 21


@pytest.mark.parametrize("index", [0, 1, 3, 4, -1])
def test_a_gap_or_a_repeat_is_the_workers_fault(index: int) -> None:
    end = Window(8)
    end.receive(0, 2)
    with pytest.raises(FlowControlError, match=f"token {index} arrived where 2 was due"):
        end.receive(index, 1)
    assert end.received == 2


def test_tokens_beyond_the_limit_are_the_workers_fault() -> None:
    end = Window(4)
    end.receive(0, 3)
    with pytest.raises(FlowControlError, match="token 4 arrived beyond the limit 4"):
        end.receive(3, 2)
    assert (end.received, end.buffered) == (3, 3)
    end.receive(3, 1)
    with pytest.raises(FlowControlError, match="token 4"):
        end.receive(4, 1)


def test_taking_what_has_not_arrived_is_our_fault() -> None:
    end = Window(4)
    end.receive(0, 2)
    with pytest.raises(LocalProtocolError, match="3 tokens taken with 2 in the buffer"):
        end.take(3)
    assert (end.taken, end.limit) == (0, 4)


def test_a_window_can_go_on_where_another_worker_stopped() -> None:
    end = Window(4, received=10, taken=8)
    assert (end.limit, end.buffered, end.worker_may_compute) == (12, 2, True)
    end.receive(10, 2)
    assert end.buffered == 4
    assert not end.worker_may_compute
