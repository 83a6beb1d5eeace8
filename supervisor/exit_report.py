"""What is said of a worker that is gone: one sentence, the error that callers get, whether it accuses those who
were in it, and whether to try again. Frozen values: nothing here acts, waits or has a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from infervisor.protocol.blame import accuses
from infervisor.protocol.errors import (
    InfervisorError,
    ModelLoadError,
    ProtocolError,
    RemoteProtocolError,
    WorkerDied,
    WorkerUnresponsive,
)
from infervisor.protocol.machines.process import DeathCause, ProcessPhase
from infervisor.protocol.messages import Failed
from infervisor.protocol.quoting import printable_lines
from infervisor.supervisor.process import ExitStatus

_SIGNAL_HINTS = {
    "SIGILL": "the model library was built for another CPU: reinstall it on this machine",
    "SIGKILL": (
        "killed from outside: by somebody, because memory ran out, or because the thread that started it ended"
    ),
    "SIGBUS": "a mapped file may have been truncated while it was in use",
}
_DOING = {
    ProcessPhase.SPAWNED: "while starting",
    ProcessPhase.HANDSHAKE: "while starting, before its first message",
    ProcessPhase.LOADING: "while loading the model",
    ProcessPhase.READY: "while serving",
    ProcessPhase.DRAINING: "while draining",
    ProcessPhase.TERMINATING: "while stopping",
    ProcessPhase.KILLING: "while being killed",
}


@dataclass(frozen=True, slots=True)
class ExitReport:
    """One worker's end. during: the phase it was in when it was told to go, or went.

    was_stopped: whether a signal from outside had stopped it when it was judged hung. was_oom: whether the
    kernel counted a kill for memory meanwhile; a crash by SIGKILL then has the cause out_of_memory. limit: what
    it used and what it was allowed, as "1.2 GB, above the limit of 1.0 GB".
    """

    pid: int
    cause: DeathCause
    status: ExitStatus
    during: ProcessPhase
    output_tail: str
    interpreter: str
    failed: Failed | None = None
    protocol_error: ProtocolError | None = None
    startup_s: float | None = None
    was_stopped: bool = False
    was_oom: bool = False
    limit: str = ""

    def __post_init__(self) -> None:
        # Race "it crashed by itself while the kernel killed a neighbour for memory": its own signal says so.
        may_be_oom = self.status.signal_name == "SIGKILL" or self.status == ExitStatus()
        if self.was_oom and may_be_oom and self.cause is DeathCause.CRASHED:
            object.__setattr__(self, "cause", DeathCause.OUT_OF_MEMORY)

    @property
    def accuses(self) -> bool:
        """Whether the requests that were in it are suspects now."""
        return accuses(self.cause, self.status.signal_name, self.was_stopped)

    @property
    def in_short(self) -> str:
        """How it died, in a word or two."""
        return str(self.status) if self.cause is DeathCause.CRASHED else self.cause.replace("_", " ")

    @property
    def lacks_package(self) -> bool:
        """Whether the interpreter ended because it couldn't find the worker's code."""
        return (
            self.during in (ProcessPhase.SPAWNED, ProcessPhase.HANDSHAKE)
            and self.status.exit_code == 1
            and "No module named" in self.output_tail
        )

    @property
    def is_permanent(self) -> bool:
        """Whether starting again without a change is pointless."""
        return self.lacks_package or (self.failed is not None and self.failed.permanent)

    @property
    def message(self) -> str:
        """What happened, to what, and what to do next."""
        if self.failed is not None:
            return printable_lines(self.failed.message)
        if self.lacks_package:
            missing = self.output_tail.rsplit("No module named", 1)[1].splitlines()[0].strip(" )")
            return (
                f"the interpreter {self.interpreter} can't run the worker: it has no module {missing}; "
                "install infervisor there, or name another one with python="
            )
        doing = _DOING.get(self.during, "")
        if self.cause is DeathCause.UNRESPONSIVE and self.was_stopped:
            return f"the worker was stopped from outside (SIGSTOP), stood still {doing} and was killed"
        if self.cause is DeathCause.UNRESPONSIVE:
            return f"the worker stood still {doing} and was killed; its stacks are in the output"
        if self.cause is DeathCause.DEAF:
            return (
                "the worker took a cancel only past its control pipe, which it no longer read, and was killed"
            )
        if self.cause is DeathCause.STARTUP_TIMEOUT:
            stacks = "; its stacks are in the output" if self.during is ProcessPhase.LOADING else ""
            return f"the worker made no progress for {self.startup_s:g} s {doing}, and was killed{stacks}"
        if self.cause is DeathCause.PROTOCOL_ERROR:
            return f"the worker broke the protocol {doing} and was killed: {self.protocol_error}"
        if self.cause is DeathCause.CANCEL_KILL:
            return "the worker was killed to release a cancelled request"
        if self.cause is DeathCause.STOPPED:
            return f"the worker was stopped ({self.status})"
        if self.cause is DeathCause.RECYCLED:
            return f"the worker was replaced by a new one ({self.status})"
        if self.cause is DeathCause.MEMORY_LIMIT:
            return f"the worker used {self.limit or 'more memory than its limit'}, and was killed"
        if self.cause is DeathCause.OUT_OF_MEMORY:
            return (
                f"the worker died {doing}: {self.status} (killed by the kernel because memory ran out: "
                "use a smaller model or context, or fewer workers)"
            )
        hint = _SIGNAL_HINTS.get(self.status.signal_name or "")
        if self.during in (ProcessPhase.SPAWNED, ProcessPhase.HANDSHAKE) and self.status.exit_code == 0:
            hint = f"is {self.interpreter} a Python interpreter with infervisor?"
        return f"the worker died {doing}: {self.status}" + (f" ({hint})" if hint else "")

    def error(self) -> InfervisorError:
        """Return a fresh error for one caller."""
        if self.failed is not None:
            return ModelLoadError(self.message, self.failed.code, printable_lines(self.failed.detail))
        if self.lacks_package:
            return ModelLoadError(self.message, "interpreter_without_package", self.output_tail)
        if self.cause is DeathCause.PROTOCOL_ERROR:
            return RemoteProtocolError(self.message)
        if self.cause in (DeathCause.UNRESPONSIVE, DeathCause.DEAF, DeathCause.STARTUP_TIMEOUT):
            return WorkerUnresponsive(self.message)
        return WorkerDied(
            self.message,
            exit_code=self.status.exit_code,
            signal_name=self.status.signal_name,
            output_tail=self.output_tail,
        )
