"""Foreign values and text, as they are shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.quoting import printable, printable_lines, quoted


def test_control_characters_are_escaped_and_the_rest_is_kept() -> None:
    assert printable("a\tb\u2028é🦙\x1b[2J") == "a\tb\\u2028é🦙\\x1b[2J"
    assert printable_lines("one\x07\r\ntwo") == "one\\x07\\r\ntwo"


@given(st.text())
def test_whatever_is_shown_is_printable(text: str) -> None:
    assert all(character.isprintable() or character == "\t" for character in printable(text))
    assert printable_lines(text).count("\n") == text.count("\n")


def test_values_are_cut_and_what_python_refuses_to_write_is_named() -> None:
    assert quoted("x" * 1000, 10) == "'xxxxxxxxx"
    assert quoted(10**5000) == "a value of type int that is too large to show"
