"""The sandbox process and its jobs: ended by strangers, stopped, closed, orphaned; no request is lost by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama import sandbox as sandbox_module
from infervisor.worker.engines.llama.sandbox_job import Limits
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import CHATML, LOOP, build_model
from tests.helpers.sandboxes import (
    GOOD,
    LONG,
    Make,
    child_of,
    process_of,
    running,
    sandboxes,
    text_of,
    wait_collected,
)
from tests.helpers.waiting import PATIENCE_S, wait_gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "loop.gguf", LOOP, CHATML)


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    with sandboxes(model) as made:
        yield made


# --- what strangers do ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_server_that_is_ended_is_replaced(make: Make, number: signal.Signals) -> None:
    sandbox = make()
    expected = text_of(sandbox)
    for _ in range(3):
        server = process_of(sandbox)
        server.send_signal(number)
        assert text_of(sandbox) == expected
        sandbox.check_grammar(GOOD)
        wait_collected(server.pid)


def test_interrupts_from_the_keyboard_are_not_meant_for_it(make: Make) -> None:
    sandbox = make(LONG)
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        child_of(server).send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        with pytest.raises(InvalidRequest, match="computing"):
            job.result(PATIENCE_S)
    text_of(sandbox)
    assert sandbox.pid == server.pid


def test_a_server_that_is_stopped_is_replaced(make: Make) -> None:
    sandbox = make(limits=Limits(cpu_s=1, wall_s=1.0))
    expected = text_of(sandbox)
    server = process_of(sandbox)
    server.send_signal(signal.SIGSTOP)
    assert text_of(sandbox) == expected
    assert sandbox.pid != server.pid
    wait_gone(server.pid, PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_whose_process_is_ended_is_done_again(make: Make, number: signal.Signals) -> None:
    sandbox = make(LONG)
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        first = child_of(server)
        first.send_signal(number)
        # The second run gets as far as its own limit.
        with pytest.raises(InvalidRequest, match="more than 1 s of computing"):
            job.result(PATIENCE_S)
    wait_collected(first.pid)
    assert sandbox.pid == server.pid


def test_a_job_whose_process_is_ended_twice_is_the_engines_failure(make: Make) -> None:
    sandbox = make(LONG)
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        first = child_of(server)
        first.kill()
        child_of(server, other_than=first.pid).kill()
        with pytest.raises(RuntimeError, match=r"lost twice during a render job: .*SIGKILL"):
            job.result(PATIENCE_S)
    assert text_of(sandbox).startswith("<s>")


def test_a_job_whose_process_is_stopped_ends_by_the_clock(make: Make) -> None:
    sandbox = make(LONG, Limits(cpu_s=60, wall_s=1.0))
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        child_of(server).send_signal(signal.SIGSTOP)
        with pytest.raises(InvalidRequest, match="isn't done after"):
            job.result(PATIENCE_S)
    assert text_of(sandbox).startswith("<s>")
    assert sandbox.pid == server.pid


def test_a_job_of_a_lost_server_is_done_in_the_next(make: Make) -> None:
    sandbox = make(LONG)
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        child_of(server)
        server.kill()
        with pytest.raises(InvalidRequest, match="computing"):
            job.result(PATIENCE_S)
    assert sandbox.pid != server.pid


def test_a_lost_server_takes_its_jobs_along(make: Make) -> None:
    sandbox = make(LONG, Limits(cpu_s=600, wall_s=600))
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        child = child_of(server)
        server.kill()
        wait_gone(child.pid, PATIENCE_S)
        sandbox.close()
        with pytest.raises(RuntimeError, match="closed"):
            job.result(PATIENCE_S)


def test_a_vocabulary_that_is_never_read_is_the_engines_failure(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    sandbox = make(path=path, limits=Limits(cpu_s=1, wall_s=1.0))
    sandbox.template_error()
    monkeypatch.setattr(sandbox_module, "STARTUP_S", 1.0)
    with pytest.raises(RuntimeError, match="lost twice during a grammar job: it has not answered"):
        sandbox.check_grammar(GOOD)
    monkeypatch.undo()
    assert text_of(sandbox).startswith("<s>")


def test_a_sandbox_that_cannot_be_started_is_the_engines_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = make()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RuntimeError, match="can't be started with /nowhere/python"):
        sandbox.template_error()
    monkeypatch.undo()
    assert text_of(sandbox).startswith("<s>")


# --- starting and ending --------------------------------------------------------------------------


def test_close_ends_a_job_that_runs(make: Make) -> None:
    sandbox = make(LONG, Limits(cpu_s=60, wall_s=60))
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        child = child_of(server)
        began_s = time.monotonic()
        sandbox.close()
        assert time.monotonic() - began_s < 10
        with pytest.raises(RuntimeError, match="closed"):
            job.result(PATIENCE_S)
    # No waiting here: close has collected them.
    assert not psutil.pid_exists(server.pid)
    assert not psutil.pid_exists(child.pid)
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.start()


def test_close_at_any_moment_leaves_nothing(make: Make) -> None:
    make().close()
    starting = make()
    starting.start()
    starting.close()
    starting.close()
    stopped = make()
    stopped.template_error()
    process_of(stopped).send_signal(signal.SIGSTOP)
    stopped.close()


HOST = """
import sys, time
from infervisor.worker.engines.llama.sandbox import Sandbox
sandbox = Sandbox(sys.argv[1], sys.argv[2], "t", "", "", [])
assert sandbox.template_error() is None
print(sandbox.pid, flush=True)
sandbox.render([{"role": "user", "content": "endless"}], None, None) if sys.argv[3] == "busy" else sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_it_ends_with_the_worker(model: Path, state: str) -> None:
    with no_leftovers():
        command = [sys.executable, "-P", "-c", HOST, str(model), LONG, state]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
            assert host.stdout is not None
            server = psutil.Process(int(host.stdout.readline()))
            children = [child_of(server)] if state == "busy" else []
            if state == "stopped":
                server.send_signal(signal.SIGSTOP)
            host.kill()
        for process in (server, *children):
            wait_gone(process.pid, PATIENCE_S)
