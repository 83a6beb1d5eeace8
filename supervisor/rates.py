"""What this worker's speed says about limits that are given in seconds. Pure: integers and floats in and out.

A window in seconds is that many seconds' worth of tokens; a longest wait in seconds is a queue that would take that
long to empty. Both need a measured speed, and mean nothing until a request has shown one.
"""

from __future__ import annotations

from dataclasses import dataclass

from infervisor.protocol.credit import MAX_WINDOW_TOKENS
from infervisor.protocol.timeline import Timeline, seconds_between

SMOOTHING = 0.3
"""The weight of the newest request in the running averages."""


@dataclass(slots=True)
class Rates:
    """Running averages over finished requests; None until there was one. request_s: from submit to release."""

    tokens_per_s: float | None = None
    request_s: float | None = None

    def learn(self, timeline: Timeline) -> None:
        """Take the figures of a released request; one that was never submitted says nothing."""
        self.tokens_per_s = _blend(self.tokens_per_s, timeline.tokens_per_s)
        self.request_s = _blend(self.request_s, seconds_between(timeline.submitted_ns, timeline.released_ns))

    def window_tokens(self, window_s: float, otherwise: int) -> int:
        """Return the tokens that the worker computes in `window_s` seconds, or `otherwise` if that isn't known."""
        if self.tokens_per_s is None:
            return otherwise
        return max(1, min(MAX_WINDOW_TOKENS, round(window_s * self.tokens_per_s)))

    def wait_s(self, ahead: int, places: int) -> float | None:
        """Return how long a request waits with so many `ahead` of it in the queue, or None if that isn't known."""
        return None if self.request_s is None else (ahead + 1) * self.request_s / max(1, places)


def _blend(average: float | None, newest: float | None) -> float | None:
    if average is None or newest is None:
        return average if newest is None else newest
    return average + SMOOTHING * (newest - average)
