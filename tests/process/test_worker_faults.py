"""Every planned fault does to the process what it says: the table that chaos tests build on."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from infervisor.protocol.errors import FrameTooLarge, RemoteProtocolError
from infervisor.protocol.generation import Limits
from infervisor.protocol.messages import Hello
from infervisor.worker.engines.scripted.faults import UNKNOWN_ID
from tests.helpers.raw_worker import Cancel, Ended, Load, RawWorker, Started, Tokens, raw_worker, submit


def reach(worker: RawWorker, kind: str, **parts: Any) -> None:
    """Start a stream of a, b, c whose third token meets the fault; take the first two."""
    worker.load(
        {
            "text": "abc",
            "split": "characters",
            "faults": [{"at": "decode", "after": 2, "kind": kind, **parts}],
        }
    )
    worker.send(submit(1))
    worker.expect(Started, 1)
    assert worker.tokens(1, 2) == "ab"


@pytest.mark.parametrize(
    ("kind", "parts", "code", "said"),
    [
        ("exit", {}, 3, ""),
        ("exit", {"code": 41}, 41, ""),
        ("abort", {}, -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("segfault", {}, -signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
        ("signal", {}, -signal.SIGKILL, ""),
        ("signal", {"number": int(signal.SIGBUS)}, -signal.SIGBUS, "Fatal Python error: Bus error"),
        ("signal", {"number": int(signal.SIGILL)}, -signal.SIGILL, "Fatal Python error: Illegal instruction"),
    ],
)
def test_ends_of_the_process(kind: str, parts: dict[str, Any], code: int, said: str) -> None:
    with raw_worker() as worker:
        reach(worker, kind, **parts)
        assert worker.exit_code() == code
        worker.wait_for_output(lambda output: said in output)


@pytest.mark.parametrize("phase", ["import", "load", "warm_up"])
def test_deaths_while_loading(phase: str) -> None:
    with raw_worker() as worker:
        worker.expect(Hello)
        worker.send(Load("scripted", None, {"faults": [{"at": phase, "kind": "exit"}]}))
        assert worker.exit_code() == 3


@pytest.mark.parametrize("phase", ["prepare", "open", "prefill", "decode", "release"])
def test_deaths_in_a_request(phase: str) -> None:
    with raw_worker() as worker:
        worker.load({"text": "a", "faults": [{"at": phase, "kind": "exit"}]})
        worker.send(submit(1))
        assert worker.exit_code() == 3


@pytest.mark.parametrize(
    ("kind", "error"),
    [("garbage", RemoteProtocolError), ("oversized_frame", FrameTooLarge)],
)
def test_broken_frames(kind: str, error: type[Exception]) -> None:
    with raw_worker() as worker:
        reach(worker, kind)
        with pytest.raises(error):
            worker.next_message()


def test_a_torn_frame() -> None:
    with raw_worker() as worker:
        reach(worker, "partial_frame", then="exit")
        assert worker.exit_code() == 3
        with pytest.raises(EOFError):
            worker.next_message()
        assert worker.torn_bytes > 0


def test_a_forged_id() -> None:
    with raw_worker() as worker:
        reach(worker, "forged_id")
        assert worker.expect(Tokens).id == UNKNOWN_ID


def test_tokens_beyond_credit() -> None:
    with raw_worker() as worker:
        reach(worker, "credit_violation", count=9)
        tokens = worker.expect(Tokens, 1)
        assert (tokens.index, len(tokens.tokens)) == (2, 9)


def test_closed_frames_of_a_living_worker() -> None:
    with raw_worker() as worker:
        reach(worker, "close_frames")
        worker.ended_frames()
        assert worker.process.poll() is None
        worker.shut_down()


def test_a_stalled_worker_after_half_a_frame() -> None:
    with raw_worker() as worker:
        reach(worker, "partial_frame", then="stall")
        worker.wait_for_bytes()
        assert worker.process.poll() is None


@pytest.mark.parametrize(("kind", "text"), [("hang", ""), ("ignore_cancel", "c")])
def test_a_hang_that_ends_goes_on_with_the_cancel(kind: str, text: str) -> None:
    with raw_worker() as worker:
        reach(worker, kind, seconds=0.3)
        worker.wait_for_output(lambda output: f"{kind} at decode" in output)
        worker.send(Cancel(1))
        # A step that was cut gives no token; one that couldn't be cut computed its token, which is sent.
        said, ended = worker.rest(1, first=2)
        assert (said, ended.why) == (text, "cancelled")


def test_a_refused_release_says_the_end_and_never_frees() -> None:
    with raw_worker() as worker:
        reach(worker, "refuse_release")
        worker.tokens(1, 1)
        assert worker.expect(Ended, 1).why == "stop"
        worker.send(submit(2))
        worker.wait_for_output(lambda output: "release never returns" in output)
        worker.nothing_but_noise_arrived()


@pytest.mark.parametrize("session", [False, True])
def test_a_grandchild_holds_the_pipes(session: bool) -> None:
    with raw_worker() as worker:
        reach(worker, "spawn_grandchild", session=session)
        output = worker.wait_for_output(lambda output: re.search(r"grandchild \d+\n", output) is not None)
        grandchild = int(output.rsplit(maxsplit=1)[1])
        try:
            assert (os.getpgid(grandchild) == worker.pid) != session
            worker.rest(1, first=2)
            worker.shut_down()
            worker.nothing_but_noise_arrived()  # no end of file either: the pipe is still held
        finally:
            os.kill(grandchild, signal.SIGKILL)
        worker.ended_frames()


def test_a_fault_for_one_prompt_spares_the_others() -> None:
    with raw_worker() as worker:
        worker.load({"faults": [{"at": "open", "kind": "exit", "prompt_contains": "bomb"}]})
        worker.send(submit(1, "peace", limits=Limits(max_tokens=1)))
        assert worker.answer(1)[0] == "w0 "
        worker.send(submit(2, "a bomb"))
        assert worker.exit_code() == 3
