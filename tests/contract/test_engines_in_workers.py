"""Every engine inside a real worker: what a caller may rely on whatever computes the tokens.

One terminal for each request, exact counts, streams equal to whole answers, cancels in every phase, credit never
exceeded, and a slot that is free again after each release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infervisor import EndReason, Supervisor
from infervisor.protocol.generation import Limits, Sampling
from infervisor.protocol.messages import Cancel, Credit, Ended, Message, Released, Started, Submit, Tokens
from infervisor.supervisor.events import RequestReleased
from tests.helpers.engine_models import EngineCase
from tests.helpers.models import smollm2_path
from tests.helpers.raw_worker import RawWorker, raw_worker, submit
from tests.helpers.supervised import Told
from tests.helpers.waiting import until

GREEDY = Sampling(temperature=0)
TOKENS = 8
SLOTS = 2


def model_of(case: EngineCase, models: Path) -> str | None:
    if case.model == "smollm2":
        return str(smollm2_path())
    return None if case.model is None else str(models / f"{case.model}.gguf")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def worker_of(case: EngineCase, models: Path, **options: Any) -> Iterator[RawWorker]:
    """Yield a worker that has loaded the case."""
    with raw_worker() as worker:
        worker.load({"slots": SLOTS, **case.options, **options}, case.engine, model_of(case, models))
        yield worker
        worker.shut_down()


def asked(attempt_id: int, prompt: str, **more: Any) -> Submit:
    limits = more.pop("limits", Limits(max_tokens=TOKENS))
    return submit(attempt_id, prompt, sampling=GREEDY, limits=limits, **more)


def supervisor_of(case: EngineCase, models: Path, **settings: Any) -> Supervisor:
    return Supervisor(
        model_of(case, models), engine=case.engine, options={"slots": SLOTS, **case.options}, **settings
    )


# --- through the public API -----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_streams_equal_whole_answers_and_counts_are_exact(case: EngineCase, table_models: Path) -> None:
    told = Told()
    async with supervisor_of(case, table_models, window=3, on_event=told) as supervisor:
        for prompt, expected in case.prompts.items():
            whole = await supervisor.generate(prompt, max_tokens=TOKENS, temperature=0)
            async with supervisor.stream(prompt, max_tokens=TOKENS, temperature=0) as stream:
                chunks = [chunk async for chunk in stream]
            report = await stream.released()
            assert "".join(chunk.text for chunk in chunks) == whole.text
            if expected is not None:
                assert expected.startswith(whole.text)
            ids = [token for chunk in chunks for token in chunk.token_ids]
            # The model's own end token is computed and not part of the answer.
            ended_itself = report.end_reason is EndReason.STOP
            assert report.usage.completion_tokens == len(ids) == whole.report.usage.completion_tokens
            assert report.usage.computed_tokens == len(ids) + ended_itself
            assert report.usage.prompt_tokens == whole.report.usage.prompt_tokens > 0
            assert report.usage.cached_tokens < report.usage.prompt_tokens
            assert report.end_reason in (EndReason.STOP, EndReason.LENGTH)
            assert [chunk.index for chunk in chunks] == sorted({chunk.index for chunk in chunks})
    ends = Counter(event.report.request_id for event in told.of(RequestReleased))
    assert set(ends.values()) == {1}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "phase", ["before it begins", "while it is read", "after a token", "while it is paused"]
)
async def test_after_a_cancel_in_any_phase_the_slot_is_free_and_the_next_answer_exact(
    case: EngineCase, table_models: Path, phase: str
) -> None:
    prompt = max(case.prompts, key=len)
    async with supervisor_of(case, table_models, window=1) as supervisor:
        expected = await supervisor.generate(prompt, max_tokens=TOKENS, temperature=0)
        for _ in range(SLOTS + 1):
            async with supervisor.stream(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) as stream:
                if phase == "while it is read":
                    await until(lambda stream=stream: stream.report.timeline.started_ns or stream.end_reason)
                elif phase != "before it begins":
                    await stream.__anext__()
                if phase == "while it is paused":
                    # Nothing is taken: with a window of one token it stands still once that has come.
                    await until(lambda stream=stream: stream.report.timeline.tokens >= 2)
                stream.cancel()
            report = await stream.released()
            assert report.end_reason is EndReason.CANCELLED
            assert report.is_released
        again = await supervisor.generate(prompt, max_tokens=TOKENS, temperature=0)
        assert again.text == expected.text
        assert supervisor.status().in_flight == 0


# --- frame by frame -------------------------------------------------------------------------------------


def until_released(worker: RawWorker, attempts: set[int]) -> dict[int, list[Message]]:
    """Return the messages about each attempt until all are released."""
    told: dict[int, list[Message]] = {attempt_id: [] for attempt_id in attempts}
    left = set(attempts)
    while left:
        message = worker.next_message()
        attempt_id = message.id  # type: ignore[attr-defined]
        told[attempt_id].append(message)
        if isinstance(message, Released):
            left.remove(attempt_id)
    return told


def test_each_request_has_one_beginning_one_end_and_one_release(case: EngineCase, table_models: Path) -> None:
    with worker_of(case, table_models) as worker:
        attempts = set(range(1, 6))
        prompts = list(case.prompts)
        worker.send(*(asked(number, prompts[number % len(prompts)]) for number in attempts))
        worker.send(Cancel(5))
        told = until_released(worker, attempts)
        for attempt_id, messages in told.items():
            kinds = [type(message) for message in messages]
            assert kinds.count(Ended) == kinds.count(Released) == 1
            assert kinds[-2:] == [Ended, Released]
            assert kinds.count(Started) == 1 or attempt_id == 5
            index = 0
            for message in messages:
                if isinstance(message, Tokens):
                    assert message.index == index
                    index += len(message.tokens)
            assert messages[-2].usage["completion_tokens"] == index  # type: ignore[attr-defined]
        slots = [m.slot for messages in told.values() for m in messages if isinstance(m, Started)]
        assert set(slots) <= set(range(SLOTS))
        worker.nothing_but_noise_arrived()


def test_credit_is_never_exceeded_and_a_paused_one_lets_the_other_go_on(
    case: EngineCase, table_models: Path
) -> None:
    prompts = list(case.prompts)
    with worker_of(case, table_models) as worker:
        limits = Limits(max_tokens=TOKENS, ignore_eos=True)
        worker.send(asked(1, prompts[0], credit=2, limits=limits), asked(2, prompts[1], limits=limits))
        counts: Counter[int] = Counter()
        while True:
            message = worker.next_message()
            if isinstance(message, Tokens):
                counts[message.id] += len(message.tokens)
                assert counts[1] <= 2
            if isinstance(message, Released):
                assert message.id == 2, "it has no credit to end with"
                break
        # The one that isn't paused is done; the other one has at most what it may have.
        while counts[1] < 2:
            message = worker.next_message()
            # It may have been prepared for as long as the other one took as a whole.
            if isinstance(message, Tokens):
                counts[message.id] += len(message.tokens)
        worker.nothing_but_noise_arrived()
        for limit in (3, TOKENS):
            worker.send(Credit(1, limit))
            while counts[1] < limit:
                counts[1] += len(worker.expect(Tokens, 1).tokens)
                assert counts[1] <= limit
        assert worker.expect(Ended, 1).why == "length"
        worker.expect(Released, 1)


def test_a_released_slot_takes_the_next_request(case: EngineCase, table_models: Path) -> None:
    prompt = next(iter(case.prompts))
    with worker_of(case, table_models) as worker:
        texts = set()
        for number in range(1, 3 * SLOTS):
            worker.send(asked(number, prompt))
            text, ended = worker.answer(number)
            assert ended.why in ("stop", "length")
            texts.add(text)
        assert len(texts) == 1
