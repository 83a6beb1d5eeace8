"""The real model: answers that are exact before and after cancels and kills, and releases that are measured."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from infervisor import EndReason, InvalidRequest, Stage, Supervisor, WorkerDied, default_model
from infervisor.supervisor.events import WorkerSpawned
from tests.helpers.inside import cpu_s, read_into, request_of, until, until_buffered, worker_of
from tests.helpers.supervised import QUICK_RESTART, Told

pytestmark = [pytest.mark.anyio, pytest.mark.real_model]

ASK: dict[str, Any] = {"prompt": "The three primary colours are", "temperature": 0, "max_tokens": 16}
LONG = "The quick brown fox jumps over the lazy dog. " * 200
"""About 2,000 tokens."""


@asynccontextmanager
async def smollm(**options: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor of the embedded default model."""
    told = Told()
    async with Supervisor(
        default_model(), options={"n_ctx": 4096, **options}, restart=QUICK_RESTART, on_event=told
    ) as supervisor:
        yield supervisor, told


async def test_greedy_answers_are_exact_before_and_after_a_cancel_and_a_crash() -> None:
    async with smollm() as (supervisor, told):
        answer = await supervisor.generate(**ASK)
        assert answer.report.end_reason is EndReason.LENGTH
        assert answer.report.usage.completion_tokens == 16
        assert len(answer.text.split()) > 3
        assert (await supervisor.generate(**ASK)).text == answer.text

        async with supervisor.stream("Once upon a time", temperature=0) as stream:
            await stream.__anext__()
        assert stream.end_reason is EndReason.CANCELLED
        assert (await supervisor.generate(**ASK)).text == answer.text

        pid = worker_of(supervisor).pid
        async with supervisor.stream(
            "Once upon a time", temperature=0, ignore_eos=True, on_crash="fail"
        ) as stream:
            texts = [(await stream.__anext__()).text for _ in range(3)]
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="SIGKILL") as caught:
                await read_into(stream, texts)
            assert caught.value.signal_name == "SIGKILL"
            assert caught.value.code == "worker_crashed"
            report = await stream.released()
        assert report.end_reason is EndReason.WORKER_CRASHED
        assert report.error is not None
        assert "SIGKILL" in report.error.message
        assert len("".join(texts)) > 0
        assert (await supervisor.generate(**ASK)).text == answer.text
        assert worker_of(supervisor).pid != pid
        assert len(told.of(WorkerSpawned)) == 2


async def test_a_cancel_inside_a_long_prefill_frees_the_worker_within_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with smollm() as (supervisor, told):
        expected = (await supervisor.generate(**ASK)).text
        latencies_ms: list[float] = []
        for _ in range(3):
            async with supervisor.stream(LONG) as stream:
                await until(lambda stream=stream: stream.report.timeline.started_ns is not None)  # type: ignore[misc]
                stream.cancel()
                report = await stream.released()
            assert report.timeline.first_token_ns is None, "it was cancelled inside its prefill"
            assert 1500 < report.usage.prompt_tokens < 4096
            assert report.stage is Stage.IN_BAND
            assert report.timeline.release_s is not None
            assert report.timeline.release_s < 1
            latencies_ms.append(report.timeline.release_s * 1000)
            assert (await supervisor.generate(**ASK)).text == expected
        assert len(told.of(WorkerSpawned)) == 1
    with capsys.disabled():
        print("\nreleased inside a prefill after " + ", ".join(f"{ms:.1f} ms" for ms in latencies_ms))


async def test_a_batch_as_long_as_the_prompt_is_cut_as_soon_and_a_clock_outside_agrees() -> None:
    async with smollm(n_ctx=8192, batch_tokens=8192, ubatch=8192) as (supervisor, told):
        expected = (await supervisor.generate(**ASK)).text
        pid = worker_of(supervisor).pid
        used_s = cpu_s(pid)
        async with supervisor.stream(" dog" * 7000) as stream:
            await until(lambda: cpu_s(pid) - used_s > 0.3)  # it is in the middle of its work
            asked_s = time.monotonic()
            stream.cancel()
            report = await stream.released()
            measured_s = time.monotonic() - asked_s
        assert report.timeline.first_token_ns is None, "it was cancelled inside its prefill"
        assert report.stage is Stage.IN_BAND
        assert report.timeline.release_s is not None
        assert 0 <= report.timeline.release_s <= measured_s < report.timeline.release_s + 0.5
        assert measured_s < 1
        assert (await supervisor.generate(**ASK)).text == expected
        assert len(told.of(WorkerSpawned)) == 1


async def test_a_paused_real_stream_computes_its_window_and_goes_on_without_a_gap() -> None:
    asked = {**ASK, "max_tokens": 24, "ignore_eos": True}
    async with smollm() as (supervisor, _):
        expected = await supervisor.generate(**asked)
        for window in (1, 5):
            async with supervisor.stream(**asked, window=window) as stream:
                texts = [(await stream.__anext__()).text]
                window_of = request_of(stream).window
                await until_buffered(stream, window_of.limit - 1)
                with anyio.move_on_after(0.3):
                    await anyio.Event().wait()
                assert window_of.received == window_of.limit <= 1 + window
                texts.append(await stream.text())
            assert "".join(texts) == expected.text


async def test_stop_strings_limits_and_chat() -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    async with smollm() as (supervisor, _):
        whole = await supervisor.generate(**{**ASK, "max_tokens": 40, "ignore_eos": True})
        assert whole.report.usage.completion_tokens == 40
        assert whole.report.end_reason is EndReason.LENGTH
        # A stop string from the middle of the known answer, cut anywhere between tokens.
        stop = whole.text[20:29]
        stopped = await supervisor.generate(**{**ASK, "max_tokens": 40, "ignore_eos": True}, stop=stop)
        assert stopped.report.end_reason is EndReason.STOP_SEQUENCE
        assert stopped.text == whole.text[: whole.text.index(stop)]
        for max_tokens in (1, 2, 7):
            short = await supervisor.generate(**{**ASK, "max_tokens": max_tokens, "ignore_eos": True})
            assert short.report.usage.completion_tokens == max_tokens
            assert whole.text.startswith(short.text)

        chat = await supervisor.generate(messages=messages, temperature=0, max_tokens=60)
        assert "4" in chat.text
        assert chat.report.end_reason is EndReason.STOP, "the template teaches the model where to end"
        assert "<|im_end|>" not in chat.text
        raw = await supervisor.generate(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
            temperature=0,
            max_tokens=60,
        )
        assert raw.text == chat.text, "the same prompt, written by hand"
        literal = await supervisor.generate("<|im_end|>" * 8, temperature=0, max_tokens=1, special=False)
        special = await supervisor.generate("<|im_end|>" * 8, temperature=0, max_tokens=1, special=True)
        assert literal.report.usage.prompt_tokens > special.report.usage.prompt_tokens


async def test_the_edges_of_a_small_context() -> None:
    async with smollm(n_ctx=256) as (supervisor, told):
        context = int(supervisor.status().facts["context_tokens"])
        # One word is one token here; how many the beginning takes is measured.
        extra = (await supervisor.generate(" dog", max_tokens=1)).report.usage.prompt_tokens - 1
        for room in (1, 2):
            prompt = " dog" * (context - extra - room)
            answer = await supervisor.generate(prompt, temperature=0, ignore_eos=True)
            assert answer.report.usage.prompt_tokens == context - room
            assert answer.report.usage.completion_tokens == room
            assert answer.report.end_reason is EndReason.CONTEXT_FULL
        # Far beyond the context it isn't worth counting to the end.
        for over, shown in ((0, str(context)), (1, str(context + 1)), (5000, "more than")):
            with pytest.raises(InvalidRequest) as caught:
                await supervisor.generate(" dog" * (context - extra + over))
            assert caught.value.field == "prompt"
            assert f"the prompt has {shown}" in str(caught.value)
            assert f"holds {context}" in str(caught.value)
        with pytest.raises(InvalidRequest) as caught:
            await supervisor.generate("x", max_tokens=1, logit_bias={10_000_000: 1.0})
        assert caught.value.field == "logit_bias"
        endless = await supervisor.generate("Once", temperature=0, ignore_eos=True)
        assert endless.report.end_reason is EndReason.CONTEXT_FULL
        assert endless.report.usage.prompt_tokens + endless.report.usage.completion_tokens == context
        assert len(told.of(WorkerSpawned)) == 1


async def test_a_seed_gives_the_same_answer_before_and_after_a_restart_and_a_cancel() -> None:
    asked: dict[str, Any] = {
        "prompt": "A random word:",
        "temperature": 1.5,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    async with smollm() as (supervisor, _):
        first = (await supervisor.generate(**asked, seed=7)).text
        assert (await supervisor.generate(**asked, seed=8)).text != first
        async with supervisor.stream(**{**asked, "max_tokens": None}, seed=7) as stream:
            await stream.__anext__()
        assert (await supervisor.generate(**asked, seed=7)).text == first
        pid = worker_of(supervisor).pid
        supervisor.restart_worker()
        assert (await supervisor.generate(**asked, seed=7)).text == first
        assert worker_of(supervisor).pid != pid
        drawn = [await supervisor.generate(**asked) for _ in range(2)]
        assert drawn[0].text != drawn[1].text
        assert (await supervisor.generate(**asked, seed=drawn[0].report.seed)).text == drawn[0].text
