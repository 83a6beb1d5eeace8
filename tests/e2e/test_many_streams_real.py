"""Four streams of the real model in one worker: across its death, and with a beginning that they share."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from infervisor import Answer, RestartPolicy, Stream, Supervisor
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import WorkerExited
from infervisor.worker.engines.llama.options import REPRODUCIBLE_SLICE_TOKENS
from tests.helpers.models import smollm2_path
from tests.helpers.supervised import Told

pytestmark = [pytest.mark.anyio, pytest.mark.real_model]

TOKENS = 24
PROMPTS = (
    "Once upon a time there was a",
    "The three primary colours are",
    "1, 2, 3, 5, 8, 13,",
    "The harbour lay still under the morning fog, and the boats had not gone out. " * 4,
)
ASKED: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8}
SYSTEM = "You are a careful librarian. You answer in one short sentence and never guess. " * 20
"""About 300 tokens."""


@asynccontextmanager
async def smollm2(**options: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor of four slots."""
    told = Told()
    chosen = {"n_ctx": 1024, "threads": 2, "slots": 4, **options}
    restart = RestartPolicy(max_restarts=100, backoff_initial_s=0, backoff_max_s=0)
    async with Supervisor(smollm2_path(), options=chosen, restart=restart, on_event=told) as supervisor:
        yield supervisor, told


async def killed_under_four(supervisor: Supervisor, number: int) -> tuple[list[list[int]], list[Stream]]:
    """Send the signal to the worker when each of four streams has said something; return the tokens of each."""
    said: list[list[int]] = [[], [], [], []]
    begun = [anyio.Event() for _ in PROMPTS]

    async def read(n: int) -> None:
        async for chunk in streams[n]:
            said[n] += chunk.token_ids
            if len(said[n]) >= 2:
                begun[n].set()

    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(supervisor.stream(prompt, seed=n, window=4, **ASKED))
            for n, prompt in enumerate(PROMPTS)
        ]
        async with anyio.create_task_group() as tasks:
            for n in range(4):
                tasks.start_soon(read, n)
            for each in begun:
                await each.wait()
            (pid,) = {stream.report.worker_pid for stream in streams}
            assert pid is not None
            os.kill(pid, number)
    return said, streams


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["killed", "crashed"])
async def test_four_streams_go_on_after_their_workers_death_with_the_same_tokens(number: int) -> None:
    async with smollm2(reproducible=True) as (supervisor, told):
        alone: list[list[int]] = []
        for n, prompt in enumerate(PROMPTS):
            async with supervisor.stream(prompt, seed=n, **ASKED) as stream:
                alone.append([token async for chunk in stream for token in chunk.token_ids])
        said, streams = await killed_under_four(supervisor, number)
        assert said == alone
        for stream in streams:
            assert [resume.cause for resume in stream.report.resumes] == [DeathCause.CRASHED]
            assert stream.report.usage.completion_tokens == TOKENS
        (exited,) = told.of(WorkerExited)
        assert set(exited.requests) == {stream.report.request_id for stream in streams}


@pytest.mark.parametrize("reproducible", [False, True], ids=["fast", "reproducible"])
async def test_of_two_that_begin_alike_at_once_the_second_copies_what_the_first_reads(
    reproducible: bool,
) -> None:
    questions = ("Who wrote Faust?", "Where is the Danube?")
    answers: dict[str, Answer] = {}
    async with smollm2(reproducible=reproducible) as (supervisor, _):
        shared = await supervisor.count_tokens(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")

        async def ask(question: str) -> None:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            answers[question] = await supervisor.generate(messages=messages, max_tokens=8, temperature=0)

        async with anyio.create_task_group() as tasks:
            for question in questions:
                tasks.start_soon(ask, question)
        first, second = sorted(
            (each.report.usage for each in answers.values()), key=lambda u: u.cached_tokens
        )
        assert first.cached_tokens == 0
        unit = REPRODUCIBLE_SLICE_TOKENS if reproducible else 1
        assert second.cached_tokens >= shared // unit * unit >= 200
        # The same as alone, with nothing taken over.
        if reproducible:
            async with smollm2(reproducible=True, prefix_reuse=False) as (cold, _):
                for question in questions:
                    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
                    again = await cold.generate(messages=messages, max_tokens=8, temperature=0)
                    assert again.report.usage.cached_tokens == 0
                    assert again.text == answers[question].text


async def test_several_answers_to_one_prompt_read_it_once() -> None:
    async with smollm2() as (supervisor, _):
        answers = await supervisor.answers(SYSTEM, n=4, max_tokens=8, temperature=1.0, seed=5)
        usages = [answer.report.usage for answer in answers]
        (prompt,) = {usage.prompt_tokens for usage in usages}
        assert prompt >= 200
        read = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
        assert prompt <= read <= 1.1 * prompt
        assert len({answer.text for answer in answers}) > 1, "each has a seed of its own"
