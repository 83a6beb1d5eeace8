"""Reports: of every end, at every moment, as plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infervisor import EndReason, InvalidRequest, Overloaded, Report, Stage, UsageError
from infervisor.supervisor.events import RequestReleased
from tests.helpers.inside import PATIENT, until, words
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio


def in_order(*stamps: int | None) -> bool:
    """Whether all stamps are there and none is before the one in front of it."""
    there = [stamp for stamp in stamps if stamp is not None]
    return len(there) == len(stamps) and there == sorted(there)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report after a trip through JSON; it must lose nothing."""
    plain = report.to_dict()
    back: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=False))
    assert back == plain
    assert set(back) >= {
        "request_id",
        "end_reason",
        "end_class",
        "time_points_ns",
        "figures",
        "usage",
        "seed",
    }
    assert report.to_line().isprintable()
    return back


def told_of(told: Told, report: Report) -> Report:
    """Return the report that the release event carried."""
    (event,) = [event for event in told.of(RequestReleased) if event.report.request_id == report.request_id]
    return event.report


async def test_a_whole_answer_has_all_its_time_points_in_order_and_figures_that_follow_from_them() -> None:
    async with scripted({"pace_s": 0.01, "prefill_s": 0.05}) as (supervisor, told):
        async with supervisor.stream("one two", max_tokens=6, window=9, seed=11) as stream:
            before = stream.report
            assert before.end_reason is None
            assert not before.is_released
            assert "running" in before.to_line()
            assert "not yet" in before.to_line()
            assert as_json(before)["time_points_ns"]["released"] is None
            text = await stream.text()
            report = await stream.released()
        assert text == words(6)
        timeline = report.timeline
        assert in_order(
            timeline.queued_ns,
            timeline.submitted_ns,
            timeline.started_ns,
            timeline.first_token_ns,
            timeline.last_token_ns,
            timeline.released_ns,
        )
        assert in_order(timeline.last_token_ns, timeline.ended_ns)
        assert in_order(timeline.started_ns, timeline.worker_last_token_ns)
        assert in_order(timeline.worker_first_token_ns, timeline.first_token_ns)
        assert (timeline.cancel_requested_ns, timeline.cancel_noticed_ns) == (None, None)
        assert timeline.tokens == 6
        assert timeline.ttft_s is not None
        assert timeline.total_s is not None
        assert timeline.tpot_s is not None
        assert timeline.longest_gap_s is not None
        assert timeline.ttft_s >= 0.05
        assert timeline.tpot_s >= 0.008
        assert timeline.longest_gap_s >= timeline.tpot_s
        assert timeline.total_s >= timeline.ttft_s + 5 * 0.008
        assert (report.seed, report.window, report.stage, report.error, report.warnings) == (
            11,
            9,
            None,
            None,
            (),
        )
        assert report.worker_pid == supervisor.status().worker_pid
        assert told_of(told, report) == report
        plain = as_json(report)
        assert (plain["end_reason"], plain["end_class"]) == ("length", "natural")
        assert plain["usage"] == {
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "completion_tokens": 6,
            "computed_tokens": 6,
        }
        assert plain["figures"]["ttft_s"] == timeline.ttft_s
        line = report.to_line()
        assert "6 tokens" in line
        assert "tokens/s" in line
        assert line.endswith("length")
        assert before.end_reason is None, "a report is a snapshot"
        assert before.timeline.released_ns is None


async def test_a_cancelled_request_tells_when_it_was_asked_noticed_and_freed() -> None:
    async with scripted({"pace_s": 0.01}, escalation=PATIENT) as (supervisor, told):
        async with supervisor.stream("count") as stream:
            await stream.__anext__()
            stream.cancel()
            early = stream.report
            assert early.end_reason is EndReason.CANCELLED
            assert not early.is_released
            report = await stream.released()
        timeline = report.timeline
        assert in_order(
            timeline.queued_ns,
            timeline.submitted_ns,
            timeline.started_ns,
            timeline.first_token_ns,
            timeline.cancel_requested_ns,
            timeline.cancel_noticed_ns,
            timeline.released_ns,
        )
        assert in_order(timeline.cancel_requested_ns, timeline.ended_ns, timeline.released_ns)
        assert report.stage is Stage.IN_BAND
        assert told_of(told, report) == report
        plain = as_json(report)
        assert (plain["stage"], plain["end_reason"], plain["end_class"]) == ("in_band", "cancelled", "caller")
        assert "after the cancel (in_band)" in report.to_line()
        assert report.to_line().endswith("cancelled")


async def test_a_refusal_has_a_report_and_is_told_like_every_end() -> None:
    async with scripted({"pace_s": 0.01}, max_queue=0) as (supervisor, told):
        async with supervisor.stream("runs") as running:
            await running.__anext__()
            with pytest.raises(Overloaded) as caught:
                await supervisor.generate("refused")
            report = caught.value.report
            assert report.end_reason is EndReason.OVERLOADED
            assert report.is_released
            assert in_order(report.timeline.queued_ns, report.timeline.ended_ns, report.timeline.released_ns)
            assert report.worker_pid is None
            assert told_of(told, report) == report
            plain = as_json(report)
            assert plain["error"]["code"] == "overloaded"
            assert plain["end_class"] == "refusal"
            assert plain["figures"]["ttft_s"] is None
            assert report.to_line().endswith("overloaded")


async def test_a_crash_is_in_the_report_with_the_workers_last_words() -> None:
    faults = [{"at": "decode", "after": 3, "kind": "segfault", "prompt_contains": "crash"}]
    async with scripted({"faults": faults}) as (supervisor, told):
        async with supervisor.stream("crash") as stream:
            await until(lambda: stream.end_reason is not None)
            report = await stream.released()
        assert report.end_reason is EndReason.WORKER_CRASHED
        assert report.error is not None
        assert "SIGSEGV" in report.error.message
        assert "Segmentation fault" in report.error.detail
        assert report.stage is None
        assert told_of(told, report) == report
        assert as_json(report)["end_class"] == "fault"


async def test_an_answer_of_one_token_and_one_of_none_have_the_figures_that_they_can_have() -> None:
    async with scripted({"text": "x"}) as (supervisor, _):
        one = (await supervisor.generate("say", max_tokens=1)).report
        assert one.timeline.ttft_s is not None
        assert (one.timeline.tpot_s, one.timeline.tokens_per_s, one.timeline.longest_gap_s) == (
            None,
            None,
            None,
        )
        as_json(one)
    async with scripted({"tokens": []}) as (supervisor, _):
        answer = await supervisor.generate("say")
        assert answer.text == ""
        assert answer.report.end_reason is EndReason.STOP
        assert answer.report.timeline.first_token_ns is None
        assert answer.report.usage.completion_tokens == 0
        as_json(answer.report)


async def test_deadlines_of_the_wrong_kind_are_refused_by_name() -> None:
    async with scripted() as (supervisor, _):
        with pytest.raises(InvalidRequest, match="Deadlines") as refused:
            supervisor.stream("hello", deadlines={"total_s": 5})  # type: ignore[arg-type]
        assert refused.value.field == "deadlines"


async def test_a_text_that_was_read_is_not_empty_the_second_time_but_an_error() -> None:
    async with scripted() as (supervisor, _), supervisor.stream("hello", max_tokens=2) as stream:
        assert await stream.text() == "w0 w1 "
        with pytest.raises(UsageError, match="read to its end"):
            await stream.text()
