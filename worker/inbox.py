"""What other threads leave for the work loop: messages and prepared requests as they come, and a way to wake it.

The reader, urgent and preparing threads put, the work loop takes. Unbounded on purpose: the parent bounds how
much it submits, and a bound here would only make the reader deaf to cancels.
"""

from __future__ import annotations

import threading
from collections import deque

from infervisor.protocol.messages import Message
from infervisor.worker.preparing import Prepared

Event = Message | Prepared


class Inbox:
    """A queue with one taker."""

    def __init__(self) -> None:
        self._messages: deque[Event] = deque()
        self._arrived = threading.Condition()

    def put(self, message: Event) -> None:
        """Append `message` and wake the taker. Any thread."""
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def take(self) -> list[Event]:
        """Return all that has arrived, perhaps nothing, without waiting."""
        if (
            not self._messages
        ):  # what arrives right now is taken in the next round, as it would be with the lock
            return []
        with self._arrived:
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def take_one(self) -> Event:
        """Return the oldest message. Only after `wait` without a time-out has returned."""
        with self._arrived:
            return self._messages.popleft()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something is there to take, at most `timeout_s` seconds."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._messages), timeout_s)
