"""What `supervise run` writes where, to whom, and what it does when nobody reads."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command_line import (
    ASCII_LOCALE,
    COMMAND,
    assert_gone,
    environment,
    running,
    scripted,
    supervise,
)
from tests.helpers.models import EMOJI, build_model

LLAMA = "\N{LLAMA}"
LLAMA_BYTES = bytes((0xF0, 0x9F, 0xA6, 0x99))


def test_the_answer_stands_alone_on_stdout_and_one_report_line_on_stderr() -> None:
    done = supervise("run", *scripted(text="hello, world"), "hi")
    assert done.returncode == 0
    assert done.stdout == b"hello, world"
    (line,) = done.stderr.decode().splitlines()
    assert re.fullmatch(
        r"queued .+ · first token .+ · last token .+ · released .+ · .+ tokens/s · 2 tokens · stop", line
    )


def test_quiet_leaves_stderr_empty() -> None:
    done = supervise("run", *scripted(text="hello"), "--quiet", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hello", b"")


def test_a_pipe_gets_control_characters_unchanged() -> None:
    done = supervise("run", *scripted(text="\x1b[2Jred\x07", split="characters"), "hi")
    assert done.stdout == b"\x1b[2Jred\x07"


def test_json_lines_tell_progress_then_tokens_then_one_report() -> None:
    done = supervise("run", *scripted(text="one two three"), "--json", "hi")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds == sorted(kinds, key=["progress", "token", "report"].index)
    assert kinds.count("report") == 1
    assert {line["phase"] for line in lines if line["type"] == "progress"} == {"import", "load", "warm_up"}
    tokens = [line for line in lines if line["type"] == "token"]
    assert "".join(token["text"] for token in tokens) == "one two three"
    assert [token["index"] for token in tokens] == [0, 1, 2]
    report = lines[-1]
    assert (report["end_reason"], report["exit_code"]) == ("stop", 0)
    assert report["usage"]["completion_tokens"] == 3
    assert report["time_points_ns"]["released"] is not None
    assert done.stderr == b""


def test_no_character_of_an_answer_can_break_a_json_line() -> None:
    text = "a\u2028b\u0085c\r\nd\x1be" + LLAMA
    done = supervise("run", *scripted(text=text, split="characters"), "--json", "hi")
    assert done.stdout.isascii()
    assert b"\x1b" not in done.stdout
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert "".join(line["text"] for line in lines if line["type"] == "token") == text


def test_a_failed_load_is_the_last_json_line() -> None:
    done = supervise("run", *scripted(nonsense=1), "--json", "hi")
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["type"], last["code"], last["exit_code"], done.returncode) == ("error", "bad_option", 6, 6)
    assert "nonsense" in last["message"]


def test_verbose_tells_every_event_on_stderr() -> None:
    done = supervise("run", *scripted(text="hello"), "--verbose", "hi")
    told = done.stderr.decode()
    for event in ("WorkerSpawned", "LoadProgress", "WorkerBecameReady", "RequestReleased", "WorkerExited"):
        assert event in told
    assert done.stdout == b"hello"


@pytest.mark.parametrize("split", ["words", "bytes"])
def test_an_answer_is_utf_8_whatever_the_locale(split: str) -> None:
    done = supervise("run", *scripted(text=LLAMA, split=split), "hi", env=environment(**ASCII_LOCALE))
    assert done.returncode == 0
    assert done.stdout == LLAMA_BYTES


def test_a_models_answer_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    folder = tmp_path / "d ié 模型"
    folder.mkdir()
    path = build_model(folder / f"m {LLAMA}.gguf", EMOJI)
    done = supervise("run", "-q", str(path), "hi", env=environment(**ASCII_LOCALE, TMPDIR=str(folder)))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == LLAMA_BYTES


def test_a_prompt_is_utf_8_whatever_the_locale() -> None:
    prompt = f"né {LLAMA}"
    done = supervise("run", *scripted(mode="echo"), prompt, env=environment(**ASCII_LOCALE))
    assert done.returncode == 0
    assert done.stdout == prompt.encode()


def test_help_and_version_work_in_an_ascii_locale_too() -> None:
    done = supervise("run", "--help", env=environment(**ASCII_LOCALE))
    assert done.returncode == 0
    assert b"141  whoever read the output is gone" in done.stdout
    assert supervise("--version").stdout.startswith(b"supervise ")


# --- nobody reads ----------------------------------------------------------------------------------


def test_a_reader_that_leaves_stops_it_quietly() -> None:
    with running("run", *scripted(pace_s=0.001), "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", "w0")
        command.close_stdout()
        assert command.finish() == 141
    assert b"Traceback" not in command.err
    assert b"supervise: " not in command.err
    assert "client_disconnected" in command.report
    assert_gone(pid)


def test_a_reader_that_leaves_is_noticed_while_the_prompt_is_still_being_read() -> None:
    with running("run", *scripted(prefill_s=600), "-v", "hi") as command:
        command.read_until("err", "RequestQueued")
        command.close_stdout()
        assert command.finish() == 141
    assert "0 tokens · client_disconnected" in command.report


def test_a_reader_that_leaves_during_the_load_ends_it() -> None:
    with running("run", *scripted(load_s=600), "-v", "hi") as command:
        command.read_until("err", "LoadProgress")
        command.close_stdout()
        assert command.finish() == 141


def test_a_reader_that_stops_holds_the_worker_back_and_a_deadline_still_ends_it() -> None:
    window = 4
    with running("run", *scripted(), "--window", str(window), "--consumer-timeout", "1", "hi") as command:
        assert command.process.stdout is not None
        fcntl.fcntl(command.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        # Its answer never ends and nothing reads it: only the deadline can end this.
        command.read_until("err", "consumer_timeout\n")
        assert command.finish() == 4
    received = int(re.search(r"(\d+) tokens · consumer_timeout", command.report)[1])  # type: ignore[index]
    written = len(command.out.split())
    # One more may be taken and on its way into the pipe.
    assert written - 1 <= received <= written + window + 1


def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "wb") as full:
        done = supervise("run", *scripted(text="hello"), "hi", stdout=full)
    assert done.returncode == 74
    assert b"No space left on device" in done.stderr


# --- closed streams --------------------------------------------------------------------------------


def _with_redirections(redirections: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    shell = f'exec "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", shell, "sh", *COMMAND, *arguments], capture_output=True, timeout=60, check=False
    )


def test_it_works_with_all_standard_streams_closed() -> None:
    done = _with_redirections("<&- >&- 2>&-", "run", *scripted(text="hello"), "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_with_stdout_closed_the_report_is_still_told() -> None:
    done = _with_redirections(">&-", "run", *scripted(text="hello"), "hi")
    assert done.returncode == 0
    assert b"stop" in done.stderr


def test_with_stderr_closed_nothing_else_gets_into_the_answer(tmp_path: Path) -> None:
    flood = [{"at": "decode", "kind": "flood_stderr", "bytes": 100_000}]
    done = _with_redirections("2>&-", "run", *scripted(text="hello", faults=flood), "-v", "hi")
    assert (done.returncode, done.stdout) == (0, b"hello")


def test_closed_streams_are_replaced_so_that_nothing_else_gets_their_numbers(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = (
        "import os; from infervisor.supervisor.cli.terminal import repair_standard_streams as repair;"
        "had_input = repair(); targets = [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)];"
        f"open({str(told)!r}, 'w').write(f'{{had_input}} {{targets}}')"
    )
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    subprocess.run(shell, timeout=60, check=True)
    assert told.read_text() == f"False {['/dev/null'] * 3}"


def test_the_help_loads_neither_an_event_loop_nor_psutil() -> None:
    program = (
        "import sys, infervisor.supervisor.cli.app;"
        "print([m for m in ('anyio', 'asyncio', 'psutil', 'msgpack', 'llama_cpp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"[]\n" or os.environ.get("COVERAGE_PROCESS_START")
