"""Reports as plain data and as a line, whatever has happened so far."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from infervisor.protocol.endings import EndReason
from infervisor.protocol.ladder import Stage
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.timeline import Timeline
from infervisor.supervisor.report import ErrorInfo, Report, Usage
from infervisor.supervisor.resume import Resume

MS = 1_000_000


def report(timeline: Timeline | None = None, **given: Any) -> Report:
    parts: dict[str, Any] = {
        "request_id": 3, "end_reason": None, "timeline": timeline or Timeline(queued_ns=1000 * MS),
        "usage": Usage(), "stage": None, "seed": 9, "window": 32, "worker_pid": None, **given,
    }  # fmt: skip
    return Report(**parts)


def whole() -> Report:
    """Return the report of an answer of 5 tokens, 20 ms apart, that was cancelled."""
    timeline = Timeline(queued_ns=1000 * MS, submitted_ns=1010 * MS, started_ns=1020 * MS)
    for number in range(5):
        timeline.receive_tokens(1, (1100 + 20 * number) * MS, (1099 + 20 * number) * MS)
    timeline.cancel_requested_ns = timeline.ended_ns = 1200 * MS
    timeline.cancel_noticed_ns, timeline.released_ns = 1201 * MS, 1203 * MS
    return report(
        timeline,
        end_reason=EndReason.CANCELLED,
        usage=Usage(prompt_tokens=4, completion_tokens=5, computed_tokens=6),
        stage=Stage.IN_BAND,
        worker_pid=77,
        error=ErrorInfo("code", "message", "detail", "field"),
        warnings=("careful",),
        priority=7,
        resumes=(Resume(DeathCause.CRASHED, 66, 2, 1, lost_ns=1125 * MS, resumed_ns=1140 * MS),),
    )


def test_the_whole_story_as_plain_data() -> None:
    plain = json.loads(json.dumps(whole().to_dict(), allow_nan=False))
    assert plain == {
        "request_id": 3,
        "end_reason": "cancelled",
        "end_class": "caller",
        "error": {"code": "code", "message": "message", "detail": "detail", "field": "field"},
        "time_points_ns": {
            "queued": 1000 * MS,
            "submitted": 1010 * MS,
            "started": 1020 * MS,
            "first_token": 1100 * MS,
            "last_token": 1180 * MS,
            "cancel_requested": 1200 * MS,
            "cancel_noticed": 1201 * MS,
            "ended": 1200 * MS,
            "released": 1203 * MS,
            "worker_first_token": 1099 * MS,
            "worker_last_token": 1179 * MS,
            "pause_began": None,
        },
        "figures": {
            "queue_s": 0.01,
            "ttft_s": 0.1,
            "tpot_s": 0.02,
            "tokens_per_s": 50.0,
            "paused_s": 0.0,
            "longest_gap_s": 0.02,
            "total_s": 0.2,
            "release_s": 0.003,
        },
        "tokens": 5,
        "usage": {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 5, "computed_tokens": 6},
        "stage": "in_band",
        "seed": 9,
        "window": 32,
        "priority": 7,
        "worker_pid": 77,
        "resumes": [
            {
                "cause": "crashed",
                "worker_pid": 66,
                "delivered_tokens": 2,
                "restored_tokens": 1,
                "lost_ns": 1125 * MS,
                "resumed_ns": 1140 * MS,
                "pause_s": 0.015,
            }
        ],
        "warnings": ["careful"],
    }


def test_every_time_point_is_in_the_plain_data() -> None:
    stamps = {f.name.removesuffix("_ns") for f in fields(Timeline) if f.name.endswith("_ns")} - {
        "longest_gap",
        "paused",
    }
    assert set(report().to_dict()["time_points_ns"]) == stamps


def test_what_hasnt_happened_is_none() -> None:
    plain = json.loads(json.dumps(report().to_dict()))
    assert plain["end_reason"] is plain["end_class"] is plain["error"] is plain["stage"] is None
    assert plain["figures"].pop("paused_s") == 0
    assert all(value is None for value in plain["figures"].values())
    assert {name for name, value in plain["time_points_ns"].items() if value is not None} == {"queued"}


@pytest.mark.parametrize("reason", EndReason)
def test_every_end_reason_is_data_and_ends_the_line(reason: EndReason) -> None:
    ended = report(end_reason=reason)
    assert json.loads(json.dumps(ended.to_dict()))["end_reason"] == reason.value
    assert ended.to_line().endswith(f" · {reason.value}")


def test_the_line() -> None:
    assert whole().to_line() == (
        "queued 10.0 ms · first token 100.0 ms · last token 180.0 ms · "
        "released 3.0 ms after the cancel (in_band) · 50.0 tokens/s · 5 tokens · "
        "resumed 1 × (paused 15.0 ms) · priority 7 · cancelled"
    )
    assert (
        report().to_line()
        == "queued – · first token – · last token – · released not yet · 0 tokens · running"
    )
    slow = Timeline(queued_ns=0, released_ns=2500 * MS)
    assert "released 2.50 s ·" in report(slow).to_line()


def test_a_snapshot_doesnt_change() -> None:
    live = whole()
    snapshot = live.snapshot()
    assert snapshot == live
    live.timeline.released_ns = None
    assert snapshot.is_released
    assert not live.is_released


def test_what_was_cached_is_in_the_line_if_there_is_any() -> None:
    assert "cached" not in report().to_line()
    some = replace(report(), usage=Usage(prompt_tokens=40, cached_tokens=36))
    assert "36 of the prompt cached" in some.to_line()
