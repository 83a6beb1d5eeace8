"""The only file that touches pids: spawn, wait, signal, look, collect.

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
import psutil

from infervisor.protocol.errors import WorkerSpawnError
from infervisor.supervisor.descendants import descendants_of, is_alive, members_of
from infervisor.supervisor.memory import Footprint, parse_rollup

FRAMES_PIPE_BYTES = 1 << 20
POLL_S = 0.02
MAX_CHILDREN = 1000
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
    """What was seen of a worker. Bytes; cpu_s is user and system time since its start.

    pss_bytes, uss_bytes: see `Footprint`; None unless an exact look was asked for and possible. cost_ns: how long
    looking took.
    """

    t_ns: int
    rss_bytes: int
    cpu_s: float
    threads: int
    pss_bytes: int | None = None
    uss_bytes: int | None = None
    cost_ns: int = 0

    @property
    def used_bytes(self) -> int:
        """PSS where it is known, RSS otherwise."""
        return self.rss_bytes if self.pss_bytes is None else self.pss_bytes


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

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], snapshots: int | None = None
    ) -> None:
        """Spawn `command` with the pipe numbers appended. Raises `WorkerSpawnError`; nothing is left then.

        snapshots: descriptor of the shared memory for KV snapshots, which stays the caller's.
        """
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
                    *(() if snapshots is None else ("--snapshots", str(snapshots))),
                ],
                stdin=subprocess.DEVNULL, stdout=output_write, stderr=output_write,
                pass_fds=theirs if snapshots is None else (*theirs, snapshots), env=dict(environment),
                process_group=0,
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
        self._session = os.getsid(0)
        self._seen: psutil.Process | None = None
        self._children: dict[int, psutil.Process] = {}
        self.last_full: Sample | None = None
        """The last exact look at it while it lived."""
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

    @property
    def open_descriptors(self) -> int:
        """How many of the parent's descriptors for it are open."""
        return len(self._open_fds)

    # --- looking at it ---------------------------------------------------------------------------

    def sample(self, now_ns: int, *, full: bool = False) -> Sample | None:
        """Return memory and CPU time, or None if it is gone or can't be seen.

        full: also what is its own and what it shares, which takes some 50 ms for each GB that it has mapped;
        may be called in another thread for that. Such a look also remembers its children.
        """
        began_ns = time.perf_counter_ns()
        if self.status is not None:
            return None
        try:
            if self._seen is None:
                self._seen = psutil.Process(self.pid)
            with self._seen.oneshot():
                times = self._seen.cpu_times()
                rss_bytes = self._seen.memory_info().rss
                threads = self._seen.num_threads()
            footprint = self._footprint(self._seen) if full else Footprint(None, None)
            children = descendants_of(self._seen) if full else []
        except (psutil.Error, OSError):
            return None
        if self.status is not None:
            # Race "collected while another thread looked": the figures may be a stranger's.
            return None
        cost_ns = time.perf_counter_ns() - began_ns
        cpu_s = times.user + times.system
        seen = Sample(now_ns, rss_bytes, cpu_s, threads, footprint.pss, footprint.uss, cost_ns)
        if full and rss_bytes:
            # Race "it is dying": what is dead has no pages, and what it had before is what came back.
            self.last_full = seen
            self._remember(children)
        return seen

    def _footprint(self, seen: psutil.Process) -> Footprint:
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
                return parse_rollup(file.read())
        except (OSError, ValueError, IndexError):
            pass
        try:
            figures = seen.memory_full_info()
        except (psutil.Error, OSError, AttributeError):
            return Footprint(None, None)
        return Footprint(getattr(figures, "pss", None), getattr(figures, "uss", None))

    def _remember(self, children: Sequence[psutil.Process]) -> None:
        found = {child.pid: child for child in children}
        # A child whose parent is gone is found no more, but it is still one that the worker started.
        kept = {pid: child for pid, child in self._children.items() if child.is_running()}
        self._children = dict(list((found | kept).items())[:MAX_CHILDREN])

    def group_members(self) -> tuple[int, ...]:
        """Return the processes other than itself that live in its process group. Sends no signal.

        Zombies don't count: they hold no memory.
        """
        if os.getpid() != self._parent:
            return ()
        return members_of(self.pid, self._session, is_collected=self.status is not None)

    def left_over(self) -> tuple[int, ...]:
        """Return what lives of what it started: its group, and children seen at an exact look that left it."""
        if os.getpid() != self._parent:
            return ()
        strays = [pid for pid, child in self._children.items() if child.is_running() and is_alive(pid)]
        return tuple(sorted({*self.group_members(), *strays}))


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _enlarge(fd: int) -> None:
    # A larger pipe lets the worker run on while the parent is briefly busy; the default works too.
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, FRAMES_PIPE_BYTES)
