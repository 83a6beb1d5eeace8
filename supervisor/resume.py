"""Whether a request outlives its worker, and what is told of it. Pure: no I/O, the caller passes what it knows."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import ConfigurationError
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.quoting import quoted
from infervisor.protocol.timeline import seconds_between


class OnCrash(enum.StrEnum):
    """What becomes of a running request when its worker is gone."""

    RESUME = "resume"
    """It goes on in the next worker where it was."""
    FAIL = "fail"
    """It ends with the reason of the death."""


def check_on_crash(value: object) -> OnCrash:
    """Return the choice. Raises `ConfigurationError` for anything but `resume` and `fail`."""
    if not isinstance(value, str) or value not in tuple(OnCrash):
        raise ConfigurationError(f"on_crash must be 'resume' or 'fail', not {quoted(value, 60)}")
    return OnCrash(value)


@dataclass(frozen=True, slots=True)
class Resume:
    """One worker that a request outlived.

    cause: why that worker went. worker_pid: its process. delivered_tokens: how many tokens of the answer had
    arrived by then. restored_tokens: how many of prompt and answer the next worker took from a snapshot, and
    didn't have to compute again. lost_ns: when the worker was seen to go, or was told to; resumed_ns: when the
    next token, or the end, arrived from another one, None while it hasn't.
    """

    cause: DeathCause
    worker_pid: int
    delivered_tokens: int
    restored_tokens: int
    lost_ns: int
    resumed_ns: int | None = None

    @property
    def pause_s(self) -> float | None:
        """Seconds from the loss of the worker to the next token, or None while there is none."""
        return seconds_between(self.lost_ns, self.resumed_ns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "pause_s": self.pause_s}


def end_reason_of(
    cause: DeathCause,
    *,
    on_crash: OnCrash,
    resumes: int,
    max_resumes: int,
    is_poisoned: bool,
    is_closing: bool,
) -> EndReason | None:
    """Return what a request ends with when its worker went for this cause, or None if it goes on in the next
    one."""
    if is_closing:
        return EndReason.SHUTTING_DOWN
    if is_poisoned:
        return EndReason.POISONED
    if on_crash is OnCrash.FAIL or resumes >= max_resumes:
        return cause.end_reason
    return None
