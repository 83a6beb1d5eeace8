"""Looks at what changes by itself, once a second: the memory of workers, and the file of the model.

Has what is decided about memory carried out. Decides nothing about requests. Runs as one task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from infervisor.supervisor import events
from infervisor.supervisor.memory import Verdict, kill_message, recycle_message, too_small_message
from infervisor.supervisor.model_identity import FileIdentity, change_between, identity_of
from infervisor.supervisor.settings import MemoryLimits
from infervisor.supervisor.snapshot_memory import SnapshotMemory
from infervisor.supervisor.worker import Worker

if TYPE_CHECKING:
    from infervisor.supervisor.dispatcher import Dispatcher

PERIOD_S = 1.0
IDLE_LOOKS = 10
"""After so many looks at an idle supervisor, memory that is kept for its next requests goes back."""


class Lookout:
    """The periodic look of one supervisor."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: str | None,
        limits: MemoryLimits | None,
        snapshots: SnapshotMemory | None,
    ) -> None:
        self.peak_rss_bytes = 0
        self._snapshots = snapshots
        self._idle_looks = 0
        self._dispatcher = dispatcher
        self._model = model
        self._limits = limits
        self._seen: FileIdentity | None = None
        """The file as the last worker found it that was started."""
        self._tried: FileIdentity | None = None
        """The file with which a start was tried last."""
        self._told: str | None = None
        """What was told of its change since then."""
        self._group_told = False

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await anyio.sleep(PERIOD_S)
            await self._look_once()

    async def _look_once(self) -> None:
        # In a call of its own: while it sleeps nothing may hold a worker that has died.
        for worker in list(self._dispatcher.pool.workers):
            await self._look_at_memory(worker)
        self.look_at_model()
        self._trim()

    def _trim(self) -> None:
        self._idle_looks = 0 if self._dispatcher.requests else self._idle_looks + 1
        if self._idle_looks == IDLE_LOOKS and self._snapshots is not None:
            self._snapshots.trim()

    async def _look_at_memory(self, worker: Worker) -> None:
        verdict = await worker.resources.look(worker.ready_ns)
        sample = worker.resources.sample
        if sample is None:
            return
        self.peak_rss_bytes = max(self.peak_rss_bytes, sample.rss_bytes)
        limits = self._limits
        if verdict is None or limits is None or worker.leaving_ns is not None:
            return
        used_bytes = sample.used_bytes
        match verdict:
            case Verdict.KILL:
                worker.kill_for_memory(f"{_gb(used_bytes)}, above the limit of {_gb(limits.hard_bytes)}")
                message = kill_message(limits, used_bytes)
            case Verdict.RECYCLE:
                self._dispatcher.pool.recycle([worker])
                message = recycle_message(limits, used_bytes)
            case Verdict.TOO_SMALL:
                message = too_small_message(limits, worker.resources.fresh_bytes)
        self._dispatcher.emit(events.MemoryLimitReached(worker.pid, used_bytes, message))

    def note_start(self) -> FileIdentity | None:
        """A worker is about to be started: return which file it will load, after telling how that has changed."""
        identity = identity_of(self._model)
        self._tell_change(identity)
        self._seen = self._tried = identity
        self._told = None
        return identity

    def worker_started(self, worker: Worker, model: FileIdentity | None) -> None:
        """Note the file that a new worker loads."""
        worker.model = model
        reason = worker.resources.without_group
        if reason is not None and not self._group_told:
            self._group_told = True
            message = (
                f"the kernel can't keep memory.hard_bytes, which is looked at once a second instead: {reason}"
            )
            self._dispatcher.emit(events.WorkerLogged(worker.pid, "warning", message))

    def look_at_model(self) -> None:
        """Tell of a file that was overwritten after it was loaded; start again where a bad one was replaced."""
        if self._model is None:
            return
        identity = identity_of(self._model)
        if identity != self._tried:
            # Noted first: starts look at the file, too, and each change is worth one try.
            self._tried = identity
            self._dispatcher.pool.cause_gone()
        for worker in list(self._dispatcher.pool.workers):
            spoiled = change_between(worker.model, identity)
            if spoiled is not None:
                self._warn(worker, warning_of(spoiled))
        self._tell_change(identity)

    def _tell_change(self, identity: FileIdentity | None) -> None:
        change = change_between(self._seen, identity)
        if change is not None and change != self._told:
            self._told = change
            self._dispatcher.emit(events.ModelFileChanged(str(self._model), change))

    def _warn(self, worker: Worker, warning: str) -> None:
        for attempt in worker.attempts.values():
            if warning not in attempt.request.warnings:
                attempt.request.warnings.append(warning)

    def change(self) -> str | None:
        """Return what changed in the file that a serving worker has loaded, or None."""
        if self._model is None:
            return None
        identity = identity_of(self._model)
        changes = (change_between(worker.model, identity) for worker in self._dispatcher.pool.serving)
        return next((change for change in changes if change is not None), None)


def warning_of(change: str) -> str:
    """Return what the report of an answer says that a changed file may have spoiled."""
    return f"the model file changed while it was loaded: {change}"


def _gb(size_bytes: int | None) -> str:
    return f"{(size_bytes or 0) / 1e9:.2f} GB"
