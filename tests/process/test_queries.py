"""Questions to real workers: answered beside everything else, by the next one if need be, and never twice."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import RestartPolicy, Supervisor
from infervisor.protocol.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RemoteProtocolError,
    ShuttingDown,
    WorkerDied,
)
from infervisor.supervisor.events import WorkerBecameReady, WorkerExited, WorkerSpawned
from infervisor.supervisor.queries import MAX_CALLERS
from tests.helpers.lying_worker import lying
from tests.helpers.models import CHATML, EOS, LOOP, TOKEN, build_model
from tests.helpers.supervised import QUICK_GRACES, QUICK_RESTART, Told, scripted
from tests.helpers.waiting import only_worker, until

pytestmark = pytest.mark.anyio

OFTEN = RestartPolicy(max_restarts=20, backoff_initial_s=0.01, backoff_max_s=0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("m") / "loop.gguf", LOOP, CHATML, context_tokens=1024)


@asynccontextmanager
async def llama(model: Path, **settings: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    told = Told()
    options = {"threads": 1, "slots": 1}
    settings = {"restart": QUICK_RESTART, "graces": QUICK_GRACES, "options": options, **settings}
    async with Supervisor(model, on_event=told, **settings) as supervisor:
        yield supervisor, told


@asynccontextmanager
async def lies(directory: Path, script: str, **settings: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    told = Told()
    python = lying(directory, "ready()\n" + script)
    async with Supervisor(
        engine="lies", python=python, restart=OFTEN, on_event=told, **settings
    ) as supervisor:
        yield supervisor, told


# --- answers -----------------------------------------------------------------------------------------


async def test_tokens_text_and_counts_are_the_model_s(model: Path) -> None:
    async with llama(model) as (supervisor, _):
        tokens = await supervisor.tokenize("abc</s>")
        assert tokens[-1] == EOS
        assert TOKEN["a"] in tokens
        assert EOS not in await supervisor.tokenize("abc</s>", special=False)
        assert await supervisor.tokenize("") == []
        assert await supervisor.detokenize(tokens) == "abc</s>"
        assert await supervisor.detokenize([]) == ""
        llama_bytes = await supervisor.tokenize("🦙")
        assert await supervisor.detokenize(llama_bytes) == "🦙"
        assert "\ufffd" in await supervisor.detokenize(llama_bytes[-1:])
        long = "abc" * 40_000  # longer than the context: nothing is computed
        assert await supervisor.detokenize(await supervisor.tokenize(long)) == long

        for request in ({"prompt": "abc"}, {"messages": [{"role": "user", "content": "ab"}]}):
            counted = await supervisor.count_tokens(**request)
            answer = await supervisor.generate(max_tokens=1, **request)
            assert counted == answer.report.usage.prompt_tokens


@pytest.mark.parametrize(("ask", "field"), [
    (lambda it: it.tokenize(5), "text"), (lambda it: it.tokenize("\udc80"), "text"),
    (lambda it: it.tokenize("a", special=1), "special"), (lambda it: it.tokenize("a", timeout_s=0), "timeout_s"),
    (lambda it: it.tokenize("a" * (16 << 20)), "text"),
    (lambda it: it.detokenize("ab"), "tokens"), (lambda it: it.detokenize([1, -1]), "tokens[1]"),
    (lambda it: it.detokenize([1, 10_000]), "tokens[1]"), (lambda it: it.detokenize([True]), "tokens[0]"),
    (lambda it: it.detokenize([1 << 70]), "tokens[0]"),
    (lambda it: it.count_tokens(), "prompt"), (lambda it: it.count_tokens("a", special=None), "special"),
])  # fmt: skip
async def test_bad_questions_are_named_and_ask_no_worker(model: Path, ask: Any, field: str) -> None:
    async with llama(model) as (supervisor, _):
        with pytest.raises(InvalidRequest) as caught:
            await ask(supervisor)
        assert caught.value.field == field
        assert await supervisor.tokenize("</s>") == [EOS]


async def test_answers_too_long_for_a_frame_are_refused_and_the_worker_lives(model: Path) -> None:
    async with llama(model) as (supervisor, _):
        with pytest.raises(InvalidRequest, match="parts"):
            await supervisor.tokenize("abc" * 100_000)
        assert await supervisor.count_tokens("\x01" * 5000) > 5000  # more than the context holds
        assert await supervisor.tokenize("</s>") == [EOS]


async def test_questions_take_no_slot_and_wait_behind_no_stream(model: Path) -> None:
    async with llama(model) as (supervisor, _):
        async with supervisor.stream("a", window=2) as stream:
            await anext(stream)  # it has the only slot, and stands still for want of credit
            async with supervisor.stream("b"):  # this one waits
                assert supervisor.status().queue_depth == 1
                async with anyio.create_task_group() as tasks:
                    for _ in range(20):
                        tasks.start_soon(supervisor.tokenize, "abc")
                assert await supervisor.count_tokens("abc") > 3


async def test_an_engine_without_tokens_says_so() -> None:
    async with scripted() as (supervisor, _):
        with pytest.raises(InvalidRequest, match="answers no queries"):
            await supervisor.tokenize("abc")


# --- workers that come and go ------------------------------------------------------------------------


async def test_the_next_worker_answers_what_the_one_before_took_along(model: Path) -> None:
    async with llama(model) as (supervisor, told):
        worker = only_worker()
        os.kill(worker, signal.SIGSTOP)
        found: list[list[int]] = []

        async def ask() -> None:
            found.append(await supervisor.tokenize("</s>"))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            os.kill(worker, signal.SIGKILL)
        assert found == [[EOS]] * 3
        assert len(told.of(WorkerBecameReady)) == 2


async def test_it_waits_for_a_worker(model: Path) -> None:
    async with llama(model, wait_until_ready=False) as (supervisor, told):
        assert not told.of(WorkerBecameReady)
        assert await supervisor.tokenize("</s>") == [EOS]


async def test_what_kills_three_workers_is_not_asked_again(tmp_path: Path) -> None:
    async with lies(tmp_path, 'hear("query")\nos_exit = __import__("os")._exit\nos_exit(7)\n') as (
        supervisor,
        told,
    ):
        with pytest.raises(WorkerDied) as caught:
            await supervisor.tokenize("abc")
        assert caught.value.exit_code == 7
        await told.wait_for(WorkerBecameReady, count=4)
        assert len(told.of(WorkerExited)) == 3


async def test_a_model_that_cant_be_loaded_says_why(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    async with llama(path, wait_until_ready=False) as (supervisor, _):
        with pytest.raises(ModelLoadError):
            await supervisor.tokenize("abc")


async def test_closing_ends_what_waits(tmp_path: Path) -> None:
    async with lies(tmp_path, "done()\n", graces=QUICK_GRACES) as (supervisor, _):
        caught: list[Exception] = []

        async def ask() -> None:
            try:
                await supervisor.tokenize("abc")
            except ShuttingDown as error:
                caught.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await supervisor.stop()
        assert len(caught) == 1
        with pytest.raises(ShuttingDown):
            await supervisor.tokenize("abc")


# --- workers that lie or say nothing -------------------------------------------------------------------


@pytest.mark.parametrize("said", [
    "id + 1, b'', None", "id, 'abc', None", "id, b'123', None", "id, b'\\xff\\xff\\xff\\xff', None",
    "id, None, None", "id, b'', {'code': 'x'}", "id, 7, None",
])  # fmt: skip
async def test_answers_that_cant_be_are_a_protocol_error(tmp_path: Path, said: str) -> None:
    script = f'id = hear("query")[0]\nsay("answered", now(), {said})\ndone()\n'
    async with lies(tmp_path, script) as (supervisor, told):
        with pytest.raises(RemoteProtocolError, match="answered"):
            await supervisor.tokenize("abc")
        assert len(told.of(WorkerExited)) == 3


@pytest.mark.parametrize("value", ["-1", "True", "1.5", "'a'", "None", "1 << 40"])
async def test_counts_that_cant_be_are_a_protocol_error(tmp_path: Path, value: str) -> None:
    script = f'id = hear("query")[0]\nsay("answered", now(), id, {value}, None)\ndone()\n'
    async with lies(tmp_path, script) as (supervisor, _):
        with pytest.raises(RemoteProtocolError, match="answered"):
            await supervisor.count_tokens("abc")


async def test_a_worker_s_error_is_the_caller_s(tmp_path: Path) -> None:
    script = 'id = hear("query")[0]\nerror = {"code": "engine_error", "message": "boo"}\n'
    script += 'say("answered", now(), id, None, error)\ndone()\n'
    async with lies(tmp_path, script) as (supervisor, told):
        with pytest.raises(EngineError, match="boo"):
            await supervisor.tokenize("abc")
        assert not told.of(WorkerExited)


LATE = """
first, second = hear("query")[0], hear("query")[0]
for id in (first, second):
    say("answered", now(), id, (id == second).to_bytes(4, "little"), None)
done()
"""


async def test_a_question_has_its_time_and_a_late_answer_harms_nobody(tmp_path: Path) -> None:
    async with lies(tmp_path, LATE) as (supervisor, told):
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await supervisor.tokenize("abc", timeout_s=0.05)
        assert await supervisor.tokenize("def") == [1]
        assert not told.of(WorkerExited)


async def test_a_cancelled_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    async with lies(tmp_path, LATE) as (supervisor, told):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.tokenize, "abc")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert await supervisor.tokenize("def") == [1]
        assert not told.of(WorkerExited)


async def test_a_question_that_hasnt_left_is_taken_back(model: Path) -> None:
    async with llama(model) as (supervisor, _):
        worker = only_worker()
        os.kill(worker, signal.SIGSTOP)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.count_tokens, "a" * 1_000_000)  # fills the pipe
                tasks.start_soon(supervisor.count_tokens, "b" * 1_000_000)
                await anyio.wait_all_tasks_blocked()
                dispatcher = supervisor._dispatcher
                assert dispatcher is not None
                queries = dispatcher.pool.serving[0].queries
                assert len(queries) == 2
                tasks.cancel_scope.cancel()
            assert len(queries) == 1
        finally:
            os.kill(worker, signal.SIGCONT)
        await until(lambda: not len(queries))
        assert await supervisor.tokenize("</s>") == [EOS]


async def test_too_many_at_once_are_refused(tmp_path: Path) -> None:
    async with lies(tmp_path, "done()\n", graces=QUICK_GRACES) as (supervisor, _):
        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_CALLERS):
                tasks.start_soon(supervisor.tokenize, "abc")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await supervisor.tokenize("abc")
            tasks.cancel_scope.cancel()


async def test_workers_are_only_asked_while_they_serve(model: Path) -> None:
    async with llama(model) as (supervisor, told):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.recycle)
            while len(told.of(WorkerSpawned)) < 2 or len(told.of(WorkerExited)) < 1:
                assert await supervisor.tokenize("</s>") == [EOS]
