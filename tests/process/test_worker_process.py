"""The life of a real worker process: its first words, how it loads, every way it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.messages import PROTOCOL_VERSION, Failed, Hello, Progress
from infervisor.worker.exits import Exit
from tests.helpers import probe_worker
from tests.helpers.raw_worker import (
    PATIENCE_S,
    Cancel,
    Load,
    Shutdown,
    Started,
    raw_worker,
    submit,
)

HOUR = 3600.0
ROOT = Path(__file__).parents[2]


def test_hello_comes_first() -> None:
    with raw_worker() as worker:
        hello = worker.next_message(noise=True)
        assert isinstance(hello, Hello)
        assert (hello.protocol, hello.pid) == (PROTOCOL_VERSION, worker.pid)
        assert {"python", "infervisor", "msgpack"} <= set(hello.versions)
        worker.shut_down()


def test_loading_tells_every_phase_and_not_too_often() -> None:
    with raw_worker() as worker:
        worker.load({"load_s": 0.3, "load_steps": 300})
        progress = [(m.phase, m.fraction) for m in worker.seen if isinstance(m, Progress)]
        assert [phase for phase, _ in dict.fromkeys((phase, None) for phase, _ in progress)] == [
            "import", "load", "warm_up",
        ]  # fmt: skip
        assert [f for phase, f in progress if phase == "load"][-1] == 1
        assert 3 <= len(progress) <= 40
        worker.shut_down()


def test_ready_carries_the_facts() -> None:
    with raw_worker() as worker:
        ready = worker.load({"slots": 3, "context_tokens": 77, "abort": "none"})
        assert ready.fingerprint == ready.facts["fingerprint"]
        assert (ready.facts["slots"], ready.facts["context_tokens"], ready.facts["abort"]) == (3, 77, "none")
        worker.shut_down()


# --- exits -------------------------------------------------------------------------------------------


def refused(worker: Any, engine: str, options: dict[str, Any]) -> Failed:
    worker.expect(Hello)
    worker.send(Load(engine, None, options))
    failed: Failed = worker.expect(Failed)
    assert worker.exit_code() == Exit.LOAD_FAILED
    return failed


def test_a_refused_load_says_why_and_ends_the_worker() -> None:
    with raw_worker() as worker:
        failed = refused(worker, "scripted", {"speed": 1})
        assert (failed.code, failed.permanent) == ("bad_option", True)
        assert "'speed'" in failed.message
        assert failed.message in worker.output()


def test_an_unknown_engine_is_a_refused_load() -> None:
    with raw_worker() as worker:
        failed = refused(worker, "oracle", {})
        assert (failed.code, failed.permanent) == ("unknown_engine", True)


def test_a_crashing_load_carries_the_traceback() -> None:
    with raw_worker() as worker:
        failed = refused(worker, "scripted", {"faults": [{"at": "load", "kind": "raise", "message": "boom"}]})
        assert (failed.code, failed.permanent) == ("engine_error", False)
        assert "RuntimeError: boom" in failed.message
        assert "Traceback" in failed.detail


def test_a_missing_library_names_the_interpreter_and_the_next_step() -> None:
    with raw_worker(program=probe_worker.PROGRAM) as worker:
        failed = refused(worker, "probe", {"probe": "import_error"})
        assert (failed.code, failed.permanent) == ("engine_import", True)
        assert sys.executable in failed.message
        assert "pip install" in failed.message


def test_facts_that_cannot_be_sent_are_a_failed_load() -> None:
    with raw_worker(program=probe_worker.PROGRAM) as worker:
        failed = refused(worker, "probe", {"probe": "unsendable_facts"})
        assert failed.code == "engine_error"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nonsense"], "required"),
        (["--control", "x", "--frames", "4", "--urgent", "5", "--parent", "1"], "--control"),
        (["--control", "999", "--frames", "4", "--urgent", "5", "--parent", "1"], "--control 999"),
        (["--control", "1", "--frames", "4", "--urgent", "5", "--parent", "1"], "--control 1"),
    ],
)
def test_bad_arguments(arguments: list[str], named: str) -> None:
    with raw_worker(arguments=arguments) as worker:
        assert worker.exit_code() == Exit.BAD_ARGUMENTS
        worker.ended_frames()
        assert named in worker.wait_for_output(lambda output: "worker:" in output)


def test_a_worker_whose_parent_is_another_ends() -> None:
    ends = os.pipe()
    try:
        fds = [str(ends[0]), str(ends[1]), str(ends[0])]
        arguments = ["--control", fds[0], "--frames", fds[1], "--urgent", fds[2], "--parent", "1"]
        process = subprocess.run(
            [sys.executable, "-P", "-m", "infervisor.worker", *arguments],
            pass_fds=ends,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        for fd in ends:
            os.close(fd)
    assert process.returncode == Exit.ASKED_FOR
    assert b"process 1 is not my parent" in process.stderr


GARBAGE = (8).to_bytes(4, "big") + b"\xc1" * 8


@pytest.mark.parametrize("state", ["before load", "while loading", "ready", "in a step"])
def test_garbage_on_control(state: str) -> None:
    with raw_worker() as worker:
        if state == "while loading":
            worker.expect(Hello)
            worker.send(Load("scripted", None, {"load_s": HOUR}))
            worker.expect(Progress)
        elif state != "before load":
            worker.load({"pace_s": HOUR})
        if state == "in a step":
            worker.send(submit(1))
            worker.expect(Started)
        worker.send_bytes(GARBAGE)
        assert worker.exit_code() == Exit.BROKEN_CONTROL
        worker.wait_for_output(lambda output: "control stream is broken" in output)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([submit(1)], "submit came before load"),
        ([Load("scripted", None, {}), Load("scripted", None, {})], "load came after"),
        ([Load("scripted", None, {}), submit(1, credit=1), submit(1)], "attempt 1 was submitted twice"),
    ],
)
def test_messages_out_of_place(messages: list[Any], named: str) -> None:
    with raw_worker() as worker:
        worker.send(*messages)
        assert worker.exit_code() == Exit.BROKEN_CONTROL
        worker.wait_for_output(lambda output: named in output)


def test_a_slot_that_cannot_be_freed_is_an_internal_error() -> None:
    with raw_worker() as worker:
        worker.load({"text": "a", "faults": [{"at": "release", "kind": "raise", "message": "stuck"}]})
        worker.send(submit(1))
        assert worker.exit_code() == Exit.INTERNAL_ERROR
        output = worker.wait_for_output(lambda output: "stuck" in output)
        assert "internal error" in output
        assert "Traceback" in output


STATES: dict[str, dict[str, Any]] = {
    "before load": {},
    "loading": {"load_s": HOUR},
    "idle": {},
    "reading a prompt": {"prefill_s": HOUR, "slice_s": HOUR},
    "computing": {"pace_s": HOUR},
    "in a template": {"open_s": HOUR},
    "paused": {},
    "hanging in a step": {"faults": [{"at": "prefill", "kind": "hang"}]},
    "hanging while loading": {"faults": [{"at": "warm_up", "kind": "hang"}]},
    "deaf to cancels": {"faults": [{"at": "prefill", "kind": "ignore_cancel"}]},
}


def bring(worker: Any, state: str) -> None:
    """Bring a new worker into one of `STATES`."""
    if state == "before load":
        worker.expect(Hello)
        return
    if "loading" in state:
        worker.expect(Hello)
        worker.send(Load("scripted", None, STATES[state]))
        phase = "warm_up" if "hanging" in state else "load"
        while worker.expect(Progress).phase != phase:
            pass
        if "hanging" in state:
            worker.wait_for_output(lambda output: "hang at warm_up" in output)
        return
    worker.load(STATES[state])
    if state != "idle":
        worker.send(submit(1, credit=1))
    if state not in ("idle", "in a template"):
        worker.expect(Started)
    if state == "paused":
        worker.tokens(1, 1)
    if "faults" in STATES[state]:
        worker.wait_for_output(lambda output: "scripted fault:" in output)


@pytest.mark.parametrize("state", STATES)
def test_it_ends_with_its_control_pipe(state: str) -> None:
    with raw_worker() as worker:
        bring(worker, state)
        worker.close(worker.control)
        assert worker.exit_code() == Exit.ASKED_FOR


@pytest.mark.parametrize(
    "state", [state for state in STATES if "hanging in" not in state and "deaf" not in state]
)
def test_it_shuts_down_when_asked(state: str) -> None:
    with raw_worker() as worker:
        bring(worker, state)
        if state == "before load":
            worker.send(Cancel(1))
        worker.send(Shutdown())
        assert worker.exit_code() == Exit.ASKED_FOR, worker.output()


def test_it_ends_quietly_when_nobody_reads_its_frames() -> None:
    with raw_worker() as worker:
        worker.load()
        worker.close(worker.frames)
        worker.send(submit(1))
        assert worker.exit_code() == Exit.ASKED_FOR
        assert "Traceback" not in worker.output()


PARENT = """
import sys
from tests.helpers.raw_worker import RawWorker, submit
worker = RawWorker()
worker.load({"faults": [{"at": "prefill", "kind": sys.argv[1]}]})
worker.send(submit(1))
worker.wait_for_output(lambda output: "scripted fault:" in output)
print(worker.pid, flush=True)
worker.exit_code()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal and pidfd")
@pytest.mark.parametrize("kind", ["hang", "hang_gil", "block_reader"])
def test_it_does_not_survive_a_killed_parent(kind: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    )
    try:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            gone = select.select([worker], [], [], PATIENCE_S)[0]
            if not gone:
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            assert gone, "the worker outlived its parent"
        finally:
            os.close(worker)
    finally:
        parent.kill()
        parent.communicate()


# --- signals, descriptors, output --------------------------------------------------------------------


def test_ctrl_c_is_the_parents_business() -> None:
    with raw_worker() as worker:
        worker.load({"text": "a b"})
        os.killpg(worker.pid, signal.SIGINT)
        worker.send(submit(1))
        assert worker.answer(1)[0] == "a b"
        worker.shut_down()


def test_sigterm_ends_it_even_in_a_hang() -> None:
    with raw_worker() as worker:
        bring(worker, "hanging in a step")
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.exit_code() == -signal.SIGTERM


@pytest.mark.parametrize("kind", ["hang", "hang_gil"])
def test_all_stacks_can_be_had_while_it_hangs(kind: str) -> None:
    with raw_worker() as worker:
        worker.load({"faults": [{"at": "prefill", "kind": kind}]})
        worker.send(submit(1))
        worker.wait_for_output(lambda output: f"{kind} at prefill" in output)
        os.kill(worker.pid, signal.SIGUSR2)
        output = worker.wait_for_output(lambda output: "__main__.py" in output and "in main" in output)
        assert output.count("hread 0x") == 3, "the work loop's, the reader's and the urgent thread's stack"


def test_the_pipes_do_not_reach_a_grandchild() -> None:
    with raw_worker(program=probe_worker.PROGRAM) as worker:
        ready = worker.load({"probe": "descriptors"}, engine="probe")
        # 0, 1, 2, and the one that lists them.
        assert ready.facts["extra"]["descriptors"] == [0, 1, 2, 3]
        worker.shut_down()


def test_the_worker_loads_nothing_that_only_the_parent_needs() -> None:
    with raw_worker(program=probe_worker.PROGRAM) as worker:
        modules = worker.load({"probe": "modules"}, engine="probe").facts["extra"]["modules"]
        assert "infervisor.worker.work_loop" in modules
        for name in ("anyio", "typer", "psutil", "asyncio", "infervisor.supervisor", "llama_cpp", "numpy"):
            assert [m for m in modules if m == name or m.startswith(name + ".")] == []
        worker.shut_down()


@pytest.mark.parametrize("kind", ["flood_stdout", "flood_stderr"])
@pytest.mark.parametrize("newlines", [True, False])
def test_a_flood_of_output_hurts_no_frame(kind: str, newlines: bool) -> None:
    fault = {"at": "decode", "after": 1, "kind": kind, "bytes": 3_000_000, "newlines": newlines}
    with raw_worker() as worker:
        worker.load({"text": "a b c", "faults": [fault]})
        worker.send(submit(1))
        assert worker.answer(1)[0] == "a b c"
        worker.wait_for_output(lambda output: len(output) >= 3_000_000)
        worker.shut_down()


def test_output_is_utf8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "POSIX"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    with raw_worker() as worker:
        failed = refused(worker, "scripted", {"mode": "🦙"})
        assert "🦙" in failed.message
        assert "🦙" in worker.wait_for_output(lambda output: "mode must be" in output)
