"""A supervisor's state at one moment, as plain values. Reading it changes nothing and waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infervisor.supervisor.process import Sample

if TYPE_CHECKING:
    from infervisor.supervisor.dispatcher import Dispatcher


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. phase: of its process. role: serving, standby, retiring or starting.

    in_flight: requests in it; submits: that it was given so far. sample: the last look at its memory and CPU time.
    """

    pid: int
    phase: str
    role: str
    in_flight: int
    submits: int
    sample: Sample | None


@dataclass(frozen=True, slots=True)
class Status:
    """slot: phase of the place that is nearest to serving. workers: all that live.

    worker, worker_pid, facts, versions and sample are those of the first of them that serves: phase of its
    process, or None; what it says of its model; the last look at its memory and CPU time. queue_depth and
    queue_peak count waiting requests, in_flight those in workers. restarts: by cause. snapshot_bytes: shared
    memory that snapshots take now. places: requests that run at once when all workers serve. problem: why none
    serves, once that is known. loading: phase and fraction of the worker that is nearest to being ready.
    """

    slot: str
    worker: str | None
    worker_pid: int | None
    facts: Mapping[str, Any]
    versions: Mapping[str, Any]
    queue_depth: int
    queue_peak: int
    in_flight: int
    restarts: Mapping[str, int]
    sample: Sample | None
    peak_rss_bytes: int
    workers: tuple[WorkerStatus, ...] = ()
    snapshot_bytes: int = 0
    places: int = 1
    problem: str | None = None
    loading: tuple[str, float] | None = None


def status_of(dispatcher: Dispatcher, peak_rss_bytes: int, snapshot_bytes: int) -> Status:
    """Return the state as of now. From any thread."""
    pool = dispatcher.pool
    first = pool.first
    return Status(
        slot=pool.phase.value,
        worker=None if first is None else first.state.phase.value,
        worker_pid=None if first is None else first.pid,
        facts={} if first is None else dict(first.facts),
        versions={} if first is None else dict(first.versions),
        queue_depth=len(dispatcher.queue),
        queue_peak=dispatcher.queue.peak,
        in_flight=len(dispatcher.attempts),
        restarts=dict(pool.restarts),
        sample=None if first is None else first.resources.sample,
        peak_rss_bytes=peak_rss_bytes,
        workers=tuple(
            WorkerStatus(
                pid=worker.pid,
                phase=worker.state.phase.value,
                role=pool.role_of(worker),
                in_flight=len(worker.attempts),
                submits=worker.submits,
                sample=worker.resources.sample,
            )
            for worker in list(pool.workers)
        ),
        snapshot_bytes=snapshot_bytes,
        places=pool.places,
        problem=pool.problem,
        loading=None if pool.is_ready else pool.loading,
    )
