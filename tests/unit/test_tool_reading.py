"""Calls taken out of chunks: what belongs to a token goes with it, and nothing is lost or said twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.supervisor.logprobs import TokenLogprob
from infervisor.supervisor.request import Chunk, Request
from infervisor.supervisor.request_input import check_request
from infervisor.supervisor.resume import OnCrash
from infervisor.supervisor.settings import Deadlines
from infervisor.supervisor.tool_reading import ToolReading

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def request(tool_format: str | None = "hermes", request_id: int = 1, **options: Any) -> Request:
    options = {"tools": [TOOL], "seed": 1, **options}
    given_input = check_request(None, [{"role": "user", "content": "hi"}], **options)
    given_input = replace(given_input, template_clock_s=0.0)
    made = Request(request_id, given_input, Deadlines(), OnCrash.FAIL, 0)
    made.tool_format = tool_format
    return made


def reading(**options: Any) -> ToolReading:
    made = ToolReading.of(request(**options))
    assert made is not None
    return made


def told(number: int) -> TokenLogprob:
    return TokenLogprob(number, b"x", -1.0)


def chunk(text: str, index: int) -> Chunk:
    return Chunk(text, index, (index,), 10 * index, (told(index),))


def read(said: list[str], tools: ToolReading) -> list[Chunk]:
    shown = [tools.feed(chunk(text, index)) for index, text in enumerate(said)]
    return [each for each in (*shown, tools.finish()) if each is not None]


@pytest.mark.parametrize(
    "options",
    [{"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tool_format": None}, {"tool_format": "odd"}],
)
def test_without_tools_or_a_known_format_nothing_is_taken_out(options: dict[str, Any]) -> None:
    assert ToolReading.of(request(**options)) is None


def test_what_was_held_back_goes_with_what_comes_next() -> None:
    tools = reading()
    shown = read(["so ", "<tool", "ing> ", "it"], tools)
    # The space before what may be a mark may have to go with it.
    assert [each.text for each in shown] == ["so", " <tooling>", " it"]
    assert [each.token_ids for each in shown] == [(0,), (1, 2), (3,)]
    assert [each.index for each in shown] == [0, 1, 3]
    assert [each.logprobs for each in shown] == [(told(0),), (told(1), told(2)), (told(3),)]
    assert [each.t_ns for each in shown] == [0, 20, 30]
    assert tools.calls == ()


def test_ids_differ_between_answers_and_calls() -> None:
    names: list[str] = []
    for number in (1, 2):
        tools = reading(request_id=number)
        read([CALL, CALL], tools)
        names += [call.id for call in tools.calls]
    assert len(set(names)) == 4


@given(
    st.lists(
        st.sampled_from([CALL, "text", " ", "<tool_call>", "{", "}", "\n", "<", "</tool_call>"]), max_size=8
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_however_it_is_cut_the_same_comes_out(said: list[str], sizes: list[int]) -> None:
    whole = "".join(said)
    cut: list[str] = []
    at = 0
    while at < len(whole):
        size = sizes[len(cut) % len(sizes)]
        cut.append(whole[at : at + size])
        at += size
    one, other = reading(), reading()
    shown, expected = read(cut, one), read([whole] if whole else [], other)
    assert "".join(each.text for each in shown) == "".join(each.text for each in expected)
    assert one.calls == other.calls == tuple(call for each in shown for call in each.tool_calls)
    ids = [token for each in shown for token in each.token_ids]
    assert ids == list(range(len(ids)))
    assert all(each.text or each.tool_calls for each in shown)
    assert all(len(each.logprobs) == len(each.token_ids) for each in shown)
