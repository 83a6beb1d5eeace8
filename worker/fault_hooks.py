"""What fault injection may reach below an engine: explicit, and handed only to an engine that asks for it.

The worker has no faults of its own; the scripted engine makes them for tests and demonstrations.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol, runtime_checkable


class FaultHooks:
    """The raw frames descriptor, and a gate in front of the control reader."""

    def __init__(self, frames_fd: int) -> None:
        self.frames_fd = frames_fd
        self._gate = threading.Event()
        self._gate.set()

    def read(self, fd: int, size: int) -> bytes:
        """Read as `os.read` does, but hold back what was read while the reader is blocked."""
        data = os.read(fd, size)
        self._gate.wait()
        return data

    def block_reader(self) -> None:
        """Make the control reader deaf from now on, even to the end of its pipe."""
        self._gate.clear()


@runtime_checkable
class TakesFaultHooks(Protocol):
    """An engine that injects faults."""

    def use_fault_hooks(self, hooks: FaultHooks) -> None:
        """Take the hooks. Called once, before `load`."""
        ...
