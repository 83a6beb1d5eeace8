"""What peers' users expect of a request, with real workers: several answers, priorities, log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import (
    BlockingStreams,
    BlockingSupervisor,
    ConfigurationError,
    EndReason,
    EngineError,
    InfervisorError,
    InvalidRequest,
    Overloaded,
    RestartPolicy,
    Stream,
    Streams,
    Supervisor,
    TokenLogprob,
    TopLogprob,
)
from infervisor.protocol.messages import PROTOCOL_VERSION
from infervisor.supervisor.events import RequestReleased, RequestStarted
from tests.helpers.inside import holds_nothing, until, words
from tests.helpers.lying_worker import lying
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

ONCE = RestartPolicy(max_restarts=1, max_failed_starts=1, backoff_initial_s=0.01, cooldown_s=600)
USAGE = '{"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1, "computed_tokens": 1}'
CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def answering(*tokens: str, facts: str = "") -> str:
    """Return a script that answers a request, `submit`, with these tokens, each written as Python."""
    script = f'ready({facts})\nsubmit = hear("submit")\nid = submit[0]\nsay("started", now(), id, 0, 0, 1)\n'
    for index, token in enumerate(tokens):
        script += f'say("tokens", now(), id, {index}, [{token}])\n'
    return (
        script
        + f'say("ended", now(), id, "stop", "", {USAGE}, None)\nsay("released", now(), id, None, now())\ndone()\n'
    )


def liar(directory: Path, script: str, **settings: Any) -> Supervisor:
    return Supervisor(
        engine="lies", python=lying(directory, script), restart=ONCE, **{"on_crash": "fail", **settings}
    )


async def pid_of(stream: Stream) -> int | None:
    """Return the worker that a stream is in."""
    await anext(stream)
    return stream.report.worker_pid


# --- several answers ---------------------------------------------------------------------------------


async def test_several_answers_differ_by_their_seeds() -> None:
    async with scripted({"slots": 3, "mode": "random"}) as (supervisor, _):
        answers = await supervisor.answers("hello", n=3, max_tokens=4, seed=(1 << 32) - 1)
        assert [answer.report.seed for answer in answers] == [(1 << 32) - 1, 0, 1]
        assert len({answer.text for answer in answers}) == 3
        alone = await supervisor.generate("hello", max_tokens=4, seed=1)
        assert alone.text == answers[2].text
        drawn = await supervisor.answers("hello", n=2, max_tokens=4)
        assert (drawn[0].report.seed + 1) % (1 << 32) == drawn[1].report.seed
        assert holds_nothing(supervisor)


async def test_they_go_to_one_worker_though_another_one_holds_fewer() -> None:
    async with scripted({"slots": 3, "pace_s": 0.005}, workers=2) as (supervisor, _):
        await supervisor.wait_ready(all_workers=True)
        async with supervisor.streams("hello", n=3) as streams:
            assert len({await pid_of(stream) for stream in streams}) == 1
        single = [supervisor.stream("hello") for _ in range(3)]
        async with single[0], single[1], single[2]:
            assert len({await pid_of(stream) for stream in single}) == 2


async def test_they_wait_for_no_worker_that_is_full() -> None:
    async with scripted({"slots": 2, "pace_s": 0.005}, workers=2) as (supervisor, _):
        await supervisor.wait_ready(all_workers=True)
        async with supervisor.stream("one") as one, supervisor.stream("two") as two:
            pids = {await pid_of(one), await pid_of(two)}
            assert len(pids) == 2
            async with supervisor.streams("hello", n=2) as streams:
                assert {await pid_of(stream) for stream in streams} == pids


async def test_each_of_them_is_a_stream_of_its_own() -> None:
    async with scripted({"slots": 3, "pace_s": 0.002}) as (supervisor, told):
        async with supervisor.streams("hello", n=3, max_tokens=30) as streams:
            assert len(streams) == 3
            assert [stream.report.request_id for stream in streams] == [1, 2, 3]
            await anext(streams[0])
            streams[1].cancel()
            assert await streams[0].text() == words(29, start=1)
            assert await streams[2].text() == words(30)
            assert streams[1].end_reason is EndReason.CANCELLED
        ended = [event.report.end_reason for event in told.of(RequestReleased)]
        assert sorted(ended) == [EndReason.CANCELLED, EndReason.LENGTH, EndReason.LENGTH]


async def test_leaving_them_cancels_all_and_waits_for_all() -> None:
    async with scripted({"slots": 3, "pace_s": 0.005}) as (supervisor, _):
        async with supervisor.streams("hello", n=3) as streams:
            for stream in streams:
                await anext(stream)
        assert [stream.end_reason for stream in streams] == [EndReason.CANCELLED] * 3
        assert all(stream.report.is_released for stream in streams)
        assert holds_nothing(supervisor)


async def test_if_one_is_refused_none_is_left() -> None:
    async with scripted({"slots": 2, "pace_s": 0.005}, max_queue=0) as (supervisor, _):
        async with supervisor.stream("running") as running:
            await anext(running)
            streams = supervisor.streams("hello", n=2)
            with pytest.raises(Overloaded):
                await streams.__aenter__()
            assert [stream.end_reason for stream in streams] == [EndReason.CANCELLED, EndReason.OVERLOADED]
            assert all(stream.report.is_released for stream in streams)
            assert running.end_reason is None


async def test_if_one_fails_the_others_end_and_its_error_tells_why(tmp_path: Path) -> None:
    fault = {"at": "open", "kind": "raise", "after": 1, "once_file": str(tmp_path / "once")}
    async with scripted({"slots": 3, "pace_s": 0.005, "faults": [fault]}) as (supervisor, told):
        with pytest.raises(EngineError, match="scripted fault") as caught:
            await supervisor.answers("hello", n=2)
        assert caught.value.report.end_reason is EndReason.ENGINE_ERROR
        assert caught.value.report.is_released
        assert holds_nothing(supervisor)
        assert len(told.of(RequestReleased)) == 2
        assert len(await supervisor.answers("hello", n=2, max_tokens=5)) == 2


async def test_a_cancelled_call_releases_all_of_them() -> None:
    async with scripted({"slots": 3, "pace_s": 0.005}) as (supervisor, told):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: supervisor.answers("hello", n=3))
            await told.wait_for(RequestStarted, count=3)
            tasks.cancel_scope.cancel()
        assert holds_nothing(supervisor)
        assert [event.report.end_reason for event in told.of(RequestReleased)] == [EndReason.CANCELLED] * 3


# --- what the model can't do -------------------------------------------------------------------------


async def test_more_answers_than_slots_are_refused_before_anything_is_sent() -> None:
    async with scripted({"slots": 2}) as (supervisor, told):
        with pytest.raises(InvalidRequest, match="2 slots") as caught:
            await supervisor.answers("hello", n=3)
        assert caught.value.field == "n"
        report = caught.value.report
        assert (report.end_reason, report.error.field) == (EndReason.INVALID_REQUEST, "n")
        assert report.timeline.submitted_ns is None
        assert not told.of(RequestStarted)
        assert holds_nothing(supervisor)
        assert len(await supervisor.answers("hello", n=2, max_tokens=2)) == 2


async def test_while_no_worker_is_ready_that_is_found_out_later_and_sent_to_none() -> None:
    async with scripted({"slots": 2, "load_s": 0.2}, wait_until_ready=False) as (supervisor, told):
        async with supervisor.streams("hello", n=3) as streams:
            assert [stream.end_reason for stream in streams] == [None] * 3
            for stream in streams:
                with pytest.raises(InvalidRequest, match="2 slots") as caught:
                    await stream.text()
                assert caught.value.field == "n"
                assert caught.value.report.timeline.submitted_ns is None
        assert not told.of(RequestStarted)
        assert (await supervisor.generate("hello", max_tokens=2)).text == words(2)


async def test_a_bias_for_a_token_that_isnt_there_is_refused_in_the_parent() -> None:
    async with scripted({"vocabulary_tokens": 100}) as (supervisor, _):
        with pytest.raises(InvalidRequest, match="100 tokens") as caught:
            await supervisor.generate("hello", logit_bias={100: 1.0})
        assert caught.value.field == "logit_bias"
        assert (await supervisor.generate("hello", logit_bias={99: 1.0}, max_tokens=2)).text == words(2)


async def test_a_chat_without_a_template_gets_the_templates_own_error(tmp_path: Path) -> None:
    script = answering(
        '[1, "hi", None]', facts='has_chat_template=False, extra={"template_error": "it wants poems"}'
    )
    async with liar(tmp_path, script) as supervisor:
        with pytest.raises(InvalidRequest, match=r"^it wants poems$") as caught:
            await supervisor.generate(messages=CHAT)
        assert caught.value.field == "messages"
        assert (await supervisor.generate("hello")).text == "hi"


# --- priorities --------------------------------------------------------------------------------------


async def test_a_higher_priority_goes_first() -> None:
    async with scripted({"pace_s": 0.005}) as (supervisor, told):
        running = supervisor.stream("running")
        waiting = [supervisor.stream("waits", max_tokens=2, priority=level) for level in (-5, 0, 3, 0, 100)]
        async with running, waiting[0], waiting[1], waiting[2], waiting[3], waiting[4]:
            await anext(running)
            running.cancel()
            await until(lambda: holds_nothing(supervisor))
        ends = [event.report for event in told.of(RequestReleased)][1:]
        assert [report.priority for report in ends] == [100, 3, 0, 0, -5]
        assert [report.request_id for report in ends] == [6, 4, 3, 5, 2]


# --- what is told of tokens, and what the worker is told ------------------------------------------------


async def test_log_probabilities_come_with_the_tokens_of_each_chunk(tmp_path: Path) -> None:
    script = answering(
        r'[5, "", [-0.5, [[5, b"\xc3", -0.5], [6, b"x", -2.0]], b"\xc3"]]',
        r'[7, "\u00fc", [-1.0, [[7, b"\xbc", -1.0]], b"\xbc"]]',
        r'[8, "!", [-3.0, [], b"!"]]',
    )
    async with liar(tmp_path, script) as supervisor:
        answer = await supervisor.generate("hello", logprobs=True, top_logprobs=2)
    half = TopLogprob(5, b"\xc3", -0.5)
    assert answer.text == "ü!"
    assert answer.logprobs == (
        TokenLogprob(5, b"\xc3", -0.5, (half, TopLogprob(6, b"x", -2.0))),
        TokenLogprob(7, b"\xbc", -1.0, (TopLogprob(7, b"\xbc", -1.0),)),
        TokenLogprob(8, b"!", -3.0),
    )
    assert half.text == "\ufffd"


@pytest.mark.parametrize(
    "told", ["None", '[-1.0, [], "a"]', '[-1.0, [[1, b"a", -1.0]], b"a"]', "[0.5, [], b'a']"]
)
async def test_a_worker_that_tells_something_else_is_replaced(tmp_path: Path, told: str) -> None:
    async with liar(tmp_path, answering(f'[1, "a", {told}]')) as supervisor:
        with pytest.raises(InfervisorError) as caught:
            await supervisor.generate("hello", logprobs=True)
        assert caught.value.code == EndReason.PROTOCOL_ERROR
        assert caught.value.report.timeline.tokens == 1


async def test_what_is_asked_for_reaches_the_worker(tmp_path: Path) -> None:
    script = answering("[1, repr(submit[11:]), None]")
    async with liar(tmp_path, script) as supervisor:
        answer = await supervisor.generate(
            messages=CHAT, tools=[TOOL], tool_choice="none", json_schema={"type": "object"}, priority=4
        )
    output = {"json_schema": '{"type": "object"}', "tool_choice": "none"}
    assert answer.text == repr([None, output, [TOOL], 4])


async def test_settings_of_all_requests_reach_the_worker(tmp_path: Path) -> None:
    script = f"PROTOCOL = {PROTOCOL_VERSION}\n"
    script += 'say("hello", now(), PROTOCOL, 1, {})\nload = hear("load")\n'
    script += (
        'say("ready", now(), "print", {"slots": 1, "context_tokens": 9, "extra": {"load": load}})\ndone()\n'
    )
    async with liar(tmp_path, script, slots=3, step_budget_s=0.25, workers=2, snapshots=None) as supervisor:
        assert supervisor.status().facts["extra"]["load"] == ["lies", None, {"slots": 3}, None, 0.25, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slots": 2, "options": {"slots": 3}}, "slots=2, but options"),
        ({"slots": 0}, "slots must be"),
        ({"slots": True}, "slots must be"),
        ({"step_budget_s": 0}, "step_budget_s must be more than 0"),
        ({"step_budget_s": "fast"}, "step_budget_s must be"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Supervisor(engine="scripted", **settings)
    assert Supervisor(engine="scripted", slots=2, options={"slots": 2})


# --- tool calls --------------------------------------------------------------------------------------

HERMES = 'extra={"tool_format": "hermes"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'


def pieces(text: str, size: int) -> list[str]:
    """Return tokens, as `answering` takes them, that say `text` in pieces of so many characters."""
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    return [f"[{index}, {piece!r}, None]" for index, piece in enumerate(cut)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_calls_are_taken_out_of_the_text(tmp_path: Path, size: int) -> None:
    said = "I look: " + CALL + "\n" + CALL
    async with liar(tmp_path, answering(*pieces(said, size), facts=HERMES)) as supervisor:
        async with supervisor.stream(messages=CHAT, tools=[TOOL], window=1000) as stream:
            chunks = [chunk async for chunk in stream]
    assert "".join(map(str, chunks)) == "I look:"
    calls = [call for chunk in chunks for call in chunk.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"town": "Rome"})] * 2
    assert tuple(calls) == stream.tool_calls
    ids = {call.id for call in calls}
    assert len(ids) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == list(range(len(tokens)))
    assert [chunk.index for chunk in chunks] == [
        sum(len(before.token_ids) for before in chunks[:place]) for place in range(len(chunks))
    ]


async def test_a_whole_answer_has_its_calls(tmp_path: Path) -> None:
    said = CALL
    async with liar(tmp_path, answering(*pieces(said, 4), facts=HERMES)) as supervisor:
        answer = await supervisor.generate(messages=CHAT, tools=[TOOL])
    assert answer.text == ""
    assert [call.name for call in answer.tool_calls] == ["weather"]


@pytest.mark.parametrize(
    ("said", "options", "facts"),
    [
        ('<tool_call>\n{"name": "weather", "argu', {"tools": [TOOL]}, HERMES),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', {"tools": [TOOL]}, HERMES),
        ('<tool_call>{"name": "weather"}</tool_call>', {"tools": [TOOL], "tool_choice": "none"}, HERMES),
        ('<tool_call>{"name": "weather"}</tool_call>', {}, HERMES),
        ('<tool_call>{"name": "weather"}</tool_call>', {"tools": [TOOL]}, ""),
        ('<tool_call>{"name": "weather"}</tool_call>', {"tools": [TOOL]}, 'extra={"tool_format": "odd"}'),
        ('<tool_call>{"name": "weather"}</tool_call>', {"tools": [TOOL]}, 'extra={"tool_format": 5}'),
        ("not a <tool", {"tools": [TOOL]}, HERMES),
    ],
    ids=["cut", "unknown", "none", "no tools", "no format", "odd format", "no name of one", "a mark"],
)
async def test_what_is_no_call_stays_text(
    tmp_path: Path, said: str, options: dict[str, Any], facts: str
) -> None:
    async with liar(tmp_path, answering(*pieces(said, 5), facts=facts)) as supervisor:
        answer = await supervisor.generate(messages=CHAT, **options)
    assert (answer.text, answer.tool_calls) == (said, ())


async def test_a_worker_that_dies_in_a_call_leaves_its_text(tmp_path: Path) -> None:
    script = answering(*pieces("so: <tool_call>{", 4), facts=HERMES)
    script = script[: script.index('say("ended"')] + "import os\nos._exit(3)\n"
    async with liar(tmp_path, script) as supervisor:
        stream = supervisor.stream(messages=CHAT, tools=[TOOL])
        assert str(await anext(stream)) == "so:"
        assert str(await anext(stream)) == " <tool_call>{"
        with pytest.raises(InfervisorError) as caught:
            await anext(stream)
        assert caught.value.code == EndReason.WORKER_CRASHED
        assert stream.tool_calls == ()


async def test_a_cancelled_stream_says_no_more_of_what_was_held_back(tmp_path: Path) -> None:
    script = answering(*pieces("so: <tool_call>{", 4), facts=HERMES)
    script = script[: script.index('say("ended"')]
    script += f'hear("cancel")\nsay("ended", now(), id, "cancelled", "", {USAGE}, None)\n'
    script += 'say("released", now(), id, now(), now())\ndone()\n'
    async with liar(tmp_path, script) as supervisor:
        async with supervisor.stream(messages=CHAT, tools=[TOOL]) as stream:
            assert str(await anext(stream)) == "so:"
            with anyio.move_on_after(0.05):
                await anext(stream)
            stream.cancel()
            assert [chunk async for chunk in stream] == []


# --- the same for threads ----------------------------------------------------------------------------


def test_threads_get_several_answers_too() -> None:
    with BlockingSupervisor(engine="scripted", slots=3, options={"pace_s": 0.002}) as supervisor:
        assert [answer.text for answer in supervisor.answers("hello", n=3, max_tokens=3)] == [words(3)] * 3
        with supervisor.streams("hello", n=2, max_tokens=60) as streams:
            assert str(next(streams[1])) == "w0 "
            assert streams[0].text() == words(60)
        assert [stream.end_reason for stream in streams] == [EndReason.LENGTH, EndReason.CANCELLED]
        assert [answer.text for answer in supervisor.streams("hello", n=2, max_tokens=3).answers()] == [
            words(3)
        ] * 2
        with pytest.raises(InvalidRequest, match="3 slots"):
            supervisor.answers("hello", n=4)
        assert supervisor.status().in_flight == 0


def test_several_answers_can_do_the_same_for_threads() -> None:
    public = {name for name in vars(Streams) if not name.startswith("_")}
    assert public == {name for name in vars(BlockingStreams) if not name.startswith("_")}
    assert {"cancel", "answers"} <= public


def test_threads_get_log_probabilities_too(tmp_path: Path) -> None:
    script = answering('[1, "a", [-1.0, [], b"a"]]')
    with BlockingSupervisor(engine="lies", python=lying(tmp_path, script)) as supervisor:
        with supervisor.stream("hello", logprobs=True) as stream:
            chunk = next(stream)
        assert chunk.logprobs == (TokenLogprob(1, b"a", -1.0),)
        assert stream.tool_calls == ()
