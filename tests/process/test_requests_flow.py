"""Flow control end to end: a reader that stops and goes, windows of every size, text that is held back."""

from __future__ import annotations

import random

import anyio
import psutil
import pytest

from infervisor import Chunk, EndReason, Report, Stream
from infervisor.protocol.messages import Beat, Credit
from tests.helpers.inside import cpu_s, record_sent, request_of, until, until_buffered, words, worker_of
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

WINDOWS = (1, 2, 7, 256)


async def read_all(stream: Stream) -> tuple[list[Chunk], Report]:
    """Read to the end and wait for the release."""
    chunks = [chunk async for chunk in stream]
    return chunks, await stream.released()


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("window", WINDOWS)
async def test_a_reader_that_stops_and_goes_never_lets_the_worker_run_further_ahead_than_its_window(
    window: int,
) -> None:
    luck = random.Random(window)
    stops = {luck.randrange(1, 290) for _ in range(6)}
    async with scripted() as (supervisor, _), supervisor.stream("count", window=window) as stream:
        taken: list[Chunk] = []
        async for chunk in stream:
            taken.append(chunk)
            if len(taken) in stops:
                # It stands still: the worker computes what is granted, and not one token more.
                granted = request_of(stream).window.limit - len(taken)
                assert granted <= window
                await until_buffered(stream, granted)
                assert request_of(stream).window.received == len(taken) + granted
            if len(taken) == 300:
                break
        await until_buffered(stream, request_of(stream).window.limit - 300)
        stream.cancel()
        report = await stream.released()
    assert text_of(taken) == words(300)
    assert [chunk.index for chunk in taken] == list(range(300))
    assert 300 <= report.usage.computed_tokens <= 300 + window
    assert report.usage.completion_tokens == report.usage.computed_tokens


async def test_a_paused_worker_computes_nothing_and_uses_no_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scripted() as (supervisor, _), supervisor.stream("count", window=7) as stream:
        await stream.__anext__()
        await until_buffered(stream, request_of(stream).window.limit - 1)
        worker = worker_of(supervisor)
        watchdog = worker._watchdog
        beats: list[int] = []
        on_beat = watchdog.beat

        def record(message: Beat, now: int) -> None:
            beats.append(message.steps)
            on_beat(message, now)

        monkeypatch.setattr(watchdog, "beat", record)
        # One step for the prompt and one for each token: with this beat all activity before was told.
        await until(lambda: watchdog.steps == 1 + request_of(stream).window.received)
        steps, used_s = watchdog.steps, cpu_s(worker.pid)
        beats.clear()
        with anyio.move_on_after(1.0):
            await anyio.Event().wait()
        assert watchdog.steps == steps
        assert cpu_s(worker.pid) - used_s < 0.2
        assert len(beats) <= 1, "a worker in which nothing moves has nothing to tell"
        assert request_of(stream).window.received == request_of(stream).window.limit
        rest = [(await stream.__anext__()).text for _ in range(50)]
    assert "".join(rest) == words(50, start=1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.produces("end: stop_sequence")
async def test_a_long_stop_string_and_a_split_character_dont_lock_up_any_window(window: int) -> None:
    # "<<END OF ANSWER>>" comes byte by byte: many tokens without text, in the smallest window. Before it
    # comes a false start, whose text must be delivered after all.
    answer = "Sí 🦙 <<END OF AN apple "
    options = {"text": f"{answer}<<END OF ANSWER>>never shown", "split": "bytes"}
    async with scripted(options) as (supervisor, _):
        async with supervisor.stream("say", window=window, stop=["<<END OF ANSWER>>"]) as stream:
            with anyio.fail_after(20):
                chunks, report = await read_all(stream)
        computed = len(f"{answer}<<END OF ANSWER>>".encode())
        assert text_of(chunks) == answer
        assert all(chunk.text for chunk in chunks)
        assert report.end_reason is EndReason.STOP_SEQUENCE
        assert report.usage.completion_tokens == computed
        # Every shown token is in a chunk, in order; those of the stop string stand for no text.
        assert ids_of(chunks) == list(range(len(answer.encode())))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("so far <<EN", "so far <<EN"),
        ("half a llama \U0001f999", "half a llama \U0001f999"),
    ],
)
async def test_what_was_held_back_is_delivered_when_the_answer_ends_before_it_is_a_stop_string(
    text: str, shown: str
) -> None:
    async with scripted({"text": text, "split": "bytes"}) as (supervisor, _):
        async with supervisor.stream("say", window=1, stop="<<END>>") as stream:
            chunks, report = await read_all(stream)
    assert text_of(chunks) == shown
    assert ids_of(chunks) == list(range(len(text.encode())))
    assert report.end_reason is EndReason.STOP
    assert report.usage.completion_tokens == len(text.encode())


async def test_a_character_that_is_cut_off_becomes_one_replacement_character() -> None:
    tokens = [b"ok ", b"\xf0", b"\x9f", b"\xa6"]
    async with scripted({"tokens": tokens}) as (supervisor, _):
        async with supervisor.stream("say", window=1) as stream:
            chunks, report = await read_all(stream)
    assert text_of(chunks) == "ok \ufffd"
    assert ids_of(chunks) == [0, 1, 2, 3]
    assert report.usage.completion_tokens == 4


async def test_line_separators_and_control_characters_pass_unchanged() -> None:
    text = "a\u2028b\u2029c\r\n\n\nd\x00e\x1b[2Jf\u0085g\ufeffdata: [DONE]\n\nh\U0001f468\u200d\U0001f469"
    async with scripted({"text": text, "split": "characters"}) as (supervisor, _):
        answer = await supervisor.generate("say", window=2)
    assert answer.text == text


@pytest.mark.parametrize("max_tokens", [1, 2, 31, 32, 33])
async def test_max_tokens_is_exact(max_tokens: int) -> None:
    async with scripted() as (supervisor, _):
        async with supervisor.stream("one two three", max_tokens=max_tokens) as stream:
            chunks, report = await read_all(stream)
    assert text_of(chunks) == words(max_tokens)
    assert ids_of(chunks) == list(range(max_tokens))
    assert report.end_reason is EndReason.LENGTH
    usage = report.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.computed_tokens) == (
        3,
        max_tokens,
        max_tokens,
    )


@pytest.mark.produces("end: context_full")
async def test_a_full_context_is_a_natural_end_of_its_own() -> None:
    async with scripted({"context_tokens": 10}) as (supervisor, _):
        answer = await supervisor.generate("one two three")
        assert answer.text == words(7)
        assert answer.report.end_reason is EndReason.CONTEXT_FULL
        assert answer.report.usage.completion_tokens == 7
        longest = await supervisor.generate(" ".join("x" * 9))
        assert longest.text == words(1)
        assert longest.report.end_reason is EndReason.CONTEXT_FULL


@pytest.mark.produces("request: running × Finished → ended", "end: stop")
async def test_the_models_own_end_is_no_token_of_the_answer() -> None:
    async with scripted({"text": "that is all"}) as (supervisor, _):
        answer = await supervisor.generate("say")
        assert answer.text == "that is all"
        assert answer.report.end_reason is EndReason.STOP
        assert (answer.report.usage.completion_tokens, answer.report.usage.computed_tokens) == (3, 4)
        going_on = await supervisor.generate("say", ignore_eos=True, max_tokens=5)
        assert going_on.report.usage.completion_tokens == 5
        assert going_on.report.end_reason is EndReason.LENGTH


async def test_an_endless_answer_costs_no_memory_while_its_reader_stands_still() -> None:
    here = psutil.Process()
    async with scripted() as (supervisor, _):
        async with supervisor.stream("count", max_tokens=200_000, window=64) as stream:
            first = await stream.__anext__()
            await until_buffered(stream, request_of(stream).window.limit - 1)
            there = psutil.Process(worker_of(supervisor).pid)
            before = here.memory_info().rss + there.memory_info().rss
            go_on = anyio.Event()
            rest: list[str] = []

            async def read() -> None:
                await go_on.wait()
                for _ in range(20_000):
                    rest.append((await stream.__anext__()).text)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                with anyio.move_on_after(1.0):
                    await anyio.Event().wait()
                assert here.memory_info().rss + there.memory_info().rss - before < 4 << 20
                assert request_of(stream).window.received == 64 == request_of(stream).window.limit
                go_on.set()
            await until_buffered(stream, 1)
            report = stream.report
            assert report.end_reason is None
        assert stream.end_reason is EndReason.CANCELLED
    assert first.text + "".join(rest) == words(20_001)
    assert stream.report.usage.computed_tokens <= 20_001 + 64


async def test_credit_is_sent_once_every_half_window_not_once_a_token() -> None:
    async with scripted() as (supervisor, _):
        sent = record_sent(supervisor)
        answer = await supervisor.generate("count", max_tokens=640, window=64)
    assert answer.report.usage.completion_tokens == 640
    raised = [message for message in sent if isinstance(message, Credit)]
    assert 640 // 32 - 2 <= len(raised) <= 640 // 32
    assert [message.limit for message in raised] == sorted({message.limit for message in raised})
