"""What is told of a request afterwards, and while it runs: figures and reasons, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from infervisor.protocol.endings import EndReason
from infervisor.protocol.ladder import Stage
from infervisor.protocol.timeline import Timeline
from infervisor.supervisor.resume import Resume


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens. computed is the engine's own count; cached tokens were not computed again.

    If the worker died before it could tell them, completion and computed are the tokens that arrived. After a
    resume, computed counts the tokens of all workers; what was read or decoded again to get back there isn't
    counted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data. detail: the worker's traceback or last output lines, already escaped."""

    code: str
    message: str
    detail: str = ""
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A request's story. While it runs, what hasn't happened is None.

    timeline: time points in ns of the monotonic clock, with the figures that follow from them in seconds.
    stage: the rung of the cancel ladder that was reached, or None if nothing was cancelled.
    seed: the one used, drawn at random if none was given. warnings: what may have spoiled the answer.
    worker_pid: the last worker that had it. resumes: the workers that it outlived, and how long each pause was.
    priority: the one it was given, before the time that it waited counted.
    """

    request_id: int
    end_reason: EndReason | None
    timeline: Timeline
    usage: Usage
    stage: Stage | None
    seed: int
    window: int
    worker_pid: int | None
    error: ErrorInfo | None = None
    warnings: tuple[str, ...] = ()
    resumes: tuple[Resume, ...] = ()
    priority: int = 0

    @property
    def is_released(self) -> bool:
        """Whether its resources are free."""
        return self.timeline.released_ns is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: time points in ns, figures in seconds, names as strings.

        tokens: of the answer, as many as have arrived.
        """
        timeline = self.timeline
        return {
            "request_id": self.request_id,
            "end_reason": self.end_reason,
            "end_class": None if self.end_reason is None else self.end_reason.end_class,
            "error": None if self.error is None else asdict(self.error),
            "time_points_ns": _stamps(timeline),
            "figures": {
                "queue_s": timeline.queue_s,
                "ttft_s": timeline.ttft_s,
                "tpot_s": timeline.tpot_s,
                "tokens_per_s": timeline.tokens_per_s,
                "longest_gap_s": timeline.longest_gap_s,
                "paused_s": timeline.paused_ns / 1e9,
                "total_s": timeline.total_s,
                "release_s": timeline.release_s,
            },
            "tokens": timeline.tokens,
            "usage": asdict(self.usage),
            "stage": self.stage,
            "seed": self.seed,
            "window": self.window,
            "priority": self.priority,
            "worker_pid": self.worker_pid,
            "resumes": [resume.to_dict() for resume in self.resumes],
            "warnings": list(self.warnings),
        }

    def to_line(self) -> str:
        """Return one line for people."""
        timeline = self.timeline
        parts = [
            f"queued {_seconds(timeline.queue_s)}",
            f"first token {_seconds(timeline.ttft_s)}",
            f"last token {_seconds(_since(timeline, timeline.last_token_ns))}",
            f"released {_released(timeline, self.stage)}",
        ]
        if timeline.tokens_per_s is not None:
            parts.append(f"{timeline.tokens_per_s:.1f} tokens/s")
        # Without the worker's last word, what arrived is what is known.
        parts.append(f"{max(self.usage.completion_tokens, timeline.tokens)} tokens")
        if self.usage.cached_tokens:
            parts.append(f"{self.usage.cached_tokens} of the prompt cached")
        pauses = [resume.pause_s for resume in self.resumes if resume.pause_s is not None]
        if pauses:
            parts.append(f"resumed {len(pauses)} × (paused {', '.join(map(_seconds, pauses))})")
        if len(pauses) < len(self.resumes):
            parts.append("interrupted")
        if self.priority:
            parts.append(f"priority {self.priority}")
        parts.append(str(self.end_reason or "running"))
        return " · ".join(parts)

    def snapshot(self) -> Report:
        """Return a copy that further events don't change."""
        return replace(self, timeline=replace(self.timeline))


def _stamps(timeline: Timeline) -> Mapping[str, int | None]:
    return {
        key[:-3]: value
        for key, value in asdict(timeline).items()
        if key.endswith("_ns") and key not in ("longest_gap_ns", "paused_ns")
    }


def _since(timeline: Timeline, stamp_ns: int | None) -> float | None:
    return None if stamp_ns is None else (stamp_ns - timeline.queued_ns) / 1e9


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _released(timeline: Timeline, stage: Stage | None) -> str:
    if timeline.released_ns is None:
        return "not yet"
    if timeline.cancel_requested_ns is None:
        return _seconds(_since(timeline, timeline.released_ns))
    how = "" if stage is None else f" ({stage})"
    return f"{_seconds(timeline.release_s)} after the cancel{how}"
