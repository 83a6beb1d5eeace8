"""Answers with a form, on the real model: whole ones follow it, cut ones say so, and a death in the middle changes
nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from infervisor import EndReason, InvalidRequest, Supervisor
from tests.helpers.models import smollm2_path

pytestmark = [pytest.mark.anyio, pytest.mark.real_model]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["glad", "sad"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Invent a person, as JSON."}],
    "json_schema": PERSON,
    "max_tokens": 150,
    "temperature": 1.0,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 20}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    options = {"n_ctx": 1024, "threads": 2, "reproducible": True}
    async with Supervisor(smollm2_path(), options=options) as running:
        yield running


async def test_whole_answers_follow_the_schema(supervisor: Supervisor) -> None:
    for seed in range(4):
        answer = await supervisor.generate(**ASKED, seed=seed)
        assert answer.report.end_reason is EndReason.STOP
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert answer.report.warnings == ()


async def test_a_death_in_the_middle_of_a_form_changes_nothing(supervisor: Supervisor) -> None:
    undisturbed = await supervisor.generate(**ASKED, seed=3)
    for kill_at in (1, 9):
        text, count, killed = "", 0, False
        async with supervisor.stream(**ASKED, seed=3, window=2) as stream:
            async for chunk in stream:
                text += chunk.text
                count += len(chunk.token_ids)
                if count >= kill_at and not killed:
                    killed = True
                    pid = stream.report.worker_pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
        assert len(stream.report.resumes) == 1
        assert text == undisturbed.text


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": PERSON},
        {"grammar": 'root ::= "abc " root | "end"'},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
    ids=["schema", "grammar", "tool"],
)
async def test_a_form_that_was_cut_says_so(supervisor: Supervisor, form: dict[str, Any]) -> None:
    answer = await supervisor.generate(messages=ASKED["messages"], max_tokens=3, temperature=0, **form)
    assert answer.report.end_reason is EndReason.LENGTH
    (warning,) = answer.report.warnings
    assert "was cut (length)" in warning
    assert answer.tool_calls == ()


async def test_a_required_call_is_one_of_a_tool(supervisor: Supervisor) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        question = [{"role": "user", "content": "What is the weather in Paris?"}]
        answer = await supervisor.generate(
            messages=question, tools=[WEATHER], tool_choice=choice, max_tokens=80, seed=1
        )
        (call,) = answer.tool_calls
        assert call.name == "weather"
        jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])
        assert answer.text == ""
        # And the model can be told what came of it.
        question += [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "20 degrees and sunny"},
        ]  # type: ignore[list-item]
        assert (await supervisor.generate(messages=question, max_tokens=10)).text


async def test_a_bad_grammar_costs_its_neighbour_nothing(supervisor: Supervisor) -> None:
    async with supervisor.stream("Once upon a time", max_tokens=60, ignore_eos=True, temperature=0) as stream:
        text = (await anext(stream)).text
        for grammar in ('root ::= a "x"\na ::= a | ""', 'root ::= "a"{3,1}', f"root ::= {'(' * 100_000}"):
            with pytest.raises(InvalidRequest) as refused:
                await supervisor.generate("x", grammar=grammar, max_tokens=3)
            assert refused.value.field == "grammar"
        text += await stream.text()
    assert not stream.report.resumes
    alone = await supervisor.generate("Once upon a time", max_tokens=60, ignore_eos=True, temperature=0)
    assert text == alone.text


async def test_logprobs_are_those_of_each_token(supervisor: Supervisor) -> None:
    answer = await supervisor.generate(
        "The capital of France is",
        max_tokens=8,
        temperature=0,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
    )
    assert len(answer.logprobs) == answer.report.usage.completion_tokens == 8
    for told in answer.logprobs:
        assert told.top[0].token_id == told.token_id, "greedy takes the most probable"
        assert [each.logprob for each in told.top] == sorted(
            (each.logprob for each in told.top), reverse=True
        )
        assert -20 < told.logprob <= 0
    assert "".join(told.text for told in answer.logprobs) == answer.text
