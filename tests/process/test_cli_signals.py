"""Ctrl-C, SIGTERM, and a worker that is killed under a running answer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import termios
import time

import psutil
import pytest

from tests.helpers.command_line import Running, assert_gone, running, scripted

SLOW = scripted(pace_s=0.005)
DEAF = {"at": "decode", "kind": "ignore_cancel", "after": 3}


def _no_traceback(command: Running) -> None:
    assert b"Traceback" not in command.err
    assert b"KeyboardInterrupt" not in command.err


def test_ctrl_c_cancels_and_tells_how_long_the_release_took() -> None:
    with running("run", *SLOW, "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", "w2 ")
        command.interrupt()
        assert command.finish() == 130
    assert "after the cancel (in_band)" in command.report
    assert command.report.endswith("cancelled")
    # The signal went to the whole group of the command; the worker saw none of it and ended in order.
    assert f"WorkerExited pid={pid} cause=stopped status=exit code 0" in command.err.decode()
    _no_traceback(command)
    assert_gone(pid)


def test_a_second_ctrl_c_kills_a_worker_that_does_not_listen() -> None:
    with running("run", *scripted(faults=[DEAF]), "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", "w2 ")
        command.interrupt()
        command.read_until("err", "stopping; Ctrl-C again kills the worker")
        command.interrupt()
        assert command.finish() == 130
    assert "killing the worker" in command.err.decode()
    assert "after the cancel (kill)" in command.report
    _no_traceback(command)
    assert_gone(pid)


def test_ctrl_c_during_the_load_ends_it() -> None:
    with running("run", *scripted(load_s=600), "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("err", "phase=load")
        command.interrupt()
        assert command.finish() == 130
    assert command.out == b""
    _no_traceback(command)
    assert_gone(pid)


def test_ctrl_c_in_the_middle_of_a_long_prompt_releases_it() -> None:
    with running("run", *scripted(prefill_s=600), "-v", "hi") as command:
        command.read_until("err", "RequestQueued")
        command.interrupt()
        assert command.finish() == 130
    assert "0 tokens · cancelled" in command.report


def test_ctrl_c_works_while_standard_output_takes_nothing() -> None:
    with running("run", *scripted(), "hi") as command:
        assert command.process.stdout is not None
        capacity = fcntl.fcntl(command.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        _wait_until_full(command.process.stdout.fileno(), capacity)
        command.interrupt()
        command.read_until("err", "cancelled\n")
        assert command.process.wait(30) == 130
        command.finish()
    assert "after the cancel (in_band)" in command.report


def _wait_until_full(fd: int, capacity: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        (waiting,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))
        if waiting >= capacity - 64:
            return
        assert time.monotonic() < deadline, f"only {waiting} bytes wait"
        time.sleep(0.01)


def test_sigterm_ends_it_as_one_ctrl_c_does() -> None:
    with running("run", *SLOW, "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", "w2 ")
        command.process.send_signal(signal.SIGTERM)
        assert command.finish() == 143
    assert "after the cancel (in_band)" in command.report
    assert_gone(pid)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_process_of_a_container_takes_signals_too(number: signal.Signals, code: int) -> None:
    # The system gives process 1 of a pid namespace no signal that it has no handler for.
    contained = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if shutil.which("unshare") is None or subprocess.run([*contained, "true"], check=False).returncode:
        pytest.skip("pid namespaces are not permitted here")
    with running("run", *SLOW, "-v", "hi", prefix=contained) as command:
        command.read_until("out", "w2 ")
        (first,) = psutil.Process(command.process.pid).children()
        family = [first, *first.children(recursive=True)]
        assert len(family) == 2
        first.send_signal(number)
        assert command.finish() == code
    assert "after the cancel (in_band)" in command.report
    _no_traceback(command)
    for member in family:
        assert_gone(member.pid)


def test_a_ctrl_c_that_the_caller_ignores_stays_ignored() -> None:
    text = " ".join(f"n{number}" for number in range(100))
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    with running("run", *scripted(text=text, pace_s=0.005), "hi", prefix=ignoring) as command:
        command.read_until("out", "n2")
        command.interrupt()
        assert command.finish() == 0
    assert command.out.decode() == text


@pytest.mark.parametrize("command_name", ["run", "probe"])
def test_a_worker_does_not_outlive_a_command_that_is_killed(command_name: str) -> None:
    words = ["hi"] if command_name == "run" else []
    with running(command_name, *scripted(load_s=600), "-v", *words) as command:
        pid = command.worker_pid()
        command.read_until("err", "phase=load")
        command.process.kill()
        assert command.finish() == -signal.SIGKILL
    assert_gone(pid)


def test_a_worker_that_is_killed_in_the_middle_ends_the_answer_as_a_fault_where_that_is_wanted() -> None:
    with running("run", *SLOW, "--on-crash", "fail", "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", "w2 ")
        os.kill(pid, signal.SIGKILL)
        assert command.finish() == 5
    told = command.err.decode()
    assert "supervise: worker_crashed: the worker died while serving: SIGKILL(-9)" in told
    assert command.report.endswith("worker_crashed")
    assert told.count("WorkerSpawned") == 1
    _no_traceback(command)


def test_an_answer_whose_worker_is_killed_goes_on_and_the_notes_say_so() -> None:
    with running("run", *SLOW, "--max-tokens", "60", "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", "w2 ")
        os.kill(pid, signal.SIGKILL)
        assert command.finish() == 0
    assert command.out.decode().rstrip("\n") == "".join(f"w{number} " for number in range(60))
    told = command.err.decode()
    assert f"supervise: worker {pid} is gone (crashed); the answer goes on in another one" in told
    assert "goes on with it after" in told
    assert "resumed 1 × (paused" in command.report
    _no_traceback(command)


def test_an_answer_that_goes_on_is_told_as_json_too() -> None:
    with running("run", *SLOW, "--max-tokens", "60", "--standby", "1", "--json", "-v", "hi") as command:
        pid = command.worker_pid()
        command.read_until("out", '"text": "w2 "')
        os.kill(pid, signal.SIGKILL)
        assert command.finish() == 0
    lines = [json.loads(line) for line in command.out.splitlines()]
    assert "".join(line["text"] for line in lines if line["type"] == "token") == "".join(
        f"w{number} " for number in range(60)
    )
    (gone,) = [line for line in lines if line["type"] == "interrupted"]
    (back,) = [line for line in lines if line["type"] == "resumed"]
    assert (gone["cause"], gone["worker_pid"]) == ("crashed", pid)
    assert back["worker_pid"] != pid
    assert lines[-1]["resumes"][0]["pause_s"] == back["pause_s"]


def test_ctrl_c_stops_a_probe() -> None:
    with running("probe", *scripted(prefill_s=600), "-v") as command:
        pid = command.worker_pid()
        command.read_until("err", "RequestQueued")
        command.interrupt()
        assert command.finish() == 130
    _no_traceback(command)
    assert_gone(pid)
