"""From the words of a command line to values. Every refusal is a `typer.BadParameter`: exit code 2.

Texts are UTF-8 whatever the locale: they are taken from the raw bytes of the arguments.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Sequence
from typing import Any

import typer

MAX_STDIN_BYTES = 16 << 20
"""More doesn't fit a request; so an endless input is refused instead of read for ever."""


def text_of(argument: str, name: str) -> str:
    """Return an argument as the text that its bytes are in UTF-8."""
    return _decoded(os.fsencode(argument), name)


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{name} isn't valid UTF-8: byte {raw[error.start]:02X} at offset {error.start}"
        ) from None


def _shown(word: str) -> str:
    return repr(os.fsencode(word).decode(errors="backslashreplace"))


def model_and_prompt(words: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    """Tell model and prompt apart among up to two positional words and the value of `--model`.

    A single word is the model if it ends in .gguf or names something that exists, otherwise the prompt.
    """
    if model is not None:
        if len(words) > 1:
            raise typer.BadParameter("the model is given twice: as an argument and with --model")
        return model, words[0] if words else None
    if len(words) == 2:
        if not words[0].lower().endswith(".gguf") and not _exists(words[0]):
            raise typer.BadParameter(
                f"{_shown(words[0])} is no model: there is no such file. Quote a prompt of several words, "
                "or name the model with --model"
            )
        return words[0], words[1]
    if not words:
        return None, None
    word = words[0]
    exists = _exists(word)
    if word.lower().endswith(".gguf"):
        if not exists and any(character.isspace() for character in word):
            raise typer.BadParameter(
                f"{_shown(word)} could be a model or a prompt: name the model with --model, or give both"
            )
        return word, None
    return (word, None) if exists else (None, word)


def _exists(word: str) -> bool:
    try:
        return os.path.exists(os.fsencode(os.path.expanduser(word)))
    except (OSError, ValueError):
        return False  # too long, or with a NUL: no path


def prompt_of(word: str | None, *, model: str | None, has_input: bool, raw: bool) -> str:
    """Return the prompt: the argument, or else all of standard input if that isn't a terminal.

    The line end that `echo` adds is taken off, but not from a raw prompt, which is continued as it is.
    """
    if word is not None:
        prompt, source = text_of(word, "the prompt"), "the prompt"
    else:
        taken = "" if model is None else f" ({_shown(model)} was taken as the model)"
        if not has_input or os.isatty(0):
            raise typer.BadParameter(f"no prompt{taken}: give one as an argument or on standard input")
        prompt, source = _decoded(_read_stdin(), "standard input"), f"standard input{taken}"
        prompt = prompt if raw else prompt.removesuffix("\n")
    if not prompt:
        raise typer.BadParameter(f"{source} is empty: there is nothing to answer")
    return prompt


def _read_stdin() -> bytes:
    pieces: list[bytes] = []
    size = 0
    while size <= MAX_STDIN_BYTES:
        try:
            piece = os.read(0, 1 << 16)
        except BlockingIOError:
            # Another process has made the stream that we share with it non-blocking.
            select.select([0], [], [])
            continue
        except OSError as error:
            raise typer.BadParameter(f"standard input can't be read: {error.strerror}") from None
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    raise typer.BadParameter(f"standard input holds more than {MAX_STDIN_BYTES >> 20} MiB")


def seconds_or_none(flag: str, text: str) -> float | None:
    """Return the seconds of a flag; 0 and "none" are no limit."""
    if text.strip().lower() == "none":
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise typer.BadParameter(f"{flag}: {text!r} is neither a number of seconds nor none") from None
    return seconds or None


def engine_options(given: Sequence[str]) -> dict[str, Any]:
    """Return the options of `-o name=value`: JSON values, or else the text as it is."""
    options: dict[str, Any] = {}
    for entry in given:
        name, equals, value = text_of(entry, "an engine option").partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{entry!r} isn't of the form name=value")
        try:
            options[name] = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            options[name] = value
    return options


def llama_options(
    engine: str, ctx: int | None, threads: int | None, gpu_layers: int | None
) -> dict[str, Any]:
    """Return the llama engine's options that have flags of their own."""
    given = {
        "n_ctx": ctx,
        "threads": threads,
        "threads_batch": threads,
        "n_gpu_layers": gpu_layers,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if options and engine != "llama":
        raise typer.BadParameter(
            f"--ctx, --threads and --gpu-layers are the llama engine's; give {engine} its options with -o"
        )
    return options


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def model_path(model: str | None, engine: str) -> str | None:
    """Return the model's absolute path as text, or the embedded default's path if the llama engine has none."""
    if model is not None:
        # Made absolute as bytes: under an ASCII locale a directory's name is no text to Python.
        path = os.path.abspath(os.path.expanduser(os.fsencode(model)))
        return _decoded(path, "the path of the model")
    if engine != "llama":
        return None
    from infervisor import ConfigurationError, default_model

    try:
        return os.fspath(default_model())
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
