"""The requests that wait, in the order in which they came, and which of them goes where next.

Owns the order and the limits of the queue. Who may go into which worker is decided in `protocol.blame`. Runs in the
loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from infervisor.protocol.blame import Places, place
from infervisor.supervisor.rates import Rates
from infervisor.supervisor.request import Request
from infervisor.supervisor.worker import Worker


class RequestQueue:
    """Waiting requests, oldest first. peak: the most that ever waited at once."""

    def __init__(self, max_length: int, max_wait_s: float | None, rates: Rates) -> None:
        self.peak = 0
        self._requests: deque[Request] = deque()
        self._max_length = max_length
        self._max_wait_s = max_wait_s
        self._rates = rates

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def append(self, request: Request) -> None:
        """Let a new one wait."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Let one wait again that lost its worker: in front of all that came later."""
        came_ns = request.timeline.queued_ns
        ahead = sum(1 for other in self._requests if other.timeline.queued_ns <= came_ns)
        self._requests.insert(ahead, request)

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
        found = place((request.suspicion.is_suspect for request in self._requests), places)
        return None if found is None else (self._requests[found[0]], workers[found[1]])
