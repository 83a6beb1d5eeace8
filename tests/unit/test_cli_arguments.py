"""From words to values: which word is the model, what is a prompt, which options are meant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import typer

from infervisor.supervisor.cli.answer_arguments import form, logit_bias
from infervisor.supervisor.cli.arguments import (
    engine_options,
    llama_options,
    model_and_prompt,
    model_beside_prompts,
    prompts_of,
    seconds_or_none,
    text_of,
)


def test_two_words_are_model_and_prompt_in_this_order(tmp_path: Path) -> None:
    assert model_and_prompt(["missing.gguf", "b.gguf"], None) == ("missing.gguf", "b.gguf")
    file = tmp_path / "no ending"
    file.touch()
    assert model_and_prompt([str(file), "a prompt"], None) == (str(file), "a prompt")


def test_two_words_of_a_prompt_are_told_to_be_quoted() -> None:
    with pytest.raises(typer.BadParameter, match="Quote a prompt"):
        model_and_prompt(["hi", "there"], None)


def test_no_word_is_neither() -> None:
    assert model_and_prompt([], None) == (None, None)


@pytest.mark.parametrize("word", ["m.gguf", "dir/m.GGUF", "~/m.gguf"])
def test_one_word_that_ends_in_gguf_is_the_model(word: str) -> None:
    assert model_and_prompt([word], None) == (word, None)


def test_one_word_that_exists_is_the_model(tmp_path: Path) -> None:
    path = tmp_path / "weights of a model"
    path.touch()
    assert model_and_prompt([str(path)], None) == (str(path), None)


def test_an_existing_model_may_have_blanks_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a model.gguf"
    path.touch()
    assert model_and_prompt([str(path)], None) == (str(path), None)


@pytest.mark.parametrize("word", ["Why is the sky blue?", "gguf", "", "x" * 10_000, "a\0b", "m.gguf?"])
def test_any_other_word_is_the_prompt(word: str) -> None:
    assert model_and_prompt([word], None) == (None, word)


def test_a_sentence_that_ends_like_a_model_is_ambiguous() -> None:
    with pytest.raises(typer.BadParameter, match="could be a model or a prompt"):
        model_and_prompt(["where is m.gguf"], None)


def test_with_the_model_named_the_word_is_the_prompt() -> None:
    assert model_and_prompt(["where is m.gguf"], "m.gguf") == ("m.gguf", "where is m.gguf")
    assert model_and_prompt([], "m.gguf") == ("m.gguf", None)
    with pytest.raises(typer.BadParameter, match="given twice"):
        model_and_prompt(["m.gguf", "hi"], "m.gguf")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("none", None), (" None ", None), ("0", None), ("0.0", None), ("1.5", 1.5), ("1e3", 1000.0)],
)
def test_seconds(text: str, seconds: float | None) -> None:
    assert seconds_or_none("--queue-timeout", text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1s", "1,5"])
def test_what_is_no_number_of_seconds_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--queue-timeout: "):
        seconds_or_none("--queue-timeout", text)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("x=1", 1),
        ("x=0.5", 0.5),
        ("x=true", True),
        ("x=null", None),
        ('x=["a", {"b": 1}]', ["a", {"b": 1}]),
        ('x="1"', "1"),
        ("x=echo", "echo"),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=NaN", "NaN"),
        ("x=[1", "[1"),
        ("x=" + "[" * 100_000, "[" * 100_000),
    ],
)
def test_an_engine_option_is_json_or_else_text(given: str, value: object) -> None:
    assert engine_options([given]) == {"x": value}


@pytest.mark.parametrize("given", ["", "x", "=1"])
def test_an_engine_option_needs_a_name_and_a_value(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="name=value"):
        engine_options([given])


def test_flags_of_the_llama_engine_become_its_options() -> None:
    assert llama_options("llama", 512, 2, -1) == {
        "n_ctx": 512,
        "threads": 2,
        "threads_batch": 2,
        "n_gpu_layers": -1,
    }
    assert llama_options("llama", None, None, None) == {}
    assert llama_options("scripted", None, None, None) == {}
    with pytest.raises(typer.BadParameter, match="give scripted its options with -o"):
        llama_options("scripted", 512, None, None)


def test_text_of_an_argument_is_utf_8() -> None:
    assert text_of("né 🦙", "the prompt") == "né 🦙"
    with pytest.raises(typer.BadParameter, match="the prompt isn't valid UTF-8: byte FF at offset 1"):
        text_of("a\udcff", "the prompt")


# --- prompts by flags ------------------------------------------------------------------------------


def test_beside_prompts_the_only_argument_is_the_model(tmp_path: Path) -> None:
    assert model_beside_prompts([], None) is None
    assert model_beside_prompts([], "m.gguf") == "m.gguf"
    assert model_beside_prompts(["m.gguf"], None) == "m.gguf"
    assert model_beside_prompts([str(tmp_path)], None) == str(tmp_path)
    for words, model, why in (
        (["hi"], None, "give each prompt with --prompt"),
        (["m.gguf", "hi"], None, "the only argument is the model"),
        (["m.gguf"], "n.gguf", "leave the argument out"),
    ):
        with pytest.raises(typer.BadParameter, match=why):
            model_beside_prompts(words, model)


def test_prompts_are_the_lines_of_a_file_that_are_not_blank(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes("one\r\n\n  \nzwei Wörter\u2028ein Prompt\nthree".encode())
    prompts = prompts_of((), str(file), has_input=False, most=8)
    assert prompts == ["one", "zwei Wörter\u2028ein Prompt", "three"]


def test_prompts_that_are_none_or_too_many_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n\n")
    for given, path, why in (
        (["a", ""], None, "a prompt is empty"),
        (["a"], str(file), "leave one of the two out"),
        ([], str(file), "has no line with a prompt"),
        ([], str(tmp_path / "missing"), "--prompts: .*missing.* there is no such file"),
        ([], str(tmp_path), "--prompts: .* can't be read"),
        ([], "-", "nothing on standard input"),
        (["a"] * 9, None, "9 prompts; at most 8"),
    ):
        with pytest.raises(typer.BadParameter, match=why):
            prompts_of(given, path, has_input=False, most=8)


# --- adapters and the form of an answer ------------------------------------------------------------


def test_an_adapter_has_a_path_and_perhaps_a_scale(tmp_path: Path) -> None:
    odd = tmp_path / "a=1"
    odd.touch()
    given = [f"{tmp_path}/a.gguf", f"{tmp_path}/b=c.gguf", f"{tmp_path}/d.gguf=-0.5", str(odd)]
    assert llama_options("llama", None, None, None, lora=given, prefix_reuse=False) == {
        "lora": [
            {"path": f"{tmp_path}/a.gguf"},
            {"path": f"{tmp_path}/b=c.gguf"},
            {"path": f"{tmp_path}/d.gguf", "scale": -0.5},
            {"path": str(odd)},
        ],
        "prefix_reuse": False,
    }
    with pytest.raises(typer.BadParameter, match="--lora: the scale"):
        llama_options("llama", None, None, None, lora=["a.gguf=nan"])
    with pytest.raises(typer.BadParameter, match="give scripted its options with -o"):
        llama_options("scripted", None, None, None, prefix_reuse=False)


def test_biases_are_numbers_by_token() -> None:
    assert logit_bias(["5=1.5", "7=-inf", "0=-100"]) == {5: 1.5, 7: -math.inf, 0: -100.0}
    for given in ("5", "5=", "=1", "the=1", "5=nan", "5=more"):
        with pytest.raises(typer.BadParameter, match="isn't of the form TOKEN=X"):
            logit_bias([given])
    with pytest.raises(typer.BadParameter, match="5 is given twice"):
        logit_bias(["5=1", "5=2"])


def _form(**given: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("grammar", "json_schema", "tools", "tool_choice"))
    return form(**{"wants_json": False, **nothing, **given})


def test_only_what_was_asked_for_is_passed_on(tmp_path: Path) -> None:
    assert _form() == {}
    assert _form(wants_json=True) == {"response_format": {"type": "json_object"}}
    assert _form(tool_choice="required") == {"tool_choice": "required"}
    assert _form(tool_choice="weather") == {
        "tool_choice": {"type": "function", "function": {"name": "weather"}}
    }


def test_a_schema_is_text_or_a_file_and_a_grammar_a_file(tmp_path: Path) -> None:
    file = tmp_path / "form"
    file.write_text('root ::= "é"\n')
    assert _form(grammar=str(file)) == {"grammar": 'root ::= "é"\n'}
    assert _form(json_schema=str(file)) == {"json_schema": 'root ::= "é"\n'}
    assert _form(json_schema=' {"type": "object"}') == {"json_schema": ' {"type": "object"}'}
    with pytest.raises(typer.BadParameter, match=r"no such file; a schema itself begins with {"):
        _form(json_schema="object")
    with pytest.raises(typer.BadParameter, match=r"--grammar: .*there is no such file"):
        _form(grammar=str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[{]", "isn't JSON"),
        ('{"type": "function"}', "must hold a list in JSON, not dict"),
        ("[" * 100_000, "values too deep"),
    ],
)
def test_a_file_of_tools_that_can_not_be_read_is_refused(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(content)
    with pytest.raises(typer.BadParameter, match=why):
        _form(tools=str(file))
    file.write_text('[{"type": "function"}]')
    assert _form(tools=str(file)) == {"tools": [{"type": "function"}]}
