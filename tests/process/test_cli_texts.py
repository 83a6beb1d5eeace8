"""`supervise embed`, `tokenize` and `count`: where texts come from, what is refused, and each exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command_line import assert_gone, running, scripted, supervise


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["embed"], "no line holds one"),
        (["embed", "a", ""], "a text is empty"),
        (["embed", "a", "--file", "b"], "leave one of the two out"),
        (["embed", "--file", "/nonexistent/file"], "there is no such file"),
        (["embed", "--format", "xml", "a"], "Invalid value for '--format'"),
        (["embed", "-o", "slots", "a"], "isn't of the form name=value"),
        (["tokenize"], "standard input is empty"),
        (["tokenize", "one", "two"], "unexpected extra argument"),
        (["count"], "standard input is empty"),
        (["count", "a", "--messages", "b"], "give a text or --messages, not both"),
        (["count", "--messages", "/nonexistent/file"], "there is no such file"),
        (["count", "--messages", "-"], "isn't JSON"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error_that_starts_nothing(arguments: list[str], word: str) -> None:
    done = supervise(*arguments, *scripted(load_s=600), "-v")
    told = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b""), told
    assert word in told
    assert "WorkerSpawned" not in told
    assert "Traceback" not in told


def test_messages_that_are_none_are_refused_before_the_load(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "user"}]')
    done = supervise("count", *scripted(load_s=600), "--messages", str(file))
    assert done.returncode == 2
    assert "messages[0].content is missing" in done.stderr.decode()


@pytest.mark.parametrize("command", ["embed", "tokenize", "count"])
def test_an_engine_that_can_not_do_it_refuses(command: str) -> None:
    done = supervise(command, *scripted(), "hi")
    assert (done.returncode, done.stdout) == (3, b"")
    assert "supervise: invalid_request: " in done.stderr.decode()


@pytest.mark.parametrize(
    ("options", "code"),
    [({"nonsense": 1}, 6), ({"faults": [{"at": "load", "kind": "abort"}]}, 6)],
)
def test_a_load_that_fails_has_its_exit_code(options: dict[str, object], code: int) -> None:
    done = supervise("tokenize", *scripted(**options), "hi")
    assert (done.returncode, done.stdout) == (code, b"")
    assert b"supervise: " in done.stderr


def test_ctrl_c_during_the_load_ends_it() -> None:
    with running("embed", *scripted(load_s=600), "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("err", "phase=load")
        command.interrupt()
        assert command.finish() == 130
    assert b"Traceback" not in command.err
    assert_gone(pid)


def test_a_reader_that_leaves_during_the_load_ends_it() -> None:
    with running("count", *scripted(load_s=600), "-v", "hi") as command:
        command.read_until("err", "phase=load")
        command.close_stdout()
        assert command.finish() == 141
