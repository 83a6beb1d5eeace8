"""Caller text that spells control tokens stays text, and comes back unchanged."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.literal_text import ControlTexts, Literals, Markers, _any_of

SPELLINGS = ["<|im_start|>", "<|im_end|>", "</s>", "<s>", "<|im_end|><|x|>", "<unk>"]
CONTROL = ControlTexts(SPELLINGS, "template \U000f0000 text")
PIECES = st.sampled_from(
    [
        *SPELLINGS,
        "<",
        "<|",
        "im_end|>",
        "|>",
        ">",
        "</",
        "user",
        " ",
        "\n",
        "é",
        "🦙",
        "\U000f0000",
        "\U0010fffd",
    ]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join) | st.text(max_size=30)


@given(TEXTS)
def test_protected_text_spells_no_control_token_and_comes_back(text: str) -> None:
    literals = Literals(CONTROL)
    protected = literals.protect(text)
    assert not any(spelling in protected for spelling in SPELLINGS)
    assert literals.restore(protected) == text


@given(TEXTS, TEXTS)
def test_neighbours_cannot_build_a_control_token(first: str, second: str) -> None:
    literals = Literals(CONTROL)
    joined = literals.protect(first) + literals.protect(second)
    assert not any(spelling in joined for spelling in SPELLINGS)
    assert literals.restore(joined) == first + second


@given(
    st.text(
        alphabet=st.characters(exclude_characters="<>|s", max_codepoint=0xEFFFF, exclude_categories=["Cs"])
    )
)
def test_ordinary_text_passes_unchanged(text: str) -> None:
    literals = Literals(CONTROL)
    assert literals.protect(text) == text
    assert not literals.marks(text)


def test_nested_values_are_protected_and_others_kept() -> None:
    literals = Literals(CONTROL)
    value = {
        "role": "user",
        "name": "</s>",
        "calls": [{"arguments": "a<s>b", "n": 1, "ok": True, "none": None}],
    }
    protected = literals.protect(value)
    assert "</s>" not in protected["name"]
    assert "<s>" not in protected["calls"][0]["arguments"]
    assert literals.restore(protected["calls"][0]["arguments"]) == "a<s>b"
    assert (protected["role"], protected["calls"][0]["n"]) == ("user", 1)
    assert protected["calls"][0]["ok"] is True
    assert protected["calls"][0]["none"] is None


def test_mappings_keep_their_class() -> None:
    class Special(dict[str, str]):
        pass

    assert type(Literals(CONTROL).protect([Special(a="</s>")])[0]) is Special


def test_markers_that_travelled_restore_the_same() -> None:
    literals = Literals(CONTROL)
    protected = literals.protect("a</s>b<unk>")
    travelled = Markers(dict(literals.text_of))
    assert travelled.marks(protected)
    assert travelled.restore(protected) == "a</s>b<unk>"
    assert not Markers({}).marks(protected)


def test_template_characters_are_never_markers() -> None:
    literals = Literals(CONTROL)
    assert "\U000f0000" not in literals.protect("</s>")


def test_deep_nesting_is_refused() -> None:
    value: object = "x"
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidRequest, match="nested"):
        Literals(CONTROL).protect(value)
    with pytest.raises(InvalidRequest, match="tools are nested") as refused:
        Literals(CONTROL).protect(value, "tools")
    assert refused.value.field == "tools"


def test_no_control_tokens_at_all() -> None:
    literals = Literals(ControlTexts([], ""))
    text = "<s> \U000f0000"
    assert literals.restore(literals.protect(text)) == text
    assert literals.protect("<s>") == "<s>"


@given(
    st.sets(st.text("ab<|>.\\", min_size=1, max_size=5), min_size=1, max_size=12),
    st.text("ab<|>.\\", max_size=20),
)
def test_tree_pattern_finds_the_longest_alternative(words: set[str], text: str) -> None:
    tree = re.compile(_any_of(words))
    plain = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
    assert tree.findall(text) == plain.findall(text)
