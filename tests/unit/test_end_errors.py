"""The table from end reasons to errors is whole, and what it makes is fresh, named and readable."""

from __future__ import annotations

import pytest

from infervisor.protocol.blame import Suspicion
from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.errors import (
    AdmissionError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Poisoned,
    RequestCancelled,
)
from infervisor.supervisor.end_errors import ERROR_OF, error_of, poisoned_sentence, sentence_of
from infervisor.supervisor.report import ErrorInfo

UNNATURAL = [reason for reason in EndReason if not reason.is_natural]


def test_every_reason_but_the_natural_ones_has_an_error() -> None:
    assert set(ERROR_OF) == set(UNNATURAL)


@pytest.mark.parametrize("reason", UNNATURAL)
def test_an_error_has_its_reason_as_code_and_a_sentence_as_message(reason: EndReason) -> None:
    error = error_of(reason, None)
    assert type(error) is ERROR_OF[reason]
    assert error.code == reason.value
    assert str(error) == sentence_of(reason)
    assert "_" not in str(error).replace("deadlines.", "").replace(f"{reason.value.rpartition('_')[0]}_s", "")
    assert error_of(reason, None) is not error
    told = error_of(reason, ErrorInfo("x", "what exactly happened"))
    assert str(told) == "what exactly happened"
    assert told.code == reason.value
    # The code is this error's own: the next one of the class isn't touched.
    assert type(error).code == ERROR_OF[reason].code


def test_the_class_of_the_error_follows_the_class_of_the_reason() -> None:
    for reason in UNNATURAL:
        kind = ERROR_OF[reason]
        assert (kind is RequestCancelled) == (reason.end_class is EndClass.CALLER)
        assert (kind is DeadlineExceeded) == (reason.end_class is EndClass.DEADLINE)
        if reason.end_class is EndClass.REFUSAL:
            assert issubclass(kind, (AdmissionError, InvalidRequest))


def test_details_reach_the_error_that_has_room_for_them() -> None:
    engine = error_of(EndReason.ENGINE_ERROR, ErrorInfo("engine_error", "it failed", "Traceback …"))
    assert isinstance(engine, EngineError)
    assert engine.detail == "Traceback …"
    invalid = error_of(EndReason.INVALID_REQUEST, ErrorInfo("invalid_request", "too long", field="prompt"))
    assert isinstance(invalid, InvalidRequest)
    assert invalid.field == "prompt"
    bare = error_of(EndReason.INVALID_REQUEST, None)
    assert isinstance(bare, InvalidRequest)
    assert bare.field is None


def test_deadlines_say_which_setting_ran_out() -> None:
    for reason in UNNATURAL:
        if reason.end_class is EndClass.DEADLINE:
            budget = reason.value.removesuffix("_timeout")
            assert f"deadlines.{budget}_s" in sentence_of(reason)


@pytest.mark.parametrize(
    ("deaths", "begins"),
    [
        (
            [(True, "SIGSEGV(-11)"), (True, "SIGSEGV(-11)")],
            "the request was in 2 workers when they died, alone both times: SIGSEGV(-11), SIGSEGV(-11); ",
        ),
        (
            [(False, "unresponsive"), (True, "exit code 3"), (True, "")],
            "the request was in 3 workers when they died, alone in 2 of them: unresponsive, exit code 3, unknown; ",
        ),
        (
            [(True, "exit code 3")] * 3,
            "the request was in 3 workers when they died, alone every time: exit code 3, exit code 3, "
            "exit code 3; ",
        ),
    ],
)
def test_a_poisoned_request_is_told_how_its_workers_died(deaths: list[tuple[bool, str]], begins: str) -> None:
    suspicion = Suspicion()
    for alone, how in deaths:
        suspicion = suspicion.accused(alone, 0, how)
    assert suspicion.is_poisoned
    sentence = poisoned_sentence(suspicion)
    assert sentence.startswith(begins + "it is not tried again")
    error = error_of(EndReason.POISONED, ErrorInfo(EndReason.POISONED.value, sentence))
    assert isinstance(error, Poisoned)
    assert (error.code, str(error), error.retryable) == ("poisoned", sentence, False)
