"""Token bytes to safe text: against a naive reference, and the cases that people report."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.worker.text import TextAssembler


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Look at every end from the left; the longest stop string that is complete there ends the text."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def longest_open_prefix(text: str, stop: tuple[str, ...]) -> int:
    """How much of the end of `text` could still become a stop string."""
    return max(
        (n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


def assemble(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    assembler = TextAssembler(stop)
    shown = []
    for piece in pieces:
        shown.append(assembler.feed(piece))
        if assembler.stopped:
            break
    shown.append(assembler.finish())
    return shown, assembler.stopped


# Few letters, so that stop strings overlap each other and themselves; é and 🦙 take several bytes.
LETTERS = st.sampled_from(["a", "b", "é", "🦙", "\ufffd"])
STOPS = st.lists(st.lists(LETTERS, min_size=1, max_size=5).map("".join), max_size=4, unique=True).map(tuple)
PIECES = st.lists(
    st.one_of(
        st.lists(LETTERS, max_size=4).map(lambda letters: "".join(letters).encode()),
        st.binary(max_size=3),
        st.sampled_from([b"\xf0\x9f", b"\xa6\x99", b"\xc3", b"\xa9"]),
    ),
    max_size=12,
)


@given(PIECES, STOPS)
def test_any_cut_gives_what_the_whole_text_gives(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    shown, stopped = assemble(pieces, stop)
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert ("".join(shown), stopped) == reference(whole, stop)


@given(PIECES, STOPS)
def test_shown_at_once_unless_it_could_become_a_stop_string(
    pieces: list[bytes], stop: tuple[str, ...]
) -> None:
    assembler = TextAssembler(stop)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = whole = ""
    for piece in pieces:
        shown += assembler.feed(piece)
        whole += decoder.decode(piece)
        if assembler.stopped:
            return
        assert shown == whole[: len(whole) - longest_open_prefix(whole, stop)]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_valid_text_survives_byte_by_byte(text: str) -> None:
    shown, stopped = assemble([bytes([byte]) for byte in text.encode()])
    assert ("".join(shown), stopped) == (text, False)
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


@pytest.mark.parametrize(
    ("stop", "expected", "stopped"),
    [
        (("DEFGHIJ",), "", True),
        (("GH",), "DEF", True),
        (("JK",), "DEFGHIJ", False),
        (("FG", "EFGH"), "DE", True),
        (("EFG", "FG"), "D", True),
        (("J",), "DEFGHI", True),
    ],
)
def test_stop_strings_over_token_borders(stop: tuple[str, ...], expected: str, stopped: bool) -> None:
    shown, ended = assemble([b"DEF", b"G", b"HI", b"J"], stop)
    assert ("".join(shown), ended) == (expected, stopped)


def test_a_stop_string_that_repeats_itself() -> None:
    shown, stopped = assemble([b"a", b"ab", b"aa", b"b", b"aaab", b"x"], ("aaaa", "aabaaab"))
    assert ("".join(shown), stopped) == reference("aabaabaaabx", ("aaaa", "aabaaab"))


def test_the_token_before_stays_visible_when_the_stop_string_begins_inside_it() -> None:
    assembler = TextAssembler(("END",))
    assert assembler.feed(b"llama E") == "llama "
    assert assembler.feed(b"ND more") == ""
    assert assembler.stopped
    assert assembler.feed(b"again") == ""
    assert assembler.finish() == ""


def test_an_unfinished_character_becomes_one_replacement() -> None:
    assembler = TextAssembler()
    assert assembler.feed(b"ok\xf0\x9f\xa6") == "ok"
    assert assembler.finish() == "\ufffd"


def test_the_replacement_of_an_unfinished_character_can_complete_a_stop_string() -> None:
    assembler = TextAssembler(("b\ufffd",))
    assert assembler.feed(b"ab\xf0\x9f") == "a"
    assert assembler.finish() == ""
    assert assembler.stopped


def test_a_family_emoji_comes_whole_however_it_is_cut() -> None:
    family = "👩‍👩‍👧‍👦🇩🇪歪"
    for size in range(1, 6):
        data = family.encode()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert "".join(assemble(pieces)[0]) == family


def test_the_longest_stop_strings_hold_back_no_more_than_their_length() -> None:
    stop = tuple("a" * 1023 + chr(ord("b") + n) for n in range(8))
    assembler = TextAssembler(stop)
    shown = "".join(assembler.feed(b"aaaa") for _ in range(1000))
    assert len(shown) == 4000 - 1023
    assert assembler.feed(b"b") == ""
    assert assembler.stopped
