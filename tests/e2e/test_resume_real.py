"""Real models across `kill -9`: under `reproducible` the reader gets the tokens of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from infervisor import EndReason, Report, RestartPolicy, Snapshots, Supervisor, default_model
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.messages import Tokens
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.events import RequestInterrupted, RequestResumed
from tests.helpers.gemma import gemma_model
from tests.helpers.supervised import Told

pytestmark = [pytest.mark.anyio, pytest.mark.real_model]

WINDOW = 4
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
PENALISED: dict[str, Any] = {
    **SEEDED, "repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.3, "logit_bias": {198: -5.0},
}  # fmt: skip
OFTEN = Snapshots(share=0.5)
"""A busy machine must not look like one that can't afford any."""
PARAGRAPH = "The harbour lay still under the morning fog, and the boats had not gone out. " * 6
"""About 100 tokens, of several prefill slices."""
EMOJI = "😀🎉🚀 😀🎉🚀 😀🎉🚀 😀🎉🚀 😀"
"""Makes SmolLM2 go on with characters of several tokens each."""


@asynccontextmanager
async def reproducible(
    model: Path, snapshots: Snapshots | None = None, **settings: Any
) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor that resumes as often as it has to."""
    told = Told()
    options = {"n_ctx": 1024, "reproducible": True, "threads": 1}
    restart = RestartPolicy(max_restarts=1000, backoff_initial_s=0, backoff_max_s=0)
    async with Supervisor(
        model, options=options, restart=restart, on_event=told, on_crash="resume", max_resumes=100,
        snapshots=snapshots, window=WINDOW, **settings,
    ) as supervisor:  # fmt: skip
        yield supervisor, told


Chunks = list[tuple[str, int, tuple[int, ...]]]


async def read(
    supervisor: Supervisor, prompt: str, kills: Sequence[int] = (), **asked: Any
) -> tuple[Chunks, Report]:
    """Read an answer; its worker is killed each time that so many tokens were read."""
    left = sorted(kills)
    chunks: Chunks = []
    async with supervisor.stream(prompt, **asked) as stream:
        async for chunk in stream:
            chunks.append((chunk.text, chunk.index, chunk.token_ids))
            if left and chunk.index + len(chunk.token_ids) >= left[0]:
                left.pop(0)
                pid = stream.report.worker_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
    return chunks, stream.report


def text_of(chunks: Chunks) -> str:
    return "".join(text for text, _, _ in chunks)


def ids_of(chunks: Chunks) -> list[int]:
    return [token for _, _, ids in chunks for token in ids]


def is_told_of(report: Report, kills: int) -> bool:
    """Whether the report tells of each kill what happened."""
    pids = [resume.worker_pid for resume in report.resumes]
    counts = [resume.delivered_tokens for resume in report.resumes]
    return (
        len(report.resumes) == kills == len({*pids, report.worker_pid}) - 1
        and counts == sorted(counts)
        and all(resume.cause is DeathCause.CRASHED for resume in report.resumes)
        and all(resume.pause_s is not None and resume.pause_s > 0 for resume in report.resumes)
    )


@contextmanager
def killed_at(*counts: int) -> Iterator[None]:
    """Kill the worker in the moment in which the parent has received so many tokens of its request.

    Its next token is a step away, so that the cut is where it is wanted; a token that it sends in that moment all
    the same is read as its last words.
    """
    left = sorted(counts)
    on_tokens = Attempt.on_tokens

    def killing(attempt: Attempt, message: Tokens, now: int) -> None:
        on_tokens(attempt, message, now)
        if left and len(attempt.request.delivered) >= left[0]:
            left.pop(0)
            os.kill(attempt.worker.pid, signal.SIGKILL)

    Attempt.on_tokens = killing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attempt.on_tokens = on_tokens  # type: ignore[method-assign]
    assert not left, f"never came to {left} tokens"


@pytest.mark.parametrize("snapshots", [OFTEN, None], ids=["snapshots", "read_again"])
@pytest.mark.parametrize("model", [default_model, gemma_model], ids=["smollm2", "gemma"])
async def test_a_text_is_the_same_across_kills(
    model: Callable[[], Path], snapshots: Snapshots | None
) -> None:
    asked = {"max_tokens": 26, "ignore_eos": True}
    async with reproducible(model(), snapshots, standby=1) as (supervisor, told):
        for prompt, sampling, kills in (
            ("Once upon a time", GREEDY, (1,)),
            (PARAGRAPH, GREEDY, (12,)),
            ("Once upon a time", SEEDED, (2, 19)),
            (PARAGRAPH, PENALISED, (16,)),
        ):
            expected, undisturbed = await read(supervisor, prompt, **asked, **sampling)
            chunks, report = await read(supervisor, prompt, kills, **asked, **sampling)
            assert ids_of(chunks) == ids_of(expected)
            assert text_of(chunks) == text_of(expected)
            assert [index for _, index, _ in chunks] == [index for _, index, _ in expected]
            assert is_told_of(report, len(kills)), report
            assert report.end_reason is undisturbed.end_reason is EndReason.LENGTH
            assert report.usage.completion_tokens == 26
            assert report.usage.prompt_tokens == undisturbed.usage.prompt_tokens
            for resume in report.resumes:
                known = report.usage.prompt_tokens + resume.delivered_tokens
                if snapshots is None:
                    assert resume.restored_tokens == 0
                elif prompt is PARAGRAPH:
                    assert report.usage.prompt_tokens <= resume.restored_tokens <= known
        assert len(told.of(RequestInterrupted)) == len(told.of(RequestResumed)) == 5


async def test_characters_of_several_tokens_are_whole_across_a_kill_inside_them() -> None:
    asked = {**GREEDY, "max_tokens": 24, "ignore_eos": True}
    async with reproducible(default_model(), OFTEN, standby=1) as (supervisor, _):
        expected, _ = await read(supervisor, EMOJI, **asked)
        inside = [index + 1 for _, index, ids in expected if len(ids) > 1 and index]
        assert len(inside) >= 2, f"no characters of several tokens: {expected}"
        with killed_at(*inside[:2]):
            chunks, report = await read(supervisor, EMOJI, **asked)
        assert chunks == expected
        assert "\N{REPLACEMENT CHARACTER}" not in text_of(chunks)
        assert is_told_of(report, 2), report
        assert any(resume.delivered_tokens in inside for resume in report.resumes), report.resumes


async def test_a_stop_string_that_a_kill_cuts_still_ends_the_text() -> None:
    asked = {**GREEDY, "max_tokens": 40, "ignore_eos": True}
    prompt = "The three primary colours are"
    async with reproducible(default_model(), OFTEN, standby=1) as (supervisor, _):
        whole, _ = await read(supervisor, prompt, **asked)
        # From the middle of one token's text to the middle of another's.
        start = len(text_of(whole[:12])) + 1
        stop = text_of(whole)[start : len(text_of(whole[:16])) + 1]
        expected, undisturbed = await read(supervisor, prompt, stop=stop, **asked)
        assert undisturbed.end_reason is EndReason.STOP_SEQUENCE
        held_back = whole[12][1] + 1  # the first tokens of which some text waits for what follows
        for cut in (held_back, held_back + 2):
            with killed_at(cut):
                chunks, report = await read(supervisor, prompt, stop=stop, **asked)
            assert text_of(chunks) == text_of(expected) == text_of(whole)[: text_of(whole).index(stop)]
            assert is_told_of(report, 1), report
            assert report.end_reason is EndReason.STOP_SEQUENCE
            assert report.usage.completion_tokens == undisturbed.usage.completion_tokens


async def test_max_tokens_is_exact_even_if_the_last_one_is_the_last_word() -> None:
    asked = {**GREEDY, "max_tokens": 9, "ignore_eos": True}
    async with reproducible(default_model(), standby=1) as (supervisor, _):
        expected, _ = await read(supervisor, "Once upon a time", **asked)
        for cut in (8, 9):
            with killed_at(cut):
                chunks, report = await read(supervisor, "Once upon a time", **asked)
            assert chunks == expected
            assert report.end_reason is EndReason.LENGTH
            assert report.usage.completion_tokens == len(ids_of(chunks)) == 9
            # With all nine there, only its word that this is the end can have been lost; or it wasn't.
            assert is_told_of(report, 1) or cut == 9, report


async def test_a_natural_end_comes_where_it_would_have_come() -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 60, **GREEDY}
    async with reproducible(default_model(), OFTEN, standby=1) as (supervisor, _):
        expected = await supervisor.generate(**asked)
        assert expected.report.end_reason is EndReason.STOP
        with killed_at(3):
            answer = await supervisor.generate(**asked)
        assert answer.text == expected.text
        assert answer.report.end_reason is EndReason.STOP
        assert is_told_of(answer.report, 1), answer.report
        assert answer.report.usage.completion_tokens == expected.report.usage.completion_tokens
