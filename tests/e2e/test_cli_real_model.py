"""The command line with the embedded default model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import assert_gone, running, supervise

pytestmark = pytest.mark.real_model


def test_a_greedy_answer_is_whole_and_the_same_twice() -> None:
    arguments = ("run", "--temperature", "0", "--max-tokens", "12", "What is the capital of France?")
    first, second = supervise(*arguments), supervise(*arguments)
    assert first.returncode == second.returncode == 0
    assert len(first.stdout) > 12
    assert first.stdout == second.stdout
    assert b"12 tokens" in first.stderr


def test_a_raw_prompt_is_continued_and_a_chat_is_answered() -> None:
    arguments = ("run", "--json", "--temperature", "0", "--max-tokens", "4", "The capital of France is")
    counts = []
    for raw in ((), ("--raw",)):
        done = supervise(*arguments, *raw)
        assert done.returncode == 0
        counts.append(json.loads(done.stdout.splitlines()[-1])["usage"]["prompt_tokens"])
    chat, raw_count = counts
    assert raw_count < chat


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    done = supervise("run", "--ctx", "256", "--raw", "-q", stdin=b"word " * 300)
    assert done.returncode == 3
    assert b"256" in done.stderr
    assert b"30" in done.stderr


def test_ctrl_c_in_a_long_prefill_releases_in_band() -> None:
    with running("run", "-v", "--raw", "word " * 3000) as command:
        pid = command.worker_pid()
        command.read_until("err", "RequestQueued")
        command.interrupt()
        assert command.finish() == 130
    assert "after the cancel (in_band)" in command.report
    assert "0 tokens · cancelled" in command.report
    assert_gone(pid)


def test_every_step_of_a_probe_passes() -> None:
    done = supervise("probe", "--json")
    *steps, verdict = [json.loads(line) for line in done.stdout.splitlines()]
    assert {step["name"]: step["status"] for step in steps if step["status"] != "ok"} == {}
    assert (verdict["ok"], done.returncode) == (True, 0)
    assert steps[1]["figures"]["facts"]["context_tokens"] == 4096


# --- several answers ---------------------------------------------------------------------------------


def _lines(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_four_prompts_side_by_side_say_what_each_says_alone() -> None:
    questions = (
        "What is the capital of France?",
        "Name a colour.",
        "Count to five.",
        "Say hello in Spanish.",
    )
    greedy = ("--temperature", "0", "--max-tokens", "12", "-o", "reproducible=true")
    asked = [word for question in questions for word in ("-p", question)]
    done = supervise("run", *greedy, "--slots", "4", *asked)
    assert done.returncode == 0, done.stderr.decode()
    said = re.split(r"── \d: .* ──\n", done.stdout.decode())[1:]
    for question, answer in zip(questions, said, strict=True):
        assert supervise("run", *greedy, question).stdout.decode() == answer.removesuffix("\n")


def test_several_answers_to_one_prompt_read_it_once() -> None:
    done = supervise(
        "run",
        "--n",
        "3",
        "--max-tokens",
        "4",
        "--json",
        "Tell me everything about the city of Paris, please.",
    )
    usages = [line["usage"] for line in _lines(done.stdout) if line["type"] == "report"]
    assert len(usages) == 3
    cached = sorted(usage["cached_tokens"] for usage in usages)
    assert cached[0] == 0
    assert cached[1] > usages[0]["prompt_tokens"] / 2


# --- the form of an answer -----------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def test_an_answer_follows_a_schema_and_a_grammar(tmp_path: Path) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "maximum": 99},
            },
            "required": ["name", "age"],
        }
    )
    done = supervise("run", "--json-schema", schema, "--max-tokens", "100", "-q", "Invent a person.")
    assert done.returncode == 0, done.stderr.decode()
    person = json.loads(done.stdout)
    assert (type(person["name"]), type(person["age"])) == (str, int)
    grammar = tmp_path / "yes.gbnf"
    grammar.write_text('root ::= "yes" | "no"\n')
    done = supervise("run", "--grammar", str(grammar), "-q", "Is the sky blue?")
    assert done.stdout in (b"yes", b"no")
    grammar.write_text("root ::= nothing\n")
    done = supervise("run", "--grammar", str(grammar), "Is the sky blue?")
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"invalid_request" in done.stderr


def test_a_required_tool_is_called_in_a_line_of_json(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    command = ("run", "--tools", str(tools), "--tool-choice", "get_weather", "--max-tokens", "100")
    done = supervise(*command, "What is the weather in Paris?")
    assert done.returncode == 0, done.stderr.decode()
    (call,) = json.loads(done.stdout)["tool_calls"]
    assert call["name"] == "get_weather"
    assert isinstance(call["arguments"]["city"], str)
    done = supervise(*command, "--json", "What is the weather in Paris?")
    (call,) = [call for line in _lines(done.stdout) for call in line.get("tool_calls", ())]
    assert json.loads(call["arguments"]).keys() == {"city"}


def test_logprobs_are_a_table_for_people_and_all_of_them_in_json() -> None:
    command = ("run", "--temperature", "0", "--top-logprobs", "2", "--max-tokens", "4")
    done = supervise(*command, "What is the capital of France?")
    table = done.stderr.decode().splitlines()
    assert table[0].split()[:3] == ["token", "logprob", "p"]
    assert len(table) == 1 + 4 + 1
    lines = _lines(supervise(*command, "--json", "What is the capital of France?").stdout)
    tokens = [token for line in lines for token in line.get("logprobs", ())]
    assert len(tokens) == 4
    for token in tokens:
        # Greedy: the chosen one is the most probable one.
        assert token["top"][0]["token_id"] == token["token_id"]
        assert math.isclose(token["top"][0]["logprob"], token["logprob"])
        assert len(token["top"]) == 2


def test_a_banned_token_does_not_come() -> None:
    question = ("--temperature", "0", "--max-tokens", "1", "What is the capital of France?")
    (first,) = [
        line for line in _lines(supervise("run", "--json", *question).stdout) if line["type"] == "token"
    ]
    (banned,) = first["token_ids"]
    done = supervise("run", "--json", "--logit-bias", f"{banned}=-inf", *question)
    (other,) = [line for line in _lines(done.stdout) if line["type"] == "token"]
    assert other["token_ids"] != [banned]
    done = supervise("run", "--logit-bias", "999999=1", *question)
    assert done.returncode == 3
    assert b"logit_bias names the token 999999" in done.stderr


# --- texts ---------------------------------------------------------------------------------------------


def test_tokens_are_told_and_counted(tmp_path: Path) -> None:
    done = supervise("tokenize", "Hello world")
    tokens = json.loads(done.stdout)
    assert done.returncode == 0
    assert len(tokens) == 2
    assert supervise("count", stdin=b"Hello world").stdout == b"2\n"
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": "Hello world"}]))
    counted = int(supervise("count", "--messages", str(chat)).stdout)
    run = supervise("run", "--json", "--max-tokens", "1", "Hello world")
    assert counted == _lines(run.stdout)[-1]["usage"]["prompt_tokens"] > 2
    special = supervise("tokenize", "<|im_start|>")
    assert len(json.loads(special.stdout)) == 1
    assert len(json.loads(supervise("tokenize", "--no-special", "<|im_start|>").stdout)) > 1


def test_each_line_is_a_vector() -> None:
    done = supervise("embed", "-q", stdin=b"a cat\n\na dog\n")
    assert (done.returncode, done.stderr) == (0, b"")
    first, second = _lines(done.stdout)
    assert (first["index"], second["index"]) == (0, 1)
    assert math.isclose(math.hypot(*first["vector"]), 1.0, rel_tol=1e-5)
    assert first["vector"] != second["vector"]
    tsv = supervise("embed", "--format", "tsv", "--no-normalise", "a cat").stdout.decode()
    numbers = [float(number) for number in tsv.split("\t")]
    assert len(numbers) == len(first["vector"])
    length = math.hypot(*numbers)
    assert not math.isclose(length, 1.0, rel_tol=1e-2)
    assert all(
        math.isclose(x / length, y, abs_tol=1e-5) for x, y in zip(numbers, first["vector"], strict=True)
    )


def test_a_text_that_does_not_fit_is_refused() -> None:
    done = supervise("embed", "--ctx", "256", "word " * 300)
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"256" in done.stderr
