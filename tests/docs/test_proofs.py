"""Every row of the tables and every end reason has a real test that produces it, and the page says which."""

from __future__ import annotations

import pytest

from infervisor import EndReason
from infervisor.protocol.machines.request import REQUEST, Lost, RequestState
from tests.helpers import produced
from tests.helpers.produced import ALL, NOT_YET, PAGE, check, page, promises, recording

QUEUED_LOST = "request: queued × Lost → ended"


def test_every_row_and_every_end_reason_is_promised_by_a_test_or_said_to_be_impossible_yet() -> None:
    promised = set(promises())
    assert promised <= ALL, "no row and no end reason: look for a slip in the mark"
    assert NOT_YET.keys() <= ALL
    assert not promised & NOT_YET.keys(), "promised by a test: take it off NOT_YET"
    assert sorted(ALL - promised - NOT_YET.keys()) == [], "nothing produces these"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.helpers.produced"


def test_a_promise_that_is_not_kept_fails_and_one_that_is_kept_passes() -> None:
    with recording() as seen:
        REQUEST.step(RequestState(), Lost(EndReason.UNAVAILABLE), 0)
    REQUEST.step(RequestState(), Lost(EndReason.UNAVAILABLE), 0)
    assert seen == {QUEUED_LOST}
    check([QUEUED_LOST], seen)
    with pytest.raises(AssertionError, match="end: unavailable"):
        check([QUEUED_LOST, "end: unavailable"], seen)


def test_what_is_said_to_be_impossible_yet_may_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    check([], {QUEUED_LOST, "end: poisoned"})
    monkeypatch.setattr(produced, "NOT_YET", {"end: poisoned": "comes later"})
    with pytest.raises(AssertionError, match="end: poisoned"):
        check([], {QUEUED_LOST, "end: poisoned"})
