"""Credit: how far the worker may compute ahead of the reader. Integers in, integers out.

A limit is absolute and counted in computed tokens, as QUIC counts bytes: a token with index ≥ limit is not
computed. Limits only grow; a late or repeated one changes nothing. The reader's end keeps
limit ≤ taken + window and raises it in steps of max(1, window // 2), so that a stream costs one credit
frame every half window, not one a token. A reader that stops costs at most one window, ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infervisor.protocol.errors import FlowControlError, LocalProtocolError

MAX_WINDOW_TOKENS = 1 << 20


@dataclass(slots=True)
class Grant:
    """The worker's end: what may be computed."""

    limit: int
    computed: int = 0

    @property
    def may_compute(self) -> bool:
        """Whether the next token may be computed. Ask before computing it."""
        return self.computed < self.limit

    def raise_to(self, limit: int) -> None:
        """Take a new limit; a smaller one is late and changes nothing."""
        self.limit = max(self.limit, limit)

    def spend(self) -> int:
        """Count one computed token and return its index. Raises `LocalProtocolError` beyond the limit."""
        if self.computed >= self.limit:
            raise LocalProtocolError(f"token {self.computed} was computed beyond the limit {self.limit}")
        self.computed += 1
        return self.computed - 1


@dataclass(slots=True)
class Window:
    """The reader's end: what was granted, received and taken, all counted in tokens."""

    window: int
    limit: int = field(init=False)
    received: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        self.limit = self.taken + self.window

    @property
    def buffered(self) -> int:
        """Tokens that arrived and were not taken: never more than the window."""
        return self.received - self.taken

    @property
    def worker_may_compute(self) -> bool:
        """Whether the worker has credit left, as far as this end knows."""
        return self.received < self.limit

    def receive(self, index: int, count: int) -> None:
        """Count tokens that arrived. Raises `FlowControlError` for a gap, a repeat or broken credit."""
        if index != self.received:
            raise FlowControlError(f"token {index} arrived where {self.received} was due")
        if index + count > self.limit:
            raise FlowControlError(f"token {index + count - 1} arrived beyond the limit {self.limit}")
        self.received += count

    def take(self, count: int = 1) -> int | None:
        """Count tokens that the reader took; return the new limit to send, or None if not worth it."""
        if self.taken + count > self.received:
            raise LocalProtocolError(f"{count} tokens taken with {self.buffered} in the buffer")
        self.taken += count
        limit = self.taken + self.window
        if limit - self.limit < max(1, self.window // 2):
            return None
        self.limit = limit
        return limit
