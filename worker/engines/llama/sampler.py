"""The sampler chain of one sequence, built from what the request asks for and freed with it.

Each token takes one random draw, so that what comes next depends on the seed and on how many tokens there are: a
chain that replays an answer goes on like the one that gave it. Runs in the work loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling
from infervisor.worker.engines.llama.grammar import Grammar, GrammarVocabulary
from infervisor.worker.engines.llama.grammar_sampler import DeadEnd, GrammarSampler, draw
from infervisor.worker.engines.llama.greedy import Argmax

__all__ = ["MIN_TEMPERATURE", "DeadEnd", "SamplerChain", "check_logit_bias"]

MIN_TEMPERATURE = 1e-5
"""Logits are divided by it in 32 bits; below this they overflow, and the vocabulary's last token wins."""
_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp takes this seed to mean "choose one"; its neighbour stands in, so that it is repeatable."""
_SECOND_STREAM = 0x9E3779B9
"""Makes of a seed another one, for what is drawn when a grammar refuses the first choice."""


class SamplerChain:
    """A native sampler chain; where it would do nothing but take the most probable token, `argmax` does.

    grammar: GBNF that the answer follows, found harmless in another process; needs vocab. Raises `InvalidRequest`
    for what can't be sampled like that, naming the field.
    """

    def __init__(
        self,
        llama_cpp: Any,
        sampling: Sampling,
        seed: int,
        vocabulary_tokens: int,
        argmax: Argmax | None = None,
        *,
        grammar: str | None = None,
        vocab: GrammarVocabulary | None = None,
    ) -> None:
        check_logit_bias(sampling.logit_bias, vocabulary_tokens)
        self._llama = llama_cpp
        self._sample = llama_cpp.llama_sampler_sample
        self._argmax = argmax if _is_plainly_greedy(sampling) else None
        self._free = llama_cpp.llama_sampler_free
        parameters = llama_cpp.llama_sampler_chain_default_params()
        parameters.no_perf = True
        self._guide: GrammarSampler | None = None
        self.pointer = llama_cpp.llama_sampler_chain_init(parameters)
        try:
            for part in _parts(llama_cpp, sampling, seed, vocabulary_tokens):
                llama_cpp.llama_sampler_chain_add(self.pointer, part)
            if grammar is not None:
                if vocab is None:
                    raise ValueError("a grammar needs the vocabulary whose tokens it judges")
                self._guide = self._guided(vocab, Grammar(vocab, grammar), sampling, seed)
        except BaseException:
            self.close()
            raise
        self._window = sampling.repeat_last_n if _has_penalties(sampling) else 0
        self._random = sampling.temperature > 0

    def _guided(
        self, vocabulary: GrammarVocabulary, grammar: Grammar, sampling: Sampling, seed: int
    ) -> GrammarSampler:
        shaping = bool(sampling.logit_bias) + _has_penalties(sampling)
        second = _dist(self._llama, seed ^ _SECOND_STREAM) if sampling.temperature > 0 else None
        greedy = self._argmax.token if self._argmax is not None else None
        return GrammarSampler(vocabulary, grammar, sampling, self.pointer, shaping, second, greedy)

    def sample(self, context: Any, output: int) -> int:
        """Choose the next token from the output row of the last decode. Raises `DeadEnd` if none is left."""
        if self._guide is not None:
            return self._guide.sample(context, output)
        if self._argmax is not None:
            token = self._argmax.token(context, output)
            if token is not None:
                return token
        return int(self._sample(self.pointer, context, output))

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Let the prompt's last tokens count for the penalties, as llama.cpp's own server does."""
        accept = self._llama.llama_sampler_accept
        for token in tokens[max(0, len(tokens) - self._window) :]:
            accept(self.pointer, token)

    def replay(self, tokens: Sequence[int]) -> None:
        """Bring the chain to where sampling `tokens` had brought it: penalties, grammar, one random draw for each.

        Raises `InvalidRequest` if they can't have been sampled under the grammar.
        """
        if self._guide is not None:
            self._guide.replay(tokens)
        if self._random:
            llama = self._llama
            last = llama.llama_sampler_chain_n(self.pointer) - 1
            draw(llama, llama.llama_sampler_chain_get(self.pointer, last), len(tokens))
        accept = self._llama.llama_sampler_accept
        for token in tokens:
            accept(self.pointer, token)

    def close(self) -> None:
        """Free the chain and all its parts. Idempotent."""
        guide, self._guide = self._guide, None
        if guide is not None:
            guide.close()
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            self._free(pointer)


def check_logit_bias(bias: Mapping[int, float], vocabulary_tokens: int) -> None:
    """Raise `InvalidRequest` for a token outside the vocabulary, or if every token is banned."""
    for token in bias:
        if not 0 <= token < vocabulary_tokens:
            raise InvalidRequest(
                f"logit_bias names token {token}, and this model's vocabulary has {vocabulary_tokens} tokens "
                f"(0 to {vocabulary_tokens - 1})",
                "logit_bias",
            )
    if sum(1 for value in bias.values() if value == -math.inf) >= vocabulary_tokens:
        raise InvalidRequest(
            f"logit_bias bans all {vocabulary_tokens} tokens of the vocabulary: nothing is left to say",
            "logit_bias",
        )


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.repeat_last_n > 0 and (
        sampling.repeat_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    )


def _is_plainly_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 and not sampling.logit_bias and not _has_penalties(sampling)


def _parts(llama: Any, sampling: Sampling, seed: int, vocabulary_tokens: int) -> list[Any]:
    """Return the samplers in llama.cpp's order. Those whose setting is neutral are left out."""
    parts: list[Any] = []
    if sampling.logit_bias:
        entries = [llama.llama_logit_bias(token, value) for token, value in sampling.logit_bias.items()]
        array = (llama.llama_logit_bias * len(entries))(*entries)
        parts.append(llama.llama_sampler_init_logit_bias(vocabulary_tokens, len(entries), array))
    if _has_penalties(sampling):
        parts.append(
            llama.llama_sampler_init_penalties(
                vocabulary_tokens,
                sampling.repeat_last_n,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
    if sampling.temperature == 0:
        parts.append(llama.llama_sampler_init_greedy())
        return parts
    if sampling.top_k:
        parts.append(llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1:
        parts.append(llama.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1:
        parts.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0:
        parts.append(llama.llama_sampler_init_min_p(sampling.min_p, 1))
    parts.append(llama.llama_sampler_init_temp(max(sampling.temperature, MIN_TEMPERATURE)))
    parts.append(_dist(llama, seed))
    return parts


def _dist(llama: Any, seed: int) -> Any:
    return llama.llama_sampler_init_dist(_RANDOM_SEED - 1 if seed == _RANDOM_SEED else seed)
