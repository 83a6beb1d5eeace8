"""`worker.scheduler`: who is in a step and with how much, by rules alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.worker.scheduler import (
    LEAST_SLICE_TOKENS,
    LONE_STEPS,
    LONGEST_STEP_S,
    Costs,
    Scheduler,
    Share,
    Want,
)


@dataclass
class Machine:
    """A model whose costs are linear: what steps take, and what sequences have left."""

    token_s: float = 0.003
    step_s: float = 0.002
    decode_s: float = 0.006
    left: dict[int, int] = field(default_factory=dict)
    """Prompt tokens that each sequence hasn't read."""
    said: dict[int, int] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)

    def wants(self, priority: Callable[[int], int] = lambda _: 0, allowance: int = 1) -> list[Want]:
        return [
            Want(one, True, left, priority(one)) if left else Want(one, False, allowance)
            for one, left in self.left.items()
        ]

    def run(self, scheduler: Scheduler, wants: list[Want]) -> list[Share]:
        shares = scheduler.plan(wants)
        reading = [share for share in shares if self.left[share.id]]
        read = 0
        for share in shares:
            if self.left[share.id]:
                assert share.tokens <= self.left[share.id]
                self.left[share.id] -= share.tokens
                read += share.tokens
            else:
                self.said[share.id] = self.said.get(share.id, 0) + 1
        sampling = len(shares) - len(reading)
        seconds = read * self.token_s + (self.step_s + sampling * self.decode_s if sampling else 0)
        self.steps.append(seconds)
        scheduler.measured(sampling, read, seconds)
        return shares


WANTS = st.lists(
    st.builds(
        Want,
        id=st.integers(0, 1 << 40),
        reading=st.booleans(),
        tokens=st.integers(1, 5000),
        priority=st.integers(-100, 100),
    ),
    max_size=64,
    unique_by=lambda want: want.id,
)


@given(
    rounds=st.lists(st.tuples(WANTS, st.floats(1e-6, 10)), min_size=1, max_size=6),
    largest=st.integers(8, 2048),
    fixed=st.booleans(),
    budget_s=st.none() | st.floats(1e-4, 10),
)
def test_nobody_gets_more_than_it_may(
    rounds: list[tuple[list[Want], float]], largest: int, fixed: bool, budget_s: float | None
) -> None:
    scheduler = Scheduler(largest, fixed_slices=fixed, budget_s=budget_s)
    for wants, seconds in rounds:
        by_id = {want.id: want for want in wants}
        shares = scheduler.plan(wants)
        assert len({share.id for share in shares}) == len(shares)
        for share in shares:
            want = by_id[share.id]
            assert 1 <= share.tokens <= want.tokens
            if want.reading and fixed:
                assert share.tokens == min(largest, want.tokens)
        # Whoever waits for its next token is in every step, with all that its credit allows.
        assert {share.id for share in shares} >= {want.id for want in wants if not want.reading}
        assert all(share.tokens == by_id[share.id].tokens for share in shares if not by_id[share.id].reading)
        assert bool(shares) == bool(wants)
        # Somebody always reads, and one step never reads more than one slice of the batch.
        read = [share.tokens for share in shares if by_id[share.id].reading]
        assert bool(read) == any(want.reading for want in wants)
        assert sum(read) <= (largest if not fixed else max(largest, max(read, default=0)))
        scheduler.measured(len(shares) - len(read), sum(read), seconds)


@given(
    prompts=st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    running=st.integers(0, 8),
    priorities=st.lists(st.integers(-5, 5), min_size=12, max_size=12),
    fixed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_nobody_starves(prompts: list[int], running: int, priorities: list[int], fixed: bool) -> None:
    machine = Machine(left=dict(enumerate(prompts)) | {100 + one: 0 for one in range(running)})
    scheduler = Scheduler(32 if fixed else 512, fixed_slices=fixed)
    # At the least slice for everybody, one after the other, all are read after so many steps.
    bound = sum(-(-tokens // LEAST_SLICE_TOKENS) for tokens in prompts) + len(prompts)
    for step in range(bound):
        wants = [
            want for want in machine.wants(lambda one: priorities[one]) if want.reading or want.id >= 100
        ]
        if not any(want.reading for want in wants):
            break
        machine.run(scheduler, wants)
        assert all(machine.said.get(100 + one, 0) == step + 1 for one in range(running))
    assert not any(machine.left.values())


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    machine = Machine(left={1: 5000, 9: 0})
    scheduler = Scheduler(512)
    for _ in range(50):
        machine.run(scheduler, machine.wants())
    assert machine.left[1] > 4000
    machine.left[2] = 40
    steps = 0
    while machine.left[2]:
        machine.run(scheduler, machine.wants())
        steps += 1
    # Its own slices, with one of the long prompt's before each.
    assert steps <= 2 * (40 // LEAST_SLICE_TOKENS + 1)
    assert machine.left[1] > 3500


def test_a_newcomer_starts_level_with_those_that_have_read_much() -> None:
    machine = Machine(left={1: 5000, 2: 5000})
    scheduler = Scheduler(64)
    for _ in range(60):
        machine.run(scheduler, machine.wants())
    machine.left[3] = 5000
    before = dict(machine.left)
    for _ in range(60):
        machine.run(scheduler, machine.wants())
    read = [before[one] - machine.left[one] for one in (1, 2, 3)]
    assert max(read) - min(read) <= 128


def test_short_prompts_share_a_slice() -> None:
    machine = Machine(left={one: 20 for one in range(4)})
    scheduler = Scheduler(512)
    scheduler.measured(0, 100, 0.1)
    scheduler.measured(0, 100, 0.1)
    assert len(machine.run(scheduler, machine.wants())) == 4
    assert not any(machine.left.values())


def test_no_slice_of_a_few_tokens_is_cut_off_for_the_next() -> None:
    scheduler = Scheduler(512)
    scheduler.measured(0, 40, 0.1)  # 80 tokens are affordable now
    shares = scheduler.plan([Want(1, True, 75), Want(2, True, 500)])
    assert shares == [Share(1, 75)]


def test_beside_a_running_sequence_a_step_takes_what_it_may() -> None:
    machine = Machine(left={1: 0})
    scheduler = Scheduler(512)
    for _ in range(20):
        machine.run(scheduler, machine.wants())
    alone_s = machine.steps[-1]
    machine.left[2] = 1500
    machine.steps.clear()
    while machine.left[2]:
        machine.run(scheduler, machine.wants())
    gaps = sorted(machine.steps)
    assert gaps[len(gaps) * 95 // 100] <= (LONE_STEPS + 1) * alone_s * 1.05
    # And the prompt takes no more than a third longer than alone.
    assert sum(gaps) <= 1500 * machine.token_s * 1.34


@pytest.mark.parametrize("budget_s", [0.02, 0.05, 0.12])
def test_a_given_budget_is_kept(budget_s: float) -> None:
    machine = Machine(left={1: 0, 2: 0})
    scheduler = Scheduler(512, budget_s=budget_s)
    for _ in range(20):
        machine.run(scheduler, machine.wants())
    machine.left[3] = 3000
    for _ in range(10):
        machine.run(scheduler, machine.wants())
    least_s = machine.step_s + 2 * machine.decode_s + LEAST_SLICE_TOKENS * machine.token_s
    machine.steps.clear()
    for _ in range(10):
        machine.run(scheduler, machine.wants())
    assert all(0.5 * budget_s < taken <= max(budget_s * 1.05, least_s + 1e-9) for taken in machine.steps)


def test_alone_a_prompt_is_read_in_long_slices() -> None:
    machine = Machine(left={1: 3000})
    scheduler = Scheduler(2048)
    while machine.left[1] > 500:
        machine.run(scheduler, machine.wants())
    assert 0.5 * LONGEST_STEP_S < machine.steps[-1] <= LONGEST_STEP_S * 1.05


def test_one_lucky_step_does_not_make_a_slice_of_seconds() -> None:
    scheduler = Scheduler(2048)
    scheduler.measured(0, 32, 0.1)
    for _ in range(3):
        scheduler.measured(0, 32, 1e-5)
    assert scheduler.slice_tokens(0) <= 64


def test_a_higher_priority_reads_more_and_nobody_nothing() -> None:
    machine = Machine(left={1: 100_000, 2: 100_000})
    scheduler = Scheduler(64)
    for _ in range(300):
        machine.run(scheduler, machine.wants({1: 0, 2: 3}.__getitem__))
    read = {one: 100_000 - left for one, left in machine.left.items()}
    assert read[2] / read[1] == pytest.approx(1.25**3, rel=0.1)
    assert read[1] > 0


def test_who_is_forgotten_starts_anew() -> None:
    scheduler = Scheduler(64)
    for _ in range(5):
        scheduler.plan([Want(1, True, 5000)])
    scheduler.forget(1)
    assert scheduler.plan([Want(1, True, 5000), Want(2, True, 5000)])[0].id == 1


def test_costs_of_an_unknown_number_of_sequences_are_the_nearest_known() -> None:
    costs = Costs()
    assert costs.decode_s(3) == 0
    costs.learn(1, 0, 0.01)
    costs.learn(4, 0, 0.03)
    assert costs.decode_s(0) == 0
    assert costs.decode_s(2) == 0.01
    assert costs.decode_s(9) == 0.03
    assert costs.lone_decode_s == 0.01


def test_reading_beside_sampling_is_charged_for_itself_alone() -> None:
    costs = Costs()
    costs.learn(1, 0, 0.01)
    costs.learn(1, 10, 0.04)
    assert costs.read_token_s == pytest.approx(0.003)


def test_the_short_rest_of_a_prompt_teaches_nothing() -> None:
    costs = Costs()
    costs.learn(0, LEAST_SLICE_TOKENS - 1, 1.0)
    assert costs.read_token_s == 0
