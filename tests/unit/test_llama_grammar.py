"""Sampling under grammars on real llama.cpp: what may be said, exactly, and what is drawn for it."""

from __future__ import annotations

import codecs
import ctypes
import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling
from infervisor.worker.engines.llama import grammar_sampler
from infervisor.worker.engines.llama.grammar import Grammar, GrammarVocabulary
from infervisor.worker.engines.llama.grammar_sampler import DeadEnd
from infervisor.worker.engines.llama.greedy import Argmax, Rows
from infervisor.worker.engines.llama.sampler import SamplerChain
from tests.helpers.models import EOS, LOOP, TOKEN, TYPES, VOCABULARY, build_model, byte_token, smollm2_path
from tests.helpers.native_context import GivenLogits, NativeContext

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
RECORD = JSON.replace(
    "root   ::= object",
    r"""root ::= "{" ws "\"name\":" string ", \"hobbies\":" array ", \"home\":" object ", \"job\":" string "}" """,
)
CHAT = "<|im_start|>user\nDescribe a person as JSON: name, age, hobbies.<|im_end|>\n<|im_start|>assistant\nSure! "
WIDE: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = {
    "greedy": Sampling(temperature=0),
    "greedy, penalties": Sampling(temperature=0, repeat_penalty=1.5, presence_penalty=1.5),
    "greedy, bias": Sampling(temperature=0, logit_bias={28: -math.inf, 198: 5.0}),
    "random": Sampling(temperature=1),
    "wide": Sampling(**WIDE),
    "penalties": Sampling(temperature=1, repeat_penalty=1.5, presence_penalty=1.5, frequency_penalty=1.0),
    "everything": Sampling(
        temperature=1.3, top_k=30, top_p=0.97, min_p=0.002, typical_p=0.98, repeat_penalty=1.2,
        logit_bias={28: -math.inf, 198: 5.0},
    ),
}  # fmt: skip
A, B, C, J = TOKEN["a"], TOKEN["b"], TOKEN["c"], TOKEN["J"]


@pytest.fixture(scope="module")
def real() -> Iterator[NativeContext]:
    context = NativeContext(smollm2_path())
    yield context
    context.close()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeContext]:
    context = NativeContext(build_model(tmp_path_factory.mktemp("m") / "loop.gguf", LOOP), 256)
    yield context
    context.close()


class Given:
    """A chain that is given its logits by the test, over the vocabulary of a model."""

    def __init__(self, model: NativeContext, sampling: Sampling, grammar: str, seed: int = 1) -> None:
        self.library = GivenLogits(model.llama, model.words.size)
        rows = Rows(self.library, model.words.size)
        self.vocabulary = GrammarVocabulary(self.library, model.native, rows)
        self.chain = SamplerChain(
            self.library, sampling, seed, rows.size, Argmax(rows), grammar=grammar, vocab=self.vocabulary
        )

    def token(self, **logits: float) -> int:
        """Choose after these logits were given to tokens of the table model, by their spelling."""
        for text, logit in logits.items():
            self.library.row[TOKEN[text]] = logit
        return self.chain.sample(None, 0)


def reference(model: NativeContext, grammar: str, said: Sequence[int]) -> set[int]:
    """Return what may follow by asking the native grammar about every token."""
    llama, size = model.llama, model.words.size
    sampler = llama.llama_sampler_init_grammar(model.native, grammar.encode(), b"root")
    for token in said:
        llama.llama_sampler_accept(sampler, token)
    data = (llama.llama_token_data * size)(
        *(llama.llama_token_data(token, 0.0, 0.0) for token in range(size))
    )
    array = llama.llama_token_data_array(data, size, -1, False)
    llama.llama_sampler_apply(sampler, ctypes.byref(array))
    llama.llama_sampler_free(sampler)
    before = b"".join(model.words.piece(token) for token in said)
    allowed: set[int] = set()
    for token in (item.id for item in data if item.logit == 0):
        # The grammar counts the spelling of control tokens, and takes characters in more bytes than they need.
        piece, is_end = model.words.piece(token), model.words.is_end(token)
        try:
            codecs.getincrementaldecoder("utf-8")().decode(before + piece, final=is_end)
        except UnicodeDecodeError:
            continue
        if piece or is_end:
            allowed.add(token)
    return allowed


def can_go_on(text: str) -> bool:
    """Whether JSON begins like that: whether one of some endings makes it whole."""
    closers, string, escaped = "", False, False
    for character in text:
        if escaped:
            escaped = False
        elif string:
            escaped, string = character == "\\", character != '"'
        elif character in "{[":
            closers = ("}" if character == "{" else "]") + closers
        elif character in "}]":
            closers = closers[1:]
        else:
            string = character == '"'
    for end in ('"', 'n"', '0"', '00"', '000"', '0000"') if string else ("",):
        for middle in ("", ":0", "0", '"":0', "rue", "ue", "e", "alse", "lse", "se", "ull", "ll", "l"):
            try:
                json.loads(text + end + middle + closers)
            except ValueError:
                continue
            return True
    return False


# --- what is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_the_answer_follows_the_grammar_and_ends_where_it_may(real: NativeContext, name: str) -> None:
    tokens = real.answer(CHAT, SETTINGS[name], 60, 2, JSON)
    ended = real.words.is_end(tokens[-1])
    data = b"".join(real.words.piece(token) for token in tokens)
    if ended:
        assert isinstance(json.loads(data), dict)
    else:
        assert can_go_on(data.decode("utf-8", "ignore")), data


def test_the_check_of_json_can_fail() -> None:
    assert can_go_on('{"a": [1, {"b": "x\\u00')
    assert not can_go_on('{"a": [1, {"b" "')
    assert not can_go_on("Sure! {")


def test_a_short_grammar_is_said_exactly(real: NativeContext) -> None:
    for seed in range(4):
        tokens = real.answer(CHAT, Sampling(**WIDE), 20, seed, 'root ::= "yes" | "no, 日本" | "🦙"')
        assert real.words.is_end(tokens[-1])
        assert real.text(tokens[:-1]) in {"yes", "no, 日本", "🦙"}


def test_an_end_comes_only_where_the_grammar_may_end(table: NativeContext) -> None:
    given = Given(table, Sampling(temperature=0), 'root ::= "ab" "c"?')
    given.library.row[EOS] = 50.0
    assert [given.token(a=5.0, b=5.0, c=5.0), given.token(), given.token()] == [A, B, EOS]
    given.chain.close()


def test_control_tokens_are_spelled_since_they_are_not_in_the_text(real: NativeContext) -> None:
    control = real.words.control_tokens()["<|im_start|>"][0]
    for settings in ({"temperature": 0.0}, {"temperature": 1.0}, WIDE):
        sampling = Sampling(**settings, logit_bias={control: 100.0})
        tokens = real.answer(CHAT, sampling, 20, 1, 'root ::= "<|im_start|>"')
        assert control not in tokens
        assert real.text(tokens[:-1]) == "<|im_start|>"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["table", "real"])
def test_any_walk_stays_within_the_grammar(
    table: NativeContext, real: NativeContext, model: str, seed: int
) -> None:
    # Random logits reach tokens that no model would say, and pieces of characters in any order.
    context = {"table": table, "real": real}[model]
    given = Given(context, Sampling(**WIDE), "root ::= [а-яё日本🦙-🦝 é]{20,} [x-z]")
    random = np.random.default_rng(seed)
    said: list[int] = []
    while len(said) < 60:
        given.library.row[:] = random.normal(0, 3, context.words.size).tolist()
        token = given.token()
        if context.words.is_end(token):
            break
        said.append(token)
    given.chain.close()
    data = b"".join(context.words.piece(token) for token in said)
    text = data.decode("utf-8", "ignore")
    assert len(data) - len(text.encode()) < 4, "at most the last character isn't whole"
    assert all(
        character in " éё日本" or "а" <= character <= "я" or "🦙" <= character <= "🦝"
        for character in text[:-1]
    )
    assert len(text) > 20, text


# --- which tokens are tried --------------------------------------------------------------------------

RUSSIAN_OR_LLAMA = "root ::= [а-яё日🦙-🦝]+ [^b-z]"
PLACES = [
    (JSON, ""),
    (JSON, "{"),
    (JSON, '{"na'),
    (JSON, '{"a":'),
    (JSON, '{"a": "b"'),
    (JSON, '{"a": "b"}'),
    (RUSSIAN_OR_LLAMA, ""),
    (RUSSIAN_OR_LLAMA, "да"),
    ('root ::= "<a" [^>]* ">"', "<a b"),
    ('root ::= "a" <[300]> "b" | "a" !<[301]> "c"', "a"),
]


@pytest.mark.parametrize(("grammar", "text"), PLACES)
def test_what_may_follow_is_what_the_native_grammar_says_of_every_token(
    real: NativeContext, grammar: str, text: str
) -> None:
    said = real.words.tokenise(text, special=False)
    check_choices(real, grammar, said)


@pytest.mark.parametrize("grammar", [RUSSIAN_OR_LLAMA, "root ::= [а-яё日🦙-🦝]*"])
@pytest.mark.parametrize("said", [[], [0xF0], [0xF0, 0x9F], [0xF0, 0x9F, 0xA6], [0xD0], [0xD0, 0xB4]])
def test_what_may_follow_a_piece_of_a_character(table: NativeContext, said: list[int], grammar: str) -> None:
    check_choices(table, grammar, [byte_token(byte) for byte in said])


def check_choices(model: NativeContext, grammar: str, said: Sequence[int]) -> None:
    expected = reference(model, grammar, said)
    place = Grammar(model.grammars, grammar)
    assert all(place.accept(token) for token in said)
    logits = np.random.default_rng(1).normal(0, 5, model.words.size).astype(np.float32)
    assert place.choices(logits, 0).tolist() == sorted(expected)
    for most in (1, 40):
        best = sorted(expected, key=lambda token: -logits[token])[:most]
        found = place.choices(logits, most).tolist()
        assert set(best) <= set(found) <= expected
        assert found == sorted(found)
    logits[sorted(expected)[::2]] = -np.inf
    assert place.choices(logits, 0).tolist() == sorted(expected)[1::2]
    some = [*sorted(expected)[:20], *range(0, model.words.size, 997)]
    assert [token for token in some if place.allows(token)] == [token for token in some if token in expected]
    place.close()
    place.close()


# --- what is drawn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replayed_chain_goes_on_exactly_after_any_number_of_tokens(real: NativeContext, name: str) -> None:
    # All chains choose from the same output rows; chain k joins after k tokens, which it replays.
    prompt = real.tokens(CHAT)
    real.begin(prompt)
    said: list[int] = []
    chains: list[SamplerChain] = []
    refused = 0
    while len(said) < 30:
        free, joining = real.chain(SETTINGS[name], 7), real.chain(SETTINGS[name], 7, RECORD)
        for chain in (free, joining):
            chain.accept_prompt(prompt)
            chain.replay(said)
        chains.append(joining)
        chosen = [chain.sample(real.context, -1) for chain in chains]
        assert len(set(chosen)) == 1, (len(said), chosen)
        refused += free.sample(real.context, -1) != chosen[0]
        free.close()
        said += chosen[:1]
        if real.words.is_end(said[-1]):
            break
        real.read(said[-1:])
    for chain in chains:
        chain.close()
    assert len(said) > 10
    assert refused, "the grammar never mattered"


def test_second_choices_are_as_probable_as_they_should_be(table: NativeContext) -> None:
    given = Given(table, Sampling(**WIDE), "root ::= [ab]*")
    probable = {"J": math.log(0.4) + 20, "a": math.log(0.3) + 20, "b": math.log(0.3) + 20}
    drawn = Counter(given.token(**probable) for _ in range(4000))
    given.chain.close()
    assert set(drawn) == {A, B}
    # Drawn with the number that led to the refused J, 70 % of them would be the one that lies next to it.
    assert 0.46 < drawn[A] / 4000 < 0.54


def test_what_is_drawn_depends_on_seed_and_number_of_tokens_alone(table: NativeContext) -> None:
    later: list[list[int]] = []
    for before in ({"J": 40.0}, {"a": 40.0}, None):
        given = Given(table, Sampling(**WIDE), "root ::= [ab]*", seed=5)
        if before is None:
            given.chain.replay([A] * 50)
        else:
            for _ in range(50):
                given.token(**before)
        later.append([given.token(J=20.0, a=20.0, b=20.0) for _ in range(30)])
        given.chain.close()
    assert later[0] == later[1] == later[2]
    assert len(set(later[0])) == 2


def test_penalties_do_not_see_what_the_grammar_refused(table: NativeContext) -> None:
    given = Given(table, Sampling(temperature=0, presence_penalty=2.0), "root ::= [bc] [abc] [abc]")
    assert given.token(a=10.0, b=8.0) == B, "a is refused"
    assert given.token(a=10.0, b=0.0, c=9.0) == A, "and hadn't been penalised"
    assert given.token() == C, "now it has"
    given.chain.close()


# --- what can't be said ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.0, "repeat_penalty": 1.5}, {}, WIDE]
)
def test_where_no_token_is_left_the_chain_says_so(table: NativeContext, settings: dict[str, Any]) -> None:
    banned = {A: -math.inf, byte_token(ord("a")): -math.inf}
    given = Given(table, Sampling(**settings, logit_bias=banned), 'root ::= "b" "a"')
    assert given.token(b=9.0) == B
    with pytest.raises(DeadEnd, match="logit_bias"):
        given.token(a=20.0)
    given.chain.close()
    given = Given(table, Sampling(**settings), 'root ::= "a"')
    given.library.row[byte_token(ord("a"))] = -math.inf
    with pytest.raises(DeadEnd, match="no token can follow"):
        given.token(a=-math.inf)
    given.chain.close()


def test_a_banned_token_is_not_chosen_for_want_of_another(real: NativeContext) -> None:
    # Where all are impossible, a greedy chain takes the first of the vocabulary: an end, which the grammar allows.
    grammar = 'root ::= "a"?'
    bans = dict.fromkeys(reference(real, grammar, []), -math.inf)
    assert 0 in bans
    given = Given(real, Sampling(temperature=0, logit_bias=bans), grammar)
    given.library.row[:] = [-math.inf] * real.words.size
    with pytest.raises(DeadEnd):
        given.token()
    given.chain.close()


def test_a_grammar_that_explodes_far_into_an_answer_ends_it_before_it_holds_up_everybody(
    table: NativeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is possible doubles with each letter. The trial in the sandbox follows some paths, and not this one.
    monkeypatch.setattr(grammar_sampler, "MOST_TOKEN_S", 0.02)
    given = Given(table, Sampling(temperature=0), 'root ::= "a" root "b" | "a" root "c" | "J"')
    with pytest.raises(DeadEnd, match="too ambiguous"):
        deque((given.token(a=9.0) for _ in range(30)), maxlen=0)
    given.chain.close()


def test_where_nothing_is_a_number_no_token_is_left(table: NativeContext) -> None:
    given = Given(table, Sampling(temperature=0), "root ::= [a-z]")
    given.library.row[:] = [math.nan] * table.words.size
    with pytest.raises(DeadEnd):
        given.token()
    given.chain.close()


def test_delivered_tokens_that_the_grammar_forbids_are_refused(table: NativeContext) -> None:
    for delivered in ([J], [A, A], [A, B, A], [EOS], [A, TYPES.index(3)], [A - len(VOCABULARY)], [999_999]):
        given = Given(table, Sampling(), 'root ::= "ab"')
        with pytest.raises(
            InvalidRequest, match=rf"token {delivered[-1]} at {len(delivered) - 1}"
        ) as refused:
            given.chain.replay(delivered)
        assert refused.value.field == "delivered"
        given.chain.close()
        given.chain.close()


@pytest.mark.parametrize(
    "grammar", ["", "root ::= (", 'rule ::= "a"', "root ::= missing", 'root ::= root "a"', 'root ::= "a"\0']
)
def test_a_grammar_that_the_library_does_not_take_is_refused(table: NativeContext, grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="root") as refused:
        table.chain(Sampling(), 1, grammar)
    assert refused.value.field == "grammar"


def test_without_numpy_a_grammar_is_refused(table: NativeContext) -> None:
    rows = Rows(table.llama, table.words.size)
    rows.numpy = None
    with pytest.raises(InvalidRequest, match="pip install numpy") as refused:
        Grammar(GrammarVocabulary(table.llama, table.native, rows), 'root ::= "a"')
    assert refused.value.field == "grammar"
