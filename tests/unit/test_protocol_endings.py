"""End reasons: the list of the contract, and a class for each."""

from __future__ import annotations

import pytest

from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.messages import ENDED_WHY

# Written out a second time: callers, metrics and HTTP clients depend on these words.
CONTRACT = {
    "natural": "stop stop_sequence length context_full",
    "caller": "cancelled client_disconnected",
    "deadline": "queue_timeout startup_timeout first_token_timeout stall_timeout total_timeout "
    "consumer_timeout",
    "fault": "worker_crashed worker_unresponsive worker_killed engine_error protocol_error poisoned",
    "refusal": "overloaded invalid_request unavailable shutting_down",
}


@pytest.mark.parametrize("end_class", EndClass)
def test_each_class_holds_the_reasons_of_the_contract(end_class: EndClass) -> None:
    assert [reason for reason in EndReason if reason.end_class is end_class] == CONTRACT[end_class].split()


def test_every_reason_and_class_is_in_the_contract() -> None:
    assert set(CONTRACT) == set(EndClass)
    assert set(EndReason) == {reason for reasons in CONTRACT.values() for reason in reasons.split()}


@pytest.mark.parametrize("reason", EndReason)
def test_only_a_natural_end_is_a_whole_answer(reason: EndReason) -> None:
    assert reason.is_natural == (reason in CONTRACT["natural"].split())


def test_what_a_worker_says_of_an_end_is_a_reason() -> None:
    assert {EndReason(why).end_class for why in ENDED_WHY} == {
        EndClass.NATURAL,
        EndClass.CALLER,
        EndClass.REFUSAL,
        EndClass.FAULT,
    }
    assert {why for why in ENDED_WHY if EndReason(why).is_natural} == set(CONTRACT["natural"].split())
