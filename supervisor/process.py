"""The only file that touches pids: spawn, wait, signal, collect.

A process is watched through a pidfd, or by looking at it now and then where there is none. Its exit is seen
first and collected later, on purpose: until it is collected the pid can't belong to a stranger, so signals
are safe, and afterwards none is sent.

It is spawned in the calling thread and never in a pool: on Linux the parent-death signal follows the thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
import psutil

from infervisor.protocol.errors import WorkerSpawnError

FRAMES_PIPE_BYTES = 1 << 20
POLL_S = 0.02
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended. Both are None if somebody else collected it."""

    exit_code: int | None = None
    signal_number: int | None = None

    @property
    def signal_name(self) -> str | None:
        """The signal's name, or None for an ordinary exit."""
        if self.signal_number is None:
            return None
        try:
            return signal.Signals(self.signal_number).name
        except ValueError:
            return f"signal {self.signal_number}"

    def __str__(self) -> str:
        if self.signal_number is not None:
            return f"{self.signal_name}(-{self.signal_number})"
        return "exit status unknown" if self.exit_code is None else f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class Sample:
    """What psutil saw of a worker. Bytes; cpu_s is user and system time since its start."""

    t_ns: int
    rss_bytes: int
    cpu_s: float
    threads: int


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends are above 2, even if the host runs with closed standard streams."""
    ends = os.pipe()
    raised = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) if end < 3 else end for end in ends)
    for end, new in zip(ends, raised, strict=True):
        if end != new:
            os.close(end)
    return raised[0], raised[1]


class WorkerProcess:
    """One child and the parent's ends of its pipes: `control`, `frames`, `urgent` and `output`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Spawn `command` with the pipe numbers appended. Raises `WorkerSpawnError`; nothing is left then."""
        opened: list[int] = []
        try:
            control_read, self.control = self._keep(opened, _pipe())
            self.frames, frames_write = self._keep(opened, _pipe())
            urgent_read, self.urgent = self._keep(opened, _pipe())
            self.output, output_write = self._keep(opened, _pipe())
            for fd in (self.control, self.frames, self.urgent, self.output, urgent_read):
                os.set_blocking(fd, False)
            _enlarge(self.frames)
            theirs = (control_read, frames_write, urgent_read)
            self._popen = subprocess.Popen(
                [
                    *command,
                    "--control", str(control_read), "--frames", str(frames_write),
                    "--urgent", str(urgent_read), "--parent", str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL, stdout=output_write, stderr=output_write,
                pass_fds=theirs, env=dict(environment), process_group=0,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            for fd in opened:
                os.close(fd)
            raise WorkerSpawnError(
                f"the worker could not be started with {command[0]!r}: {error}; "
                "name an interpreter that exists with python="
            ) from error
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        for fd in (*theirs, output_write):
            os.close(fd)
        self.pid = self._popen.pid
        self._parent = os.getpid()
        self.status: ExitStatus | None = None
        self._pidfd = _open_pidfd(self.pid)
        self._open_fds = [self.control, self.frames, self.urgent, self.output]
        if self._pidfd is not None:
            self._open_fds.append(self._pidfd)

    @staticmethod
    def _keep(opened: list[int], ends: tuple[int, int]) -> tuple[int, int]:
        opened.extend(ends)
        return ends

    async def wait_exit(self) -> None:
        """Return when the exit can be seen. Doesn't collect it. Safe to cancel."""
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
            return
        while not self.has_exited():  # noqa: ASYNC110 - nothing would set an event
            await anyio.sleep(POLL_S)

    def has_exited(self) -> bool:
        """Whether its exit could be seen now, even if nobody has been woken by it yet."""
        if self.status is not None:
            return True
        try:
            return self._look()
        except ChildProcessError:
            return True

    def _look(self) -> bool:
        """Whether it is a zombie. Raises `ChildProcessError` if somebody else collected it."""
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        # macOS before Python 3.13.
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            raise ChildProcessError(f"process {self.pid} was collected") from None

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it was collected."""
        if self._holds_pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it: then it neither hears nor computes."""
        try:
            return self._holds_pid() and psutil.Process(self.pid).status() in _STOPPED
        except psutil.Error:
            return False

    def kill_group(self) -> None:
        """Send SIGKILL to the process and to whatever it started in its group, unless it was collected."""
        if self._holds_pid():
            # A group of which only the unreaped leader is left answers with either error.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _holds_pid(self) -> bool:
        """Whether the pid can't be a stranger's yet, and is this process's to signal."""
        if self.status is not None or os.getpid() != self._parent:
            return False
        try:
            self._look()
        except ChildProcessError:
            # Race "the host collected it": it ignores SIGCHLD or waits for any child.
            return False
        return True

    def collect(self) -> ExitStatus:
        """Collect a process whose exit was seen, close the pipes, and return how it ended. Idempotent."""
        if self.status is None:
            try:
                _, raw = os.waitpid(self.pid, 0)
            except ChildProcessError:
                # The host ignores SIGCHLD or waits for any child: the status went elsewhere.
                self.status = ExitStatus()
            else:
                code = os.waitstatus_to_exitcode(raw)
                self.status = ExitStatus(signal_number=-code) if code < 0 else ExitStatus(exit_code=code)
            # Popen must not wait for the pid again, which may be a stranger's by now.
            self._popen.returncode = 0
        for fd in self._open_fds:
            os.close(fd)
        self._open_fds.clear()
        return self.status

    def sample(self, now_ns: int) -> Sample | None:
        """Return memory and CPU time, or None if it is gone or can't be seen."""
        if self.status is not None:
            return None
        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                times = process.cpu_times()
                return Sample(
                    t_ns=now_ns,
                    rss_bytes=process.memory_info().rss,
                    cpu_s=times.user + times.system,
                    threads=process.num_threads(),
                )
        except (psutil.Error, OSError):
            return None


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _enlarge(fd: int) -> None:
    # A larger pipe lets the worker run on while the parent is briefly busy; the default works too.
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, FRAMES_PIPE_BYTES)
