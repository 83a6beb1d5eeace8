"""Budgets as clocks, against a model that counts every nanosecond down."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infervisor.protocol.deadlines import TIMEOUT_OF, Budget, Clocks
from infervisor.protocol.endings import EndClass, EndReason

BUDGET = st.sampled_from(Budget)


class AgainstCountdown(RuleBasedStateMachine):
    """The model: what is left of each budget, and which of them run."""

    @initialize(
        budgets=st.dictionaries(BUDGET, st.none() | st.integers(0, 50)), now=st.integers(0, 1_000_000_000)
    )
    def begin(self, budgets: dict[Budget, int | None], now: int) -> None:
        self.clocks = Clocks.of(budgets.items())
        self.whole = {budget: ns for budget, ns in budgets.items() if ns is not None}
        self.left = dict(self.whole)
        self.running: set[Budget] = set()
        self.started: dict[Budget, int] = {}
        self.now = now

    @rule(ns=st.integers(0, 30))
    def let_time_pass(self, ns: int) -> None:
        self.now += ns
        for budget in self.running:
            self.left[budget] -= ns

    @rule(budget=BUDGET)
    def run(self, budget: Budget) -> None:
        self.clocks.run(budget, self.now)
        if budget in self.whole and budget not in self.running:
            self.running.add(budget)
            self.started[budget] = self.now

    @rule(budget=BUDGET)
    def hold(self, budget: Budget) -> None:
        self.clocks.hold(budget, self.now)
        self.running.discard(budget)

    @rule(budget=BUDGET)
    def restart(self, budget: Budget) -> None:
        self.clocks.restart(budget, self.now)
        if budget in self.whole:
            self.left[budget] = self.whole[budget]
            self.running.add(budget)
            self.started[budget] = self.now

    @rule(budget=BUDGET)
    def stop(self, budget: Budget) -> None:
        self.clocks.stop(budget)
        if budget in self.whole:
            self.left[budget] = self.whole[budget]
            self.running.discard(budget)

    @rule(budget=BUDGET, ns=st.integers(0, 30))
    def postpone(self, budget: Budget, ns: int) -> None:
        self.clocks.postpone(budget, ns, self.now)
        if budget in self.running:
            forgiven = min(ns, self.now - self.started[budget])
            self.left[budget] += forgiven
            self.started[budget] += forgiven

    @invariant()
    def the_next_one_due_is_the_one_with_least_left(self) -> None:
        due = self.clocks.next_due()
        if not self.running:
            assert due is None
            assert self.clocks.expired(self.now + 10**12) is None
            return
        least = min(self.left[budget] for budget in self.running)
        assert due is not None
        assert due[0] == self.now + least
        assert due[1] in self.running
        assert self.left[due[1]] == least
        # A budget is used up at its very end: not a nanosecond before, and at any time after.
        assert self.clocks.expired(due[0] - 1) is None
        assert self.clocks.expired(due[0]) is due[1]
        assert self.clocks.expired(due[0] + 10**12) is due[1]
        assert self.clocks.expired(self.now) is (due[1] if least <= 0 else None)


TestAgainstCountdown = AgainstCountdown.TestCase
TestAgainstCountdown.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_budget_without_a_limit_never_expires() -> None:
    clocks = Clocks.of([(budget, None) for budget in Budget])
    for budget in Budget:
        clocks.run(budget, 0)
        clocks.restart(budget, 0)
        clocks.hold(budget, 5)
        clocks.stop(budget)
        clocks.run(budget, 5)
    assert clocks.next_due() is None
    assert clocks.expired(1 << 62) is None


def test_a_clock_that_stands_keeps_what_it_used() -> None:
    clocks = Clocks.of([(Budget.QUEUE, 10)])
    clocks.run(Budget.QUEUE, 0)
    clocks.hold(Budget.QUEUE, 7)
    assert clocks.expired(100) is None
    clocks.run(Budget.QUEUE, 100)
    assert clocks.next_due() == (103, Budget.QUEUE)
    clocks.run(Budget.QUEUE, 102)  # runs already: not a second start
    assert clocks.next_due() == (103, Budget.QUEUE)
    clocks.restart(Budget.QUEUE, 102)
    assert clocks.next_due() == (112, Budget.QUEUE)


def test_two_requests_share_no_clock() -> None:
    one, other = Clocks(), Clocks()
    assert one._clocks is not other._clocks
    budgets = [(Budget.TOTAL, 5)]
    one, other = Clocks.of(budgets), Clocks.of(budgets)
    one.run(Budget.TOTAL, 0)
    assert other.next_due() is None


def test_every_budget_has_a_reason_of_its_own() -> None:
    assert set(TIMEOUT_OF) == set(Budget)
    assert set(TIMEOUT_OF.values()) == {r for r in EndReason if r.end_class is EndClass.DEADLINE}
    assert TIMEOUT_OF[Budget.FIRST_TOKEN] is EndReason.FIRST_TOKEN_TIMEOUT
