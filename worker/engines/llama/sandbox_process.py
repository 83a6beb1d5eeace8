"""The sandbox process: forks a child for each job, which runs a stranger's template or grammar under limits.

Started by the worker (sandbox_host.py), never by hand, and killed by nothing that a job does: what burns time or
memory, or crashes, is the child. Owns the compiled template and, from the first grammar on, a vocabulary without
weights, so that a child has them at once. One thread: a fork takes no others along. Ends with the worker.

A job comes as one byte with a socket. The child reads the request from it and writes the reply; how it died,
if it does, is written there by this process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.grammar_source import GrammarTrial
from infervisor.worker.engines.llama.sandbox_job import (
    ENDED,
    MEMORY,
    NEEDS_VOCABULARY,
    OVERDUE,
    Death,
    Incomplete,
    Limits,
    Setup,
    packed,
    read_value,
    write_frame,
)
from infervisor.worker.engines.llama.template import ChatTemplate
from infervisor.worker.parent_guard import die_with_parent

OUT_OF_MEMORY = 77
"""Exit code of a child in which Python ran out of memory."""
GRAMMAR_STACK_BYTES = 4 << 20
"""Half of what the worker usually has: what just fits here must fit there."""
GIVES_WAY = 10
LATE_S = 1.0
"""A child that is stopped doesn't see its own alarm; so long after it, it is killed."""


@dataclass(slots=True)
class _Child:
    socket: socket.socket
    started_s: float
    gave_way: bool = False
    overdue: bool = False


class Server:
    """The jobs that run, and what they are forked with."""

    def __init__(self, control: socket.socket, setup: Setup, wakeup: int) -> None:
        self._control = control
        self._setup = setup
        self._limits = setup.limits
        self._wakeup = wakeup
        self._children: dict[int, _Child] = {}
        self._trial: GrammarTrial | None = None
        self._template = _tried_template(setup)
        gc.freeze()  # or the children's collections would copy every page

    def run(self) -> None:
        """Serve jobs until the worker closes its end; then end the children."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        try:
            while True:
                for fd, _ in poller.poll(self._until_next_alarm_ms()):
                    if fd == self._wakeup:
                        os.read(self._wakeup, 4096)
                    elif not self._take_job():
                        return
                self._collect()
                self._watch_clock()
        finally:
            self._end_children()

    def _take_job(self) -> bool:
        needs, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not needs:
            return False
        for fd in descriptors:
            with socket.socket(fileno=fd) as job:
                self._begin(needs, job)
        return True

    def _begin(self, needs: bytes, job: socket.socket) -> None:
        try:
            if needs == NEEDS_VOCABULARY and self._trial is None:
                self._trial = GrammarTrial(self._setup.model_path)
                gc.freeze()
            job.settimeout(None)
            server, pid = os.getpid(), os.fork()
        except (OSError, RuntimeError, LoadRefused) as error:
            with contextlib.suppress(OSError):
                write_frame(
                    job,
                    packed(["failed", f"the sandbox can't begin a job: {error}", None]),
                    time.monotonic() + 1,
                )
            return
        if pid == 0:
            _be_child(lambda: self._do(job), server, self._limits, needs == NEEDS_VOCABULARY, self._foreign())
        self._children[pid] = _Child(job.dup(), time.monotonic())

    def _foreign(self) -> Sequence[int]:
        # A job's socket must end with its own child, and the worker's with this process.
        return [self._control.fileno(), *(child.socket.fileno() for child in self._children.values())]

    def _do(self, job: socket.socket) -> None:
        kind, arguments = read_value(job)
        try:
            reply = ["done", self._result(kind, arguments), None]
        except InvalidRequest as error:
            reply = ["refused", str(error), error.field]
        except MemoryError:
            raise
        except Exception:
            reply = ["failed", traceback.format_exc(), None]
        write_frame(job, packed(reply))

    def _result(self, kind: str, arguments: dict[str, Any]) -> Any:
        if kind == "template_error":
            return self._template.error
        if kind == "render":
            text, literals = self._template.render(**arguments)
            return [text, dict(literals.text_of) if literals.marks(text) else {}]
        assert self._trial is not None
        if kind == "schema":
            return self._trial.of_schema(**arguments)
        if kind == "grammar":
            return self._trial.check(**arguments)
        raise ValueError(f"a job of unknown kind {kind!r}")

    def _collect(self) -> None:
        for pid, child in list(self._children.items()):
            collected, status, usage = os.wait4(pid, os.WNOHANG)
            if collected:
                del self._children[pid]
                code = os.waitstatus_to_exitcode(status)
                if code != 0:
                    _tell(child.socket, Death(code, _cause(child.overdue, code, usage, self._limits)))
                child.socket.close()

    def _watch_clock(self) -> None:
        now_s = time.monotonic()
        for pid, child in self._children.items():
            if not child.gave_way and now_s >= child.started_s + self._limits.yield_s:
                child.gave_way = True
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + GIVES_WAY)
            if not child.overdue and now_s >= child.started_s + self._limits.wall_s + LATE_S:
                child.overdue = True
                os.kill(pid, signal.SIGKILL)

    def _until_next_alarm_ms(self) -> float | None:
        alarms = [
            child.started_s + (self._limits.wall_s + LATE_S if child.gave_way else self._limits.yield_s)
            for child in self._children.values()
            if not child.overdue
        ]
        return max(0.0, 1000 * (min(alarms) - time.monotonic()) + 1) if alarms else None

    def _end_children(self) -> None:
        for pid, child in self._children.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            child.socket.close()


def _tried_template(setup: Setup) -> ChatTemplate:
    """Return the template, compiled where a child could compile it."""

    def fresh() -> ChatTemplate:
        return ChatTemplate(setup.template, setup.origin, setup.bos, setup.eos, setup.spellings)

    if setup.template is None:
        return fresh()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_child(fresh, server, setup.limits, False, ())
    # Nobody is served until this is known. A stranger who stops the child makes the worker lose patience.
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return fresh()
    template = ChatTemplate(None, setup.origin, setup.bos, setup.eos, ())
    template.give_up(f"it {Death(code, _cause(False, code, usage, setup.limits)).told(setup.limits)}")
    return template


def _be_child(
    work: Callable[[], object], server: int, limits: Limits, small_stack: bool, foreign: Sequence[int]
) -> NoReturn:
    """Run `work` under the limits and end this process. Called right after the fork, in the child."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in foreign:
            os.close(fd)
        if die_with_parent(server):
            _limit(limits, small_stack)
            work()
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except (Incomplete, BrokenPipeError, ConnectionError):
        code = 0  # whoever asked has gone
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _limit(limits: Limits, small_stack: bool) -> None:
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    _lower(resource.RLIMIT_CORE, 0, 0)
    _lower(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1)
    size = _address_space_bytes()
    if size is not None:
        _lower(resource.RLIMIT_AS, size + limits.memory_bytes, size + limits.memory_bytes)
    if small_stack:
        _lower(resource.RLIMIT_STACK, GRAMMAR_STACK_BYTES, GRAMMAR_STACK_BYTES)


def _lower(which: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(which)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(which, (soft, hard))


def _address_space_bytes() -> int | None:
    # Where there is no such file (macOS), the system doesn't keep that limit either: the clock must do.
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _cause(overdue: bool, code: int, usage: Any, limits: Limits) -> int:
    if overdue or code == -signal.SIGALRM:
        return OVERDUE
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # A failed allocation ends native code in several ways. By then a good part of the limit is in use.
    grown = usage.ru_maxrss * unit - before > limits.memory_bytes // 4
    crashed = code not in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGTERM)
    return MEMORY if code == OUT_OF_MEMORY or (grown and crashed) else ENDED


def _tell(job: socket.socket, death: Death) -> None:
    job.setblocking(False)
    with contextlib.suppress(OSError):
        job.send(death.to_bytes())


def _set_signals() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def main() -> None:
    """Be a sandbox until the worker ends."""
    parser = argparse.ArgumentParser(prog="sandbox", add_help=False, allow_abbrev=False)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.socket, False)
    wakeup = _set_signals()
    if not die_with_parent(arguments.parent):
        return
    with socket.socket(fileno=arguments.socket) as control:
        try:
            setup = Setup.from_wire(read_value(control))
        except (Incomplete, ConnectionError):
            return  # the worker has gone, or wants none any more
        Server(control, setup, wakeup).run()


if __name__ == "__main__":
    main()
