"""Embeddings through real workers: exact on table models, and as alive as any other request."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import Deadlines, EndReason, Escalation, Overloaded, Stage, Supervisor
from infervisor.protocol.errors import (
    DeadlineExceeded,
    EngineError,
    FlowControlError,
    InvalidRequest,
    RemoteProtocolError,
    WorkerDied,
)
from infervisor.supervisor.events import RequestReleased, RequestResumed, RequestStarted, WorkerExited
from infervisor.supervisor.request import Request
from tests.helpers.lying_worker import lying
from tests.helpers.models import BOS, CHATML, LOOP, VOCABULARY, build_model, smollm2_path
from tests.helpers.supervised import QUICK_ESCALATION, QUICK_GRACES, QUICK_RESTART, Told, scripted
from tests.helpers.waiting import only_worker, until

pytestmark = pytest.mark.anyio

TEXTS = ["abc", "a", "ab" * 30, "cab" * 70, "🦙", "alpha beta"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("m") / "loop.gguf", LOOP, CHATML, context_tokens=256)


@asynccontextmanager
async def llama(model: Path, *, slots: int = 2, **settings: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    told = Told()
    options = {"threads": 1, "slots": slots, **settings.pop("options", {})}
    settings = {
        "restart": QUICK_RESTART, "graces": QUICK_GRACES, "escalation": QUICK_ESCALATION, "options": options,
        **settings,
    }  # fmt: skip
    async with Supervisor(model, on_event=told, **settings) as supervisor:
        yield supervisor, told


async def expected(supervisor: Supervisor, text: str) -> list[float]:
    """Return the vector of a text in a table model: how often each token is in it, made one of length 1."""
    counts = Counter([BOS, *await supervisor.tokenize(text, special=False)])
    length = math.sqrt(sum(count * count for count in counts.values()))
    return [counts[token] / length for token in range(len(VOCABULARY))]


def alike(one: Sequence[float], other: Sequence[float]) -> None:
    assert list(one) == pytest.approx(list(other), abs=2e-3)


def running(supervisor: Supervisor) -> Request:
    """Return the one request that there is."""
    dispatcher = supervisor._dispatcher
    assert dispatcher is not None
    (request,) = dispatcher.requests.values()
    return request


# --- what comes out ------------------------------------------------------------------------------------


async def test_vectors_are_exact_and_in_order(model: Path) -> None:
    async with llama(model) as (supervisor, told):
        result = await supervisor.embed(TEXTS)
        assert (len(result.vectors), result.dimensions) == (len(TEXTS), len(VOCABULARY))
        tokens = 0
        for text, vector in zip(TEXTS, result.vectors, strict=True):
            alike(vector, await expected(supervisor, text))
            tokens += 1 + len(await supervisor.tokenize(text, special=False))
        report = result.report
        assert report.end_reason is EndReason.STOP
        assert (report.usage.prompt_tokens, report.usage.completion_tokens) == (tokens, 0)
        assert report.timeline.first_token_ns is not None
        assert report.is_released
        one = await supervisor.embed(TEXTS[3], normalise=False)
        assert len(one.vectors) == 1
        length = math.hypot(*one.vectors[0])
        assert length > 2
        alike([value / length for value in one.vectors[0]], result.vectors[3])
        assert told.of(RequestStarted)[0].prompt_tokens == tokens


async def test_streams_beside_it_say_what_they_would_say_alone(model: Path) -> None:
    async with llama(model, slots=3) as (supervisor, _):
        alone = await supervisor.generate("x", max_tokens=150, temperature=0)
        vectors: list[Any] = []

        async def embed() -> None:
            vectors.append((await supervisor.embed(TEXTS * 20)).vectors)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed)
            tasks.start_soon(embed)
            together = await supervisor.generate("x", max_tokens=150, temperature=0)
        assert together.text == alone.text
        assert [len(each) for each in vectors] == [len(TEXTS) * 20] * 2
        for each in vectors:
            for number in range(0, len(each), 17):
                alike(each[number], await expected(supervisor, TEXTS[number % len(TEXTS)]))


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("texts", "field"), [
    ([], "texts"), (["a", ""], "texts[1]"), (["a", 5], "texts[1]"), (["abc", "ab" * 200, "c"], "texts[1]"),
])  # fmt: skip
async def test_bad_texts_are_named(model: Path, texts: list[Any], field: str) -> None:
    async with llama(model) as (supervisor, told):
        with pytest.raises(InvalidRequest) as caught:
            await supervisor.embed(texts)
        assert caught.value.field == field
        assert len((await supervisor.embed("a")).vectors) == 1
        assert not told.of(WorkerExited)


async def test_an_engine_without_embeddings_says_so() -> None:
    async with scripted() as (supervisor, _):
        with pytest.raises(InvalidRequest) as caught:
            await supervisor.embed("abc")
        assert caught.value.field == "texts"
        assert caught.value.report.end_reason is EndReason.INVALID_REQUEST


async def test_it_waits_its_turn(model: Path) -> None:
    async with llama(model, slots=1, max_queue=1) as (supervisor, _):
        async with supervisor.stream("a", window=2) as stream:
            await anext(stream)
            with pytest.raises(DeadlineExceeded) as caught:
                await supervisor.embed("abc", deadlines=Deadlines(queue_s=0.05))
            assert caught.value.code == EndReason.QUEUE_TIMEOUT
            async with supervisor.stream("b"):
                with pytest.raises(Overloaded):
                    await supervisor.embed("abc")


# --- cancelling ----------------------------------------------------------------------------------------


@pytest.mark.real_model
async def test_a_cancel_inside_a_long_text_frees_the_slot_at_once() -> None:
    patient = Escalation(signal_after_s=5, kill_after_s=10)  # all of it takes much longer
    options = {"n_ctx": 8192}
    async with llama(smollm2_path(), slots=1, options=options, escalation=patient) as (supervisor, told):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.embed, "many words " * 3000)
            await told.wait_for(RequestStarted)
            request = running(supervisor)
            tasks.cancel_scope.cancel()
        report = (await told.wait_for(RequestReleased)).report
        assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.IN_BAND)
        assert report.timeline.cancel_noticed_ns is not None
        assert request.vectors == []
        vectors = (await supervisor.embed(["Hello", "world"])).vectors
        assert [round(math.hypot(*vector), 4) for vector in vectors] == [1, 1]


async def test_a_deadline_ends_it_with_its_name(model: Path) -> None:
    async with llama(model) as (supervisor, _):
        with pytest.raises(DeadlineExceeded) as caught:
            await supervisor.embed(["ab" * 100] * 2048, deadlines=Deadlines(total_s=0.2))
        assert caught.value.code == EndReason.TOTAL_TIMEOUT
        assert caught.value.report.is_released


async def test_a_cancel_while_vectors_come_leaves_the_worker_as_it_was(model: Path) -> None:
    async with llama(model) as (supervisor, told):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.embed, ["ab" * 100] * 2048)
            await told.wait_for(RequestStarted)
            request = running(supervisor)
            await until(lambda: len(request.vectors) > 5)
            tasks.cancel_scope.cancel()
        assert len(request.vectors) < 2048
        assert not told.of(WorkerExited)
        alike((await supervisor.embed("abc")).vectors[0], await expected(supervisor, "abc"))


# --- workers that die ----------------------------------------------------------------------------------


async def test_it_goes_on_in_the_next_worker_with_the_texts_that_are_left(model: Path) -> None:
    texts = ["ab" * (1 + number % 100) for number in range(600)]
    async with llama(model) as (supervisor, told):
        found: list[Any] = []

        async def embed() -> None:
            found.append(await supervisor.embed(texts))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed)
            await told.wait_for(RequestStarted)
            request = running(supervisor)
            for deaths in (1, 2):
                enough = len(request.vectors) + 20
                await until(partial(lambda least: len(request.vectors) > least, enough))
                assert len(request.vectors) < len(texts)
                os.kill(only_worker(), signal.SIGKILL)
                await told.wait_for(WorkerExited, count=deaths)
                await told.wait_for(RequestResumed, count=deaths)
        (result,) = found
        assert len(result.vectors) == len(texts)
        for number in (*range(100), 599):
            alike(result.vectors[number], await expected(supervisor, texts[number]))
        for number in range(100, 600):
            alike(result.vectors[number], result.vectors[number % 100])
        report = result.report
        assert len(report.resumes) == 2
        counted = sum(1 + len(text) for text in texts)
        assert abs(report.usage.prompt_tokens - counted) <= len(
            texts
        )  # a space before each, if the model wants it


async def test_it_can_be_told_to_fail_with_its_worker(model: Path) -> None:
    async with llama(model) as (supervisor, told):
        caught: list[WorkerDied] = []

        async def embed() -> None:
            try:
                await supervisor.embed(["ab" * 100] * 2048, on_crash="fail")
            except WorkerDied as error:
                caught.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed)
            await told.wait_for(RequestStarted)
            os.kill(only_worker(), signal.SIGKILL)
        assert [error.signal_name for error in caught] == ["SIGKILL"]


# --- workers that lie ----------------------------------------------------------------------------------

BEGIN = """
import struct
def vectors(index, *numbers): say("vectors", now(), id, index, [struct.pack("<2f", n, 1) for n in numbers])
def end(why):
    usage = dict.fromkeys(["prompt_tokens", "cached_tokens", "completion_tokens", "computed_tokens"], 6)
    say("ended", now(), id, why, "", usage, None)
    say("released", now(), id, None, now())
ready()
submit = hear("submit")
id = submit[0]
say("started", now(), id, 0, 0, 6)
"""


@asynccontextmanager
async def lies(directory: Path, script: str, **settings: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    told = Told()
    python = lying(directory, BEGIN + script + "\ndone()\n")
    settings = {"restart": QUICK_RESTART, "graces": QUICK_GRACES, "on_crash": "fail", **settings}
    async with Supervisor(engine="lies", python=python, on_event=told, **settings) as supervisor:
        yield supervisor, told


async def test_the_last_vector_is_the_end_whatever_follows(tmp_path: Path) -> None:
    async with lies(tmp_path, "vectors(0, 3)\nvectors(1, 4, 5)\n__import__('os')._exit(9)") as (
        supervisor,
        told,
    ):
        result = await supervisor.embed(["a", "b", "c"])
        assert [vector.tolist() for vector in result.vectors] == [[3, 1], [4, 1], [5, 1]]
        assert result.report.end_reason is EndReason.STOP
        await told.wait_for(WorkerExited)


@pytest.mark.parametrize("script", [
    "vectors(1, 3)", "vectors(0, 1); vectors(0, 1)", "vectors(0, 1, 2, 3, 4)", "end('stop')",
    "vectors(0, 1); end('stop')", "vectors(0, 1); end('length')", "say('tokens', now(), id, 0, [[5, 'a', None]])",
    "vectors(0, float('nan'))", "vectors(0, 1); say('vectors', now(), id, 1, [b'1234'])",
    "say('vectors', now(), id, 0, [])", "say('vectors', now(), id, 0, [b'123'])",
])  # fmt: skip
async def test_what_cant_be_an_answer_is_a_protocol_error(tmp_path: Path, script: str) -> None:
    async with lies(tmp_path, script) as (supervisor, told):
        with pytest.raises((RemoteProtocolError, FlowControlError)) as caught:
            await supervisor.embed(["a", "b", "c"])
        assert caught.value.code == EndReason.PROTOCOL_ERROR
        assert (await told.wait_for(WorkerExited)).cause == "protocol_error"


async def test_vectors_for_a_prompt_are_a_protocol_error(tmp_path: Path) -> None:
    async with lies(tmp_path, "vectors(0, 1)") as (supervisor, _):
        with pytest.raises(RemoteProtocolError, match="nothing to embed"):
            await supervisor.generate("abc")


async def test_a_worker_may_end_it_early_with_an_error(tmp_path: Path) -> None:
    async with lies(tmp_path, "vectors(0, 1); end('cancelled')", on_crash="resume") as (supervisor, told):
        with pytest.raises(EngineError):
            await supervisor.embed(["a", "b"])
        assert not told.of(WorkerExited)
