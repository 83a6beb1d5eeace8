"""docs/protocol.md is enough to write a worker: the one in C, written from it, does what the page asks of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from infervisor import (
    EndReason,
    InvalidRequest,
    ModelLoadError,
    RestartPolicy,
    Stream,
    Supervisor,
)
from infervisor.protocol.ladder import Stage
from infervisor.protocol.messages import Answered, Query
from tests.docs.markdown import ROOT
from tests.helpers.inside import PATIENT, holds_nothing, until, until_buffered
from tests.helpers.leaks import no_leftovers
from tests.helpers.raw_worker import (
    Cancel,
    Credit,
    Drain,
    Ended,
    Load,
    RawWorker,
    Released,
    Shutdown,
    Started,
    Tokens,
    raw_worker,
    submit,
)
from tests.helpers.supervised import QUICK_GRACES, Told

SOURCE = ROOT / "examples/other_language_worker.c"
LONG_STEP_MS = 600_000
"""Longer than any test waits: who returns sooner was interrupted."""
EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the worker, compiled without a warning by the command that its first lines name."""
    path = tmp_path_factory.mktemp("parrot") / "parrot"
    (command,) = re.findall(r"^ \* +cc (.*) -o parrot ", SOURCE.read_text(), flags=re.MULTILINE)
    flags = [*command.split(), "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run(
        ["gcc", *flags, "-o", path, SOURCE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with no_leftovers():
        yield


def supervised(parrot: Path, told: Told | None = None, **settings: Any) -> Supervisor:
    """Return a supervisor of the worker in C."""
    chosen = {"engine": "parrot", "escalation": PATIENT, "graces": QUICK_GRACES, **settings}
    return Supervisor(python=parrot, on_event=told, **chosen)


def on_pipes(parrot: Path) -> AbstractContextManager[RawWorker]:
    """Return the worker in C on bare pipes, started as a supervisor starts it."""
    return raw_worker(program=("-c", EXEC, str(parrot), "-P", "-m", "infervisor.worker"))


# --- under a supervisor ----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_it_answers_prompts_and_chats(parrot: Path) -> None:
    async with supervised(parrot) as supervisor:
        answer = await supervisor.generate("Wer rastet,  der röstet.\n")
        assert answer.text == "Wer rastet,  der röstet.\n"
        assert answer.report.end_reason is EndReason.STOP
        usage = answer.report.usage
        # The end token is computed, but not sent.
        assert (usage.prompt_tokens, usage.completion_tokens, usage.computed_tokens) == (4, 4, 5)
        chat = await supervisor.generate(
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say this"}]
        )
        assert chat.text == "Say this"
        assert holds_nothing(supervisor)


@pytest.mark.anyio
async def test_it_ends_where_the_limits_say(parrot: Path) -> None:
    async with supervised(parrot) as supervisor:
        cut = await supervisor.generate("a b c", max_tokens=5, ignore_eos=True)
        assert (cut.text, cut.report.end_reason) == ("a b ca b ", EndReason.LENGTH)
        # Held back over several tokens, and given out when it turned out to be none.
        stopped = await supervisor.generate("one two three two four!", stop=["two four", "three two five"])
        assert (stopped.text, stopped.report.end_reason) == ("one two three ", EndReason.STOP_SEQUENCE)
        held = await supervisor.generate("one two", stop=["two three"])
        assert (held.text, held.report.end_reason) == ("one two", EndReason.STOP)
        full = await supervisor.generate("word " * 4090, ignore_eos=True)
        assert full.report.end_reason is EndReason.CONTEXT_FULL
        assert full.report.usage.completion_tokens == 6


@pytest.mark.anyio
async def test_it_computes_at_most_a_window_ahead_of_a_reader_that_stops(parrot: Path) -> None:
    async with supervised(parrot, window=4) as supervisor:
        async with supervisor.stream("x y ", ignore_eos=True) as stream:
            taken = 0
            async for _ in stream:
                taken += 1
                if taken == 10:
                    break
            await until_buffered(stream, 2)
        assert stream.report.end_reason is EndReason.CANCELLED
        assert taken + 2 <= stream.report.usage.computed_tokens <= taken + 4


@pytest.mark.anyio
async def test_a_cancel_interrupts_its_running_step_and_the_next_request_is_served(parrot: Path) -> None:
    async with supervised(parrot, options={"step_ms": LONG_STEP_MS}) as supervisor:
        for _ in range(2):
            stream = supervisor.stream("never said")
            async with stream:
                await stream_started(stream)
            report = stream.report
            assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.IN_BAND)
            assert report.timeline.cancel_noticed_ns is not None
            assert report.usage.computed_tokens == 0
        assert supervisor.status().restarts == {}


async def stream_started(stream: Stream) -> None:
    """Wait until the worker says that the request has a slot."""
    await until(lambda: stream.report.timeline.started_ns is not None)


@pytest.mark.anyio
async def test_what_it_refuses_is_an_invalid_request_and_it_lives_on(parrot: Path) -> None:
    async with supervised(parrot) as supervisor:
        with pytest.raises(InvalidRequest, match="doesn't fit") as caught:
            await supervisor.generate("word " * 5000)
        assert caught.value.field == "prompt"
        assert (await supervisor.generate("still here")).text == "still here"
        assert supervisor.status().restarts == {}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logprobs": True, "top_logprobs": 3}, "logprobs"),
        ({"grammar": 'root ::= "yes"'}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tool_choice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_it_does_not_know_of_answers_it_refuses_by_name(
    parrot: Path, options: dict[str, Any], field: str
) -> None:
    chat = [{"role": "user", "content": "Say this"}]
    async with supervised(parrot) as supervisor:
        with pytest.raises(InvalidRequest, match="a parrot") as caught:
            await supervisor.generate(messages=chat, **options)
        assert caught.value.field == field
        offered = {"tools": [{"type": "function", "function": {"name": "f"}}], "priority": -7}
        assert (await supervisor.generate(messages=chat, **offered)).text == "Say this"
        assert supervisor.status().restarts == {}


@pytest.mark.anyio
async def test_it_embeds_nothing_and_counts_beside_a_stream(parrot: Path) -> None:
    async with supervised(parrot, options={"step_ms": LONG_STEP_MS}) as supervisor:
        with pytest.raises(InvalidRequest, match="no vectors") as caught:
            await supervisor.embed("a text")
        assert caught.value.field == "texts"
        async with supervisor.stream("never said") as stream:
            await stream_started(stream)
            chat = [{"role": "user", "content": "one"}, {"role": "user", "content": "two  three four"}]
            assert await supervisor.count_tokens(messages=chat) == 3
            with pytest.raises(InvalidRequest, match="no vocabulary"):
                await supervisor.tokenize("a text")
            with pytest.raises(InvalidRequest, match="no vocabulary"):
                await supervisor.detokenize([1, 2, 3])
        assert supervisor.status().restarts == {}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "message"),
    [({"engine": "llama", "model": "/x.gguf"}, "engine parrot"), ({"options": {"step": 1}}, "option step")],
    ids=["engine", "option"],
)
async def test_what_it_can_not_load_is_told(parrot: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        async with supervised(parrot, **settings):
            pass


@pytest.mark.anyio
async def test_an_answer_goes_on_in_the_next_one_when_it_dies(parrot: Path) -> None:
    told = Told()
    restart = RestartPolicy(backoff_initial_s=0.01)
    said = "a word after another that nobody says twice"
    async with supervised(parrot, told, restart=restart, options={"step_ms": 20}) as supervisor:
        async with supervisor.stream(said, window=2) as stream:
            first = (await anext(stream)).text
            pid = supervisor.status().worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert first + await stream.text() == said
        (resume,) = stream.report.resumes
        assert resume.worker_pid == pid != stream.report.worker_pid
        assert 1 <= resume.delivered_tokens <= 3


# --- on bare pipes ---------------------------------------------------------------------------------


def test_credit_bounds_it_to_the_token_and_a_late_or_smaller_limit_changes_nothing(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        # The first step lasts until the smaller limit has been read.
        worker.load({"step_ms": 20}, engine="parrot")
        worker.send(submit(7, "a b c d e ", limits={"max_tokens": 5}, credit=2), Credit(7, 1))
        worker.expect(Started, 7)
        assert worker.tokens(7, 2) == "a b "
        worker.send(Credit(7, 3), Credit(99, 1000))
        assert worker.tokens(7, 1) == "c "
        worker.send(Cancel(98), Cancel(7))
        ended = worker.expect(Ended, 7)
        assert (ended.why, ended.usage["computed_tokens"]) == ("cancelled", 3)
        assert worker.expect(Released, 7).noticed_ns is not None
        worker.shut_down()


def test_the_urgent_pipe_and_its_signal_cancel_without_control(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load({"step_ms": LONG_STEP_MS}, engine="parrot")
        worker.send(submit(1 << 40, "never said"))
        worker.expect(Started, 1 << 40)
        worker.cancel_urgently(5, 1 << 40)
        assert worker.expect(Ended, 1 << 40).why == "cancelled"
        worker.expect(Released, 1 << 40)
        worker.shut_down()


def test_a_cancel_may_overtake_its_submit(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load(engine="parrot")
        worker.send(Cancel(1), submit(1))
        assert worker.expect(Ended, 1).why == "cancelled"
        worker.expect(Released, 1)
        worker.shut_down()


def test_an_attempt_that_continues_another_one_begins_with_the_token_that_is_due(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load(engine="parrot")
        worker.send(submit(1, "a b c", delivered=(0, 1)))
        worker.expect(Started, 1)
        first = worker.expect(Tokens, 1)
        assert (first.index, first.tokens[0][1]) == (2, "c")
        worker.expect(Ended, 1)


def test_a_question_is_answered_while_it_computes_as_fast_as_it_can(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load(engine="parrot")
        worker.send(submit(1, "a b ", limits={"ignore_eos": True}))
        worker.expect(Started, 1)
        # The pipe is full long before the context is: the answer can't have ended before this is read.
        worker.send(Query(5, "count", {"prompt": "a b c"}))
        message = worker.next_message()
        while isinstance(message, Tokens):
            message = worker.next_message()
        assert isinstance(message, Answered)
        assert (message.id, message.value, message.error) == (5, 3, None)


def test_draining_it_takes_no_more_submits(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load(engine="parrot")
        worker.send(Drain(), submit(1))
        ended = worker.expect(Ended, 1)
        assert (ended.why, ended.error and ended.error["code"]) == ("engine_error", "draining")
        worker.expect(Released, 1)
        worker.shut_down()


def test_shutdown_cuts_what_runs_and_releases_it(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load({"step_ms": LONG_STEP_MS}, engine="parrot")
        worker.send(submit(1))
        worker.expect(Started, 1)
        worker.send(Shutdown())
        assert worker.expect(Ended, 1).why == "cancelled"
        worker.expect(Released, 1)
        assert worker.exit_code() == 0


def test_it_ends_with_the_control_pipe_whatever_runs(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load({"step_ms": LONG_STEP_MS}, engine="parrot")
        worker.send(submit(1))
        worker.expect(Started, 1)
        worker.close(worker.control)
        assert worker.exit_code() == 0


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"\xff\xff\xff\xff", "declares too much"),
        (b"\x00\x00\x00\x01\x01", "no array"),
        (b"\x00\x00\x00\x05\x91\xa3foo", "message"),
        (b"\x00\x00\x00\x07\x91\xa5drain", "before load"),
        (b"\x00\x00\x00\x08\x91\xa6cancel", "number of fields"),
        (b"\x00\x00\x00\x09\x92\xa6cancel\xc0", "cancel.id"),
        (b"\x00\x00\x00\x09\x92\xa6cancel\xcf", "middle of a value"),
        (b"\x00\x00\x00\x0c\x97\xa4load\xc0\xc0\xc0\xc0\xc0\xc0", "load.engine"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_broken_control_ends_it_with_its_exit_code_and_the_rule(parrot: Path, data: bytes, rule: str) -> None:
    with on_pipes(parrot) as worker:
        worker.send_bytes(data)
        assert worker.exit_code() == 76
        assert rule in worker.wait_for_output(lambda output: rule in output)


def test_a_second_load_or_a_second_submit_of_an_id_is_broken_control(parrot: Path) -> None:
    for again in (Load("parrot", None, {}), submit(1)):
        with on_pipes(parrot) as worker:
            worker.load({"step_ms": LONG_STEP_MS}, engine="parrot")
            worker.send(submit(1), again)
            assert worker.exit_code() == 76


def test_asked_for_its_stacks_it_writes_them_and_goes_on(parrot: Path) -> None:
    with on_pipes(parrot) as worker:
        worker.load(engine="parrot")
        worker.process.send_signal(signal.SIGUSR2)
        worker.wait_for_output(lambda output: "parrot" in output)
        worker.send(submit(1, "still here"))
        assert worker.answer(1)[0] == "still here"


def test_a_wrong_command_line_has_its_exit_code(parrot: Path) -> None:
    for arguments in ([], ["--control", "0", "--frames", "1", "--urgent", "2", "--parent", "1"]):
        done = subprocess.run([parrot, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == 64
