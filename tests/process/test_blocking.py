"""The blocking façade: the same requests, ends and errors for threads that have no event loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import (
    BlockingStream,
    BlockingSupervisor,
    Chunk,
    ConfigurationError,
    DeadlineExceeded,
    Deadlines,
    EndReason,
    EngineError,
    InfervisorError,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RequestCancelled,
    ShuttingDown,
    Stage,
    Stream,
    Supervisor,
    UsageError,
    WorkerDied,
)
from infervisor.supervisor.loop_thread import LoopThread
from infervisor.supervisor.request import Request
from tests.helpers.encoder_model import build_encoder
from tests.helpers.host_process import complaints, host
from tests.helpers.inside import PATIENT, words
from tests.helpers.supervised import QUICK_ESCALATION, QUICK_GRACES, QUICK_RESTART
from tests.helpers.waiting import is_gone, wait_gone

PATIENCE_S = 20.0
ENDLESS = {"pace_s": 0.005}


@contextmanager
def blocking(options: dict[str, Any] | None = None, **settings: Any) -> Iterator[BlockingSupervisor]:
    """Yield a blocking supervisor of the scripted engine with short graces."""
    settings = {"escalation": QUICK_ESCALATION, "restart": QUICK_RESTART, "graces": QUICK_GRACES, **settings}
    with BlockingSupervisor(engine="scripted", options=options or {}, **settings) as supervisor:
        yield supervisor


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Yield threads to call from. A call that never returns would show as a test that never ends."""
    with ThreadPoolExecutor(16) as pool:
        yield pool


def wait_until(condition: Callable[[], object]) -> None:
    """Return once the condition holds: for what no event tells a thread."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def request_of(stream: BlockingStream) -> Request:
    """Return the request behind a stream."""
    return stream._stream._request


def wait_until_waiting(stream: BlockingStream) -> None:
    """Return once a reader of the stream waits in the loop for news."""
    wait_until(lambda: request_of(stream).news._waiting)


def rest_of(stream: BlockingStream) -> str:
    """Read a stream to its end."""
    return "".join(str(chunk) for chunk in stream)


def result_of(future: Future[Any]) -> Any:
    """Return what a thread came to, within bounds."""
    return future.result(PATIENCE_S)


# --- the same as the asynchronous one ------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [(Supervisor, BlockingSupervisor), (Stream, BlockingStream)])
def test_it_has_the_methods_and_parameters_of_the_asynchronous_one(one: type, other: type) -> None:
    for name, member in vars(one).items():
        if name.startswith("_") and name != "__init__":
            continue
        same = vars(other)[name]
        assert isinstance(same, property) == isinstance(member, property), name
        if isinstance(member, property) or (name == "__init__" and one is Stream):
            continue
        wanted = inspect.signature(member).parameters
        given = dict(inspect.signature(same).parameters)
        assert {key: given[key].default for key in wanted} == {
            key: parameter.default for key, parameter in wanted.items()
        }, name
        # What waits and what no deadline bounds takes a timeout besides.
        assert set(given) - set(wanted) <= ({"timeout"} if name == "wait_ready" else set()), name


def test_a_whole_life() -> None:
    with blocking(ENDLESS) as supervisor:
        facts = supervisor.wait_ready(timeout=PATIENCE_S)
        assert facts["engine"] == "scripted"
        answer = supervisor.generate("hello", max_tokens=3)
        assert (answer.text, answer.report.end_reason) == (words(3), EndReason.LENGTH)
        with supervisor.stream("hello", max_tokens=5) as stream:
            chunks = list(stream)
            assert list(stream) == []
        assert [chunk.text for chunk in chunks] == [f"w{index} " for index in range(5)]
        assert all(isinstance(chunk, Chunk) for chunk in chunks)
        assert stream.end_reason is EndReason.LENGTH
        assert stream.released().is_released
        with supervisor.stream("hello", max_tokens=5) as stream:
            next(stream)
            assert stream.text() == words(4, start=1)
        pid = supervisor.status().worker_pid
        supervisor.restart_worker()
        wait_until(lambda: supervisor.status().worker_pid not in (pid, None))
        assert supervisor.generate("hello", max_tokens=3).text == words(3)
    assert supervisor.status().slot == "stopped"
    assert "stopped" in repr(supervisor)


def test_an_asynchronous_supervisor_can_be_made_before_its_loop_runs() -> None:
    supervisor = Supervisor(engine="scripted")

    async def use() -> str:
        async with supervisor:
            return (await supervisor.generate("hello", max_tokens=3)).text

    assert anyio.run(use) == words(3)


def test_a_slow_reader_stops_the_worker_a_window_ahead() -> None:
    with blocking(window=2) as supervisor:
        with supervisor.stream("hello") as stream:
            for taken in range(1, 6):
                next(stream)
                wait_until(lambda taken=taken: request_of(stream).window.received == taken + 2)  # type: ignore[misc]
                assert request_of(stream).window.taken == taken
        assert stream.report.usage.computed_tokens == 7


def test_eight_threads_stream_at_once() -> None:
    barrier = threading.Barrier(8)

    def ask(number: int) -> str:
        barrier.wait(PATIENCE_S)
        with supervisor.stream(f"thread {number}", max_tokens=40 + number) as stream:
            return rest_of(stream)

    with blocking({"slots": 3}, window=4) as supervisor, threads() as pool:
        texts = list(pool.map(ask, range(8), timeout=3 * PATIENCE_S))
        assert texts == [words(40 + number) for number in range(8)]
        assert supervisor.status().queue_peak == 5


# --- leaving and cancelling ----------------------------------------------------------------------------


def test_leaving_early_cancels_and_waits_for_the_release() -> None:
    with blocking(ENDLESS, escalation=PATIENT) as supervisor:
        with supervisor.stream("hello") as stream:
            for chunk in stream:
                if chunk.index == 2:
                    break
        assert stream.report.is_released
        assert (stream.report.end_reason, stream.report.stage) == (EndReason.CANCELLED, Stage.IN_BAND)
        assert supervisor.generate("hello", max_tokens=3).text == words(3)


PHASES: dict[str, dict[str, Any]] = {
    "loading": {"options": {"load_s": 60}, "wait_until_ready": False},
    "queued": {"options": ENDLESS},
    "prefill": {"options": {"prefill_s": 60}},
    "decode": {"options": {"pace_s": 60}},
}


@pytest.mark.parametrize("how", ["cancel", "client", "kill"])
@pytest.mark.parametrize("phase", PHASES)
def test_another_thread_ends_a_stream_whose_reader_waits(phase: str, how: str) -> None:
    with blocking(**PHASES[phase], escalation=PATIENT) as supervisor, threads() as pool:
        if phase == "queued":
            before = supervisor.stream("before")
            next(before)
        with supervisor.stream("hello") as stream:
            reading = pool.submit(rest_of, stream)
            wait_until_waiting(stream)
            if phase in ("prefill", "decode"):
                wait_until(lambda: request_of(stream).timeline.started_ns)
            if how == "kill":
                stream.kill()
            else:
                stream.cancel(EndReason.CLIENT_DISCONNECTED if how == "client" else EndReason.CANCELLED)
            assert result_of(reading) == ""
            wanted = EndReason.CLIENT_DISCONNECTED if how == "client" else EndReason.CANCELLED
            report = stream.released()
            assert (report.end_reason, report.is_released) == (wanted, True)
            if phase in ("prefill", "decode"):
                assert report.stage is (Stage.KILL if how == "kill" else Stage.IN_BAND)
        if phase == "queued":
            assert before.read() is not None
            before.cancel()


def test_what_a_thread_asks_for_is_done_in_its_order() -> None:
    with blocking(ENDLESS, escalation=PATIENT) as supervisor:
        for _ in range(5):
            with supervisor.stream("hello") as stream:
                next(stream)
                stream.cancel(EndReason.CLIENT_DISCONNECTED)
                assert stream.read() is None
            assert stream.end_reason is EndReason.CLIENT_DISCONNECTED
            with supervisor.stream("hello") as stream:
                next(stream)
                stream.cancel(EndReason.CLIENT_DISCONNECTED)
            assert stream.end_reason is EndReason.CLIENT_DISCONNECTED


def test_a_stream_that_is_dropped_is_cancelled_when_it_is_collected() -> None:
    with blocking(ENDLESS, escalation=PATIENT) as supervisor:
        for _ in supervisor.stream("dropped"):
            break
        gc.collect()
        assert supervisor.generate("hello", max_tokens=3, deadlines=Deadlines(queue_s=PATIENCE_S))


def test_a_cancelled_text_is_an_error_and_no_fragment() -> None:
    with blocking(ENDLESS) as supervisor, threads() as pool, supervisor.stream("hello") as stream:
        reading = pool.submit(stream.text)
        wait_until_waiting(stream)
        stream.cancel()
        with pytest.raises(RequestCancelled) as raised:
            result_of(reading)
        assert raised.value.report.end_reason is EndReason.CANCELLED


# --- errors --------------------------------------------------------------------------------------------


def fault(kind: str, word: str) -> dict[str, Any]:
    """Return a fault that hits the requests whose prompt has a word."""
    return {"at": "decode", "after": 2, "kind": kind, "prompt_contains": word}


def test_errors_come_in_the_callers_thread_with_their_report() -> None:
    options = {
        "pace_s": 0.002,
        "faults": [fault("raise", "bad"), fault("exit", "bomb"), fault("hang", "slow")],
    }
    with blocking(options, max_queue=0) as supervisor:
        with pytest.raises(InvalidRequest) as invalid:
            supervisor.stream("hello", top_k="many")
        assert invalid.value.field == "top_k"
        for prompt, kind, reason in (
            ("bad", EngineError, EndReason.ENGINE_ERROR),
            ("bomb", WorkerDied, EndReason.WORKER_CRASHED),
        ):
            supervisor.wait_ready(timeout=PATIENCE_S)
            with pytest.raises(kind) as error:
                supervisor.generate(prompt, on_crash="fail")
            assert error.value.report is not None
            assert error.value.report.end_reason is reason
        supervisor.wait_ready(timeout=PATIENCE_S)
        texts: list[str] = []
        with supervisor.stream("slow", deadlines=Deadlines(stall_s=0.3)) as stream:
            with pytest.raises(DeadlineExceeded) as late:
                texts.extend(chunk.text for chunk in stream)
            assert "".join(texts) == words(2)
            with pytest.raises(Overloaded) as full:
                supervisor.stream("one too many").__enter__()
        for raised, reason in ((late, EndReason.STALL_TIMEOUT), (full, EndReason.OVERLOADED)):
            assert raised.value.report.end_reason is reason


def test_what_keeps_it_from_starting_is_raised_on_entering() -> None:
    with pytest.raises(ConfigurationError, match="window"):
        BlockingSupervisor(engine="scripted", window=0)
    with pytest.raises(ModelLoadError, match="no_such"), blocking({"no_such": 1}):
        raise AssertionError
    with pytest.raises(InfervisorError), blocking(python="/no/such/python"):
        raise AssertionError


def test_misuse_is_named() -> None:
    supervisor = BlockingSupervisor(engine="scripted", options=ENDLESS)
    for use in (supervisor.status, lambda: supervisor.stream("x"), supervisor.wait_ready):
        with pytest.raises(UsageError, match="with BlockingSupervisor"):
            use()
    with supervisor, threads() as pool:
        with pytest.raises(UsageError, match="entered before"):
            supervisor.__enter__()
        with pytest.raises(UsageError, match="never started"):
            supervisor.stream("x").released()
        with supervisor.stream("hello", deadlines=Deadlines()) as stream:
            while stream.read() is None:
                raise AssertionError
            os.kill(supervisor.status().worker_pid or 0, signal.SIGSTOP)
            reading = pool.submit(rest_of, stream)
            wait_until_waiting(stream)
            with pytest.raises(UsageError, match="another thread"):
                next(stream)
            stream.kill()
            assert all(word.startswith("w") for word in result_of(reading).split())
    for use in (lambda: supervisor.stream("x"), supervisor.wait_ready, supervisor.restart_worker):
        with pytest.raises(ShuttingDown):
            use()
    supervisor.stop()


# --- waiting with a limit ------------------------------------------------------------------------------


def test_a_read_that_times_out_takes_nothing_and_loses_nothing() -> None:
    with blocking({"pace_s": 0.05}, window=1) as supervisor, supervisor.stream("hello") as stream:
        texts: list[str] = []
        timeouts = 0
        while len(texts) < 6:
            try:
                chunk = stream.read(timeout=0.004)
            except TimeoutError:
                timeouts += 1
                assert request_of(stream).window.taken == len(texts)
            else:
                assert chunk is not None
                texts.append(chunk.text)
        assert "".join(texts) == words(6)
        assert timeouts > 6


def test_a_read_with_timeout_zero_only_looks() -> None:
    with blocking({"pace_s": 0.02, "slots": 1}, window=4) as supervisor:
        with supervisor.stream("hello", max_tokens=6) as stream:
            with pytest.raises(TimeoutError):
                stream.read(timeout=0)
            wait_until(lambda: request_of(stream).window.buffered == 4)
            assert "".join(str(stream.read(timeout=0)) for _ in range(4)) == words(4)
            assert rest_of(stream) == words(2, start=4)
            assert stream.read(timeout=0) is None
    with blocking({"load_s": 60}, wait_until_ready=False) as supervisor:
        with pytest.raises(TimeoutError):
            supervisor.wait_ready(timeout=0.05)


# --- event loops and callbacks -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_thread_that_runs_an_event_loop_is_refused_and_not_blocked(anyio_backend: str) -> None:
    with pytest.raises(UsageError, match="async with Supervisor"):
        BlockingSupervisor(engine="scripted").__enter__()
    entered: Future[BlockingSupervisor] = Future()
    leave = threading.Event()

    def hold() -> None:
        with blocking(ENDLESS) as supervisor:
            entered.set_result(supervisor)
            assert leave.wait(PATIENCE_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, hold)
        supervisor = await anyio.to_thread.run_sync(entered.result)
        stream = await anyio.to_thread.run_sync(lambda: supervisor.stream("hello"))
        await anyio.to_thread.run_sync(lambda: next(stream))
        uses: list[Callable[[], object]] = [
            lambda: supervisor.stream("x"),
            lambda: supervisor.generate("x"),
            supervisor.stop,
            supervisor.wait_ready,
            stream.read,
            stream.text,
            stream.released,
            lambda: stream.__exit__(None, None, None),
        ]
        for use in uses:
            with pytest.raises(UsageError, match="async with Supervisor"):
                use()
        # What waits for nothing is welcome.
        assert supervisor.status().in_flight == 1
        stream.cancel()
        assert (await anyio.to_thread.run_sync(stream.released)).end_reason is EndReason.CANCELLED
        leave.set()


def test_a_callback_of_a_loop_that_runs_outside_any_task_is_refused_too() -> None:
    found: list[str] = []

    async def main() -> None:
        done = asyncio.Event()

        def callback() -> None:
            try:
                BlockingSupervisor(engine="scripted").__enter__()
            except UsageError as error:
                found.append(error.code)
            done.set()

        asyncio.get_running_loop().call_soon(callback)
        await done.wait()

    asyncio.run(main())
    assert found == ["usage"]


def test_events_come_in_the_supervisors_own_thread_which_may_look_and_cancel_but_not_wait() -> None:
    seen: list[object] = []
    streams: list[BlockingStream] = []
    supervisors: list[BlockingSupervisor] = []

    def on_event(event: object) -> None:
        if type(event).__name__ == "RequestStarted":
            try:
                streams[0].read()
            except UsageError as error:
                seen.append(error.code)
            seen.append(threading.current_thread().name)
            seen.append(supervisors[0].status().in_flight)
            streams[0].cancel()

    with blocking({"prefill_s": 60}, on_event=on_event, escalation=PATIENT) as supervisor:
        supervisors.append(supervisor)
        streams.append(supervisor.stream("hello"))
        assert rest_of(streams[0]) == ""
        assert streams[0].released().end_reason is EndReason.CANCELLED
    assert seen == ["usage", "infervisor", 1]


# --- stopping ------------------------------------------------------------------------------------------


def test_stopping_wakes_all_who_wait() -> None:
    with blocking(ENDLESS) as supervisor, threads() as pool:
        running = supervisor.stream("running", window=3)
        next(running)
        wait_until(lambda: request_of(running).window.buffered == 3)
        queued = supervisor.stream("queued")
        waiting = [
            pool.submit(rest_of, queued),
            pool.submit(supervisor.generate, "queued too"),
            pool.submit(queued.released),
        ]
        wait_until_waiting(queued)
        wait_until(lambda: supervisor.status().queue_depth == 2)
        for stopping in [pool.submit(supervisor.stop) for _ in range(3)]:
            assert result_of(stopping) is None
        for future in waiting[:2]:
            with pytest.raises(ShuttingDown) as raised:
                result_of(future)
            assert raised.value.report.end_reason is EndReason.SHUTTING_DOWN
        assert result_of(waiting[2]).end_reason is EndReason.SHUTTING_DOWN
        # What had arrived can still be read, as in the asynchronous one; then comes the reason.
        assert [str(next(running)) for _ in range(3)] == ["w1 ", "w2 ", "w3 "]
        for use in (running.read, running.text):
            with pytest.raises(ShuttingDown, match="closing"):
                use()
        assert running.released().is_released
        running.cancel()
        with pytest.raises(ShuttingDown):
            supervisor.stream("late")


def test_text_that_arrived_before_the_stop_can_be_had_after_it() -> None:
    with blocking() as supervisor:
        stream = supervisor.stream("hello", max_tokens=10)
        untouched = supervisor.stream("untouched")
        next(stream)
        wait_until(lambda: stream.report.is_released)
    assert stream.text() == words(9, start=1)
    assert stream.read() is None
    with pytest.raises(ShuttingDown):
        untouched.read()
    with stream:
        pass


def test_it_can_be_stopped_while_it_starts() -> None:
    supervisor = BlockingSupervisor(engine="scripted", options={"load_s": 60}, graces=QUICK_GRACES)
    with threads() as pool:
        entering = pool.submit(supervisor.__enter__)
        wait_until(lambda: supervisor._supervisor._dispatcher)
        supervisor.stop()
        with pytest.raises(ShuttingDown, match="while it started"):
            result_of(entering)


def test_calls_that_race_with_the_stop_end_one_way_or_the_other() -> None:
    with threads() as pool:
        for _ in range(3):
            with blocking() as supervisor:

                def ask(supervisor: BlockingSupervisor = supervisor) -> str:
                    for _ in range(10_000):
                        try:
                            assert supervisor.generate("hello", max_tokens=2).text == words(2)
                        except ShuttingDown:
                            return "shut"
                    return "never"

                asking = [pool.submit(ask) for _ in range(6)]
                assert supervisor.generate("hello", max_tokens=2).text == words(2)
                supervisor.stop()
                assert [result_of(future) for future in asking] == ["shut"] * 6


def test_a_call_on_its_way_into_a_loop_that_ends_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking() as supervisor, threads() as pool:
        loop = supervisor._loop
        assert loop is not None
        start = loop._portal.start_task_soon
        late: list[threading.Thread] = []

        def start_late(function: Callable[..., Any]) -> Future[Any]:
            if threading.current_thread() in late:
                wait_until(lambda: loop._is_closed)
                time.sleep(0.05)  # a loop that didn't wait would have ended by now
            return start(function)

        def call() -> None:
            late.append(threading.current_thread())
            supervisor.stream("late")

        monkeypatch.setattr(loop._portal, "start_task_soon", start_late)
        calling = pool.submit(call)
        wait_until(lambda: loop._submitting)
        supervisor.stop()
        with pytest.raises(ShuttingDown):
            result_of(calling)


def test_what_breaks_the_loop_is_raised_on_leaving() -> None:
    def on_event(event: object) -> None:
        if type(event).__name__ == "RequestStarted":
            raise SystemExit(3)

    with pytest.raises(BaseException) as raised:  # noqa: PT011, PT012 (which of them is the next assertion's)
        with blocking(ENDLESS, on_event=on_event) as supervisor:
            with pytest.raises(BaseException) as read:  # noqa: PT011
                supervisor.generate("hello")
            assert not isinstance(read.value, AssertionError)
    assert isinstance(raised.value, SystemExit)


def test_a_supervisor_that_is_dropped_warns_and_is_stopped() -> None:
    supervisor = BlockingSupervisor(engine="scripted", graces=QUICK_GRACES).__enter__()
    stream = supervisor.stream("hello")
    next(stream)
    pid = supervisor.status().worker_pid
    assert pid is not None
    del supervisor
    gc.collect()
    # Its stream is in use.
    assert not is_gone(pid)
    assert next(stream).index == 1
    held = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="never left"):
        held.clear()
    wait_gone(pid, PATIENCE_S)


# --- processes -----------------------------------------------------------------------------------------


FORK = """
import os, sys
from infervisor import BlockingSupervisor, UsageError

supervisor = BlockingSupervisor(engine="scripted", options={"pace_s": 0.005}).__enter__()
stream = supervisor.stream("hello", max_tokens=50)
first = next(stream)
uses = [
    lambda: supervisor.stream("x"), lambda: supervisor.generate("x"), supervisor.stop, supervisor.status,
    supervisor.wait_ready, supervisor.restart_worker, stream.read, stream.text, stream.cancel, stream.kill,
    stream.released, stream.__enter__, lambda: stream.__exit__(None, None, None),
    lambda: supervisor.__exit__(None, None, None),
]
child = os.fork()
if child == 0:
    refused = 0
    for use in uses:
        try:
            use()
        except UsageError:
            refused += 1
    print("refused", refused, "of", len(uses), flush=True)
    # Leaves through everything: collection and the exit hooks.
    sys.exit(7)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), flush=True)
print(stream.text()[-4:])
supervisor.stop()
"""


def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    with host(FORK, flags=("-W", "error")) as program:
        code, said, errors = program.finish()
    assert said.splitlines() == ["refused 14 of 14", "child 7", "w49 "]
    assert (code, complaints(errors)) == (0, [])


INTERRUPTED = """
import signal, sys, time
from infervisor import BlockingSupervisor

state = sys.argv[1]
options = {"starting": {"load_s": 60}, "prefill": {"prefill_s": 60}}.get(state, {"pace_s": 0.02})
try:
    supervisor = BlockingSupervisor(engine="scripted", options=options, wait_until_ready=False)
    with supervisor:
        if state == "starting":
            print("go", flush=True)
            supervisor.wait_ready()
        elif state == "generate":
            print("go", flush=True)
            try:
                supervisor.generate("hello")
            except KeyboardInterrupt:
                while supervisor.status().in_flight:
                    time.sleep(0.005)
                raise
        else:
            with supervisor.stream("hello", window=1) as stream:
                texts = []
                try:
                    for chunk in stream:
                        texts.append(str(chunk))
                        if len(texts) == 1:
                            print("go", flush=True)
                except KeyboardInterrupt:
                    if state == "once":
                        # Whoever catches it may go on: no chunk is lost.
                        while len(texts) < 40:
                            texts.append(str(next(stream)))
                        print("".join(texts) == "".join(f"w{i} " for i in range(40)), flush=True)
                    raise
finally:
    if state in ("once", "decode"):
        print(stream.report.end_reason, stream.report.is_released)
    print(supervisor.status().slot, supervisor.status().worker, flush=True)
"""


@pytest.mark.parametrize("state", ["starting", "generate", "decode", "once"])
def test_ctrl_c_wakes_the_main_thread_and_nothing_hangs(state: str) -> None:
    with host(INTERRUPTED, state, flags=("-W", "error")) as program:
        assert program.line() == "go"
        program.signal(signal.SIGINT)
        code, said, errors = program.finish()
    wanted = {"once": ["True", "cancelled True"], "decode": ["cancelled True"]}.get(state, [])
    assert said.splitlines() == [*wanted, "stopped None"]
    assert code == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


STALLED = """
import sys, threading, time
from infervisor import BlockingSupervisor

def stall():
    print("go", flush=True)
    time.sleep(0.7)

with BlockingSupervisor(engine="scripted", options={"pace_s": 0.1}) as supervisor:
    portal = supervisor._loop._portal
    with supervisor.stream("hello", window=1) as stream:
        request = stream._stream._request
        texts = [str(next(stream))]
        if sys.argv[1] == "waiting":
            # The loop stands still with a call that waits in it: the next call overtakes its withdrawal.
            def stall_later():
                while not request.news._waiting:
                    time.sleep(0.001)
                portal.start_task_soon(stall)
            threading.Thread(target=stall_later).start()
        else:
            # The loop stands still before the call has come in.
            portal.start_task_soon(stall)
        try:
            while True:
                texts.append(str(next(stream)))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        texts.append(str(next(stream)))
        while request.window.buffered < 1:
            time.sleep(0.005)
        assert request.window.taken == len(texts), "taken ahead of the reader"
        while len(texts) < 8:
            texts.append(str(next(stream)))
        print("".join(texts))
"""


@pytest.mark.parametrize("state", ["waiting", "submitting"])
def test_whoever_goes_on_reading_after_ctrl_c_misses_nothing(state: str) -> None:
    with host(STALLED, state, flags=("-W", "error")) as program:
        assert program.line() == "go"
        if state == "submitting":
            time.sleep(0.3)  # while the loop stands still for longer, and the main thread has called
        program.signal(signal.SIGINT)
        code, said, errors = program.finish()
    assert (code, said, errors) == (0, f"interrupted\n{words(8)}\n", "")


INTERRUPTED_ENTERING = """
import signal
from infervisor import BlockingSupervisor

def tell(event):
    if type(event).__name__ == "WorkerSpawned":
        print(event.pid, flush=True)

try:
    with BlockingSupervisor(engine="scripted", options={"load_s": 60}, on_event=tell):
        pass
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_it_enters_ends_the_worker() -> None:
    with host(INTERRUPTED_ENTERING, flags=("-W", "error")) as program:
        pid = int(program.line())
        program.signal(signal.SIGINT)
        code, said, errors = program.finish()
    assert (code, said, errors) == (0, "interrupted\n", "")
    assert is_gone(pid)


UNCLOSED = """
import sys, threading
from infervisor import BlockingSupervisor

def tell(event):
    if type(event).__name__ == "WorkerExited":
        print("exit hook:", event.cause, flush=True)

options = {"pace_s": 0.005}
supervisor = BlockingSupervisor(engine="scripted", options=options, on_event=tell).__enter__()
print(supervisor.status().worker_pid, flush=True)
if sys.argv[1] == "streaming":
    stream = supervisor.stream("hello")
    next(stream)
if sys.argv[1] == "thread":
    # A daemon thread that waits in the middle of an answer doesn't keep the interpreter.
    begun = threading.Event()
    def read():
        for chunk in supervisor.stream("hello"):
            begun.set()
    threading.Thread(target=read, daemon=True).start()
    begun.wait()
if sys.argv[1] == "raise":
    raise SystemExit(5)
"""


@pytest.mark.parametrize("state", ["idle", "streaming", "thread", "raise"])
def test_an_interpreter_that_ends_stops_what_was_never_left(state: str) -> None:
    with host(UNCLOSED, state, flags=("-W", "error")) as program:
        pid = int(program.line())
        code, said, errors = program.finish()
    assert code == (5 if state == "raise" else 0)
    assert said == "exit hook: stopped\n"
    assert "Fatal" not in errors
    if state != "thread":  # whose daemon is told that it is shut down, or isn't any more
        assert errors == ""
    assert is_gone(pid)


def test_it_can_be_started_and_stopped_without_a_block() -> None:
    supervisor = BlockingSupervisor(engine="scripted")
    supervisor.stop()  # nothing to stop yet
    assert supervisor.start() is supervisor
    assert supervisor.generate("hello", max_tokens=2).text == "w0 w1 "
    with pytest.raises(UsageError, match="entered before"):
        supervisor.start()
    supervisor.stop()
    supervisor.stop()


# --- what can't begin ------------------------------------------------------------------------------------


def test_a_supervisor_whose_thread_cannot_be_started_is_closed_and_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = BlockingSupervisor(engine="scripted")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            supervisor.__enter__()
    stopping = threading.Thread(target=supervisor.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    with pytest.raises(ShuttingDown):
        supervisor.generate("x")


def test_a_thread_that_asks_before_it_is_entered_is_told_so() -> None:
    supervisor = BlockingSupervisor(engine="scripted")
    supervisor._loop = LoopThread(supervisor._supervisor)  # as between the two halves of entering
    with pytest.raises(UsageError, match="isn't entered yet"):
        supervisor.generate("x")
    supervisor._loop = None
    with supervisor:
        assert supervisor.generate("x", max_tokens=1).text == words(1)


KILLED_WHILE_IT_STARTS = """
import sys, threading, psutil
from infervisor import BlockingSupervisor

real = threading.Thread.start

def start(thread):
    real(thread)
    if thread.name == "infervisor":
        raise KeyboardInterrupt  # as if Ctrl-C came while Thread.start waits for the thread

threading.Thread.start = start
supervisor = BlockingSupervisor(engine="scripted")
try:
    supervisor.__enter__()
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate()], psutil.Process().children())
"""


def test_ctrl_c_while_its_thread_starts_leaves_nothing() -> None:
    with host(KILLED_WHILE_IT_STARTS, flags=("-W", "error")) as program:
        code, said, errors = program.finish()
    assert (code, said, errors) == (0, "['MainThread'] []\n", "")


# --- looking on, and vectors ---------------------------------------------------------------------------


def test_a_thread_sees_phases_and_hears_events() -> None:
    heard: list[object] = []
    with blocking(ENDLESS) as supervisor:
        assert supervisor.model is None
        assert supervisor.deadlines.startup_s is not None
        remove = supervisor.add_listener(heard.append)
        stream = supervisor.stream("hello", window=4)
        assert stream.phase == "new"
        with stream:
            wait_until(lambda: stream.phase == "paused")
        assert stream.phase == "released"
        remove()
        count = len(heard)
        assert count
        supervisor.generate("hello", max_tokens=1)
        assert len(heard) == count


def test_a_thread_gets_vectors_and_another_one_can_cancel_them(tmp_path: Path) -> None:
    with BlockingSupervisor(build_encoder(tmp_path / "bert.gguf")) as supervisor:
        same = supervisor.embed(["abc"]).vectors[0]
        assert list(supervisor.embedding_request(["abc"]).embeddings().vectors[0]) == list(same)
        request = supervisor.embedding_request(["abc xyz " * 50] * 2000)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(request.embeddings)
            wait_until(lambda: request.phase in ("prefill", "decode"))
            request.cancel(EndReason.CLIENT_DISCONNECTED)
            with pytest.raises(RequestCancelled) as raised:
                result_of(asked)
        assert raised.value.code == "client_disconnected"
        assert raised.value.report.is_released
