"""What the log tells of workers: each event of the supervisors as a line, at the level that it deserves.

Says nothing of requests, which have a line of their own, unless somebody debugs. Runs in the event loop's thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from infervisor import Event

LEVELS: Mapping[str, int] = {
    "WorkerBecameReady": logging.INFO,
    "WorkerPromoted": logging.INFO,
    "RestartScheduled": logging.INFO,
    "WorkerHung": logging.WARNING,
    "MemoryLimitReached": logging.WARNING,
    "ModelFileChanged": logging.WARNING,
    "ReleaseLate": logging.WARNING,
    "WorkerReleaseLate": logging.WARNING,
    "RequestInterrupted": logging.WARNING,
    "RequestResumed": logging.INFO,
    "BreakerOpened": logging.ERROR,
}
"""Everything else is for debugging."""
EXPECTED_ENDS = ("stopped", "recycled")
LONG = frozenset({"facts", "report", "resume", "release", "output_tail"})
"""Fields that would fill a screen; reports have a line of their own."""
RENAMED = {"message": "detail", "level": "worker_level"}
"""A line of the log has fields of these names already."""


class WorkerLog:
    """The listener of all supervisors: `worker_log(model, event)`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, model: str, event: Event) -> None:
        """Log an event of the model's supervisor."""
        level = level_of(event)
        if not self._logger.isEnabledFor(level):
            return
        values = {
            RENAMED.get(field.name, field.name): getattr(event, field.name)
            for field in dataclasses.fields(event)
            if field.name not in LONG
        }
        self._logger.log(level, type(event).__name__, extra={"values": {"model": model, **values}})


def level_of(event: Event) -> int:
    """Return how much an event matters."""
    name = type(event).__name__
    if name == "WorkerExited":
        return logging.INFO if str(getattr(event, "cause", "")) in EXPECTED_ENDS else logging.WARNING
    if name == "WorkerLogged":
        return logging.WARNING if getattr(event, "level", "") in ("warning", "error") else logging.DEBUG
    return LEVELS.get(name, logging.DEBUG)
