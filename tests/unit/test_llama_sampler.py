"""Sampler chains on real llama.cpp: what each setting does to the next token."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling
from infervisor.worker.engine import Broken, Sampled
from infervisor.worker.engines.llama.engine import LlamaEngine
from infervisor.worker.engines.llama.greedy import Argmax, Rows
from infervisor.worker.engines.llama.sampler import SamplerChain
from tests.helpers.engine_models import answer, no_progress, open_in, request
from tests.helpers.models import LOOP, TOKEN, VOCABULARY, build_model

A, B, C = TOKEN["a"], TOKEN["b"], TOKEN["c"]
LOOSE: dict[str, Any] = {"temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEngine]:
    loaded = LlamaEngine()
    path = build_model(tmp_path_factory.mktemp("m") / "loop.gguf", LOOP)
    loaded.load(str(path), {"threads": 1}, no_progress)
    yield loaded
    loaded.close()


def said(engine: LlamaEngine, tokens: int = 6, prompt: str = "c", **settings: Any) -> list[int]:
    return answer(engine, request(prompt, **settings), tokens).tokens


def test_greedy(engine: LlamaEngine) -> None:
    assert said(engine) == [A, B, C, A, B, C]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-10, 1e-6, 0.01])
def test_tiny_temperatures_are_greedy(engine: LlamaEngine, temperature: float) -> None:
    assert said(engine, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0) == [A, B, C, A, B, C]


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"typical_p": 1e-6, "top_k": 1}]
)
def test_narrow_settings_leave_the_best_token(engine: LlamaEngine, narrow: dict[str, Any]) -> None:
    assert said(engine, **{**LOOSE, **narrow}) == [A, B, C, A, B, C]


def test_random_settings_reach_other_tokens(engine: LlamaEngine) -> None:
    assert len({tuple(said(engine, seed=seed, **LOOSE)) for seed in range(5)}) > 1


@pytest.mark.parametrize("seed", [0, 1, (1 << 32) - 2, (1 << 32) - 1])
def test_every_seed_is_repeatable(engine: LlamaEngine, seed: int) -> None:
    assert said(engine, seed=seed, **LOOSE) == said(engine, seed=seed, **LOOSE)


@pytest.mark.parametrize("seed", [1 << 32, 1 << 63])
def test_seed_beyond_32_bits_is_refused(engine: LlamaEngine, seed: int) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        open_in(engine, 0, request("c", seed=seed))


def test_bias_and_ban(engine: LlamaEngine) -> None:
    # The table gives the right token a lead of 10 × √width; a ban needs no lead.
    assert said(engine, 1, logit_bias={A: -math.inf}) != [A]
    assert said(engine, 1, logit_bias={A: -100.0, B: 100.0}) == [B]


def test_all_but_one_token_banned(engine: LlamaEngine) -> None:
    bans = {token: -math.inf for token in range(len(VOCABULARY)) if token != B}
    assert said(engine, 3, logit_bias=bans) == [B, B, B]
    assert said(engine, 3, logit_bias=bans, **LOOSE) == [B, B, B]


def test_all_tokens_banned_is_refused(engine: LlamaEngine) -> None:
    with pytest.raises(InvalidRequest, match="bans all") as refused:
        open_in(engine, 0, request("c", logit_bias=dict.fromkeys(range(len(VOCABULARY)), -math.inf)))
    assert refused.value.field == "logit_bias"
    assert said(engine) == [A, B, C, A, B, C]


def test_bias_outside_the_vocabulary_is_refused(engine: LlamaEngine) -> None:
    for token in (len(VOCABULARY), 999_999):
        with pytest.raises(InvalidRequest, match=rf"{token}.*{len(VOCABULARY)}") as refused:
            open_in(engine, 0, request("c", logit_bias={token: 5.0}))
        assert refused.value.field == "logit_bias"


def test_penalties_see_answer_and_prompt(engine: LlamaEngine) -> None:
    # A penalised token falls below the biased one, which is otherwise far behind the table's choice.
    penalised: dict[str, Any] = {"repeat_penalty": 100.0, "logit_bias": {TOKEN["HI"]: 50.0}}
    assert said(engine, 4, prompt="J", **penalised) == [A, B, C, TOKEN["HI"]]
    assert said(engine, 1, prompt="abc", **penalised) == [TOKEN["HI"]]
    assert said(engine, 1, prompt="abc", **penalised, repeat_last_n=0) == [A]


def test_penalty_window_may_be_longer_than_the_context(engine: LlamaEngine) -> None:
    assert said(engine, 3, frequency_penalty=0.5, presence_penalty=0.5, repeat_last_n=1 << 20) == [A, B, C]


# --- going on with a sampler that another process had -------------------------------------------------

EVERYTHING = Sampling(
    temperature=1.3, top_k=30, top_p=0.97, min_p=0.002, typical_p=0.98, repeat_penalty=1.2, repeat_last_n=40,
    frequency_penalty=0.15, presence_penalty=0.1, logit_bias={3: 2.0, 4: -math.inf},
)  # fmt: skip
SETTINGS = {
    "everything": EVERYTHING,
    "greedy with penalties": Sampling(temperature=0, repeat_penalty=1.3, repeat_last_n=64),
    "wide": Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0),
    "one candidate": Sampling(temperature=1.0, top_k=1),
    "penalties of few": Sampling(temperature=1.0, repeat_penalty=1.5, repeat_last_n=3),
}
SIZE = 50


class Choosing:
    """A chain that is given logits of its own at each index, as a model would."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.llama = pytest.importorskip("llama_cpp")
        self.chain = SamplerChain(self.llama, sampling, seed, SIZE)

    def token(self, index: int) -> int:
        draw = random.Random(index)
        # Now and then the model is sure: then one candidate is left, and still a number has to be drawn.
        sure = index % 5 == 0
        data = (self.llama.llama_token_data * SIZE)(
            *(
                self.llama.llama_token_data(token, draw.gauss(0, 2) + 60 * (sure and token == 7), 0.0)
                for token in range(SIZE)
            )
        )
        array = self.llama.llama_token_data_array(data, SIZE, -1, False)
        self.llama.llama_sampler_apply(self.chain.pointer, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        self.llama.llama_sampler_accept(self.chain.pointer, token)
        return token


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, 7, (1 << 32) - 1])
def test_a_replayed_chain_goes_on_like_the_undisturbed_one_after_any_number_of_tokens(
    name: str, seed: int
) -> None:
    prompt = [1, 2, 3, 7, 7, 9] * 12
    undisturbed = Choosing(SETTINGS[name], seed)
    undisturbed.chain.accept_prompt(prompt)
    length = 120
    whole = [undisturbed.token(index) for index in range(length)]
    undisturbed.chain.close()
    assert len(set(whole)) > 1
    for cut in (1, 2, 3, 4, 5, 39, 41, 119):
        other = Choosing(SETTINGS[name], seed)
        other.chain.accept_prompt(prompt)
        other.chain.replay(whole[:cut])
        assert [other.token(index) for index in range(cut, length)] == whole[cut:], cut
        other.chain.close()


def test_what_is_drawn_depends_on_seed_and_index_alone() -> None:
    # The same choice after 100 draws, whatever those had been made from.
    said: set[int] = set()
    for before in ("wide", "sure", "replayed"):
        sampling = SETTINGS["wide"]
        other = Choosing(sampling, 11)
        if before == "replayed":
            other.chain.replay([5] * 100)
        elif before == "sure":
            for _ in range(100):
                other.token(0)
        else:
            for index in range(1, 101):
                other.token(index)
        said.add(other.token(101))
        other.chain.close()
    assert len(said) == 1


class Logits:
    """Stands for the library: one row of logits at a fixed address, as a context has it."""

    def __init__(self, *values: float) -> None:
        self.row = (ctypes.c_float * len(values))(*values)

    def llama_get_logits_ith(self, context: object, output: int) -> Any:
        return ctypes.cast(self.row, ctypes.POINTER(ctypes.c_float))


def test_the_most_probable_token_is_the_first_of_equals_and_follows_the_memory() -> None:
    library = Logits(0.5, 2.0, 2.0, -1.0)
    argmax = Argmax(Rows(library, 4))
    assert argmax.token(None, 0) == 1
    library.row[3] = 7.0
    assert argmax.token(None, 0) == 3, "the row is looked at anew each time"


def test_what_is_not_a_number_is_left_to_the_chain() -> None:
    assert Argmax(Rows(Logits(0.5, math.nan, 2.0), 3)).token(None, 0) is None


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (Sampling(temperature=0), True),
        (Sampling(temperature=0.1), False),
        (Sampling(temperature=0, repeat_penalty=1.1), False),
        (Sampling(temperature=0, logit_bias={1: 2.0}), False),
    ],
)
def test_only_a_plainly_greedy_chain_is_passed_by(sampling: Sampling, plain: bool) -> None:
    llama = pytest.importorskip("llama_cpp")
    chain = SamplerChain(llama, sampling, 1, 4, Argmax(Rows(Logits(0, 0, 9, 0), 4)))
    try:
        assert (chain._argmax is not None) is plain
        if plain:
            assert chain.sample(None, 0) == 2
    finally:
        chain.close()


def test_where_choosing_fails_the_sequence_is_broken_and_its_neighbour_goes_on(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in (0, 1):
        open_in(engine, slot, request("c"))
    while not all(isinstance(each, Sampled) for each in engine.step([0, 1]) or ()):
        pass

    def run_out(_context: object, _output: int) -> int:
        raise MemoryError("no room for the candidates")

    monkeypatch.setattr(engine._voices[0].sampler, "sample", run_out)
    broken, going = engine.step([0, 1]) or pytest.fail("cut")
    assert isinstance(broken, Broken)
    assert "MemoryError: no room" in str(broken)
    assert isinstance(going, Sampled)
    assert going.token == B
    engine.release(0)
    engine.release(1)
    assert said(engine) == [A, B, C, A, B, C]
