"""Text in columns of a terminal: wrapping, frames, how panels are laid out, and what is written over what."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor import EndReason, Report, Timeline, Usage
from infervisor.supervisor.cli.board import FRAME_CELLS, MIN_WIDTH, grid, panel, status_of
from infervisor.supervisor.cli.column import Column, wrap
from infervisor.supervisor.cli.screen import Screen
from tests.helpers.terminal import screen_of

NS = 1_000_000_000
WORDS = st.text(st.sampled_from("ab 日本🦙e\u0301 -"), max_size=120)


def cells(text: str) -> int:
    """Count cells without the library that is under test."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


# --- wrapping --------------------------------------------------------------------------------------


@given(WORDS, st.integers(2, 20))
def test_no_line_is_wider_than_its_column_and_nothing_but_blanks_is_lost(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cells(line.rstrip()) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(st.lists(st.text(st.sampled_from("ab 日🦙\n"), max_size=8), max_size=30), st.integers(4, 12))
def test_however_an_answer_comes_in_pieces_it_fills_the_same_lines(pieces: Sequence[str], width: int) -> None:
    grown, whole = Column(width), Column(width)
    for piece in pieces:
        grown.add(piece)
    whole.add("".join(pieces))
    assert list(grown.last(None)) == list(whole.last(None))


def test_lines_are_cut_at_blanks_and_words_that_are_too_long_anywhere() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("a 0123456789", 4) == ["a", "0123", "4567", "89"]
    assert wrap("日本語です", 5) == ["日本", "語で", "す"]
    assert wrap("", 5) == [""]


def test_indentation_stays_and_a_tab_is_blanks() -> None:
    column = Column(20)
    column.add("  if x:\n\ty = 1\n")
    assert list(column.last(None)) == ["  if x:", "    y = 1"]


def test_the_last_lines_are_shown_and_all_of_them_come_back_in_another_width() -> None:
    column = Column(4)
    column.add("a b c d e f")
    assert list(column.last(1)) == ["e f"]
    assert list(column.last(2)) == ["c d", "e f"][-2:]
    column.resize(11)
    assert list(column.last(None)) == ["a b c d e f"]


# --- panels ----------------------------------------------------------------------------------------


@given(st.integers(44, 400), st.integers(5, 100), st.integers(2, 8))
def test_panels_fit_beside_each_other_and_all_have_a_place(columns: int, lines: int, count: int) -> None:
    beside, width, height = grid(columns, lines, count)
    assert 1 <= beside <= count
    assert beside * width <= columns
    assert width > FRAME_CELLS + 2
    rows = -(-count // beside)
    assert rows * height <= max(lines - 1, 3 * rows)


def test_wide_terminals_have_all_side_by_side_and_narrow_ones_stack_them() -> None:
    assert grid(4 * MIN_WIDTH, 24, 4)[0] == 4
    assert grid(80, 24, 4)[:2] == (2, 40)
    assert grid(44, 50, 4)[:2] == (1, 44)
    assert grid(120, 30, 5)[0] == 5
    assert grid(100, 30, 5)[0] == 3


ESCAPE = re.compile(r"\x1b\[(\d*)([A-Za-z])")


@given(st.lists(WORDS, max_size=3), WORDS, WORDS, st.integers(10, 60), st.integers(1, 50))
def test_every_edge_stands_in_its_column_whatever_the_text(
    lines: Sequence[str], title: str, status: str, width: int, left: int
) -> None:
    drawn = panel(title, lines, status, left=left, width=width, height=5, style="\x1b[2m")
    assert len(drawn) == 5
    for line in drawn:
        assert line.startswith(f"\x1b[{left}G")
        _, _, edge = line.rpartition(f"\x1b[{left + width - 1}G")
        assert ESCAPE.sub("", edge) in ("│", "╮", "╯")
        before = ESCAPE.sub("", line.removesuffix(edge))
        assert cells(before) == width - 1


# --- what is said of a stream ----------------------------------------------------------------------


def _report(timeline: Timeline, usage: Usage | None = None, reason: EndReason | None = None) -> Report:
    return Report(
        request_id=1,
        end_reason=reason,
        timeline=timeline,
        usage=usage or Usage(),
        stage=None,
        seed=0,
        window=32,
        worker_pid=None,
    )


def test_each_stage_of_a_request_is_told_in_its_own_words() -> None:
    queued = Timeline(queued_ns=0)
    assert status_of(_report(queued), 3 * NS // 2) == "queued 1.5 s"
    reading = Timeline(queued_ns=0, started_ns=NS)
    assert status_of(_report(reading, Usage(20, 12)), 2 * NS) == "reading 8 of 20 tokens"
    saying = Timeline(queued_ns=0, started_ns=NS, first_token_ns=2 * NS, last_token_ns=4 * NS, tokens=21)
    assert status_of(_report(saying, Usage(20, 12)), 5 * NS) == "10.0 tokens/s"
    ended = _report(saying, Usage(20, 12, 21), EndReason.LENGTH)
    assert status_of(ended, 5 * NS) == "length · 21 tokens · 10.0 tokens/s"


# --- the screen ------------------------------------------------------------------------------------


LINES = st.lists(st.sampled_from(["a", "bb", "ccc", ""]), max_size=4)


@given(st.lists(st.tuples(LINES, st.lists(st.sampled_from(["n1", "n2"]), max_size=2)), max_size=8))
def test_a_frame_replaces_the_one_before_and_lines_above_stay(
    frames: Sequence[tuple[list[str], list[str]]],
) -> None:
    screen = Screen()
    said: list[str] = []
    written = ""
    for lines, above in frames:
        said += above
        written += screen.frame(lines, (80, 24), above).decode()
        # The cursor is below the last line.
        assert screen_of(written + "|") == [*said, *lines, "|"]


def test_what_has_not_changed_is_not_drawn_again() -> None:
    screen = Screen()
    screen.frame(["one", "two"], (80, 24))
    again = screen.frame(["one", "2"], (80, 24))
    assert b"one" not in again
    assert b"2" in again


def test_another_size_begins_anew_on_a_clear_terminal() -> None:
    screen = Screen()
    written = screen.frame(["one", "two"], (80, 24), ["before"]) + screen.frame(["three"], (60, 24))
    assert screen_of(written.decode()) == ["three", ""]


@pytest.mark.parametrize("above", [(), ("n",)])
def test_wrapping_is_switched_on_again_after_each_frame(above: Sequence[str]) -> None:
    frame = Screen().frame(["one"], (80, 24), above)
    assert frame.rindex(b"\x1b[?7h") > frame.rindex(b"one") > frame.rindex(b"\x1b[?7l")
