"""A notice that any number of tasks wait for, again and again: an event without the lost wake-up."""

from __future__ import annotations

import anyio


class Notice:
    """`ring` wakes all who wait at that moment. Costs nothing while nobody waits."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[anyio.Event] = []

    def ring(self) -> None:
        """Wake all who wait now."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()

    async def wait(self) -> None:
        """Wait for the next ring. Check the condition before and after; safe to cancel."""
        event = anyio.Event()
        self._waiting.append(event)
        try:
            await event.wait()
        finally:
            if event in self._waiting:
                self._waiting.remove(event)
