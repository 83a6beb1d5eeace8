"""Who is suspected when a worker dies, and where a suspect may run.

A death accuses everybody who was in the worker, unless it came from outside or from us. A suspect resumes
alone, in a worker that nobody joins, so that its next death accuses it and no other; one that dies alone twice
is poisoned. Further tokens acquit it. Pure functions and frozen values: no I/O, no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from infervisor.protocol.machines.process import DeathCause

ACQUITTED_AFTER_TOKENS = 32
"""So many tokens after the last death a suspect is past what may have killed its worker."""
POISONED_AFTER = 2
"""Deaths alone. One may be chance; two of the same request, with nobody else there, are its doing."""
FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
"""Signals that a process doesn't raise by what it computes: somebody sent them."""


def accuses(cause: DeathCause, signal_name: str | None, was_stopped: bool) -> bool:
    """Whether a worker's death makes suspects of the requests that were in it.

    signal_name: of the signal that ended it, or None if it exited or nobody knows. was_stopped: whether a signal
    from outside had stopped it when it was judged hung.
    """
    match cause:
        case DeathCause.CRASHED:
            return signal_name not in FROM_OUTSIDE
        case DeathCause.UNRESPONSIVE:
            return not was_stopped
        case DeathCause.PROTOCOL_ERROR | DeathCause.MEMORY_LIMIT:
            # What grows beyond its limit grew by what it computed: whoever was in it may do the same to another.
            return True
    return False


@dataclass(frozen=True, slots=True)
class Accusation:
    """A death with the request in the worker. how: the death in a word or two. alone: nobody else was in it."""

    how: str
    alone: bool


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What speaks against one request. at_tokens: how many had been delivered at the last death."""

    deaths: tuple[Accusation, ...] = ()
    at_tokens: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it must run alone."""
        return bool(self.deaths)

    @property
    def died_alone(self) -> int:
        """How many workers died with nobody else in them since it was acquitted last."""
        return sum(death.alone for death in self.deaths)

    @property
    def is_poisoned(self) -> bool:
        """Whether it isn't to be tried again."""
        return self.died_alone >= POISONED_AFTER

    def accused(self, alone: bool, delivered_tokens: int, how: str = "") -> Suspicion:
        """Return the suspicion after an accusing death, with so many tokens delivered until then."""
        return Suspicion((*self.deaths, Accusation(how, alone)), delivered_tokens)

    def progressed(self, delivered_tokens: int) -> Suspicion:
        """Return the suspicion once so many tokens are delivered: none, if they are enough to acquit it."""
        if self.deaths and delivered_tokens < self.at_tokens + ACQUITTED_AFTER_TOKENS:
            return self
        return _INNOCENT


_INNOCENT = Suspicion()


@dataclass(frozen=True, slots=True)
class Places:
    """One worker that takes requests. free: how many more it takes now; held: how many are in it.

    A worker that will take no more (retiring, going) must not be listed: room would be kept in it for a suspect.
    """

    free: int
    held: int
    has_suspect: bool


def _nowhere(waiting: int) -> Collection[int]:
    return ()


def place(
    queue: Iterable[bool],
    workers: Sequence[Places],
    near: Callable[[int], Collection[int]] = _nowhere,
) -> tuple[int, int] | None:
    """Return the next request to submit and the worker for it, as two indices, or None.

    queue: for each waiting request, in the order in which they are due, whether it is a suspect. The first that is
    due goes first, into the worker that holds the fewest; but a suspect goes only into an empty worker, one suspect
    at a time, and nobody joins it. While the first suspect waits for an empty worker, the one that holds the fewest
    takes no newcomers: later requests overtake the suspect elsewhere, yet can't make it wait for ever.
    near: which workers have in memory what a waiting request begins with; it goes there if there is room for it,
    and waits for none of them.
    """
    by_load = sorted(range(len(workers)), key=lambda index: workers[index].held)
    a_suspect_runs = any(worker.has_suspect for worker in workers)
    kept: int | None = None
    for waiting, is_suspect in enumerate(queue):
        if is_suspect:
            if a_suspect_runs:
                # Its turn comes after that one, in the worker that nobody joins meanwhile.
                continue
            for index in by_load:
                if workers[index].held == 0 and workers[index].free > 0:
                    return waiting, index
            # Which one is kept may change from call to call, but the fewest that any holds only gets less.
            kept = next((index for index in by_load if workers[index].held > 0), None)
            continue
        nearest = near(waiting)
        for index in sorted(by_load, key=lambda index: index not in nearest) if nearest else by_load:
            if workers[index].free > 0 and not workers[index].has_suspect and index != kept:
                return waiting, index
        # Where this one finds no room, none behind it does: nobody overtakes but a suspect's youngers.
        return None
    return None
