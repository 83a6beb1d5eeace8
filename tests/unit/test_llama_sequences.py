"""`worker.engines.llama.sequences`: memory holds what its tape says, whatever is opened, cut, copied and released.

The decoder here is a model of llama.cpp's memory: lists of tokens, one for each slot, and interrupts wherever they
can come. What real memory then computes is for the tests on the real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infervisor.worker.engines.llama.decoder import Decoder
from infervisor.worker.engines.llama.sequences import Sequences

SLOTS = 3


class Memory:
    """Stands in for `Decoder`. can_cut: whether memory can be rolled back."""

    batch_tokens = 512

    def __init__(self, can_cut: bool = True) -> None:
        self.cells: list[list[int]] = [[] for _ in range(SLOTS)]
        self.can_cut = can_cut
        self.interrupt_after: int | None = None
        """The next call is cut after so many tokens are in memory."""
        self.computed = 0

    def _cut_at(self) -> int | None:
        cut, self.interrupt_after = self.interrupt_after, None
        return cut

    def prefill(self, slot: int, tokens: list[int], start: int, stop: int) -> tuple[int, bool]:
        assert len(self.cells[slot]) == start < stop
        cut = self._cut_at()
        if cut is None:
            self.cells[slot] += tokens[start:stop]
            self.computed += stop - start
            return stop, True
        kept = min(start + cut, stop)
        self.cells[slot] += tokens[start:kept]
        return self.roll_back(slot, kept), False

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int], *, outputs: bool = True
    ) -> bool:
        assert len(set(slots)) == len(slots)
        cut = self._cut_at()
        for number, (slot, token, position) in enumerate(zip(slots, tokens, positions, strict=True)):
            assert len(self.cells[slot]) == position
            if cut is None or number < cut:
                self.cells[slot].append(token)
        return cut is None

    def roll_back(self, slot: int, position: int) -> int:
        if position and (self.can_cut or len(self.cells[slot]) == position):
            del self.cells[slot][position:]
            return position
        self.forget(slot)
        return 0

    def keep(self, slot: int, position: int) -> int:
        return self.roll_back(slot, position)

    def copy(self, source: int, slot: int, position: int) -> int:
        assert source != slot
        self.cells[slot] = list(self.cells[source])
        return self.roll_back(slot, position)

    def forget(self, slot: int) -> None:
        self.cells[slot] = []

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        assert not self.cells[slot]
        self.cells[slot] = list(memory[:tokens])
        return len(memory) >= tokens


def sequences_over(memory: Memory, *, slice_tokens: int | None = None, reuses: bool = True) -> Sequences:
    return Sequences(cast(Decoder, memory), SLOTS, slice_tokens=slice_tokens, reuses=reuses)


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=90)


class AnyOrder(RuleBasedStateMachine):
    """Open, read, sample, interrupt, fail and release in any order."""

    @initialize(can_cut=st.booleans(), unit=st.sampled_from([None, 8]), reuses=st.booleans())
    def begin(self, can_cut: bool, unit: int | None, reuses: bool) -> None:
        self.memory = Memory(can_cut)
        self.unit = unit
        self.reuses = reuses
        self.sequences = sequences_over(self.memory, slice_tokens=unit, reuses=reuses)
        self.open: dict[int, int] = {}
        """Slot → length of its prompt."""
        self.prefixes = [[1, 2] * 40]

    @precondition(lambda self: len(self.open) < SLOTS)
    @rule(
        tail=PROMPTS,
        which=st.integers(0, 5),
        cut=st.integers(0, 200),
        delivered=st.lists(st.integers(1, 2), max_size=5),
    )
    def start(self, tail: list[int], which: int, cut: int, delivered: list[int]) -> None:
        # Prompts that begin like earlier ones, to the same length or less.
        prompt = [*self.prefixes[which % len(self.prefixes)][:cut], *tail]
        free = [slot for slot in range(SLOTS) if slot not in self.open]
        slot, tape, after = self.sequences.open(free, prompt, delivered)
        assert slot in free
        assert tape.tokens == [*prompt, *delivered]
        assert tape.position <= len(prompt) - 1, "the last token is always computed"
        assert not (after is not None and after[0] not in self.open)
        if not self.reuses:
            assert tape.position == 0
            assert after is None
        if self.unit:
            assert tape.position % self.unit == 0
        self.open[slot] = len(prompt)
        self.prefixes = [prompt, *self.prefixes][:6]

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), most=st.integers(1, 40), interrupt=st.none() | st.integers(0, 40))
    def read(self, which: int, most: int, interrupt: int | None) -> None:
        slot = sorted(self.open)[which % len(self.open)]
        tape = self.sequences[slot]
        if not tape.reading:
            return
        before = tape.position
        self.memory.interrupt_after = (
            interrupt if self.unit is None else (0 if interrupt is not None else None)
        )
        finished = self.sequences.read(slot, self.unit or most)
        was_cut = self.memory.interrupt_after is None and interrupt is not None
        self.memory.interrupt_after = None
        assert finished or was_cut
        if finished:
            assert tape.position > before or tape.missing == 0
            told = self.sequences.told(slot)
            assert told.total_tokens == len(tape.tokens)
            assert (told.done_tokens == told.total_tokens) == (not tape.reading)

    @precondition(lambda self: self.open)
    @rule(token=st.integers(1, 2), interrupt=st.none() | st.integers(0, 3))
    def sample(self, token: int, interrupt: int | None) -> None:
        members = [slot for slot in sorted(self.open) if not self.sequences[slot].reading]
        if not members:
            return
        before = {slot: len(self.sequences[slot].tokens) for slot in members}
        self.memory.interrupt_after = interrupt
        if self.sequences.decode(members):
            for slot in members:
                self.sequences[slot].tokens.append(token)
        else:
            assert {slot: len(self.sequences[slot].tokens) for slot in members} == before

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        slot = sorted(self.open)[which % len(self.open)]
        if fails:
            # Whatever the failed step left there, nobody may use it.
            self.sequences.doubt([slot])
            self.memory.cells[slot].append(99)
        self.sequences.release(slot)
        del self.open[slot]

    @invariant()
    def memory_holds_what_the_tapes_say(self) -> None:
        if not hasattr(self, "sequences"):
            return
        for slot in range(SLOTS):
            cells = self.memory.cells[slot]
            if slot in self.open:
                tape = self.sequences[slot]
                assert cells == tape.tokens[: tape.position]
                assert 99 not in cells
            elif not self.reuses:
                assert cells == []


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def read_all(sequences: Sequences, slot: int) -> None:
    while sequences[slot].reading:
        assert sequences.read(slot, 1000)
        sequences.told(slot)


def test_a_follower_copies_what_its_leader_has_read() -> None:
    memory = Memory()
    sequences = sequences_over(memory)
    prompt = list(range(200))
    first, _, after = sequences.open([0, 1, 2], prompt, ())
    assert after is None
    second, tape, after = sequences.open([1, 2], [*prompt[:150], 7, 8], ())
    assert after == (first, 150)
    assert sequences.read(first, 160)
    sequences.told(first)
    assert sequences.read(second, 1000)
    told = sequences.told(second)
    assert (told.copied_tokens, told.done_tokens) == (150, 152)
    assert tape.position == 151
    assert memory.computed == 160 + 1


def test_a_follower_whose_leader_is_gone_takes_what_is_left_and_reads_the_rest() -> None:
    memory = Memory()
    sequences = sequences_over(memory)
    prompt = list(range(200))
    first, _, _ = sequences.open([0, 1], prompt, ())
    second, _, after = sequences.open([1], prompt, ())
    assert after == (first, 199)
    assert sequences.read(first, 80)
    sequences.release(first)
    # And somebody else has taken the slot over meanwhile.
    sequences.open([first], [*prompt[:40], 5], ())
    read_all(sequences, second)
    assert memory.cells[second] == prompt[:-1]


def test_a_copy_that_was_cut_is_still_told() -> None:
    memory = Memory()
    sequences = sequences_over(memory)
    prompt = list(range(100))
    first, _, _ = sequences.open([0, 1], prompt, ())
    second, _, _ = sequences.open([1], [*prompt[:60], *range(500, 540)], ())
    assert sequences.read(first, 99)
    memory.interrupt_after = 0
    assert not sequences.read(second, 10)
    assert sequences.read(second, 10)
    assert sequences.told(second).copied_tokens == 60


def test_a_snapshot_with_more_than_is_there_replaces_it() -> None:
    memory = Memory()
    sequences = sequences_over(memory)
    prompt = list(range(100))
    slot, _, _ = sequences.open([0], prompt, ())
    assert sequences.read(slot, 40)
    sequences.release(slot)
    slot, tape, _ = sequences.open([0], prompt, (7, 8))
    assert tape.position == 40
    saved = memoryview(bytes([*prompt, 7]))
    assert not sequences.restore(slot, saved[:40], 40), "as much is there already"
    assert sequences.restore(slot, saved, 101)
    assert tape.position == 101
    assert not sequences.restore(slot, saved, 103), "more than the sequence has"


def test_misuse_is_named() -> None:
    sequences = sequences_over(Memory())
    with pytest.raises(RuntimeError, match="slot 1 is free"):
        sequences[1]
    sequences.open([1], [1, 2], ())
    with pytest.raises(RuntimeError, match="slot 1 is taken"):
        sequences.open([1], [1, 2], ())
    sequences.release(1)
    sequences.release(1)


def test_the_slot_for_what_needs_no_memory_is_the_one_that_will_be_missed_least() -> None:
    sequences: Any = sequences_over(Memory())
    for free in (0, 1):
        slot, _, _ = sequences.open([free], [free] * 9, ())
        read_all(sequences, slot)
    sequences.release(1)
    sequences.release(0)
    assert sequences.least_held([0, 1]) == 1
    assert sequences.least_held([0, 1, 2]) == 2


def test_where_slices_matter_only_what_was_read_in_slices_is_taken_over() -> None:
    sequences = sequences_over(Memory(), slice_tokens=8)
    prompt = list(range(20))
    slot, tape, _ = sequences.open([0], prompt, ())
    while tape.reading:
        assert sequences.read(slot, 8)
        sequences.told(slot)
    for token in range(100, 130):
        assert sequences.decode([slot])
        tape.tokens.append(token)
    sequences.release(slot)
    longer = [*prompt, *range(100, 125), 7]
    assert sequences.open([0], longer, ())[1].position == 16


def test_elsewhere_the_answer_is_taken_over_too() -> None:
    sequences = sequences_over(Memory())
    slot, tape, _ = sequences.open([0], list(range(20)), ())
    read_all(sequences, slot)
    for token in range(100, 130):
        assert sequences.decode([slot])
        tape.tokens.append(token)
    sequences.release(slot)
    longer = [*range(20), *range(100, 125), 7]
    assert sequences.open([0], longer, ())[1].position == 45
