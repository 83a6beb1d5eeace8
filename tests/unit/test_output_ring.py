"""The output ring: bounded, clipped, safe to print, however the stream is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.supervisor.output_ring import MAX_LINE_BYTES, MAX_LINES, OutputRing


def fed(*pieces: bytes) -> OutputRing:
    ring = OutputRing()
    for piece in pieces:
        ring.feed(piece)
    return ring


def test_lines_are_kept_oldest_first_and_an_unfinished_one_counts() -> None:
    ring = fed(b"one\ntw", b"o\r\nthr", b"ee")
    assert ring.tail() == "one\ntwo\nthree"
    assert ring.tail(1) == "three"
    assert ring.total_bytes == 14


def test_only_the_last_lines_are_kept() -> None:
    ring = fed(b"".join(b"%d\n" % number for number in range(MAX_LINES + 50)))
    assert ring.tail(10_000).splitlines() == [str(number) for number in range(50, MAX_LINES + 50)]


def test_a_long_line_is_clipped_and_says_so_once_it_ends() -> None:
    ring = fed(*[b"x" * 1000] * 100)
    assert ring.tail() == "x" * MAX_LINE_BYTES
    ring.feed(b"\nnext")
    assert ring.tail() == "x" * MAX_LINE_BYTES + " [clipped]\nnext"


def test_a_line_of_exactly_the_limit_is_whole() -> None:
    assert fed(b"x" * MAX_LINE_BYTES + b"\n").tail() == "x" * MAX_LINE_BYTES


def test_control_characters_and_broken_text_are_escaped() -> None:
    raw = b"\x1b[2J\x07\x00\x9b \xe6\xad \xf0\x9f\xa6\x99 \xe2\x80\xae\ttab\x7f"
    assert fed(raw).tail() == r"\x1b[2J\x07\x00\x9b \xe6\xad 🦙 \u202e" + "\t" + r"tab\x7f"


@given(st.binary(max_size=200))
def test_whatever_is_fed_is_printable(raw: bytes) -> None:
    assert all(character.isprintable() or character in "\t\n" for character in fed(raw).tail())


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=30) | st.just(b"\n") | st.just(b"y" * (MAX_LINE_BYTES + 1)), max_size=20))
def test_any_split_of_the_stream_gives_the_same_lines(pieces: list[bytes]) -> None:
    assert fed(*pieces).tail(500) == fed(b"".join(pieces)).tail(500)
