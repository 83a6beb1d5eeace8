"""The requests that wait, in the order in which they are due, and which of them goes where next.

Owns the order and the limits of the queue. Who may go into which worker is decided in `protocol.blame`. Runs in the
loop's thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Sequence

from infervisor.protocol.blame import Places, place
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.rates import Rates
from infervisor.supervisor.request import Request
from infervisor.supervisor.worker import Worker

LEVEL_NS = 10 * NS_PER_S
"""How long a request waits until it goes before a fresh one of a priority higher by one."""


def due_ns(priority: int, queued_ns: int) -> int:
    """Return a request's place in the queue: who has less goes first.

    A level of priority is worth `LEVEL_NS` of waiting. So nobody starves: whatever comes more than 2,000 s later
    goes after it, even from the lowest priority to the highest. All grow older alike, so no clock is needed to
    compare them.
    """
    return queued_ns - priority * LEVEL_NS


def _due_ns(request: Request) -> int:
    return due_ns(request.input.priority, request.timeline.queued_ns)


class RequestQueue:
    """Waiting requests, the first that is due in front. peak: the most that ever waited at once."""

    def __init__(self, max_length: int, max_wait_s: float | None, rates: Rates) -> None:
        self.peak = 0
        self._requests: list[Request] = []
        self._max_length = max_length
        self._max_wait_s = max_wait_s
        self._rates = rates

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Let a new one wait, or one again that lost its worker: behind those that are due at the same time."""
        insort(self._requests, request, key=_due_ns)

    def remove(self, request: Request) -> None:
        """Let it wait no more."""
        self._requests.remove(request)

    def note_peak(self) -> None:
        """Count what waits now. Not what went through at once, since a free worker took it."""
        self.peak = max(self.peak, len(self._requests))

    def crowd(self, workers: Sequence[Worker], places: int) -> str | None:
        """Return why one more request is too many, or None. places: how many requests run at once."""
        waiting = len(self._requests)
        if not waiting and any(worker.free_places > 0 for worker in workers):
            return None
        if waiting >= self._max_length:
            return f"the queue is full ({waiting} requests wait)"
        wait_s = self._rates.wait_s(waiting, places)
        if self._max_wait_s is not None and wait_s is not None and wait_s > self._max_wait_s:
            return f"the wait would be about {wait_s:.1f} s, and at most {self._max_wait_s:g} s is allowed"
        return None

    def next_for(self, serving: Sequence[Worker]) -> tuple[Request, Worker] | None:
        """Return who goes next, and into which worker; None if nobody can. It still waits until it is removed."""
        if not self._requests:
            return None
        workers = [worker for worker in serving if worker.takes_attempts]
        places = [Places(each.free_places, each.busy_attempts, each.has_suspect) for each in workers]
        if not any(entry.free > 0 for entry in places):
            return None

        def near(waiting: int) -> Collection[int]:
            group = self._requests[waiting].group
            return () if group is None else [at for at, each in enumerate(workers) if _holds(each, group)]

        found = place((request.suspicion.is_suspect for request in self._requests), places, near)
        return None if found is None else (self._requests[found[0]], workers[found[1]])


def _holds(worker: Worker, group: int) -> bool:
    return any(attempt.request.group == group for attempt in worker.attempts.values())
