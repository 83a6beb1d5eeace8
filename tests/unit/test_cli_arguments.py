"""From words to values: which word is the model, what is a prompt, which options are meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from infervisor.supervisor.cli.arguments import (
    engine_options,
    llama_options,
    model_and_prompt,
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
