"""Several answers in one run: columns on a terminal, whole answers in order in a pipe, JSON that says whose."""

from __future__ import annotations

import fcntl
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.command_line import assert_gone, running, scripted, supervise
from tests.helpers.terminal import FOREGROUND, resize, terminal

FOUR = ("-p", "one", "-p", "two", "-p", "three", "-p", "four")
SIDE_BY_SIDE = (120, 24)
WORDS = " ".join(f"n{number}" for number in range(2000))


WIDE = "模型日本語のテキストはとても長いので折り返しが必要です🦙한국어"


def _prompts(*prompts: str) -> list[str]:
    return [word for prompt in prompts for word in ("-p", prompt)]


def _reports(told: str, count: int) -> list[str]:
    """Return the report lines, one for each answer and in their order."""
    lines = re.findall(r"^(\d): (queued .*)$", told, re.MULTILINE)
    assert [number for number, _ in lines] == [str(number) for number in range(1, count + 1)], told
    return [line for _, line in lines]


def _panels(screen: Sequence[str], first: str, beside: int) -> list[list[str]]:
    """Return the texts of the panels of one row; `first` is in the title of its first one."""
    (top,) = [index for index, line in enumerate(screen) if first in line and "╭" in line]
    panels: list[list[str]] = [[] for _ in range(beside)]
    for line in screen[top + 1 :]:
        if line.startswith("╰"):
            break
        parts = re.findall(r"│ (.*?) *│", line)
        assert len(parts) == beside, line
        for panel, part in zip(panels, parts, strict=True):
            panel.append(part)
    return panels


# --- on a terminal ---------------------------------------------------------------------------------


def test_four_prompts_are_answered_in_four_columns() -> None:
    slow = scripted(pace_s=0.005)
    with terminal(
        FOREGROUND, "run", *slow, "--slots", "4", *FOUR, "--max-tokens", "60", size=SIDE_BY_SIDE
    ) as shown:
        # All four are under way at once, and say how fast.
        shown.read_until(lambda: len(re.findall(r"╰─ [0-9.]+ tokens/s", "\n".join(shown.screen()))) == 4)
        assert shown.finish() == 0


def test_what_stays_on_the_terminal_is_all_of_every_answer_and_its_report() -> None:
    with terminal(FOREGROUND, "run", *scripted(), *FOUR, "--max-tokens", "300", size=SIDE_BY_SIDE) as shown:
        assert shown.finish() == 0
    panels = _panels(shown.screen(), "1: one", 4)
    whole = " ".join(f"w{number}" for number in range(300))
    assert [" ".join(panel) for panel in panels] == [whole] * 4
    assert all(line.endswith("300 tokens · length") for line in _reports("\n".join(shown.screen()), 4))


def test_a_narrow_terminal_stacks_the_columns() -> None:
    with terminal(FOREGROUND, "run", *scripted(), *FOUR, "--max-tokens", "20", size=(50, 40)) as shown:
        assert shown.finish() == 0
    screen = shown.screen()
    tops = [line for line in screen if line.startswith("╭")]
    assert [re.findall(r"\d: \w+", line) for line in tops] == [["1: one", "2: two"], ["3: three", "4: four"]]
    assert _panels(screen, "3: three", 2)[0][0] == "w0 w1 w2 w3 w4 w5 w6"


def test_wide_characters_do_not_move_the_edges_and_no_control_character_gets_through() -> None:
    text = (
        "日本語のテキストはとても長いので折り返しが必要です 🦙🦙 e\u0301 한국어\x1b]0;gotcha\x07 \x1b[2J\tend"
    )
    options = scripted(text=text, split="characters")
    with terminal(FOREGROUND, "run", *options, *_prompts("模型", "two"), size=(60, 24)) as shown:
        assert shown.finish() == 0
    assert b"\x1b]0;" not in shown.shown
    assert b"\x07" not in shown.shown
    assert b"\x1b[2J" not in shown.shown
    screen = shown.screen()
    framed = [line for line in screen if line[:1] in ("╭", "│", "╰")]
    assert len(framed) > 4
    # Cells of a line: each wide character is followed by nothing in its second cell.
    for line in framed:
        wide = sum(character in WIDE for character in line)
        marks = line.count("\u0301")
        assert len(line) + wide - marks == 60, line
    joined = "".join("".join(panel) for panel in _panels(screen, "1: 模型", 2)[:1]).replace(" ", "")
    assert joined == text.replace("\x1b", r"\x1b").replace("\x07", r"\x07").replace("\t", "").replace(" ", "")


def test_a_terminal_that_gets_another_size_is_drawn_anew() -> None:
    command = ("run", *scripted(pace_s=0.005), *FOUR)
    with terminal(FOREGROUND, *command, size=SIDE_BY_SIDE) as shown:
        shown.read_until(b"tokens/s")
        resize(shown.master, (50, 24))
        shown.read_until(b"\x1b[H\x1b[2J")
        shown.process.send_signal(signal.SIGINT)
        assert shown.finish() == 130
    assert max(map(len, (line for line in shown.screen() if line.startswith(("╭", "╰"))))) == 50


def test_ctrl_c_cancels_all_of_them() -> None:
    # Sent, not typed: a terminal throws away what it hasn't shown yet when Ctrl-C is typed.
    with terminal(FOREGROUND, "run", *scripted(pace_s=0.005), *FOUR, size=SIDE_BY_SIDE) as shown:
        shown.read_until(b"w3")
        shown.process.send_signal(signal.SIGINT)
        assert shown.finish() == 130
    assert b"Traceback" not in shown.shown
    assert b"stopping; Ctrl-C again kills the worker" in shown.shown
    assert all("after the cancel (in_band)" in line for line in _reports("\n".join(shown.screen()), 4))


def test_a_worker_that_dies_costs_no_column_a_word_and_the_note_stands_above() -> None:
    command = ("run", *scripted(pace_s=0.005), *_prompts("one", "two"), "--max-tokens", "200")
    with terminal(FOREGROUND, *command, size=SIDE_BY_SIDE) as shown:
        shown.read_until(b"w20")
        (worker,) = psutil.Process(shown.process.pid).children()
        worker.kill()
        assert shown.finish() == 0
    screen = shown.screen()
    whole = " ".join(f"w{number}" for number in range(200))
    assert [" ".join(panel) for panel in _panels(screen, "1: one", 2)] == [whole] * 2
    notes = [index for index, line in enumerate(screen) if "is gone (crashed)" in line]
    (top,) = [index for index, line in enumerate(screen) if line.startswith("╭")]
    assert len(notes) == 2
    assert max(notes) < top


def test_a_terminal_that_takes_nothing_holds_all_of_them_back(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = ("run", *scripted(), *FOUR, "--consumer-timeout", "0.5")
    # Their answers never end: only a deadline can end this, and only if nobody takes tokens.
    script = f'echo begin; exec "$@" 2>{told}'
    with terminal(script, *command, size=SIDE_BY_SIDE) as shown:
        assert shown.process.wait(60) == 4
    assert all(line.endswith("consumer_timeout") for line in _reports(told.read_text(), 4))


def test_a_terminal_that_can_not_be_drawn_on_gets_whole_answers() -> None:
    command = ("run", *scripted(text="a\x1b[2Jb"), *_prompts("one", "two"), "-q")
    with terminal(FOREGROUND, *command, size=SIDE_BY_SIDE, TERM="dumb") as shown:
        assert shown.finish() == 0
    answer = "a\\x1b[2Jb\r\n"
    assert shown.shown.decode() == f"begin\r\n── 1: one ──\r\n{answer}── 2: two ──\r\n{answer}"


# --- into a pipe -----------------------------------------------------------------------------------


def test_answers_come_whole_and_in_the_order_of_the_prompts() -> None:
    done = supervise("run", *scripted(mode="echo", pace_s=0.001), *_prompts(WORDS, "a b", "c\n", "Wörter"))
    assert done.returncode == 0, done.stderr.decode()
    title = done.stdout.decode().partition(" ──\n")[0]
    assert title.startswith("── 1: n0 n1 n2")
    assert title.endswith(" …")
    rest = f"{WORDS}\n── 2: a b ──\na b\n── 3: c ──\nc\n── 4: Wörter ──\nWörter\n"
    assert done.stdout.decode() == f"{title} ──\n{rest}"
    assert len(_reports(done.stderr.decode(), 4)) == 4


def test_an_answer_comes_as_soon_as_it_and_those_before_it_are_done() -> None:
    command = ("run", *scripted(mode="echo", pace_s=0.01), *_prompts("a " * 20, WORDS[:1500], "c"))
    with running(*command) as run:
        run.read_until("out", "── 1: (a ?){20} ──\n(a ?){20}\n")
        assert "── 2".encode() not in run.out
        run.interrupt()
        assert run.finish() == 130
    # What there is of those that were cut off, perhaps nothing, and of those behind them, comes at the end, once.
    assert re.fullmatch("── 1: .* ──\n.*\n── 2: n0 n1 .* ──\n(n0.*\n)?── 3: c ──\nc\n", run.out.decode()), (
        run.out.decode()
    )
    first, second, third = _reports(run.err.decode(), 3)
    assert (first.endswith("stop"), second.endswith("cancelled"), third.endswith("stop")) == (
        True,
        True,
        True,
    )


def test_prompts_come_from_the_lines_of_a_file_or_of_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    wanted = b"\xe2\x94\x80\xe2\x94\x80 1: one \xe2\x94\x80\xe2\x94\x80\none\n"
    echo = scripted(mode="echo")
    assert supervise("run", *echo, "--prompts", str(file)).stdout.startswith(wanted)
    assert supervise("run", *echo, "--prompts", "-", stdin=file.read_bytes()).stdout.startswith(wanted)
    # One is a run like any other.
    assert supervise("run", *echo, "--prompts", "-", stdin=b"one\n").stdout == b"one"
    assert supervise("run", *echo, "--prompt", "one").stdout == b"one"


def test_a_reader_that_leaves_ends_all_of_them_quietly() -> None:
    command = ("run", *scripted(mode="echo", pace_s=0.01), *_prompts("a", WORDS, WORDS), "-v")
    with running(*command) as run:
        pid = run.worker_pid()
        run.read_until("out", "── 1: a ──\na\n")
        run.close_stdout()
        assert run.finish() == 141
    assert b"Traceback" not in run.err
    assert b"supervise: " not in run.err
    assert [line.endswith("client_disconnected") for line in _reports(run.err.decode(), 3)] == [
        False,
        True,
        True,
    ]
    assert_gone(pid)


def test_a_reader_that_stops_holds_those_back_that_it_does_not_see(tmp_path: Path) -> None:
    endless = " ".join(["x"] * 200_000)
    file = tmp_path / "prompts"
    file.write_text(f"{WORDS}\n{endless}\n")
    command = ("run", *scripted(mode="echo"), "--window", "4", "--consumer-timeout", "1", "-v")
    with running(*command, "--prompts", str(file)) as run:
        assert run.process.stdout is not None
        fcntl.fcntl(run.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        # The first answer is more than the pipe holds; while it is being written the second stands still.
        run.read_until("err", "consumer_timeout")
        assert run.finish() == 4
    first, second = _reports(run.err.decode(), 2)
    assert first.endswith("2000 tokens · stop")
    assert WORDS.encode() in run.out
    assert int(re.search(r"(\d+) tokens · consumer_timeout", second)[1]) < 100_000  # type: ignore[index]


def test_a_second_ctrl_c_kills_the_worker_of_all_of_them() -> None:
    deaf = [{"at": "decode", "kind": "ignore_cancel", "after": 3}]
    with running("run", *scripted(faults=deaf), *FOUR, "--json", "-v") as run:
        pid = run.worker_pid()
        run.read_until("out", '"stream": 1, "text": "w2 "')
        run.interrupt()
        # Its ladder has begun: without the second one it would take seconds.
        run.read_until("err", "CancelEscalated")
        run.interrupt()
        assert run.finish() == 130
    assert b"Traceback" not in run.err
    assert_gone(pid)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_is_that_of_the_worst_end_and_the_others_stay_whole(as_json: bool) -> None:
    command = ("run", *scripted(mode="echo", context_tokens=8), *_prompts("a b", "c " * 9, "d"))
    done = supervise(*command, *(["--json"] if as_json else []))
    assert done.returncode == 3, done.stderr.decode()
    if as_json:
        reports = {line["stream"]: line for line in _lines(done.stdout) if line["type"] == "report"}
        assert [reports[stream]["exit_code"] for stream in (1, 2, 3)] == [0, 3, 0]
        assert reports[2]["error"]["code"] == "invalid_request"
        return
    assert done.stdout.decode().split("\n")[:2] == ["── 1: a b ──", "a b"]
    assert done.stdout.decode().endswith("── 3: d ──\nd\n")
    assert "supervise: 2: invalid_request: the prompt has 9 tokens" in done.stderr.decode()


# --- JSON, and several answers to one prompt ----------------------------------------------------------


def _lines(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_lines_say_whose_they_are_and_each_answer_has_a_report() -> None:
    done = supervise("run", *scripted(mode="echo"), *_prompts("a b c", "d e", "f"), "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [line for line in _lines(done.stdout) if line["type"] != "progress"]
    said = ["".join(x["text"] for x in lines if x["type"] == "token" and x["stream"] == n) for n in (1, 2, 3)]
    assert said == ["a b c", "d e", "f"]
    reports = [line for line in lines if line["type"] == "report"]
    assert sorted(report["stream"] for report in reports) == [1, 2, 3]
    assert {report["end_reason"] for report in reports} == {"stop"}


def test_several_answers_to_one_prompt_have_seeds_that_count_up() -> None:
    done = supervise(
        "run", *scripted(mode="random"), "--n", "3", "--seed", "7", "--max-tokens", "5", "--json", "hi"
    )
    lines = _lines(done.stdout)
    reports = {line["stream"]: line for line in lines if line["type"] == "report"}
    assert [reports[stream]["seed"] for stream in (1, 2, 3)] == [7, 8, 9]
    said = {
        n: "".join(x["text"] for x in lines if x["type"] == "token" and x["stream"] == n) for n in (1, 2, 3)
    }
    assert len(set(said.values())) == 3
    alone = supervise("run", *scripted(mode="random"), "--seed", "8", "--max-tokens", "5", "-q", "hi")
    assert alone.stdout.decode() == said[2]


def test_more_answers_than_slots_are_refused_with_what_to_do() -> None:
    done = supervise("run", *scripted(slots=2), "--n", "3", "hi")
    assert done.returncode == 3
    assert "slots=3" in done.stderr.decode()
