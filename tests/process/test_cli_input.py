"""Where a prompt comes from, what is refused before anything is started, and each exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command_line import ASCII_LOCALE, COMMAND, environment, scripted, supervise

ECHO = scripted(mode="echo")


def _refused(done: subprocess.CompletedProcess[bytes], *words: str) -> None:
    """Check for a usage error that names `words` and started nothing."""
    told = done.stderr.decode()
    assert done.returncode == 2, told
    assert done.stdout == b""
    for word in words:
        assert word in told
    assert "WorkerSpawned" not in told
    assert "Traceback" not in told


# --- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_comes_from_standard_input_without_its_last_line_end() -> None:
    done = supervise("run", *ECHO, stdin="zwei Wörter\n".encode())
    assert (done.returncode, done.stdout) == (0, "zwei Wörter".encode())


def test_a_large_prompt_arrives_whole() -> None:
    prompt = b" ".join(b"w%d" % number for number in range(12_000))
    assert len(prompt) > 1 << 16
    done = supervise("run", *ECHO, "--quiet", stdin=prompt)
    assert done.stdout == prompt


def test_standard_input_is_left_alone_when_the_prompt_is_an_argument() -> None:
    ours, theirs = os.pipe()
    try:
        os.write(theirs, b"for somebody else")
        done = supervise("run", *ECHO, "hi", stdin=ours)
        assert (done.returncode, done.stdout) == (0, b"hi")
        assert os.read(ours, 100) == b"for somebody else"
    finally:
        os.close(ours)
        os.close(theirs)


def test_closed_standard_input_is_no_prompt() -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "run", *ECHO, "-v"]
    _refused(subprocess.run(command, capture_output=True, timeout=60, check=False), "no prompt")


@pytest.mark.parametrize("empty", [b"", b"\n"])
def test_empty_standard_input_is_no_prompt(empty: bytes) -> None:
    _refused(supervise("run", *ECHO, "-v", stdin=empty), "standard input is empty")


def test_bytes_that_are_no_text_are_refused_before_a_worker_is_started() -> None:
    _refused(supervise("run", *ECHO, "-v", b"a\xff"), "the prompt isn't valid UTF-8", "byte FF at offset 1")
    _refused(supervise("run", *ECHO, "-v", stdin=b"ab\xe6\xad"), "standard input isn't valid UTF-8")
    _refused(supervise("run", *ECHO, "-v", "--stop", b"\xff", "hi"), "a stop string isn't valid UTF-8")
    _refused(supervise("run", *ECHO, "-v", "--system", b"\xff", "hi"), "the system message")
    _refused(supervise("run", "-v", b"\xff.gguf", "hi"), "the path of the model isn't valid UTF-8")


def test_a_word_that_was_taken_as_the_model_is_named_when_the_prompt_is_missing(tmp_path: Path) -> None:
    _refused(supervise("run", *ECHO, "-v", str(tmp_path)), "was taken as the model", tmp_path.name)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nonsense", "hi"], "No such option"),
        (["--queue-timeout", "soon", "hi"], "neither a number of seconds nor none"),
        (["--total-timeout", "-1", "hi"], "deadlines.total_s must be more than 0"),
        (["-o", "pace", "hi"], "isn't of the form name=value"),
        (["--ctx", "512", "hi"], "--no-prefix-reuse are the llama engine's"),
        (["--raw", "--system", "Be brief.", "hi"], "--system needs the chat template"),
        (["m.gguf", "one", "two"], "at most two arguments"),
        (["--model", "m.gguf", "n.gguf", "hi"], "the model is given twice"),
        (["what is model.gguf"], "could be a model or a prompt"),
        (["-p", "one", "two"], "give each prompt with --prompt"),
        (["-p", "one", "--prompts", "file"], "leave one of the two out"),
        (["--prompts", "/nonexistent/file"], "there is no such file"),
        (["--prompts", "-"], "has no line with a prompt"),
        ([*["-p", "one"] * 9], "at most 8 are answered side by side"),
        (["--n", "2", "-p", "one", "-p", "two"], "--n is for one prompt"),
        (["--n", "9", "hi"], "Invalid value for '--n'"),
        (["--raw", "--tools", "file", "hi"], "--tools needs the chat template"),
        (["--grammar", "/nonexistent/file", "hi"], "--grammar: '/nonexistent/file': there is no such file"),
        (["--json-schema", "object", "hi"], "a schema itself begins with {"),
        (["--logit-bias", "the=5", "hi"], "isn't of the form TOKEN=X"),
        (["--slots", "0", "hi"], "Invalid value for '--slots'"),
        (["-o", "slots=2", "--slots", "3", "hi"], "slots"),
        (["--step-budget-ms", "0", "hi"], "step_budget_s"),
        (["--lora", "a.gguf", "hi"], "--lora and --no-prefix-reuse are the llama engine's"),
        (["--window", "0", "hi"], "window must be a whole number"),
        (["--max-tokens", "2.5", "hi"], "Invalid value for '--max-tokens'"),
        (["--seed", "1.5", "hi"], "Invalid value for '--seed'"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], word: str) -> None:
    _refused(supervise("run", *ECHO, "-v", *arguments), word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--temperature", "1000"], "temperature must be between"),
        (["--seed", "4294967296"], "seed must be between"),
        (["--seed", "18446744073709551616"], "seed must be between"),
        (["--seed", "-1"], "seed must be between"),
        (["--max-tokens", "0"], "max_tokens must be between"),
        (["--max-tokens", "-1"], "max_tokens must be between"),
        (["--stop", ""], "stop holds an empty string"),
        (["--logit-bias", "5=101"], "logit_bias value must be between"),
        (["--top-logprobs", "21"], "top_logprobs must be between"),
        (["--priority", "101"], "priority must be between"),
        (["--json-schema", "{"], "json_schema is not JSON"),
        (["--json-schema", '{"type": "nonsense"}'], "json_schema"),
        (["--json-schema", "{}", "--response-format", "json"], "response_format"),
        (["--tool-choice", "required"], "tool_choice is required, and there are no tools"),
        (["--tool-choice", "weather"], "tool_choice names 'weather', which isn't a tool"),
    ],
)
def test_a_setting_out_of_range_is_a_usage_error_before_the_load(arguments: list[str], word: str) -> None:
    done = supervise("run", *scripted(load_s=600), *arguments, "hi")
    assert (done.returncode, done.stdout) == (2, b"")
    assert word in done.stderr.decode()


# --- exit codes ------------------------------------------------------------------------------------

RAISE = {"at": "decode", "kind": "raise", "after": 2}
ABORT = {"at": "decode", "kind": "abort", "after": 2}
REFUSE = {"at": "load", "kind": "load_refused", "message": "it doesn't fit"}


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([*scripted(text="yes")], 0, "stop"),
        ([*scripted(), "--max-tokens", "3"], 0, "length"),
        ([*scripted(), "--stop", "w3"], 0, "stop_sequence"),
        ([*scripted(context_tokens=8)], 0, "context_full"),
        ([*scripted(context_tokens=2)], 3, "invalid_request: the prompt has 3 tokens"),
        ([*scripted(prefill_s=600), "--first-token-timeout", "0.2"], 4, "first_token_timeout"),
        ([*scripted(pace_s=0.01), "--total-timeout", "0.3"], 4, "total_timeout"),
        ([*scripted(load_s=600, load_steps=1), "--startup-timeout", "0.5"], 4, "no progress"),
        ([*scripted(faults=[RAISE])], 5, "engine_error"),
        ([*scripted(faults=[ABORT])], 5, "SIGABRT"),
        ([*scripted(faults=[REFUSE])], 6, "it doesn't fit"),
        (["--engine", "nonsense"], 6, "there is no engine"),
        ([*scripted(), "--python", "/nonexistent/python"], 6, "could not be started"),
    ],
)
def test_every_kind_of_end_has_its_exit_code(arguments: list[str], code: int, word: str) -> None:
    done = supervise("run", *arguments, "a short prompt")
    told = done.stderr.decode()
    assert done.returncode == code, told
    assert word in told
    assert "Traceback" not in told


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_path_is_utf_8_whatever_the_locale(tmp_path: Path, is_relative: bool) -> None:
    folder = tmp_path / "d ié 模型"
    folder.mkdir()
    (folder / "m 🦙.gguf").write_bytes(LFS_POINTER)
    path = "m 🦙.gguf" if is_relative else str(folder / "m 🦙.gguf")
    done = supervise("run", path, "hi", cwd=folder, env=environment(**ASCII_LOCALE))
    assert done.returncode == 6, done.stderr.decode()
    assert f"{folder}/m 🦙.gguf is a Git LFS pointer" in done.stderr.decode()


def test_a_model_that_may_not_be_read_is_told_apart_from_a_bad_one(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    path = folder / "m.gguf"
    path.write_bytes(LFS_POINTER)
    # Who may read everything is held to the rights, too.
    held = ("setpriv", "--inh-caps", WITHOUT_RIGHTS, "--bounding-set", WITHOUT_RIGHTS)
    prefix = held if os.geteuid() == 0 else ()
    if prefix and (
        shutil.which("setpriv") is None or subprocess.run([*held, "true"], check=False).returncode
    ):
        pytest.skip("the superuser may read everything")
    for locked in (path, folder):
        locked.chmod(0)
        done = subprocess.run(
            [*prefix, *COMMAND, "run", str(path), "hi"], capture_output=True, timeout=60, check=False
        )
        locked.chmod(0o700)
        assert done.returncode == 6, done.stderr.decode()
        assert f"{path} can't be read: permission denied" in done.stderr.decode()


def test_the_home_directory_is_expanded(tmp_path: Path) -> None:
    done = supervise("run", "~/m.gguf", "hi", env=environment(HOME=str(tmp_path)))
    assert done.returncode == 6
    assert f"there is no file {tmp_path}/m.gguf" in done.stderr.decode()


# --- files that are no models ----------------------------------------------------------------------

WITHOUT_RIGHTS = "-dac_override,-dac_read_search"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4368438944\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file"),
        (LFS_POINTER, "is a Git LFS pointer, not the model"),
        (b"<!doctype html><title>A model</title>", "is a saved web page, not a model"),
        (b"\x1b[2J\x07 no model", "is not a GGUF file"),
    ],
)
@pytest.mark.parametrize("command", ["run", "probe"])
def test_a_file_that_is_no_model_is_told_what_it_is(
    tmp_path: Path, command: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / "the \x1b[31mmodel.gguf"
    if content is not None:
        path.write_bytes(content)
    done = supervise(command, str(path), *(["hi"] if command == "run" else []))
    told = (done.stdout + done.stderr).decode()
    assert done.returncode == 6, told
    assert words in told
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "Traceback" not in told
