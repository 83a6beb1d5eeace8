"""What is said of a worker that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from infervisor.protocol.errors import (
    InfervisorError,
    ModelLoadError,
    RemoteProtocolError,
    WorkerDied,
    WorkerUnresponsive,
)
from infervisor.protocol.machines.process import DeathCause, ProcessPhase
from infervisor.protocol.messages import Failed
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.process import ExitStatus


def report(**parts: Any) -> ExitReport:
    given: dict[str, Any] = {
        "pid": 7,
        "cause": DeathCause.CRASHED,
        "status": ExitStatus(signal_number=11),
        "during": ProcessPhase.READY,
        "output_tail": "last words",
        "interpreter": "/opt/python",
        "startup_s": 1.5,
        **parts,
    }
    return ExitReport(**given)


@pytest.mark.parametrize(
    ("status", "text", "name"),
    [
        (ExitStatus(signal_number=11), "SIGSEGV(-11)", "SIGSEGV"),
        (ExitStatus(signal_number=9), "SIGKILL(-9)", "SIGKILL"),
        (ExitStatus(signal_number=40), "signal 40(-40)", "signal 40"),
        (ExitStatus(exit_code=3), "exit code 3", None),
        (ExitStatus(exit_code=0), "exit code 0", None),
        (ExitStatus(), "exit status unknown", None),
    ],
)
def test_a_status_is_named(status: ExitStatus, text: str, name: str | None) -> None:
    assert (str(status), status.signal_name) == (text, name)


@pytest.mark.parametrize(
    ("parts", "message", "error"),
    [
        ({}, "the worker died while serving: SIGSEGV(-11)", WorkerDied),
        (
            {"status": ExitStatus(signal_number=9)},
            "the worker died while serving: SIGKILL(-9) (killed from outside: by somebody, because memory ran out, "
            "or because the thread that started it ended)",
            WorkerDied,
        ),
        (
            {"status": ExitStatus(exit_code=3), "during": ProcessPhase.LOADING},
            "the worker died while loading the model: exit code 3",
            WorkerDied,
        ),
        (
            {"cause": DeathCause.UNRESPONSIVE},
            "the worker stood still while serving and was killed; its stacks are in the output",
            WorkerUnresponsive,
        ),
        (
            {"cause": DeathCause.STARTUP_TIMEOUT, "during": ProcessPhase.HANDSHAKE},
            "the worker made no progress for 1.5 s while starting, before its first message, and was killed",
            WorkerUnresponsive,
        ),
        (
            {"cause": DeathCause.PROTOCOL_ERROR, "protocol_error": RemoteProtocolError("a lie")},
            "the worker broke the protocol while serving and was killed: a lie",
            RemoteProtocolError,
        ),
        (
            {"cause": DeathCause.CANCEL_KILL, "status": ExitStatus(signal_number=9)},
            "the worker was killed to release a cancelled request",
            WorkerDied,
        ),
        (
            {"cause": DeathCause.STOPPED, "status": ExitStatus(exit_code=0)},
            "the worker was stopped (exit code 0)",
            WorkerDied,
        ),
        (
            {"cause": DeathCause.UNRESPONSIVE, "was_stopped": True},
            "the worker was stopped from outside (SIGSTOP), stood still while serving and was killed",
            WorkerUnresponsive,
        ),
        (
            {"status": ExitStatus(signal_number=9), "was_oom": True},
            "the worker died while serving: SIGKILL(-9) (killed by the kernel because memory ran out: "
            "use a smaller model or context, or fewer workers)",
            WorkerDied,
        ),
        (
            {"cause": DeathCause.MEMORY_LIMIT, "limit": "1.2 GB, above the limit of 1.0 GB"},
            "the worker used 1.2 GB, above the limit of 1.0 GB, and was killed",
            WorkerDied,
        ),
        (
            {"cause": DeathCause.MEMORY_LIMIT},
            "the worker used more memory than its limit, and was killed",
            WorkerDied,
        ),
        (
            {"cause": DeathCause.RECYCLED, "status": ExitStatus(exit_code=0)},
            "the worker was replaced by a new one (exit code 0)",
            WorkerDied,
        ),
    ],
)
def test_one_sentence_and_one_error(
    parts: dict[str, Any], message: str, error: type[InfervisorError]
) -> None:
    given = report(**parts)
    assert given.message == message
    assert not given.is_permanent
    made = given.error()
    assert (type(made), str(made)) == (error, message)
    assert made is not given.error()


def test_a_death_carries_its_status_and_the_last_lines() -> None:
    made = report().error()
    assert isinstance(made, WorkerDied)
    assert (made.exit_code, made.signal_name, made.output_tail) == (None, "SIGSEGV", "last words")


@pytest.mark.parametrize("permanent", [True, False])
def test_a_refused_load_speaks_for_itself_escaped(permanent: bool) -> None:
    failed = Failed(1, "not_gguf", "begins with \x1b[2J", "line one\nline \x07 two", permanent)
    given = report(cause=DeathCause.LOAD_FAILED, failed=failed, status=ExitStatus(exit_code=69))
    made = given.error()
    assert isinstance(made, ModelLoadError)
    assert (made.code, str(made)) == ("not_gguf", r"begins with \x1b[2J")
    assert made.detail == "line one\n" + r"line \x07 two"
    assert given.is_permanent == permanent


@pytest.mark.parametrize(
    "output",
    [
        "/opt/python: No module named infervisor",
        "/opt/python: Error while finding module specification for 'infervisor.worker' "
        "(ModuleNotFoundError: No module named 'infervisor')",
    ],
)
def test_an_interpreter_without_the_package(output: str) -> None:
    given = report(status=ExitStatus(exit_code=1), during=ProcessPhase.HANDSHAKE, output_tail=output)
    assert given.is_permanent
    assert "interpreter /opt/python can't run the worker: it has no module" in given.message
    assert "infervisor" in given.message.split(";")[0]
    assert ")" not in given.message.split(";")[0]
    made = given.error()
    assert isinstance(made, ModelLoadError)
    assert made.code == "interpreter_without_package"


def test_a_missing_module_after_the_start_is_an_ordinary_death() -> None:
    given = report(status=ExitStatus(exit_code=1), output_tail="No module named 'x'")
    assert not given.is_permanent
    assert isinstance(given.error(), WorkerDied)


KILLED, UNKNOWN = ExitStatus(signal_number=9), ExitStatus()


@pytest.mark.parametrize(
    ("cause", "status", "was_oom", "expected"),
    [
        (DeathCause.CRASHED, KILLED, True, DeathCause.OUT_OF_MEMORY),
        (DeathCause.CRASHED, UNKNOWN, True, DeathCause.OUT_OF_MEMORY),
        (DeathCause.CRASHED, KILLED, False, DeathCause.CRASHED),
        # The kernel killed something else of the group; this one crashed by itself.
        (DeathCause.CRASHED, ExitStatus(signal_number=11), True, DeathCause.CRASHED),
        (DeathCause.CRASHED, ExitStatus(exit_code=1), True, DeathCause.CRASHED),
        # We had decided before.
        (DeathCause.UNRESPONSIVE, KILLED, True, DeathCause.UNRESPONSIVE),
        (DeathCause.MEMORY_LIMIT, KILLED, True, DeathCause.MEMORY_LIMIT),
    ],
)
def test_a_kill_for_memory_is_told_from_a_crash(
    cause: DeathCause, status: ExitStatus, was_oom: bool, expected: DeathCause
) -> None:
    assert report(cause=cause, status=status, was_oom=was_oom).cause is expected


@pytest.mark.parametrize(
    ("parts", "accuses", "in_short"),
    [
        ({}, True, "SIGSEGV(-11)"),
        ({"status": ExitStatus(exit_code=0)}, True, "exit code 0"),
        ({"status": UNKNOWN}, True, "exit status unknown"),
        ({"status": KILLED}, False, "SIGKILL(-9)"),
        ({"status": UNKNOWN, "was_oom": True}, False, "out of memory"),
        ({"cause": DeathCause.UNRESPONSIVE, "status": KILLED}, True, "unresponsive"),
        ({"cause": DeathCause.UNRESPONSIVE, "status": KILLED, "was_stopped": True}, False, "unresponsive"),
        ({"cause": DeathCause.PROTOCOL_ERROR, "status": KILLED}, True, "protocol error"),
        ({"cause": DeathCause.CANCEL_KILL, "status": KILLED}, False, "cancel kill"),
    ],
)
def test_whom_it_accuses_and_how_it_died_in_short(
    parts: dict[str, Any], accuses: bool, in_short: str
) -> None:
    given = report(**parts)
    assert (given.accuses, given.in_short) == (accuses, in_short)
