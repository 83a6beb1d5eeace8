"""All misbehaviour of a worker, in one file: what can go wrong, where, and how to make it happen.

A fault is a mapping in the option `faults`: {"at": phase, "after": n, "kind": name, …}. Runs in the middle of the
engine's call, as the real thing would: in the work loop's thread, or in the one that prepares.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import NoReturn

from infervisor.protocol.codec import LENGTH_BYTES, MAX_FROM_WORKER_BYTES, encode
from infervisor.protocol.messages import Tokens
from infervisor.worker.engine import LoadRefused
from infervisor.worker.fault_hooks import FaultHooks

PHASES = ("import", "load", "warm_up", "prepare", "open", "prefill", "decode", "release")
THEN = ("go_on", "stall", "exit")
UNKNOWN_ID = (1 << 63) + 7
ROOM_BYTES = 1 << 26
"""What `out_of_memory` may still allocate."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault.

    at: the phase. after: in decode, tokens of the request computed before; in prefill, prompt tokens read
    before; in prepare, open and release, requests of which that was done before; in load, load steps done before.
    kind: a name of `KINDS`. prompt_contains: only for requests whose prompt holds this. once_file: only if
    this file doesn't exist yet; it is created, so that the next worker is healthy. armed_file: only if this file
    exists; it is removed, so that somebody outside plans each time anew.
    code: of exit, or of a refused load. number: of the signal. seconds: of a hang; None is for ever. Of a burn: 1 s
    without it.
    bytes: of a flood or garbage, or kept by a leak. newlines: whether a flood has lines. count: of tokens beyond
    credit. then: go_on, stall or exit after damage to the frames pipe. session: a grandchild leaves the process
    group. permanent: of a refused load. message: of an exception.
    """

    at: str
    kind: str
    after: int = 0
    prompt_contains: str | None = None
    once_file: str | None = None
    armed_file: str | None = None
    code: int | str = 3
    number: int = signal.SIGKILL
    seconds: float | None = None
    bytes: int = 1_000_000
    newlines: bool = True
    count: int = 4096
    then: str = "go_on"
    session: bool = False
    permanent: bool = True
    message: str = "the scripted fault"

    @classmethod
    def from_mapping(cls, fault: object) -> Fault:
        """Build from the wire. Raises ValueError naming what is wrong."""
        if not isinstance(fault, Mapping):
            raise ValueError(f"a fault must be a mapping, not {fault!r:.80}")
        known = [f.name for f in fields(cls)]
        for name in fault:
            if name not in known:
                raise ValueError(f"unknown part {name!r:.80} of a fault; known are {', '.join(known)}")
        for name, choices in (("at", PHASES), ("kind", tuple(KINDS)), ("then", THEN)):
            value = fault.get(name, "go_on" if name == "then" else None)
            if value not in choices:
                raise ValueError(f"{name} of a fault must be one of {', '.join(choices)}, not {value!r:.80}")
        return cls(**fault)

    def claim(self) -> bool:
        """Return whether the fault may happen here and now: see `once_file` and `armed_file`."""
        if self.armed_file is not None:
            try:
                os.unlink(self.armed_file)
            except FileNotFoundError:
                return False
        if self.once_file is None:
            return True
        try:
            os.close(os.open(self.once_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


@dataclass(slots=True)
class Situation:
    """Where a fault happens. attempt_id and index: of the request, if there is one."""

    hooks: FaultHooks
    attempt_id: int = UNKNOWN_ID
    index: int = 0
    ignores_interrupts: bool = False
    never_releases: bool = False
    leaked: list[bytearray] = field(default_factory=list[bytearray])


Kind = Callable[[Fault, Situation], None]


# --- the process ends --------------------------------------------------------------------------------


def _exit(fault: Fault, situation: Situation) -> NoReturn:
    os._exit(int(fault.code))


def _abort(fault: Fault, situation: Situation) -> NoReturn:
    os.abort()


def _segfault(fault: Fault, situation: Situation) -> None:
    ctypes.string_at(0)


def _bus_error(fault: Fault, situation: Situation) -> None:
    """Read what was cut off a mapped file, as when a model is overwritten while it is loaded."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ) as mapped:
            file.truncate(0)
            mapped[0]


def _signal(fault: Fault, situation: Situation) -> None:
    os.kill(os.getpid(), fault.number)


def _out_of_memory(fault: Fault, situation: Situation) -> NoReturn:
    """Allocate until there is no more, then give up as a C library does."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    # A limit stands for the machine's memory, which belongs to others, too.
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + ROOM_BYTES, most))
    while libc.malloc(ROOM_BYTES // 8) is not None:
        pass
    os.write(2, b"scripted fault: failed to allocate a buffer\n")
    os.abort()


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


# --- the process hangs -------------------------------------------------------------------------------


def _hang(fault: Fault, situation: Situation) -> None:
    """Block without the interpreter's lock, deaf to interrupts."""
    threading.Event().wait(fault.seconds)


def _hang_gil(fault: Fault, situation: Situation) -> None:
    """Block for ever with the interpreter's lock held: no thread of this process runs again."""
    libc = ctypes.PyDLL(None)
    # Locking a plain mutex twice waits for ever and, unlike sleep(), isn't ended by a signal.
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _ignore_cancel(fault: Fault, situation: Situation) -> None:
    """From now on interrupts do nothing, and this step computes slowly."""
    situation.ignores_interrupts = True
    until = None if fault.seconds is None else time.monotonic() + fault.seconds
    while until is None or time.monotonic() < until:
        sum(range(1000))
        time.sleep(0.005)


def _burn(fault: Fault, situation: Situation) -> None:
    """Compute for `seconds`, deaf to interrupts."""
    until = time.monotonic() + (fault.seconds or 1.0)
    while time.monotonic() < until:
        sum(range(1000))


def _refuse_release(fault: Fault, situation: Situation) -> None:
    situation.never_releases = True


def _ignore_sigterm(fault: Fault, situation: Situation) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leak(fault: Fault, situation: Situation) -> None:
    """Keep so many more bytes, every page of them touched."""
    situation.leaked.append(bytearray(b"\x01") * fault.bytes)


def _block_reader(fault: Fault, situation: Situation) -> None:
    situation.hooks.block_reader()


# --- the engine fails --------------------------------------------------------------------------------


def _raise(fault: Fault, situation: Situation) -> NoReturn:
    raise RuntimeError(fault.message)


def _memory_error(fault: Fault, situation: Situation) -> None:
    bytearray(sys.maxsize)


def _load_refused(fault: Fault, situation: Situation) -> NoReturn:
    code = fault.code if isinstance(fault.code, str) else "model_load"
    raise LoadRefused(fault.message, code, permanent=fault.permanent)


# --- the frames pipe is damaged ----------------------------------------------------------------------


def _garbage(fault: Fault, situation: Situation) -> None:
    """A whole frame whose payload isn't msgpack."""
    payload = b"\xc1" * min(fault.bytes, 1000)
    _write(situation, len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    _then(fault)


def _partial_frame(fault: Fault, situation: Situation) -> None:
    _write(situation, (100).to_bytes(LENGTH_BYTES, "big") + b"\x96\xa6tokens")
    _then(fault)


def _oversized_frame(fault: Fault, situation: Situation) -> None:
    _write(situation, (MAX_FROM_WORKER_BYTES + 1).to_bytes(LENGTH_BYTES, "big"))
    _then(fault)


def _forged_id(fault: Fault, situation: Situation) -> None:
    """Tokens for an attempt that nobody submitted."""
    _write(situation, encode(Tokens(time.monotonic_ns(), UNKNOWN_ID, 0, [[0, "forged", None]])))
    _then(fault)


def _credit_violation(fault: Fault, situation: Situation) -> None:
    """`count` tokens of this attempt at once, in the right order, whatever was granted."""
    tokens = [[0, "x", None]] * fault.count
    _write(situation, encode(Tokens(time.monotonic_ns(), situation.attempt_id, situation.index, tokens)))
    _then(fault)


def _close_frames(fault: Fault, situation: Situation) -> None:
    """The parent sees the end of the pipe; what is sent from now on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, situation.hooks.frames_fd, inheritable=False)
    os.close(nowhere)
    _then(fault)


def _close_control(fault: Fault, situation: Situation) -> None:
    """The parent writes into a pipe that nobody reads; the worker takes it for the end of its parent."""
    control_fd = int(sys.argv[sys.argv.index("--control") + 1])
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, control_fd, inheritable=False)
    os.close(nowhere)
    _then(fault)


def _then(fault: Fault) -> None:
    if fault.then == "stall":
        threading.Event().wait(fault.seconds)
    elif fault.then == "exit":
        os._exit(int(fault.code))


def _write(situation: Situation, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(situation.hooks.frames_fd, view) :]


# --- output and grandchildren ------------------------------------------------------------------------


def _flood(fd: int) -> Kind:
    def flood(fault: Fault, situation: Situation) -> None:
        line = b"x" * 79 + (b"\n" if fault.newlines else b"x")
        left = fault.bytes
        while left > 0:
            left -= os.write(fd, (line * 100)[:left])

    return flood


def _spawn_grandchild(fault: Fault, situation: Situation) -> None:
    """A child of the worker that holds the frames and output pipes open. Its pid is printed."""
    seconds = 600 if fault.seconds is None else fault.seconds
    child = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep({seconds})"],
        pass_fds=(situation.hooks.frames_fd,),
        start_new_session=fault.session,
    )
    print(f"grandchild {child.pid}", flush=True)


KINDS: dict[str, Kind] = {
    "exit": _exit,
    "abort": _abort,
    "segfault": _segfault,
    "bus_error": _bus_error,
    "signal": _signal,
    "out_of_memory": _out_of_memory,
    "hang": _hang,
    "hang_gil": _hang_gil,
    "ignore_cancel": _ignore_cancel,
    "burn": _burn,
    "refuse_release": _refuse_release,
    "ignore_sigterm": _ignore_sigterm,
    "leak": _leak,
    "block_reader": _block_reader,
    "raise": _raise,
    "memory_error": _memory_error,
    "load_refused": _load_refused,
    "garbage": _garbage,
    "partial_frame": _partial_frame,
    "oversized_frame": _oversized_frame,
    "forged_id": _forged_id,
    "credit_violation": _credit_violation,
    "close_frames": _close_frames,
    "close_control": _close_control,
    "flood_stdout": _flood(1),
    "flood_stderr": _flood(2),
    "spawn_grandchild": _spawn_grandchild,
}
