"""The faults that the chaos table is about: what each is, how it is made, and what a person can do about it.

Data alone. A fault comes from inside (a kind of the scripted engine, in the middle of the engine's call) or from
outside (a signal, or something done to the host) where no engine runs; `cells.py` makes them happen.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One thing that can go wrong.

    title, happens, advice: for people. kind: of the scripted engine's faults, with its parts; used wherever the
    engine runs. number: a signal from outside, used elsewhere. shell: what an interpreter does instead of being a
    worker, used before there is one.
    """

    title: str
    happens: str
    advice: str
    kind: str | None = None
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    number: signal.Signals | None = None
    shell: str | None = None


def _says(frame: str, then: str = "time.sleep(600)") -> str:
    """Return the script of an interpreter that writes bytes, in hexadecimal, into the frames pipe."""
    return f"python 'os.write(frames, bytes.fromhex(\"{frame}\")); {then}'"


STALL: Mapping[str, Any] = {"then": "stall"}
_REPORT_IT = "`output_tail` of the event `WorkerExited` shows where; report it to whoever makes the library"
_NOTHING = "nothing"
_OUR_VERSIONS = "install the same version of infervisor in the worker's interpreter; if it is, report it here"

FAULTS: Mapping[str, Fault] = {
    # --- the process ends
    "sigkill": Fault(
        "killed from outside",
        "somebody, a container's end or the kernel for want of memory sends SIGKILL to the worker",
        "look for who does it; nobody's request is suspected",
        number=signal.SIGKILL, shell="kill -KILL $$",
    ),
    "sigterm": Fault(
        "asked from outside to go",
        "somebody sends SIGTERM to the worker and not to the host",
        "stop the host instead; nobody's request is suspected",
        number=signal.SIGTERM, shell="kill -TERM $$",
    ),
    "sigsegv": Fault(
        "a wild pointer",
        "the engine reads where it may not: SIGSEGV",
        _REPORT_IT,
        kind="segfault", number=signal.SIGSEGV, shell="kill -SEGV $$",
    ),
    "sigabrt": Fault(
        "a failed assertion",
        "the engine gives up by itself: SIGABRT",
        _REPORT_IT,
        kind="abort", number=signal.SIGABRT, shell="kill -ABRT $$",
    ),
    "sigbus": Fault(
        "the model's file is cut while it is mapped",
        "the engine reads beyond the end of a mapped file: SIGBUS",
        "replace a model by renaming a new file over it; never write into one that is loaded",
        kind="bus_error", number=signal.SIGBUS, shell="kill -BUS $$",
    ),
    "exit_0": Fault(
        "the worker leaves without a word",
        "something in the worker's process calls exit(0)",
        "look at the worker's last output in `output_tail`",
        kind="exit", parts={"code": 0}, shell="exit 0",
    ),
    "exit_1": Fault(
        "the worker gives up",
        "something in the worker's process calls exit(1)",
        "look at the worker's last output in `output_tail`",
        kind="exit", parts={"code": 1}, shell="exit 1",
    ),
    "out_of_memory": Fault(
        "no memory left for the engine",
        "an allocation fails and the engine's library aborts",
        "a smaller context or model, fewer slots, or more memory",
        kind="out_of_memory",
    ),
    "memory_error": Fault(
        "the engine raises MemoryError",
        "an allocation in the worker's own code fails: the requests in that step end, the worker lives on",
        "a smaller context, or more memory",
        kind="memory_error",
    ),
    "raise": Fault(
        "the engine raises an exception",
        "the requests in that step end with its message and traceback, the worker lives on",
        "read `report.error`; try again if it is worth it",
        kind="raise",
    ),
    "load_refused_once": Fault(
        "the model can't be loaded now",
        "the engine refuses to load for a reason that may pass",
        "wait, or look at the event `WorkerExited`",
        kind="load_refused", parts={"permanent": False},
    ),
    "load_refused": Fault(
        "the model can't be loaded at all",
        "the engine refuses to load for a reason that won't pass: a wrong option, a broken file",
        "the error's `code` says what is wrong; change the file or the options, then call `restart_worker()`",
        kind="load_refused",
    ),
    # --- the process stands still
    "stop_shortly": Fault(
        "stopped, and continued",
        "SIGSTOP, and SIGCONT soon after: a debugger, a frozen container, a suspended laptop",
        _NOTHING,
        number=signal.SIGCONT, shell="",
    ),
    "stop_for_good": Fault(
        "stopped for good",
        "SIGSTOP, and nobody continues the worker",
        "`Liveness` and `Deadlines` set the patience; nobody's request is suspected",
        number=signal.SIGSTOP, shell="kill -STOP $$",
    ),
    "hang": Fault(
        "the engine hangs",
        "a call into the engine never returns",
        "`output_tail` has the stacks of all threads; `Liveness` sets the patience",
        kind="hang", shell="exec sleep 600",
    ),
    "hang_gil": Fault(
        "the engine hangs with the interpreter's lock",
        "a call into the engine never returns, and no thread of the worker runs any more",
        "`output_tail` has the stacks of all threads; `Liveness` sets the patience",
        kind="hang_gil",
    ),
    "host_blocked": Fault(
        "the host stands still",
        "a blocking call in the event loop's thread: nobody reads what the worker says",
        "move blocking calls out of the event loop",
    ),
    # --- the protocol is broken
    "garbage": Fault(
        "garbage in the frames pipe",
        "a frame that isn't msgpack",
        _OUR_VERSIONS,
        kind="garbage", parts=STALL, shell=_says("00000001c1"),
    ),
    "partial_frame": Fault(
        "half a frame, and then silence",
        "the worker stalls in the middle of a frame",
        _OUR_VERSIONS,
        kind="partial_frame", parts=STALL, shell=_says("0000006496"),
    ),
    "torn_frame": Fault(
        "death in the middle of a frame",
        "the worker dies while it writes",
        _REPORT_IT,
        kind="partial_frame", parts={"then": "exit"}, shell=_says("0000006496", "os._exit(3)"),
    ),
    "oversized_frame": Fault(
        "a frame beyond the limit",
        "a frame declares more bytes than are allowed",
        _OUR_VERSIONS,
        kind="oversized_frame", parts=STALL, shell=_says("7f000000"),
    ),
    "forged_id": Fault(
        "tokens for nobody",
        "the worker sends tokens of a request that isn't in it",
        _OUR_VERSIONS,
        kind="forged_id", parts=STALL,
    ),
    "credit_violation": Fault(
        "more tokens than were granted",
        "the worker computes beyond the credit that it has",
        _OUR_VERSIONS,
        kind="credit_violation", parts=STALL,
    ),
    # --- the pipes
    "close_frames": Fault(
        "the worker closes its frames",
        "the pipe with the tokens ends while the process lives on",
        _OUR_VERSIONS,
        kind="close_frames", parts=STALL, shell="python 'os.close(frames); time.sleep(600)'",
    ),
    "close_control": Fault(
        "the worker closes its control pipe",
        "nobody reads what the host says; the worker takes it for the host's end and leaves",
        _OUR_VERSIONS,
        kind="close_control",
    ),
    "deaf": Fault(
        "the worker reads its control pipe no more",
        "no credit and no request reaches it any more",
        "`Liveness` sets the patience",
        kind="block_reader",
    ),
    "flood_stdout": Fault(
        "a flood on standard output",
        "a library prints megabytes",
        "nothing: the last lines are kept, the rest is drained",
        kind="flood_stdout", parts={"bytes": 2_000_000},
    ),
    "flood_stderr": Fault(
        "a flood on standard error",
        "a library prints megabytes in one line",
        "nothing: the last lines are kept, clipped, the rest is drained",
        kind="flood_stderr", parts={"bytes": 2_000_000, "newlines": False},
    ),
    "grandchild": Fault(
        "a child of the worker keeps the pipes open",
        "the worker has started a process, and is killed",
        "nothing: the whole process group is killed, and no end of a pipe is waited for",
        kind="spawn_grandchild", number=signal.SIGKILL,
    ),
    # --- it doesn't do what it is told
    "ignored_cancel": Fault(
        "a cancel is ignored",
        "the engine computes on, whatever it is told",
        "`Escalation` sets the graces; `report.stage` says how far it had to go",
        kind="ignore_cancel",
    ),
    "ignored_sigterm": Fault(
        "SIGTERM is ignored",
        "a worker that has to go neither drains nor heeds SIGTERM",
        "`StopGraces` sets the graces",
        kind="ignore_sigterm",
    ),
    # --- it uses too much
    "memory_limit": Fault(
        "the worker grows beyond its limit",
        "its memory is above `MemoryLimits.hard_bytes`",
        "a higher limit, a smaller context, or `soft_bytes` to replace it in good time",
        kind="leak", parts={"bytes": 192 << 20},
    ),
    # --- the request, or the host
    "poison": Fault(
        "a prompt kills every worker",
        "the request is in each worker that dies, alone at last",
        "don't send it again; `report.error` says how its workers died",
        kind="segfault", parts={"prompt_contains": "poison"},
    ),
    "host_killed": Fault(
        "the host dies",
        "SIGKILL to the process with the supervisor in it",
        "nothing: no worker outlives its host",
    ),
}  # fmt: skip
"""By name, in the order of the page."""
