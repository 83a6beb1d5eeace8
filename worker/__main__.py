"""The worker process: `python -P -m infervisor.worker --control FD --frames FD --urgent FD --parent PID`.

Written by a supervisor, never by hand; with `--snapshots FD` it may keep snapshots in that shared memory. The
order of `main` matters and is explained there. Threads: this one loads and then runs the work loop; *control*
reads the parent's messages; *urgent* takes the signal; requests are prepared in threads of their own.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.messages import PROTOCOL_VERSION, Cancel, Hello, Load
from infervisor.worker.abort import Abort
from infervisor.worker.exits import Exit, leave
from infervisor.worker.fault_hooks import FaultHooks
from infervisor.worker.inbox import Inbox
from infervisor.worker.loading import load, versions
from infervisor.worker.outbox import Outbox
from infervisor.worker.parent_guard import die_with_parent
from infervisor.worker.pipes import ControlReader
from infervisor.worker.signals import block_urgent_signal, start_urgent_thread
from infervisor.worker.snapshots import Snapshots
from infervisor.worker.work_loop import WorkLoop

SETTLE_S = 1.0
"""How long a shutdown waits for what other threads prepare."""


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        leave(Exit.BAD_ARGUMENTS, f"worker: {message}; a worker is started by a supervisor, not by hand")


def main() -> NoReturn:
    """Be a worker until the end of the process."""
    arguments = _parse()
    # Own the pipes first: nothing that this process starts may hold them open.
    for fd in (arguments.control, arguments.frames, arguments.urgent, arguments.snapshots):
        if fd is not None:
            os.set_inheritable(fd, False)
    _set_signals()
    _set_output()
    if not die_with_parent(arguments.parent):
        leave(Exit.ASKED_FOR, f"worker: process {arguments.parent} is not my parent (any more); exiting")
    code, message = _serve(arguments.control, arguments.frames, arguments.urgent, arguments.snapshots)
    leave(code, message)


def _serve(control: int, frames: int, urgent: int, snapshots_fd: int | None) -> tuple[Exit, str]:
    inbox, outbox, abort, hooks = Inbox(), Outbox(frames), Abort(), FaultHooks(frames)
    reader = ControlReader(control, inbox, abort, hooks.read)

    def cancel_urgently(attempt_id: int) -> None:
        abort.cancel(attempt_id)
        inbox.put(Cancel(attempt_id))

    # Both cancel paths stand before hello, which is what tells the parent that it may use them.
    start_urgent_thread(urgent, cancel_urgently)
    reader.start()
    outbox.send(Hello(time.monotonic_ns(), PROTOCOL_VERSION, os.getpid(), versions()))
    try:
        message = _wait_for_load(inbox)
        loaded = load(message, outbox, hooks)
        if loaded is None:
            return Exit.LOAD_FAILED, ""
        engine, facts = loaded
        abort.attach(engine)
        reader.loaded()
        snapshots = Snapshots.of(engine, facts, snapshots_fd, message.snapshot_share, outbox)
        loop = WorkLoop(engine, facts, inbox, outbox, abort, snapshots, message.step_budget_s)
        loop.run()
        # Race "something is still being prepared": closing under it would crash; the exit frees all the same.
        if loop.settle(SETTLE_S):
            engine.close()
    except RemoteProtocolError as error:
        return Exit.BROKEN_CONTROL, f"worker: the control stream is broken: {error}"
    except Exception:
        return Exit.INTERNAL_ERROR, f"worker: internal error\n{traceback.format_exc()}"
    return Exit.ASKED_FOR, ""


def _wait_for_load(inbox: Inbox) -> Load:
    while True:
        inbox.wait()
        message = inbox.take_one()
        if isinstance(message, Load):
            return message
        if not isinstance(message, Cancel):  # an urgent cancel may be early; nothing else may
            raise RemoteProtocolError(f"{type(message).__name__.lower()} came before load")


def _parse() -> argparse.Namespace:
    parser = _Arguments(prog="python -m infervisor.worker", add_help=False, allow_abbrev=False)
    for name in ("--control", "--frames", "--urgent", "--parent"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--snapshots", type=int)
    arguments = parser.parse_args()
    for name in ("control", "frames", "urgent", "snapshots"):
        fd = getattr(arguments, name)
        if fd is None:
            continue
        try:
            os.fstat(fd)
        except (OSError, OverflowError, ValueError) as error:
            parser.error(f"--{name} {fd} is not an open descriptor ({error})")
        if fd < 3:
            parser.error(f"--{name} {fd} is standard input or output; it must be 3 or above")
    return arguments


def _set_signals() -> None:
    block_urgent_signal()
    # Dispositions are inherited through exec: set each that matters. Ctrl-C is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def _set_output() -> None:
    # What an engine or a model file makes Python print must not fail on an ASCII locale or a lone surrogate.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


if __name__ == "__main__":
    main()
