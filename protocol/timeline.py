"""The time points of a request and the figures that follow from them.

Every stamp is `time.monotonic_ns()` of this host, or None while it hasn't happened. `first_token_ns` and
`last_token_ns` are the parent's receipt; the worker's own stamps stand beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

NS_PER_S = 1_000_000_000


def seconds_between(start_ns: int | None, end_ns: int | None) -> float | None:
    """Return the seconds from start to end, or None if either is missing."""
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / NS_PER_S


@dataclass(slots=True)
class Timeline:
    """When things happened to one request, in nanoseconds of the monotonic clock.

    paused_ns: how long it had no credit in all, pauses that are over; pause_began_ns: since when it has none now.
    """

    queued_ns: int
    submitted_ns: int | None = None
    started_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    cancel_requested_ns: int | None = None
    cancel_noticed_ns: int | None = None
    ended_ns: int | None = None
    released_ns: int | None = None
    worker_first_token_ns: int | None = None
    worker_last_token_ns: int | None = None
    tokens: int = 0
    longest_gap_ns: int = 0
    paused_ns: int = 0
    pause_began_ns: int | None = None

    def receive_tokens(self, count: int, now_ns: int, worker_ns: int) -> None:
        """Stamp `count` tokens that arrived together."""
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
            self.worker_first_token_ns = worker_ns
        elif self.last_token_ns is not None:
            self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.last_token_ns)
        self.last_token_ns = now_ns
        self.worker_last_token_ns = worker_ns
        self.tokens += count

    def pause(self, now_ns: int) -> None:
        """Stamp that it has no credit left: its reader is behind, and nothing is computed for it."""
        self.pause_began_ns = now_ns

    def go_on(self, now_ns: int) -> None:
        """Stamp that it got credit, or has ended."""
        if self.pause_began_ns is not None:
            self.paused_ns += max(0, now_ns - self.pause_began_ns)
            self.pause_began_ns = None

    @property
    def queue_s(self) -> float | None:
        """Seconds from queued to submitted, or to the end of a request that was never submitted."""
        until_ns = self.ended_ns if self.submitted_ns is None else self.submitted_ns
        return seconds_between(self.queued_ns, until_ns)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: seconds from queued to the first token."""
        return seconds_between(self.queued_ns, self.first_token_ns)

    @property
    def total_s(self) -> float | None:
        """Seconds from queued to ended."""
        return seconds_between(self.queued_ns, self.ended_ns)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last − first) / (tokens − 1)."""
        span = seconds_between(self.first_token_ns, self.last_token_ns)
        return None if span is None or self.tokens < 2 else span / (self.tokens - 1)

    @property
    def longest_gap_s(self) -> float | None:
        """The longest gap between two tokens (ITL), in seconds."""
        return None if self.tokens < 2 else self.longest_gap_ns / NS_PER_S

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate: the inverse of the time per output token."""
        tpot_s = self.tpot_s
        return None if not tpot_s else 1 / tpot_s

    @property
    def release_s(self) -> float | None:
        """Release latency: seconds from the cancel, or else from the end, until resources were free."""
        asked_ns = self.ended_ns if self.cancel_requested_ns is None else self.cancel_requested_ns
        latency_s = seconds_between(asked_ns, self.released_ns)
        # The worker's release may be stamped before the parent reads that the request ended, and, if it ended
        # by itself in the moment of a cancel, before that cancel.
        return None if latency_s is None else max(0.0, latency_s)
