"""Workers that lie, hang, shout or leave somebody behind, and interpreters that aren't one."""

from __future__ import annotations

import os
import signal
import venv
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from infervisor import (
    EndReason,
    InfervisorError,
    Liveness,
    ModelLoadError,
    ProtocolError,
    RestartPolicy,
    StopGraces,
    Supervisor,
    WorkerDied,
    WorkerUnresponsive,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import (
    BreakerOpened,
    WorkerBecameReady,
    WorkerExited,
    WorkerHung,
    WorkerSpawned,
)
from infervisor.supervisor.output_ring import MAX_LINE_BYTES, MAX_LINES
from tests.helpers.models import build_models
from tests.helpers.odd_worker import as_interpreter, deaf_to_sigterm
from tests.helpers.supervised import QUICK_LIVENESS, Told, answers, scripted
from tests.helpers.waiting import is_gone, until, wait_gone

pytestmark = pytest.mark.anyio

ONE_START = RestartPolicy(max_failed_starts=0, cooldown_s=600)


def once(tmp_path: Path, kind: str, at: str = "decode", **parts: Any) -> dict[str, Any]:
    """Return options with a fault that only the first worker has."""
    after = {"decode": 2}.get(at, 0)
    fault = {"at": at, "kind": kind, "after": after, "once_file": str(tmp_path / f"{kind}-{at}"), **parts}
    return {"pace_s": 0.002, "faults": [fault]}


async def read_two_then_fail(supervisor: Supervisor) -> InfervisorError:
    """Return the error that a stream ends with after its first two chunks."""
    async with supervisor.stream("hello", max_tokens=50) as stream:
        assert [(await anext(stream)).text, (await anext(stream)).text] == ["w0 ", "w1 "]
        with pytest.raises(InfervisorError) as caught:
            await stream.text()
    assert caught.value.report.is_released
    return caught.value


# --- wrong frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parts", "said"),
    [
        ("garbage", {"then": "stall"}, "isn't msgpack"),
        ("oversized_frame", {"then": "stall"}, "a frame declares 1048577 bytes"),
        ("forged_id", {"then": "stall"}, "attempt 9223372036854775815, which isn't in this worker"),
        ("credit_violation", {"then": "stall"}, "beyond the limit"),
        ("close_frames", {"then": "stall"}, "its frames ended, but the process lives on"),
        ("garbage", {"then": "go_on"}, "isn't msgpack"),
        ("close_frames", {"then": "go_on"}, "its frames ended, but the process lives on"),
    ],
)
@pytest.mark.produces("end: protocol_error")
async def test_a_worker_that_breaks_the_protocol_is_replaced(
    kind: str, parts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    async with scripted(once(tmp_path, kind, **parts)) as (supervisor, told):
        pid = supervisor.status().worker_pid
        error = await read_two_then_fail(supervisor)
        assert isinstance(error, ProtocolError)
        assert "broke the protocol while serving" in str(error)
        assert said in str(error)
        assert error.report.end_reason is EndReason.PROTOCOL_ERROR
        exited = told.of(WorkerExited)[0]
        assert (exited.pid, exited.cause) == (pid, DeathCause.PROTOCOL_ERROR)
        assert await answers(supervisor) != pid
        assert supervisor.status().restarts == {"protocol_error": 1}


async def test_a_worker_that_dies_in_the_middle_of_a_frame_died(tmp_path: Path) -> None:
    async with scripted(once(tmp_path, "partial_frame", then="exit", code=41)) as (supervisor, _):
        error = await read_two_then_fail(supervisor)
        assert isinstance(error, WorkerDied)
        assert error.exit_code == 41
        await answers(supervisor)


async def test_a_worker_that_stalls_in_the_middle_of_a_frame_hangs(tmp_path: Path) -> None:
    options = once(tmp_path, "partial_frame", then="stall")
    async with scripted(options, liveness=QUICK_LIVENESS) as (supervisor, _):
        assert isinstance(await read_two_then_fail(supervisor), WorkerUnresponsive)
        await answers(supervisor)


# --- hangs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hang", "hang_gil"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.produces("end: worker_unresponsive")
async def test_a_hang_is_found_out_with_its_stacks(kind: str, phase: str, tmp_path: Path) -> None:
    async with scripted(once(tmp_path, kind, phase), liveness=QUICK_LIVENESS) as (supervisor, told):
        pid = supervisor.status().worker_pid
        with pytest.raises(WorkerUnresponsive, match="stood still while serving") as caught:
            await supervisor.generate("hello", max_tokens=50)
        assert caught.value.report.end_reason is EndReason.WORKER_UNRESPONSIVE
        # The stack of the work loop, down to the fault.
        assert "in _misbehave" in caught.value.report.error.detail
        assert "in main" in caught.value.report.error.detail
        assert told.of(WorkerHung)[0].pid == pid
        assert told.of(WorkerHung)[0].stalled_s >= 0.5
        assert await answers(supervisor) != pid


async def test_a_slow_prefill_that_progresses_is_never_killed() -> None:
    options = {"prefill_tokens_per_s": 20, "slice_s": 0.1}
    liveness = Liveness(hang_after_s=1.5, unmeasured_s=1.5)
    async with scripted(options, liveness=liveness) as (supervisor, told):
        # Three seconds of prefill against half as much patience with a step.
        answer = await supervisor.generate("word " * 60, max_tokens=3)
        assert answer.text == "w0 w1 w2 "
        assert answer.report.timeline.ttft_s is not None
        assert answer.report.timeline.ttft_s > 2.9
        assert not told.of(WorkerHung)
        assert not told.of(WorkerExited)


async def test_a_long_pause_is_not_held_against_the_step_after_it() -> None:
    liveness = Liveness(hang_after_s=1.2, step_factor=1, unmeasured_s=5)
    async with scripted({"pace_s": 0.5}, liveness=liveness) as (supervisor, told):
        async with supervisor.stream("hello", window=1, max_tokens=4) as stream:
            texts = []
            async for chunk in stream:
                texts.append(chunk.text)
                # Credit has been sent with the chunk, so the next token is computed; then the worker pauses.
                await until(lambda: stream.report.timeline.tokens > len(texts) or len(texts) == 4)
                await anyio.sleep(1.0)
        assert texts == [f"w{index} " for index in range(4)]
        assert told.of(WorkerHung) == []


async def test_a_worker_that_moves_while_its_stacks_are_written_is_spared(tmp_path: Path) -> None:
    liveness = Liveness(hang_after_s=0.5, step_factor=4, unmeasured_s=0.5, dump_s=2)
    options = {**once(tmp_path, "hang", seconds=1.5), "pace_s": 0.02}
    async with scripted(options, liveness=liveness) as (supervisor, told):
        # It goes on a second before the kill would come, and is still at it long after that.
        answer = await supervisor.generate("hello", max_tokens=150)
        assert answer.text.endswith("w149 ")
        assert len(told.of(WorkerHung)) == 1
        assert told.of(WorkerExited) == []


# --- output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fd", ["stdout", "stderr"])
@pytest.mark.parametrize(("size", "newlines"), [(100_000, True), (100_000, False), (10_000_000, True)])
async def test_a_flood_of_output_is_drained_and_clipped(
    fd: str, size: int, newlines: bool, tmp_path: Path
) -> None:
    options = once(tmp_path, f"flood_{fd}", bytes=size, newlines=newlines)
    async with scripted(options) as (supervisor, _):
        before = psutil.Process().memory_info().rss
        answer = await supervisor.generate("hello", max_tokens=10)
        assert answer.text.endswith("w9 ")
        worker = supervisor._dispatcher.pool.first  # type: ignore[union-attr]
        assert worker is not None
        assert worker.link.output.total_bytes >= size
        tail = worker.link.output.tail(MAX_LINES)
        assert len(tail) <= MAX_LINES * (MAX_LINE_BYTES + 20)
        assert max(map(len, tail.splitlines())) <= MAX_LINE_BYTES + len(" [clipped]")
        if size == 10_000_000:
            assert psutil.Process().memory_info().rss - before < size / 2


# --- those it leaves behind ----------------------------------------------------------------------------


@pytest.mark.parametrize("session", [False, True])
async def test_a_death_is_seen_at_once_while_a_grandchild_holds_the_pipes(
    session: bool, tmp_path: Path
) -> None:
    options = once(tmp_path, "spawn_grandchild", session=session)
    async with scripted(options) as (supervisor, told):
        async with supervisor.stream("hello") as stream:
            worker = supervisor._dispatcher.pool.first  # type: ignore[union-attr]
            assert worker is not None
            async for chunk in stream:
                if chunk.index > 3:
                    break
            await until(lambda: "grandchild " in worker.link.output.tail())
            said = [line for line in worker.link.output.tail().splitlines() if line.startswith("grandchild ")]
            grandchild = int(said[0].split()[1])
            assert not is_gone(grandchild)
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await stream.text()
        try:
            exited = await told.wait_for(WorkerExited)
            assert exited.seconds < 1
            await told.wait_for(WorkerBecameReady, count=2)
            await answers(supervisor)
            if not session:
                wait_gone(grandchild, 5)
        finally:
            if not is_gone(grandchild):
                os.kill(grandchild, signal.SIGKILL)


# --- stopping ------------------------------------------------------------------------------------------


@pytest.mark.produces(
    "process: terminating × GraceOver → terminating",
    "process: terminating × GraceOver → killing",
)
async def test_a_worker_that_heeds_neither_shutdown_nor_sigterm_is_killed(tmp_path: Path) -> None:
    told = Told()
    graces = StopGraces(drain_s=0.2, exit_s=0.2, terminate_s=0.2)
    options = {"faults": [{"at": "decode", "kind": "block_reader", "prompt_contains": "deafen"}]}
    async with Supervisor(
        engine="scripted", options=options, python=deaf_to_sigterm(tmp_path), graces=graces, on_event=told
    ) as supervisor:
        pid = supervisor.status().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        assert await answers(supervisor) == pid
        await supervisor.generate("deafen", max_tokens=4)
        await supervisor.stop()
        assert is_gone(pid)
    exited = told.of(WorkerExited)
    assert [(event.pid, event.cause, event.status) for event in exited] == [
        (pid, DeathCause.STOPPED, "SIGKILL(-9)")
    ]
    assert 0.4 <= exited[0].seconds < 5


# --- interpreters --------------------------------------------------------------------------------------


async def first_failure(**settings: Any) -> tuple[InfervisorError, Told]:
    """Return what keeps a supervisor from starting."""
    told = Told()
    with pytest.raises(InfervisorError) as caught:
        async with Supervisor(on_event=told, **{"engine": "scripted", "restart": ONE_START, **settings}):
            pytest.fail("it became ready")
    assert len(told.of(BreakerOpened)) == 1
    return caught.value, told


async def test_an_interpreter_without_the_package_is_named_once(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare/bin/python"
    error, told = await first_failure(python=python, restart=RestartPolicy(cooldown_s=600))
    assert isinstance(error, ModelLoadError)
    assert error.code == "interpreter_without_package"
    assert f"the interpreter {python} can't run the worker: it has no module 'infervisor';" in str(error)
    assert "python=" in str(error)
    assert len(told.of(WorkerSpawned)) == 1


@pytest.mark.produces("process: handshake × Exited → exited")
async def test_an_interpreter_that_is_something_else_is_named() -> None:
    error, _ = await first_failure(python="/bin/false")
    assert isinstance(error, WorkerDied)
    assert "died while starting, before its first message: exit code 1" in str(error)


async def test_an_interpreter_that_shouts_garbage_harms_nothing(tmp_path: Path) -> None:
    shout = "printf '\\033[2J\\007\\377\\000 hello\\n'; printf '\\033[31m' >&2"
    python = as_interpreter(tmp_path, f'{shout}\nexec "$PYTHON" "$@"')
    faults = [{"at": "decode", "after": 1, "kind": "exit"}]
    async with scripted({"faults": faults}, python=python) as (supervisor, told):
        with pytest.raises(WorkerDied) as caught:
            await supervisor.generate("hello")
        assert r"\x1b[2J\x07\xff\x00 hello" in caught.value.output_tail
        exited = told.of(WorkerExited)[0]
        for text in (caught.value.output_tail, exited.output_tail, exited.message, str(caught.value)):
            assert all(character.isprintable() or character in "\n\t" for character in text)


async def test_a_library_for_another_processor_is_reported_with_advice(tmp_path: Path) -> None:
    stub = tmp_path / "llama_cpp"
    stub.mkdir()
    (stub / "__init__.py").write_text(
        "import os, signal\nprint('about to use AVX-1024', flush=True)\nos.kill(os.getpid(), signal.SIGILL)\n"
    )
    error, told = await first_failure(
        engine="llama", model=build_models(tmp_path) / "loop.gguf", env={"PYTHONPATH": str(tmp_path)}
    )
    assert isinstance(error, WorkerDied)
    assert error.signal_name == "SIGILL"
    assert "while loading the model: SIGILL(-4)" in str(error)
    assert "built for another CPU" in str(error)
    assert "about to use AVX-1024" in error.output_tail
    assert len(told.of(WorkerSpawned)) == 1
