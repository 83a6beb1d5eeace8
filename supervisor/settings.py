"""What a user can set: frozen values with defaults, checked when they are made. All times in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

from infervisor.protocol.deadlines import Budget
from infervisor.protocol.errors import ConfigurationError
from infervisor.protocol.ladder import Rung, Stage
from infervisor.protocol.machines.slot import RestartRules
from infervisor.protocol.quoting import quoted
from infervisor.protocol.timeline import NS_PER_S

K = TypeVar("K")
MAX_SECONDS = 10 * 365 * 86400.0
LEAST_LIMIT_BYTES = 1 << 24


def check_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return `value` as seconds. Raises `ConfigurationError` unless it is a finite number above 0 (or ≥ 0)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigurationError(f"{name} must be a number of seconds, not {quoted(value, 60)}")
    if not 0 <= value <= MAX_SECONDS or (value == 0 and not zero):
        wanted = "0 or more" if zero else "more than 0"
        raise ConfigurationError(f"{name} must be {wanted} and at most ten years, not {quoted(value, 60)}")
    return float(value)


def check_count(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as a whole number in a range. Raises `ConfigurationError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(
            f"{name} must be a whole number from {low} to {high}, not {quoted(value, 60)}"
        )
    return value


def check_kind(name: str, value: object, kind: type[K]) -> K:
    """Return `value` if it is of this kind. Raises `ConfigurationError` that says how to make one."""
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{name} must be made with {kind.__name__}(…), not {type(value).__name__}: {quoted(value)}"
        )
    return value


def to_ns(seconds: float) -> int:
    """Return nanoseconds."""
    return int(seconds * NS_PER_S)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """A request's budgets; None is no limit.

    queue_s: waiting while a worker is ready. startup_s: waiting while none is ready, given anew by load
    progress; also the worker's own time to become ready. first_token_s: from submit. stall_s: between two
    tokens while the worker may compute. total_s: wall time from queued. consumer_s: while tokens lie unread
    in the buffer, since a forgotten stream holds a slot.
    """

    queue_s: float | None = None
    startup_s: float | None = 120.0
    first_token_s: float | None = None
    stall_s: float | None = None
    total_s: float | None = None
    consumer_s: float | None = 300.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                object.__setattr__(self, f.name, check_seconds(f"deadlines.{f.name}", value))

    def budgets_ns(self) -> Iterator[tuple[Budget, int | None]]:
        """Yield each budget in nanoseconds, or None."""
        for budget in Budget:
            seconds: float | None = getattr(self, f"{budget}_s")
            yield budget, None if seconds is None else to_ns(seconds)


@dataclass(frozen=True, slots=True)
class Escalation:
    """How a cancel climbs. A grace is its floor or that many times the longest step seen, if longer.

    signal_after_s: from the in-band message to the signal. kill_after_s: from the signal to the kill.
    alert_after_s: a release that takes longer raises the `ReleaseLate` event while it is still late.
    """

    signal_after_s: float = 0.5
    signal_step_factor: float = 2.0
    kill_after_s: float = 3.0
    kill_step_factor: float = 8.0
    alert_after_s: float = 2.0

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(
                self, f.name, check_seconds(f"escalation.{f.name}", getattr(self, f.name), zero=True)
            )

    def rungs(self) -> tuple[Rung, ...]:
        """Return the ladder."""
        return (
            Rung(Stage.IN_BAND),
            Rung(Stage.SIGNAL, to_ns(self.signal_after_s), self.signal_step_factor),
            Rung(Stage.KILL, to_ns(self.kill_after_s), self.kill_step_factor),
        )


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead worker is replaced, and when no more.

    More than max_restarts within period_s, or more than max_failed_starts deaths in a row before ready, open
    the breaker; after cooldown_s the next request tries one start. Delays double from backoff_initial_s to
    backoff_max_s; jitter is a share of the delay, from 0 to 1.
    """

    max_restarts: int = 5
    period_s: float = 60.0
    max_failed_starts: int = 2
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 10.0
    jitter: float = 0.2
    cooldown_s: float = 30.0

    def __post_init__(self) -> None:
        check_count("restart.max_restarts", self.max_restarts, 0, 1_000_000)
        check_count("restart.max_failed_starts", self.max_failed_starts, 0, 1_000_000)
        for name in ("period_s", "backoff_initial_s", "backoff_max_s", "cooldown_s", "jitter"):
            object.__setattr__(
                self, name, check_seconds(f"restart.{name}", getattr(self, name), zero=name != "period_s")
            )
        if self.jitter > 1:
            raise ConfigurationError(f"restart.jitter must be from 0 to 1, not {self.jitter:g}")

    def rules(self) -> RestartRules:
        """Return the same in nanoseconds."""
        return RestartRules(
            max_restarts=self.max_restarts,
            period_ns=to_ns(self.period_s),
            max_failed_starts=self.max_failed_starts,
            backoff_initial_ns=to_ns(self.backoff_initial_s),
            backoff_max_ns=to_ns(self.backoff_max_s),
            jitter=self.jitter,
            cooldown_ns=to_ns(self.cooldown_s),
        )


@dataclass(frozen=True, slots=True)
class StopGraces:
    """How long each stage of stopping a worker may take.

    drain_s: running requests that were cancelled may release. exit_s: from the shutdown message to SIGTERM.
    terminate_s: from SIGTERM to SIGKILL.
    """

    drain_s: float = 5.0
    exit_s: float = 2.0
    terminate_s: float = 2.0

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(
                self, f.name, check_seconds(f"graces.{f.name}", getattr(self, f.name), zero=True)
            )


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a worker that owes a step counts as hung.

    No step for max(hang_after_s, step_factor × the longest step of that phase), or unmeasured_s while no step
    of the phase has been seen, or while all that it has is still being prepared (rendered, tokenised, tried).
    dump_s: time to write all stacks into its output before the kill.
    """

    hang_after_s: float = 10.0
    step_factor: float = 8.0
    unmeasured_s: float = 60.0
    dump_s: float = 0.3

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_seconds(f"liveness.{f.name}", getattr(self, f.name)))

    def limit_ns(self, longest_step_ns: int | None) -> int:
        """Return how long the step counter may stand still, given the longest step of the phase or None."""
        if longest_step_ns is None:
            return to_ns(max(self.hang_after_s, self.unmeasured_s))
        return max(to_ns(self.hang_after_s), int(longest_step_ns * self.step_factor))


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many workers there are, and when they are replaced.

    workers: that serve at once, each with a model of its own. standby: more that are loaded and idle, one of
    which takes over at once when a worker goes. max_requests: a worker is replaced after so many; None is never.
    """

    workers: int = 1
    standby: int = 0
    max_requests: int | None = None
    restart: RestartPolicy = RestartPolicy()

    def __post_init__(self) -> None:
        check_count("workers", self.workers, 1, 64)
        check_count("standby", self.standby, 0, 64)
        if self.max_requests is not None:
            check_count("max_requests", self.max_requests, 1, 1 << 40)
        check_kind("restart", self.restart, RestartPolicy)

    @property
    def places(self) -> int:
        """Workers, serving or not."""
        return self.workers + self.standby


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What snapshots of running requests may cost, so that a next worker needn't read everything again.

    max_bytes: of shared memory for all of them together; only what is written takes memory. share: of the computing
    time, from 0 to 0.5. What a request took stays for the next one, and goes back when nothing has run for some
    seconds. Where the platform has no anonymous shared files, there are none.
    """

    max_bytes: int = 1 << 30
    share: float = 0.02

    def __post_init__(self) -> None:
        check_count("snapshots.max_bytes", self.max_bytes, 1 << 20, 1 << 50)
        if (
            isinstance(self.share, bool)
            or not isinstance(self.share, (int, float))
            or not 0 < self.share <= 0.5
        ):
            raise ConfigurationError(
                f"snapshots.share must be more than 0 and at most 0.5, not {quoted(self.share, 60)}; "
                "snapshots=None takes none"
            )


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """How much memory a worker may take: its private pages and its share of common ones (PSS), in bytes.

    soft_bytes: above it the worker is replaced, without a lost stream. hard_bytes: above it the worker is killed,
    and its requests go on in the next one. cgroup: let the kernel keep the hard limit, too, in a control group
    for each worker, where this process may make one.
    """

    soft_bytes: int | None = None
    hard_bytes: int | None = None
    cgroup: bool = False

    def __post_init__(self) -> None:
        for name in ("soft_bytes", "hard_bytes"):
            value = getattr(self, name)
            if value is not None and check_count(f"memory.{name}", value, 1, 1 << 60) < LEAST_LIMIT_BYTES:
                raise ConfigurationError(
                    f"memory.{name}={value} is less than any worker takes: make it larger, at least "
                    f"{LEAST_LIMIT_BYTES} (16 MiB)"
                )
        if not isinstance(self.cgroup, bool):
            raise ConfigurationError(f"memory.cgroup must be true or false, not {quoted(self.cgroup, 60)}")
        if self.soft_bytes is not None and self.hard_bytes is not None and self.soft_bytes >= self.hard_bytes:
            raise ConfigurationError(
                f"memory.hard_bytes={self.hard_bytes} must be more than memory.soft_bytes={self.soft_bytes}: "
                "make it larger, so that a worker is replaced before it is killed"
            )
        if self.cgroup and self.hard_bytes is None:
            raise ConfigurationError(
                "memory.cgroup needs memory.hard_bytes, the limit that the kernel is to keep"
            )

    @property
    def lowest_bytes(self) -> int | None:
        """The lower limit, or None if there is none."""
        return self.hard_bytes if self.soft_bytes is None else self.soft_bytes
