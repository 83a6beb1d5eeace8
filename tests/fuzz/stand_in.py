"""What stands in for the operating system in the fuzz harness: a process without one, and a clock that is set.

The pipes are real. Everything above them, from `Link` to `Stream`, is the supervisor's own code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from infervisor.supervisor import dispatcher, worker
from infervisor.supervisor.process import ExitStatus, Sample

PIPE_BYTES = 1 << 16
START_NS = 10**12


class StandIn:
    """A worker process that does only what a script says. It is deaf to every signal but SIGKILL."""

    pids = itertools.count(1)

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], snapshots: int | None = None
    ) -> None:
        self.pid = next(StandIn.pids)
        self._control_read, self.control = os.pipe()
        self.frames, self._frames_write = os.pipe()
        self._urgent_read, self.urgent = os.pipe()
        self.output, self._output_write = os.pipe()
        self._open = [
            self._control_read, self.control, self.frames, self._frames_write,
            self._urgent_read, self.urgent, self.output, self._output_write,
        ]  # fmt: skip
        for fd in self._open:
            os.set_blocking(fd, False)
        self.signals: list[int] = []
        self.was_killed = False
        self.status: ExitStatus | None = None
        self.ending: ExitStatus | None = None
        self.speaks = True

    # --- what the supervisor asks of it ----------------------------------------------------------

    async def wait_exit(self) -> None:
        """Never awaited: the harness looks for itself."""
        raise NotImplementedError

    def has_exited(self) -> bool:
        """Whether its end could be seen."""
        return self.ending is not None

    def is_stopped(self) -> bool:
        """Whether it was stopped and not continued."""
        return False

    def signal(self, number: int) -> None:
        """Note it."""
        assert self.status is None, "a signal was sent after the process was collected"
        self.signals.append(number)

    def kill_group(self) -> None:
        """End it, unless it has ended."""
        self.was_killed = True
        self.ending = self.ending or ExitStatus(signal_number=9)

    def collect(self) -> ExitStatus:
        """Return how it ended."""
        assert self.ending is not None, "a process was collected that lives"
        if self.status is None:
            self.status = self.ending
            for fd in self._open:
                os.close(fd)
            self._open.clear()
        return self.status

    last_full: Sample | None = None

    def sample(self, now_ns: int, *, full: bool = False) -> Sample | None:
        """Nothing is known of it."""
        return None

    @property
    def open_descriptors(self) -> int:
        """How many of the parent's descriptors for it are open."""
        return len(self._open)

    def left_over(self) -> tuple[int, ...]:
        """It starts nothing that could be left."""
        return ()

    # --- what the script makes it do -------------------------------------------------------------

    @property
    def can_speak(self) -> bool:
        """Whether it may write frames."""
        return self.speaks and self.ending is None

    def say(self, data: bytes) -> int:
        """Write to the frames pipe; return how many bytes it took, 0 if it is full."""
        try:
            return os.write(self._frames_write, data)
        except BlockingIOError:
            return 0

    def hang_up(self) -> None:
        """Close the frames pipe and live on."""
        if self.can_speak:
            self.speaks = False
            self._open.remove(self._frames_write)
            os.close(self._frames_write)

    def hear(self) -> None:
        """Read what is in the control pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._control_read, PIPE_BYTES):
                pass

    def jam(self) -> None:
        """Fill the control pipe, as frames do that it didn't read."""
        with contextlib.suppress(BlockingIOError):
            while os.write(self.control, bytes(4096)):
                pass

    def print(self, data: bytes) -> None:
        """Write to standard output."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._output_write, data)

    def exit(self, status: ExitStatus) -> None:
        """End by itself."""
        self.ending = self.ending or status


class Clock:
    """Stands in for the module `time` in the supervisor. `now_ns` is set by the harness."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def monotonic_ns(self) -> int:
        """Return the time."""
        return self.now_ns

    def time(self) -> float:
        """Return the time of day, which never changes here."""
        return 0.0


@contextlib.contextmanager
def in_place() -> Iterator[Clock]:
    """Let the supervisor see a clock that is set, and spawn stand-ins; afterwards all is as before."""
    clock = Clock()
    changed: list[tuple[ModuleType, str, object]] = [
        (module, "time", clock)
        for name, module in sorted(sys.modules.items())
        if name.startswith("infervisor.supervisor.") and getattr(module, "time", None) is time
    ]
    changed += [(worker, "WorkerProcess", StandIn), (dispatcher, "_attempt_ids", itertools.count(1))]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        yield clock
    finally:
        for module, name, value in before:
            setattr(module, name, value)
