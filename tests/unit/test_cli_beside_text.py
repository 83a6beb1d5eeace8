"""What an answer brings beside its text: JSON that anybody reads, and a table for people."""

from __future__ import annotations

import json
import math

from infervisor import Chunk, TokenLogprob, ToolCall, TopLogprob
from infervisor.supervisor.cli.beside_text import MOST_TABLE_LINES, LogprobTable, call_line, chunk_as_dict
from infervisor.supervisor.cli.exit_codes import ExitCode, worst
from infervisor.supervisor.cli.presentation import as_line

LLAMA = "🦙".encode()
TOP = (TopLogprob(5, b" Paris", math.log(0.75)), TopLogprob(7, LLAMA[:2], -math.inf))
TOKEN = TokenLogprob(5, b" Paris", math.log(0.75), TOP)
CALL = ToolCall("call_1", "weather", '{"city": "Zürich"}')


def test_a_plain_chunk_has_four_fields() -> None:
    assert chunk_as_dict(Chunk(" day", 7, (1194,), 123)) == {
        "text": " day",
        "index": 7,
        "token_ids": [1194],
        "t_ns": 123,
    }


def test_logprobs_and_calls_are_json_that_reads_back() -> None:
    line = as_line(chunk_as_dict(Chunk(" Paris", 0, (5,), 1, (TOKEN,), (CALL,))))
    told = json.loads(line)
    assert told["tool_calls"] == [{"id": "call_1", "name": "weather", "arguments": '{"city": "Zürich"}'}]
    (token,) = told["logprobs"]
    assert (token["token_id"], token["text"], bytes(token["bytes"])) == (5, " Paris", b" Paris")
    assert math.isclose(token["logprob"], math.log(0.75))
    assert [other["token_id"] for other in token["top"]] == [5, 7]
    # A part of a character, and a token that can't come: JSON has no infinity.
    assert (bytes(token["top"][1]["bytes"]), token["top"][1]["logprob"]) == (LLAMA[:2], None)


def test_a_call_is_one_line_of_ascii_with_its_arguments_as_an_object() -> None:
    line = call_line(CALL)
    assert line.isascii()
    assert line.count("\n") == 1
    (call,) = json.loads(line)["tool_calls"]
    assert call == {"id": "call_1", "name": "weather", "arguments": {"city": "Zürich"}}


def test_the_table_has_a_line_for_each_token_and_ends_somewhere() -> None:
    table = LogprobTable()
    assert table.lines() == []
    table.add((TOKEN,))
    heading, line = table.lines()
    assert "most probable" in heading
    assert re_split(line) == ['" Paris"', "-0.288", "75.0%", '" Paris"', "75.0%", '"�"', "0.0%"]
    table.add([TokenLogprob(1, b"\x1b[2J", 0.0)] * MOST_TABLE_LINES)
    *lines, rest = table.lines()
    assert len(lines) == 1 + MOST_TABLE_LINES
    assert rest == "and 1 more: --json has all of them"
    assert "\x1b" not in "".join(lines)


def re_split(line: str) -> list[str]:
    """Split at blanks that aren't within quotes."""
    return [part.replace("\0", " ") for part in line.replace('" Paris"', '"\0Paris"').split()]


def test_the_gravest_code_of_several_answers_counts() -> None:
    ok, cancelled, fault = ExitCode.OK, ExitCode.CANCELLED, ExitCode.FAULT
    assert worst([ok]) is ok
    assert worst([ok, cancelled, ok]) is cancelled
    assert worst([fault, cancelled, ExitCode.DEADLINE, ok]) is fault
    assert worst([fault, ExitCode.OUTPUT_FAILED]) is ExitCode.OUTPUT_FAILED
