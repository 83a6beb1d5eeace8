"""The command on a real terminal: what is drawn, what is escaped, and job control."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil

from tests.helpers.command_line import scripted
from tests.helpers.terminal import FOREGROUND, terminal


def test_progress_is_drawn_and_wiped_and_the_answer_ends_with_a_line_end() -> None:
    with terminal(FOREGROUND, "run", *scripted(text="hello"), "hi") as shown:
        assert shown.finish() == 0
    text = shown.shown.decode()
    assert "loading ░" in text
    assert "█ 100% warm_up" in text
    after_the_bar = text.rpartition("\r\x1b[K")[2]
    assert after_the_bar.startswith("hello\r\nqueued ")


def test_a_standby_that_loads_beside_the_answer_draws_nothing_into_it() -> None:
    slow = scripted(pace_s=0.005, load_s=1.0, load_steps=10)
    with terminal(FOREGROUND, "run", *slow, "--standby", "1", "-v", "hi") as shown:
        shown.read_until(b"w2 ")
        shown.shown.clear()
        shown.read_until(b"WorkerBecameReady")
        assert b"LoadProgress" in shown.shown
        assert b"\r\x1b[K" not in shown.shown
        os.write(shown.master, b"\x03")
        assert shown.finish() == 130


SLOW_STANDARD_ERROR = """
import os, sys, time
if "infervisor.worker" not in sys.orig_argv:
    write = os.write
    def late(fd, data):
        time.sleep(0.05 if fd == 2 else 0)
        return write(fd, data)
    os.write = late
"""


def test_an_answer_that_outlives_its_worker_is_whole_on_the_screen(tmp_path: Path) -> None:
    # Wherever notes have a writer of their own, this makes them late, and what they wipe is the answer.
    (tmp_path / "sitecustomize.py").write_text(SLOW_STANDARD_ERROR)
    slow = scripted(pace_s=0.005, load_s=0.1, load_steps=20)
    command = ("run", *slow, "--standby", "1", "--max-tokens", "400", "hi")
    with terminal(FOREGROUND, *command, PYTHONPATH=str(tmp_path)) as shown:
        for number in (60, 160, 260):
            shown.read_until(f"w{number} ".encode())
            serving = min(psutil.Process(shown.process.pid).children(), key=psutil.Process.create_time)
            serving.kill()
        assert shown.finish() == 0
    lines = [line.rpartition("\r\x1b[K")[2] for line in shown.shown.decode().split("\r\n")]
    assert sum("goes on with it after" in line for line in lines) == 3
    said = " ".join(line for line in lines if not line.startswith("supervise: "))
    assert re.findall(r"\bw(\d+)", said) == [str(number) for number in range(400)]


def test_quiet_draws_nothing() -> None:
    with terminal(FOREGROUND, "run", *scripted(text="hello"), "--quiet", "hi") as shown:
        assert shown.finish() == 0
    assert shown.shown == b"begin\r\nhello\r\n"


def test_control_characters_of_an_answer_never_reach_the_terminal() -> None:
    text = "a\x1b[2Jb\x07c\rd\x9be\u202ef\tg\nh🦙"
    with terminal(FOREGROUND, "run", *scripted(text=text, split="characters"), "--quiet", "hi") as shown:
        assert shown.finish() == 0
    assert shown.shown.decode() == "begin\r\n" + r"a\x1b[2Jb\x07c\rd\x9be\u202ef" + "\tg\r\nh🦙\r\n"


def test_ctrl_c_typed_at_the_terminal_cancels() -> None:
    with terminal(FOREGROUND, "run", *scripted(pace_s=0.005), "hi") as shown:
        shown.read_until(b"w2 ")
        os.write(shown.master, b"\x03")
        assert shown.finish() == 130
    text = shown.shown.decode()
    assert "after the cancel (in_band)" in text
    assert "Traceback" not in text


def test_without_a_prompt_it_does_not_read_from_the_terminal() -> None:
    with terminal(FOREGROUND, "run", *scripted(text="hello")) as shown:
        assert shown.finish() == 2
    assert b"no prompt" in shown.shown


def test_a_background_job_is_not_stopped() -> None:
    job = 'set -m; echo begin; "$@" & wait $!; echo "code $?"'
    with terminal(job, "run", *scripted(text="hello", pace_s=0.05), "hi") as shown:
        shown.read_until(b"code ")
        shown.finish()
    # A job that touched the terminal would be stopped and `wait` would return 128 + the signal's number.
    assert b"hello" in shown.shown
    assert b"code 0" in shown.shown


def test_a_probe_is_coloured_unless_that_is_not_wanted() -> None:
    with terminal(FOREGROUND, "probe", *scripted()) as shown:
        assert shown.finish() == 0
    assert b"\x1b[32mok" in shown.shown
    with terminal(FOREGROUND, "probe", *scripted(), NO_COLOR="1") as plain:
        assert plain.finish() == 0
    assert b"\x1b" not in plain.shown


def test_the_terminal_helper_sees_a_job_that_is_stopped() -> None:
    job = 'set -m; echo begin; "$@" & wait $!; echo "code $?"; kill -KILL %1'
    reader = [sys.executable, "-c", "input()"]
    master_script = job.replace('"$@"', " ".join(f"'{word}'" for word in reader))
    with terminal(master_script) as shown:
        assert b"code 0" not in shown.read_until(b"code 1")
        shown.finish()
