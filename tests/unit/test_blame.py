"""Whom a death accuses, what acquits, and that suspects run alone while nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.blame import ACQUITTED_AFTER_TOKENS, Accusation, Places, Suspicion, accuses, place
from infervisor.protocol.machines.process import DeathCause

# --- whom a death accuses ------------------------------------------------------------------------

CRASHED, UNRESPONSIVE = DeathCause.CRASHED, DeathCause.UNRESPONSIVE


@pytest.mark.parametrize(
    ("signal_name", "expected"),
    [
        ("SIGSEGV", True),
        ("SIGABRT", True),
        ("SIGBUS", True),
        ("SIGILL", True),
        ("signal 40", True),
        (None, True),  # an exit code, or a status that somebody else collected
        ("SIGKILL", False),
        ("SIGTERM", False),
    ],
)
def test_a_crash_accuses_unless_its_signal_came_from_outside(signal_name: str | None, expected: bool) -> None:
    assert accuses(CRASHED, signal_name, False) is expected


def test_a_hang_accuses_unless_it_was_stopped_from_outside() -> None:
    # The signal is our own kill's.
    assert accuses(UNRESPONSIVE, "SIGKILL", False)
    assert not accuses(UNRESPONSIVE, "SIGKILL", True)


@pytest.mark.parametrize("cause", [cause for cause in DeathCause if cause not in (CRASHED, UNRESPONSIVE)])
@pytest.mark.parametrize("signal_name", [None, "SIGKILL", "SIGSEGV"])
def test_of_the_other_causes_a_broken_protocol_and_outgrown_memory_accuse(
    cause: DeathCause, signal_name: str | None
) -> None:
    assert accuses(cause, signal_name, False) == (
        cause in (DeathCause.PROTOCOL_ERROR, DeathCause.MEMORY_LIMIT)
    )


# --- what speaks against a request ---------------------------------------------------------------


def test_two_deaths_alone_poison() -> None:
    once = Suspicion().accused(True, 5, "SIGSEGV(-11)")
    assert (once.is_suspect, once.died_alone, once.at_tokens, once.is_poisoned) == (True, 1, 5, False)
    twice = once.accused(True, 9, "SIGABRT(-6)")
    assert (twice.died_alone, twice.at_tokens, twice.is_poisoned) == (2, 9, True)
    assert twice.deaths == (Accusation("SIGSEGV(-11)", True), Accusation("SIGABRT(-6)", True))


def test_deaths_in_company_make_suspects_and_never_poison() -> None:
    suspicion = Suspicion()
    for _ in range(5):
        suspicion = suspicion.accused(False, 0)
    assert suspicion.is_suspect
    assert not suspicion.is_poisoned
    assert suspicion.accused(True, 0).accused(True, 0).is_poisoned


def test_tokens_since_the_last_death_acquit_of_all_of_them() -> None:
    assert ACQUITTED_AFTER_TOKENS == 32
    suspicion = Suspicion().accused(False, 3).accused(True, 10)
    assert suspicion.progressed(41) is suspicion
    acquitted = suspicion.progressed(42)
    assert acquitted == Suspicion()
    assert not acquitted.is_suspect
    again = acquitted.accused(True, 43)
    assert not again.is_poisoned, "a death before the acquittal counts no more"
    assert Suspicion().progressed(0) == Suspicion()


# --- where the next one goes ---------------------------------------------------------------------


def parse(queue: str, workers: str) -> tuple[list[bool], list[Places]]:
    """Read `n` and `s` (suspect) in the queue; workers as held/places, with an s if it holds a suspect."""
    parsed = []
    for worker in workers.split():
        held, _, places = worker.rstrip("s").partition("/")
        parsed.append(Places(int(places) - int(held), int(held), worker.endswith("s")))
    return [who == "s" for who in queue], parsed


@pytest.mark.parametrize(
    ("queue", "workers", "found"),
    [
        ("", "0/2", None),
        ("n", "", None),
        ("nn", "0/2", (0, 0)),
        ("nn", "2/2", None),
        ("n", "1/2 0/2", (0, 1)),
        ("n", "0/2 0/2", (0, 0)),
        ("n", "2/2 3/4", (0, 1)),
        # A suspect wants an empty worker.
        ("s", "0/2", (0, 0)),
        ("s", "1/2 0/2", (0, 1)),
        ("s", "1/2", None),
        ("s", "0/0", None),
        # Nobody joins a suspect, and one after the other.
        ("n", "1/2s", None),
        ("n", "1/2s 1/2", (0, 1)),
        ("s", "1/2s 0/2", None),
        ("sn", "1/2s 0/2", (1, 1)),
        ("ssn", "1/2s 3/4", (2, 1)),
        ("ss", "0/2 0/2", (0, 0)),
        # While it waits, the least loaded one is kept for it.
        ("sn", "1/2", None),
        ("sn", "1/2 1/2", (1, 1)),
        ("sn", "3/4 1/4 2/4", (1, 2)),
        ("sn", "1/4 2/2", None),
        ("ssn", "1/4 2/4", (2, 1)),
        ("nsn", "1/2 2/4", (0, 0)),
        # One that takes nothing and holds nothing will never be empty for it: it isn't kept.
        ("sn", "0/0 1/2 2/4", (1, 2)),
        # A full one may be kept: it empties.
        ("sn", "2/2 3/4", (1, 1)),
    ],
)
def test_the_next_one_and_its_worker(queue: str, workers: str, found: tuple[int, int] | None) -> None:
    assert place(*parse(queue, workers)) == found


def test_only_as_much_of_a_long_queue_is_looked_at_as_is_needed() -> None:
    looked = 0

    def queue() -> Iterator[bool]:
        nonlocal looked
        for looked in range(1, 1000):  # noqa: B007
            yield False

    assert place(queue(), [Places(1, 0, False)]) == (0, 0)
    assert looked == 1


@pytest.mark.parametrize(
    ("queue", "workers", "near", "found"),
    [
        # It goes where what it begins with is in memory, though another one holds fewer.
        ("n", "2/4 0/4", {0: [0]}, (0, 0)),
        ("n", "0/4 2/4 1/4", {0: [1, 2]}, (0, 2)),
        ("nn", "2/4 0/4", {1: [0]}, (0, 1)),
        # It waits for none of them.
        ("n", "4/4 1/4", {0: [0]}, (0, 1)),
        ("n", "1/4s 3/4", {0: [0]}, (0, 1)),
        ("sn", "1/4 2/4", {1: [0]}, (1, 1)),
        ("n", "4/4", {0: [0]}, None),
        # A suspect has no neighbours.
        ("s", "1/4 0/4", {0: [0]}, (0, 1)),
    ],
)
def test_a_worker_that_has_what_it_begins_with_is_preferred(
    queue: str, workers: str, near: dict[int, list[int]], found: tuple[int, int] | None
) -> None:
    assert place(*parse(queue, workers), lambda waiting: near.get(waiting, [])) == found


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[bool], list[Places]]:
    """Any queue in front of any workers that the rules themselves could have led to."""
    workers = []
    for _ in range(draw(st.integers(0, 4))):
        places = draw(st.integers(0, 4))
        held = draw(st.integers(0, places))
        has_suspect = held == 1 and draw(st.booleans())
        workers.append(Places(places - held, held, has_suspect))
    return draw(st.lists(st.booleans(), max_size=8)), workers


@settings(max_examples=400, deadline=None)
@given(pools())
def test_the_rules_hold_wherever_one_starts(pool: tuple[list[bool], list[Places]]) -> None:
    queue, workers = pool
    found = place(queue, workers)
    if found is None:
        # Nothing that could go is held back, but for the first suspect's sake.
        open_ones = [worker for worker in workers if worker.free > 0 and not worker.has_suspect]
        if False in queue:
            assert len(open_ones) <= (True in queue)
        if True in queue and not any(worker.has_suspect for worker in workers):
            assert not any(worker.held == 0 for worker in open_ones)
        return
    waiting, index = found
    worker = workers[index]
    assert worker.free > 0
    assert not worker.has_suspect, "nobody joins a suspect"
    assert queue[waiting] not in queue[:waiting], "first come, first served, among its kind"
    if queue[waiting]:
        assert worker.held == 0, "a suspect runs alone"
        assert not any(other.has_suspect for other in workers), "one by one"
        assert not any(queue[:waiting])
    elif True not in queue[:waiting]:
        usable = [other.held for other in workers if other.free > 0 and not other.has_suspect]
        assert worker.held == min(usable)


# --- a busy pool ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Guest:
    """A request of the simulation. left: how many ticks it runs."""

    came: int
    left: int
    is_suspect: bool


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    suspects=st.integers(0, 3),
    longest=st.integers(1, 6),
)
def test_nobody_starves_in_a_pool_that_is_never_idle(
    sizes: list[int], seed: int, suspects: int, longest: int
) -> None:
    draw = random.Random(seed)
    workers: list[list[Guest]] = [[] for _ in sizes]
    queue = [Guest(0, draw.randint(1, longest), True) for _ in range(suspects)]
    started: list[Guest] = []
    waited: dict[Guest, int] = {}
    for now in range(150):
        while len(queue) < 6:  # newcomers never end
            queue.append(Guest(now, draw.randint(1, longest), False))
        while True:
            places = [
                Places(size - len(held), len(held), any(guest.is_suspect for guest in held))
                for size, held in zip(sizes, workers, strict=True)
            ]
            found = place((guest.is_suspect for guest in queue), places)
            if found is None:
                break
            guest = queue.pop(found[0])
            workers[found[1]].append(guest)
            started.append(guest)
            waited[guest] = now - guest.came
        for held in workers:
            assert len(held) == 1 or not any(guest.is_suspect for guest in held), "a suspect had company"
            for guest in list(held):
                guest.left -= 1
                if guest.left == 0:
                    held.remove(guest)
        assert sum(guest.is_suspect for held in workers for guest in held) <= 1
    # Each suspect waits until its worker has emptied, which takes at most the longest stay, and runs that long.
    patience = 2 * longest * (suspects + 1) + 6 * longest
    assert all(ticks <= patience for ticks in waited.values())
    assert all(150 - guest.came <= patience + 1 for guest in queue)
    ordinary = [guest.came for guest in started if not guest.is_suspect]
    assert ordinary == sorted(ordinary), "first come, first served"
    assert sum(guest.is_suspect for guest in started) == suspects
