"""Requests on a real worker: streams, credit, cancels, ends. No supervisor."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from infervisor.protocol.codec import encode
from infervisor.protocol.generation import Limits
from infervisor.protocol.messages import Beat
from tests.helpers import probe_worker
from tests.helpers.raw_worker import (
    Cancel,
    Credit,
    Drain,
    Ended,
    Load,
    RawWorker,
    Ready,
    Released,
    Started,
    Tokens,
    raw_worker,
    submit,
)

HOUR = 3600.0


def assert_healthy(worker: RawWorker, attempt_id: int = 999) -> None:
    """A new request is answered in full, and the worker ends as asked."""
    worker.send(submit(attempt_id, limits=Limits(max_tokens=3)))
    assert worker.answer(attempt_id)[0] == "w0 w1 w2 "
    worker.shut_down()


def test_a_stream_from_start_to_release() -> None:
    with raw_worker() as worker:
        worker.load({"text": "to be or not"})
        worker.send(submit(7, "a question"))
        started = worker.expect(Started, 7)
        assert (started.slot, started.cached_tokens, started.prompt_tokens) == (0, 0, 2)
        text, ended = worker.rest(7)
        assert (text, ended.why, ended.error) == ("to be or not", "stop", None)
        assert ended.usage == {
            "prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 4, "computed_tokens": 5,
        }  # fmt: skip
        released = worker.seen[-1]
        assert isinstance(released, Released)
        assert released.noticed_ns is None
        assert ended.t_ns <= released.freed_ns <= released.t_ns
        worker.shut_down()


def test_stop_strings_and_characters_over_token_borders() -> None:
    with raw_worker() as worker:
        worker.load({"text": "a🦙bEND tail", "split": "bytes"})
        worker.send(submit(1, limits=Limits(stop=("END",))))
        text, ended = worker.answer(1)
        assert (text, ended.why) == ("a🦙b", "stop_sequence")
        shown = [m for m in worker.seen if isinstance(m, Tokens)]
        assert len(shown) == 9, "every computed token is sent, with or without text"
        worker.send(submit(2, limits=Limits(stop=("tail!",))))
        assert worker.answer(2)[0] == "a🦙bEND tail", "what was held back comes with the end"
        worker.shut_down()


def test_requests_wait_for_a_slot() -> None:
    with raw_worker() as worker:
        worker.load({"mode": "echo", "slots": 1})
        worker.send(submit(1, "a b"), submit(2, "c d"), submit(3, "e"))
        texts: dict[int, str] = {}
        for _ in range(3):
            # One after the other; whose prompt is ready first comes first.
            attempt_id = worker.expect(Started).id
            texts[attempt_id] = worker.rest(attempt_id)[0]
        assert texts == {1: "a b", 2: "c d", 3: "e"}
        worker.shut_down()


# --- credit ------------------------------------------------------------------------------------------


def test_credit_is_honoured_exactly() -> None:
    with raw_worker() as worker:
        worker.load()
        worker.send(submit(1, credit=2))
        worker.expect(Started, 1)
        assert worker.tokens(1, 2) == "w0 w1 "
        # Late and repeated limits change nothing; this one allows one more token.
        worker.send(Credit(1, 1), Credit(1, 2), Credit(1, 3))
        assert worker.tokens(1, 1) == "w2 "
        worker.send(Cancel(1))
        ended = worker.expect(Ended, 1)
        assert (ended.usage["completion_tokens"], ended.usage["computed_tokens"]) == (3, 3)
        worker.expect(Released, 1)
        assert_healthy(worker)


def test_no_credit_reads_the_prompt_and_computes_nothing() -> None:
    with raw_worker() as worker:
        worker.load()
        worker.send(submit(1, credit=0))
        worker.expect(Started, 1)
        beat = worker.expect(Beat)
        while beat.active and not beat.steps:
            beat = worker.expect(Beat)
        worker.nothing_but_noise_arrived()
        worker.send(Credit(1, 1))
        assert worker.tokens(1, 1) == "w0 "


def test_a_paused_reader_does_not_hold_up_another() -> None:
    with raw_worker() as worker:
        worker.load({"slots": 2})
        worker.send(submit(1, credit=1))
        worker.expect(Started, 1)
        assert worker.tokens(1, 1) == "w0 "
        worker.send(submit(2, limits=Limits(max_tokens=20)))
        text, ended = worker.answer(2)
        assert (len(text.split()), ended.why) == (20, "length")
        worker.send(Credit(1, 2))
        assert worker.tokens(1, 1) == "w1 "


def test_credit_for_a_request_that_waits_counts() -> None:
    with raw_worker() as worker:
        worker.load({"slots": 1})
        worker.send(submit(1, credit=1))
        worker.expect(Started, 1)
        worker.tokens(1, 1)
        worker.send(submit(2, credit=0, limits=Limits(max_tokens=2)), Credit(2, 5), Cancel(1))
        worker.rest(1, first=1)
        assert worker.answer(2)[0] == "w0 w1 "


# --- cancel ------------------------------------------------------------------------------------------


PAUSED: dict[str, Any] = {}
CANCELLED_WHILE = {
    "reading the prompt": {"prefill_s": HOUR, "slice_s": HOUR},
    "computing a token": {"pace_s": HOUR},
    "running a template": {"open_s": HOUR},
    "paused": PAUSED,
}


@pytest.mark.parametrize("urgent", [False, True], ids=["in band", "by signal"])
@pytest.mark.parametrize("state", CANCELLED_WHILE)
def test_a_cancel_is_noticed_at_once(state: str, urgent: bool) -> None:
    with raw_worker() as worker:
        worker.load(CANCELLED_WHILE[state])
        worker.send(submit(1, credit=1))
        if state != "running a template":
            worker.expect(Started, 1)
        if state == "paused":
            worker.tokens(1, 1)
        asked_ns = time.monotonic_ns()
        if urgent:
            worker.cancel_urgently(1)
        else:
            worker.send(Cancel(1))
        ended = worker.expect(Ended, 1)
        released = worker.expect(Released, 1)
        assert (ended.why, ended.error) == ("cancelled", None)
        assert released.noticed_ns is not None
        assert asked_ns <= released.noticed_ns <= released.freed_ns <= time.monotonic_ns()
        worker.shut_down()


def test_the_neighbour_of_a_cancelled_request_loses_nothing() -> None:
    with raw_worker() as worker:
        worker.load({"slots": 2, "pace_s": 0.002})
        worker.send(submit(1, limits=Limits(max_tokens=60)), submit(2))
        cancelled = False
        text = ""
        ends: dict[int, Ended] = {}
        while len(ends) < 2:
            message = worker.next_message()
            if isinstance(message, Tokens) and message.id == 1:
                text += message.tokens[0][1]
            if isinstance(message, Tokens) and message.id == 2 and not cancelled:
                cancelled = True
                worker.send(Cancel(2))
            if isinstance(message, Ended):
                ends[message.id] = message
        assert text == "".join(f"w{index} " for index in range(60))
        assert {attempt_id: end.why for attempt_id, end in ends.items()} == {1: "length", 2: "cancelled"}


def test_a_waiting_request_is_cancelled_without_a_start() -> None:
    with raw_worker() as worker:
        worker.load({"slots": 1})
        worker.send(submit(1, credit=1))
        worker.expect(Started, 1)
        worker.tokens(1, 1)
        worker.send(submit(2), Cancel(2))
        assert worker.expect(Ended, 2).usage["computed_tokens"] == 0
        assert worker.expect(Released, 2).noticed_ns is not None


def test_a_cancel_before_its_submit_is_remembered() -> None:
    with raw_worker() as worker:
        worker.load({"slots": 2})
        worker.send(submit(1, credit=1))
        worker.expect(Started, 1)
        worker.tokens(1, 1)
        # In one write, in this order: when 1 has ended, 5 has been seen.
        worker.cancel_urgently(5, 1)
        worker.expect(Ended, 1)
        worker.expect(Released, 1)
        worker.send(submit(5))
        ended = worker.expect(Ended, 5)
        assert (ended.why, ended.usage["computed_tokens"]) == ("cancelled", 0)
        worker.expect(Released, 5)
        assert_healthy(worker)


def test_cancels_of_what_is_over_or_unknown_are_ignored() -> None:
    with raw_worker() as worker:
        worker.load()
        worker.send(submit(1, limits=Limits(max_tokens=1)))
        worker.answer(1)
        worker.send(Cancel(1), Cancel(12345), Credit(1, 99))
        worker.cancel_urgently(1, 54321)
        assert_healthy(worker)


@pytest.mark.parametrize("jam", ["deaf reader", "half a frame"])
def test_the_signal_works_while_control_is_jammed(jam: str) -> None:
    with raw_worker() as worker:
        faults = [{"at": "decode", "after": 1, "kind": "block_reader"}] if jam == "deaf reader" else []
        worker.load({"faults": faults})
        worker.send(submit(1, credit=3))
        worker.expect(Started, 1)
        worker.tokens(1, 3)
        if jam == "half a frame":
            worker.send_bytes(encode(submit(2, "x" * 100_000))[:50_000])
        else:
            worker.send(Cancel(1))
        asked_ns = time.monotonic_ns()
        worker.cancel_urgently(1)
        assert worker.expect(Ended, 1).why == "cancelled"
        noticed_ns = worker.expect(Released, 1).noticed_ns
        assert noticed_ns is not None
        assert noticed_ns >= asked_ns, "the cancel in band must not have come through"


def test_a_cancel_while_loading_ends_the_request_when_loaded() -> None:
    with raw_worker() as worker:
        worker.send(
            Load("scripted", None, {"load_s": 0.2}),
            submit(1),
            Cancel(1),
            submit(2, limits=Limits(max_tokens=1)),
        )
        worker.next_message()
        worker.expect(Ready)
        assert worker.expect(Ended, 1).why == "cancelled"
        worker.expect(Released, 1)
        assert worker.answer(2)[0] == "w0 "


# --- refusals and failures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"prompt": "w " * 100}, "prompt"),
        ({"limits": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling": {"heat": 1}}, "heat"),
        ({"prompt": None, "messages": [{"role": "user", "content": None}]}, "messages"),
    ],
)
def test_an_invalid_request_is_refused_and_the_next_one_works(bad: dict[str, Any], field: str) -> None:
    with raw_worker() as worker:
        worker.load({"context_tokens": 50})
        worker.send(submit(1, **bad))
        ended = worker.expect(Ended, 1)
        assert ended.why == "invalid_request"
        assert ended.error is not None
        assert (ended.error["code"], ended.error["field"]) == ("invalid_request", field)
        worker.expect(Released, 1)
        assert_healthy(worker)


@pytest.mark.parametrize("phase", ["prepare", "open", "prefill", "decode"])
def test_a_failing_engine_ends_the_request_and_not_the_worker(phase: str) -> None:
    fault = {
        "at": phase,
        "kind": "raise",
        "message": "the scripted boom \ud83d".encode("utf-8", "replace").decode(),
    }
    with raw_worker() as worker:
        worker.load({"faults": [fault | {"prompt_contains": "bomb"}]})
        worker.send(submit(1, "a bomb"))
        if phase in ("prefill", "decode"):
            worker.expect(Started, 1)
        ended = worker.expect(Ended, 1)
        assert ended.why == "engine_error"
        assert ended.error is not None
        assert "RuntimeError: the scripted boom" in ended.error["message"]
        assert "Traceback" in ended.error["detail"]
        worker.expect(Released, 1)
        assert_healthy(worker)


def test_a_token_that_cannot_be_sent_ends_its_request_only() -> None:
    with raw_worker(program=probe_worker.PROGRAM) as worker:
        worker.load({"probe": "unsendable_tokens"}, engine="probe")
        worker.send(submit(1))
        text, ended = worker.answer(1)
        assert (text, ended.why) == ("w0 w1 ", "engine_error")
        worker.send(submit(2, limits=Limits(max_tokens=2)))
        assert worker.answer(2)[0] == "w0 w1 "
        worker.shut_down()


def test_a_draining_worker_finishes_and_refuses() -> None:
    with raw_worker() as worker:
        worker.load({"slots": 1})
        worker.send(submit(1, credit=1), submit(2, limits=Limits(max_tokens=1)))
        worker.expect(Started, 1)
        worker.tokens(1, 1)
        worker.send(Drain(), submit(3))
        refused = worker.expect(Ended, 3)
        assert refused.error is not None
        assert (refused.why, refused.error["code"]) == ("engine_error", "draining")
        worker.expect(Released, 3)
        worker.send(Cancel(1))
        worker.expect(Ended, 1)
        worker.expect(Released, 1)
        assert worker.answer(2)[0] == "w0 "
        worker.shut_down()


def test_beats_count_steps_and_tell_of_the_end_of_activity() -> None:
    with raw_worker() as worker:
        worker.load({"pace_s": 0.03})
        worker.send(submit(1, limits=Limits(max_tokens=10)))
        worker.answer(1)
        beats = [m for m in worker.seen if isinstance(m, Beat)]
        while beats[-1].steps < 11 or beats[-1].active:
            beats.append(worker.expect(Beat))
        assert beats[-1].steps == 11, "one for the prompt, ten for the tokens"
        assert beats[-1].longest_ns["decode"] >= 30_000_000
        assert "prefill" in beats[-1].longest_ns
        stamps = [beat.t_ns for beat in beats]
        assert all(later - earlier >= 100_000_000 for earlier, later in itertools.pairwise(stamps))
        assert max(beat.active for beat in beats) == 1


def test_tokens_of_one_step_that_are_too_large_for_one_frame_go_out_in_several() -> None:
    piece = "x" * 300_000
    with raw_worker() as worker:
        worker.load({"tokens": [piece] * 8, "step_tokens": 8})
        worker.send(submit(1, credit=9))
        text, ended = worker.answer(1)
        assert (len(text), ended.why, ended.error) == (8 * len(piece), "stop", None)
        assert ended.usage["completion_tokens"] == 8
        worker.shut_down()
