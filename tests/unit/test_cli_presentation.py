"""Exit codes, escapes for terminals, and JSON lines."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor import EndClass, EndReason
from infervisor.supervisor.cli.exit_codes import ExitCode, code_of, help_text
from infervisor.supervisor.cli.presentation import as_line
from infervisor.supervisor.cli.terminal import for_terminal


@pytest.mark.parametrize("reason", list(EndReason))
def test_every_end_reason_has_an_exit_code_and_only_a_whole_answer_has_0(reason: EndReason) -> None:
    assert (code_of(reason) is ExitCode.OK) == reason.is_natural


def test_each_class_of_end_has_a_code_of_its_own() -> None:
    codes = {end_class: {code_of(r) for r in EndReason if r.end_class is end_class} for end_class in EndClass}
    assert all(len(found) == 1 for found in codes.values())
    assert len(set.union(*codes.values())) == len(EndClass)


def test_the_help_lists_every_code_once() -> None:
    lines = help_text().splitlines()
    for code in ExitCode:
        assert sum(line.startswith(f"{code.value:>3}  ") for line in lines) == 1
        assert code.meaning.isascii()


def test_ends_by_a_signal_have_the_number_that_a_shell_gives_them() -> None:
    assert (ExitCode.CANCELLED, ExitCode.READER_GONE, ExitCode.TERMINATED) == (128 + 2, 128 + 13, 128 + 15)


@given(st.text())
def test_no_control_character_is_left_for_a_terminal(text: str) -> None:
    shown = for_terminal(text)
    assert all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") for c in shown)
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]) | st.sampled_from("\n\t")))
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert for_terminal(text) == text


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "🇩🇪", "é", "נָ", "a\u00a0b"])
def test_joined_characters_stay_whole(text: str) -> None:
    assert for_terminal(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[2J", r"\x1b[2J"), ("a\rb", r"a\rb"), ("\x9b", r"\x9b"), ("\u202e", r"\u202e"), ("\x7f", r"\x7f")],
)
def test_what_drives_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert for_terminal(text) == shown


@given(st.text())
def test_a_json_line_is_one_ascii_line_that_reads_back(text: str) -> None:
    line = as_line({"text": text})
    assert line.isascii()
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"text": text}
