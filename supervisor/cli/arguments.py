"""From the words of a command line to values. Every refusal is a `typer.BadParameter`: exit code 2.

Texts are UTF-8 whatever the locale: they are taken from the raw bytes of the arguments.
"""

from __future__ import annotations

import contextlib
import json
import math
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
    if len(words) > 2:
        raise typer.BadParameter("at most two arguments, MODEL and PROMPT: quote a prompt of several words")
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


def prompt_of(
    word: str | None, *, model: str | None, has_input: bool, raw: bool, name: str = "prompt"
) -> str:
    """Return the prompt, or what else `name` says: the argument, or all of standard input if that isn't a terminal.

    The line end that `echo` adds is taken off, but not from a raw prompt, which is continued as it is.
    """
    if word is not None:
        prompt, source = text_of(word, f"the {name}"), f"the {name}"
    else:
        taken = "" if model is None else f" ({_shown(model)} was taken as the model)"
        if not has_input or os.isatty(0):
            raise typer.BadParameter(f"no {name}{taken}: give one as an argument or on standard input")
        prompt, source = _decoded(_read_stdin(), "standard input"), f"standard input{taken}"
        prompt = prompt if raw else prompt.removesuffix("\n")
    if not prompt:
        raise typer.BadParameter(
            f"{source} is empty: there is nothing to {'answer' if name == 'prompt' else 'look at'}"
        )
    return prompt


def _read_stdin() -> bytes:
    return _read(0, "standard input")


def _read(fd: int, source: str) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while size <= MAX_STDIN_BYTES:
        try:
            piece = os.read(fd, 1 << 16)
        except BlockingIOError:
            # Another process has made the stream that we share with it non-blocking.
            select.select([fd], [], [])
            continue
        except OSError as error:
            raise typer.BadParameter(f"{source} can't be read: {error.strerror}") from None
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    raise typer.BadParameter(f"{source} holds more than {MAX_STDIN_BYTES >> 20} MiB")


def file_text(path: str, flag: str, *, has_input: bool = False, hint: str = "") -> str:
    """Return what a file holds, UTF-8. has_input: whether - may be standard input. hint: after "no such file"."""
    if path == "-":
        if not has_input or os.isatty(0):
            raise typer.BadParameter(
                f"{flag}: there is nothing on standard input: pipe it in, or name a file"
            )
        return _decoded(_read_stdin(), "standard input")
    source = f"{flag}: {_shown(path)}"
    try:
        fd = os.open(os.path.expanduser(os.fsencode(path)), os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = getattr(error, "strerror", None) or str(error)
        raise typer.BadParameter(
            f"{source}: there is no such file{hint}" if missing else f"{source} can't be read: {why}"
        ) from None
    try:
        return _decoded(_read(fd, source), source)
    finally:
        os.close(fd)


def lines_of(path: str, flag: str, *, has_input: bool) -> list[str]:
    """Return the lines of a file or of standard input that aren't blank."""
    # Not splitlines: U+2028 and the like may stand in a text.
    lines = file_text(path, flag, has_input=has_input).split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip()]


def model_beside_prompts(words: Sequence[str], model: str | None) -> str | None:
    """Return the model where prompts are given by flags: the only argument, or the value of `--model`."""
    if not words:
        return model
    if model is not None:
        raise typer.BadParameter(
            "the model is given by --model and prompts by --prompt or --prompts: leave the argument out"
        )
    word = words[0]
    if len(words) > 1 or not (word.lower().endswith(".gguf") or _exists(word)):
        shown = ", ".join(map(_shown, words))
        raise typer.BadParameter(
            f"beside --prompt or --prompts the only argument is the model, not {shown}: "
            "give each prompt with --prompt"
        )
    return word


def prompts_of(given: Sequence[str], file: str | None, *, has_input: bool, most: int) -> list[str]:
    """Return the prompts of `--prompt`, or of the lines of a file."""
    if given and file is not None:
        raise typer.BadParameter("prompts are given with --prompt and --prompts: leave one of the two out")
    if file is None:
        prompts = [text_of(text, "a prompt") for text in given]
        if not all(prompts):
            raise typer.BadParameter("--prompt: a prompt is empty: there is nothing to answer")
    else:
        prompts = lines_of(file, "--prompts", has_input=has_input)
        if not prompts:
            raise typer.BadParameter(f"--prompts: {_shown(file)} has no line with a prompt")
    if len(prompts) > most:
        raise typer.BadParameter(
            f"{len(prompts)} prompts; at most {most} are answered side by side: ask in several runs"
        )
    return prompts


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
    engine: str,
    ctx: int | None,
    threads: int | None,
    gpu_layers: int | None,
    *,
    lora: Sequence[str] = (),
    prefix_reuse: bool = True,
) -> dict[str, Any]:
    """Return the llama engine's options that have flags of their own."""
    given = {
        "n_ctx": ctx,
        "threads": threads,
        "threads_batch": threads,
        "n_gpu_layers": gpu_layers,
        "lora": [_adapter(word) for word in lora] or None,
        "prefix_reuse": None if prefix_reuse else False,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if options and engine != "llama":
        raise typer.BadParameter(
            "--ctx, --threads, --gpu-layers, --lora and --no-prefix-reuse are the llama engine's; "
            f"give {engine} its options with -o"
        )
    return options


def _adapter(word: str) -> dict[str, Any]:
    """Return the adapter of `PATH[=SCALE]`. What exists as a file is a path, whatever it looks like."""
    path, equals, end = word.rpartition("=")
    scale = None
    if equals and path and not _exists(word):
        with contextlib.suppress(ValueError):
            scale = float(end)
    if scale is None:
        return {"path": _absolute(word, "the path of an adapter")}
    if not math.isfinite(scale):
        raise typer.BadParameter(f"--lora: the scale of {_shown(word)} must be a number such as 0.5")
    return {"path": _absolute(path, "the path of an adapter"), "scale": scale}


def _absolute(path: str, name: str) -> str:
    # Made absolute as bytes: under an ASCII locale a directory's name is no text to Python.
    return _decoded(os.path.abspath(os.path.expanduser(os.fsencode(path))), name)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def model_path(model: str | None, engine: str) -> str | None:
    """Return the model's absolute path as text, or the embedded default's path if the llama engine has none."""
    if model is not None:
        return _absolute(model, "the path of the model")
    if engine != "llama":
        return None
    from infervisor import ConfigurationError, default_model

    try:
        return os.fspath(default_model())
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
