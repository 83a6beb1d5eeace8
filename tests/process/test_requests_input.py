"""What a caller gets wrong ends with the field's name, and the worker never notices."""

from __future__ import annotations

from typing import Any

import pytest

from infervisor import EndReason, InvalidRequest
from infervisor.supervisor.events import WorkerSpawned
from infervisor.supervisor.request_input import MAX_PROMPT_BYTES
from tests.helpers.inside import dispatcher_of, record_sent, words
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]
LONE = "bad \ud83d text"
HUGE = 10**5000

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": b"bytes"}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": LONE}),
    ("messages", {"prompt": "both", "messages": HI}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": 5}),
    ("messages[1]", {"messages": [*HI, "hi"]}),
    ("messages[0].role", {"messages": [{"content": "hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": LONE}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("window", {"prompt": "x", "window": 0}),
    ("window", {"prompt": "x", "window": HUGE}),
    ("max_tokens", {"prompt": "x", "max_tokens": 0}),
    ("max_tokens", {"prompt": "x", "max_tokens": -1}),
    ("max_tokens", {"prompt": "x", "max_tokens": "5"}),
    ("max_tokens", {"prompt": "x", "max_tokens": 2.5}),
    ("max_tokens", {"prompt": "x", "max_tokens": True}),
    ("stop", {"prompt": "x", "stop": ""}),
    ("stop", {"prompt": "x", "stop": [""]}),
    ("stop", {"prompt": "x", "stop": ["a"] * 65}),
    ("stop", {"prompt": "x", "stop": [LONE]}),
    ("seed", {"prompt": "x", "seed": -1}),
    ("seed", {"prompt": "x", "seed": 1 << 32}),
    ("seed", {"prompt": "x", "seed": 1 << 64}),
    ("seed", {"prompt": "x", "seed": -(1 << 63) - 1}),
    ("seed", {"prompt": "x", "seed": 1.5}),
    ("seed", {"prompt": "x", "seed": "7"}),
    ("ignore_eos", {"prompt": "x", "ignore_eos": 1}),
    ("special", {"prompt": "x", "special": None}),
    ("temprature", {"prompt": "x", "temprature": 1}),
    ("temperature", {"prompt": "x", "temperature": -0.1}),
    ("top_p", {"prompt": "x", "top_p": 1.1}),
    ("top_k", {"prompt": "x", "top_k": 1.5}),
    ("logit_bias", {"prompt": "x", "logit_bias": [1]}),
    ("logit_bias", {"prompt": "x", "logit_bias": {-7: 5}}),
    ("logit_bias", {"prompt": "x", "logit_bias": {"7": 5}}),
    ("logit_bias", {"prompt": "x", "logit_bias": {7: "5"}}),
    ("grammar", {"prompt": "x", "grammar": " "}),
    ("logprobs", {"prompt": "x", "logprobs": 2}),
]


async def test_a_bad_request_is_refused_before_anything_is_sent() -> None:
    async with scripted() as (supervisor, told):
        sent = record_sent(supervisor)
        for field, given in REFUSED:
            with pytest.raises(InvalidRequest) as caught:
                supervisor.stream(**given)
            assert caught.value.field == field, given
            assert caught.value.code == "invalid_request"
            str(caught.value).encode()  # the refusal of bad text is good text
            assert len(str(caught.value)) < 1000
            with pytest.raises(InvalidRequest):
                await supervisor.generate(**given)
        assert sent == []
        assert dispatcher_of(supervisor).requests == {}
        assert (await supervisor.generate("good", max_tokens=3)).text == words(3)
        assert len(told.of(WorkerSpawned)) == 1


async def test_a_prompt_up_to_the_limit_fits_and_one_byte_more_is_refused_here() -> None:
    async with scripted({"mode": "echo"}) as (supervisor, told):
        fits = "ü" * ((MAX_PROMPT_BYTES - 2) // 2) + " x"
        assert len(fits.encode()) == MAX_PROMPT_BYTES
        async with supervisor.stream(
            fits, max_tokens=1, stop=["ü"], logit_bias={i: 1.0 for i in range(4096)}
        ) as stream:
            assert await stream.text() == ""
            assert stream.end_reason is EndReason.STOP_SEQUENCE
            assert (await stream.released()).usage.prompt_tokens == 2
        with pytest.raises(InvalidRequest) as caught:
            supervisor.stream(fits + "x")
        assert caught.value.field == "prompt"
        assert str(MAX_PROMPT_BYTES + 1) in str(caught.value)
        assert str(MAX_PROMPT_BYTES) in str(caught.value)
        assert (await supervisor.generate("still here")).text == "still here"
        assert len(told.of(WorkerSpawned)) == 1


@pytest.mark.produces("attempt: submitted × EndArrived → ending", "end: invalid_request")
async def test_a_prompt_beyond_the_context_is_the_callers_error_with_both_numbers() -> None:
    async with scripted({"context_tokens": 10}) as (supervisor, told):
        for words_in in (10, 11, 5000):
            async with supervisor.stream(" ".join("x" * words_in)) as stream:
                with pytest.raises(InvalidRequest) as caught:
                    await stream.text()
                assert caught.value.field == "prompt"
                assert f"{words_in} tokens" in str(caught.value)
                assert "holds 10" in str(caught.value)
                report = await stream.released()
            assert report.end_reason is EndReason.INVALID_REQUEST
            assert report.error is not None
            assert (report.error.code, report.error.field) == ("invalid_request", "prompt")
            assert (report.usage.computed_tokens, report.timeline.started_ns) == (0, None)
        edge = await supervisor.generate(" ".join("x" * 9))
        assert (edge.text, edge.report.end_reason) == (words(1), EndReason.CONTEXT_FULL)
        assert len(told.of(WorkerSpawned)) == 1


async def test_nul_and_text_parts_arrive_whole() -> None:
    async with scripted({"mode": "echo"}) as (supervisor, _):
        prompt = "say A \0 say\0 B \U0001f999"
        answer = await supervisor.generate(prompt)
        assert answer.text == prompt
        assert answer.report.usage.prompt_tokens == len(prompt.split(" "))
        parts = [
            {"type": "text", "text": "one "},
            {"type": "text", "text": "two\u2028"},
            {"type": "text", "text": "3"},
        ]
        chat = await supervisor.generate(messages=[{"role": "user", "content": parts}])
        assert chat.text == "one two\u20283"


async def test_stop_lists_that_name_nothing_mean_none() -> None:
    async with scripted({"text": "to the end"}) as (supervisor, _):
        for stop in (None, [], (), ["absent"]):
            assert (await supervisor.generate("say", stop=stop)).text == "to the end"
        assert (await supervisor.generate("say", stop=("the", "end"))).text == "to "


async def test_a_seed_gives_the_same_answer_always_and_none_a_fresh_one() -> None:
    async with scripted({"mode": "random", "pace_s": 0.002}) as (supervisor, told):

        async def say(seed: int | None) -> tuple[str, int]:
            answer = await supervisor.generate("dice", max_tokens=8, temperature=1.5, seed=seed)
            return answer.text, answer.report.seed

        first, seed = await say(7)
        assert seed == 7
        assert await say(7) == (first, 7)
        assert await say(8) != (first, 8)
        async with supervisor.stream("dice", temperature=1.5, seed=7) as cancelled:
            await cancelled.__anext__()
        assert await say(7) == (first, 7)
        supervisor.restart_worker()
        await told.wait_for(WorkerSpawned, count=2)
        assert await say(7) == (first, 7)
        drawn = [await say(None) for _ in range(4)]
        assert len({text for text, _ in drawn}) == 4
        assert len({seed for _, seed in drawn}) == 4
        for text, seed in drawn:
            assert await say(seed) == (text, seed), "the report tells the seed that was drawn"
        assert (await supervisor.generate("x", max_tokens=1, seed=(1 << 32) - 1)).report.seed == (1 << 32) - 1
