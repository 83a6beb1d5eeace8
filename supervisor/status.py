"""A supervisor's state at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infervisor.supervisor.process import Sample


@dataclass(frozen=True, slots=True)
class Status:
    """slot: phase of the slot. worker: phase of its process, or None. facts: what the worker says of its model.

    queue_depth and queue_peak count waiting requests, in_flight those in the worker. restarts: by cause.
    sample: the last look at the worker's memory and CPU time, or None.
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
