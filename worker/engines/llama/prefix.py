"""Which slot serves a new prompt best, by what slots still hold of those before it. Pure: no model, no clock.

A finished sequence's memory stays in its slot until the slot is needed. A request whose prompt begins like it takes
that slot over and reads only the rest; where the slot is busy, or holds more than the two share, what they share is
copied into another one. And a prompt that another sequence is just reading waits for it instead of being
read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_COPY_TOKENS = 32
"""Fewer are read again as fast as they are copied: a copy takes as long as some ten tokens, whatever it copies."""
_STRIDE = 128


@dataclass(frozen=True, slots=True)
class Held:
    """What one slot holds. in_memory: of `tokens`, those that can be taken over now; coming: those that can be in a
    while, since they are being read. since: when its last sequence was released, as a count; −1 if it is empty.
    """

    slot: int
    tokens: Sequence[int]
    in_memory: int
    coming: int
    is_free: bool
    since: int = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """Take `slot`. keep: tokens of its own memory that stay. source: the slot from which `copy` tokens come, or
    None; at once, or, if they are not there yet, when they are (`waits`).
    """

    slot: int
    keep: int = 0
    source: int | None = None
    copy: int = 0
    waits: bool = False


def choose(slots: Sequence[Held], prompt: Sequence[int], most: int, unit: int = 1) -> Choice:
    """Return the best free slot for `prompt`, of which at most `most` tokens may be taken over.

    unit: only multiples of so many tokens can be. At least one slot must be free.
    """
    free = [held for held in slots if held.is_free]
    shared = {held.slot: _shared(held, prompt, most, unit) for held in slots}
    # An empty slot costs nothing; else the one that was left first is missed least.
    oldest = min(free, key=lambda held: held.since)
    best = max(slots, key=lambda held: (shared[held.slot], held.is_free, held.since))
    own = max(free, key=lambda held: (shared[held.slot], held.since))
    count, kept = shared[best.slot], shared[own.slot]
    if own is not oldest and not _may_go(own, kept, is_whole=kept == most // unit * unit, spare=oldest):
        kept = 0
    if count - kept >= LEAST_COPY_TOKENS:
        there = min(count, best.in_memory // unit * unit)
        return Choice(oldest.slot, source=best.slot, copy=count, waits=there < count)
    return Choice(own.slot, keep=kept) if kept else Choice(oldest.slot)


def _may_go(own: Held, kept: int, *, is_whole: bool, spare: Held) -> bool:
    """Whether a slot may be taken over, though what it holds beyond `kept` tokens is lost.

    is_whole: the prompt is all in it, as when an answer is asked for again. spare: the slot that would be taken
    otherwise.
    """
    if own.in_memory - kept < LEAST_COPY_TOKENS:
        return True
    # A beginning that many prompts have, such as a system prompt, is no reason to lose one's history.
    return is_whole and spare.in_memory > 0


def _shared(held: Held, prompt: Sequence[int], most: int, unit: int) -> int:
    """Return how many tokens of the slot's, there or coming, the prompt begins with."""
    reach = held.in_memory if held.is_free else max(held.in_memory, held.coming)
    return min(common(held.tokens, prompt), reach, most) // unit * unit


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common, from the first on."""
    length = min(len(first), len(second))
    start = 0
    while start < length and first[start : start + _STRIDE] == second[start : start + _STRIDE]:
        start += _STRIDE
    for index in range(min(start, length), min(start + _STRIDE, length)):
        if first[index] != second[index]:
            return index
    return min(start + _STRIDE, length) if start < length else length
