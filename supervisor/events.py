"""What a supervisor tells while it works, as frozen values. Passed to `on_event` in the loop's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.ladder import Stage
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.release import WorkerRelease
from infervisor.supervisor.report import Report
from infervisor.supervisor.resume import Resume


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    """A worker process was started."""

    pid: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Loading goes on. phase: import, load or warm_up; fraction of that phase from 0 to 1."""

    pid: int
    phase: str
    fraction: float


@dataclass(frozen=True, slots=True)
class WorkerBecameReady:
    """The model is loaded. facts: what the worker says of it. startup_s: since the spawn."""

    pid: int
    facts: Mapping[str, Any]
    startup_s: float


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker owed a step and stood still for stalled_s seconds.

    Its stacks are written into its output; then it is killed, unless it has moved meanwhile.
    """

    pid: int
    stalled_s: float


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker is gone and collected.

    cause: why, if we ended it; crashed otherwise. status: exit code or signal name. requests: ids that were in
    it. seconds: from the decision to end it, or the sight of its exit, until it was collected.
    """

    pid: int
    cause: DeathCause
    status: str
    message: str
    output_tail: str
    requests: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """What an exited worker had taken of the machine has come back: its memory, its processes, its pipes.

    If `release.is_complete` is false, something stays that it had started.
    """

    pid: int
    release: WorkerRelease


@dataclass(frozen=True, slots=True)
class WorkerReleaseLate:
    """A worker has been going, or gone, for waited_s seconds, and these processes of it are still there."""

    pid: int
    waited_s: float
    left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryLimitReached:
    """A worker takes more memory than a limit allows, and is replaced or killed; or the limit can't be kept."""

    pid: int
    used_bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerPromoted:
    """A worker that stood by serves from now on."""

    pid: int


@dataclass(frozen=True, slots=True)
class RestartScheduled:
    """A new worker will be started after delay_s seconds. restarts: within the period, this one included."""

    delay_s: float
    restarts: int


@dataclass(frozen=True, slots=True)
class BreakerOpened:
    """A place for a worker has given up.

    It tries again when a request comes after cooldown_s seconds; with None, for a cause that can't heal by
    itself, when the model's file changes or `restart_worker()` is called. While no other place has a worker,
    requests are refused.
    """

    reason: str
    cooldown_s: float | None


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """A request was taken into the queue; depth counts it."""

    request_id: int
    depth: int


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The worker took a request into a slot and begins to read its prompt."""

    request_id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RequestInterrupted:
    """A running request lost its worker; it waits for the next one to go on in.

    delivered_tokens: of its answer, which are not computed again for its reader.
    """

    request_id: int
    pid: int
    cause: DeathCause
    delivered_tokens: int


@dataclass(frozen=True, slots=True)
class RequestResumed:
    """A request that had lost its worker has its next token, or its end, from the worker `pid`."""

    request_id: int
    pid: int
    resume: Resume


@dataclass(frozen=True, slots=True)
class CancelEscalated:
    """A cancel reached this stage of its ladder."""

    request_id: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class ReleaseLate:
    """A request ended, but its resources are not free after waited_s seconds. Sent while that is so."""

    request_id: int
    waited_s: float
    stage: Stage | None


@dataclass(frozen=True, slots=True)
class RequestReleased:
    """A request ended and its resources are free; the report is complete."""

    report: Report


@dataclass(frozen=True, slots=True)
class ModelFileChanged:
    """The model's file is not the one that was loaded: answers may be wrong until the next restart."""

    path: str
    change: str


@dataclass(frozen=True, slots=True)
class WorkerLogged:
    """A line that the worker thought worth telling."""

    pid: int
    level: str
    text: str


Event = (
    WorkerSpawned
    | LoadProgress
    | WorkerBecameReady
    | WorkerHung
    | WorkerExited
    | WorkerReleased
    | WorkerReleaseLate
    | WorkerPromoted
    | MemoryLimitReached
    | RestartScheduled
    | BreakerOpened
    | RequestQueued
    | RequestStarted
    | RequestInterrupted
    | RequestResumed
    | CancelEscalated
    | ReleaseLate
    | RequestReleased
    | ModelFileChanged
    | WorkerLogged
)
