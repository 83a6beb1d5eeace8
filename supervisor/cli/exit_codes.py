"""The one table of exit codes, which end of a request gets which, and how a command exits with one."""

from __future__ import annotations

import enum
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NoReturn

from infervisor import EndClass, EndReason


class ExitCode(enum.IntEnum):
    """What `supervise` says with its exit code. Ends by a signal are 128 + its number, as in a shell."""

    OK = 0
    USAGE = 2
    REFUSED = 3
    DEADLINE = 4
    FAULT = 5
    LOAD_FAILED = 6
    PROBE_FAILED = 7
    NO_ADDRESS = 8
    INTERNAL = 70
    OUTPUT_FAILED = 74
    CANCELLED = 130
    READER_GONE = 141
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """One line for the help."""
        return _MEANINGS[self]


_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "the answer is whole, every step of the probe passed, or the service ended as it was asked to",
    ExitCode.USAGE: "wrong command line, prompt or setting; nothing was computed",
    ExitCode.REFUSED: "the request was refused: overloaded, invalid_request, unavailable, shutting_down",
    ExitCode.DEADLINE: "a deadline passed: queue, startup, first token, stall, total, consumer",
    ExitCode.FAULT: "the worker or its engine failed during the request",
    ExitCode.LOAD_FAILED: "the worker could not be started or the model not be loaded",
    ExitCode.PROBE_FAILED: "a step of the probe failed, once the model was loaded",
    ExitCode.NO_ADDRESS: "the service can't have its address: the port is taken, or not this machine's",
    ExitCode.INTERNAL: "internal error of supervise itself",
    ExitCode.OUTPUT_FAILED: "the output could not be written, for instance because the disk is full",
    ExitCode.CANCELLED: "cancelled with Ctrl-C (SIGINT)",
    ExitCode.READER_GONE: "whoever read the output is gone (broken pipe)",
    ExitCode.TERMINATED: "asked to end with SIGTERM",
}

_OF_CLASS: Mapping[EndClass, ExitCode] = {
    EndClass.NATURAL: ExitCode.OK,
    EndClass.CALLER: ExitCode.CANCELLED,
    EndClass.DEADLINE: ExitCode.DEADLINE,
    EndClass.FAULT: ExitCode.FAULT,
    EndClass.REFUSAL: ExitCode.REFUSED,
}


def code_of(reason: EndReason) -> ExitCode:
    """Return the exit code of a request that ended by itself for this reason."""
    return _OF_CLASS[reason.end_class]


_BY_GRAVITY = (
    ExitCode.OK,
    ExitCode.CANCELLED,
    ExitCode.TERMINATED,
    ExitCode.READER_GONE,
    ExitCode.REFUSED,
    ExitCode.DEADLINE,
    ExitCode.FAULT,
    ExitCode.OUTPUT_FAILED,
)


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the gravest of the codes of several answers: what somebody wanted is less grave than a fault."""
    return max(codes, key=_BY_GRAVITY.index)


def help_text() -> str:
    r"""Return the table for `--help`; the \b keeps its lines apart."""
    return "Exit codes:\n\n\b\n" + "\n".join(f"{code.value:>3}  {code.meaning}" for code in ExitCode)


def exit_with(command: Callable[[], Awaitable[ExitCode]]) -> NoReturn:
    """Run a command in an event loop and exit with its code."""
    import anyio

    sys.exit(anyio.run(command))
