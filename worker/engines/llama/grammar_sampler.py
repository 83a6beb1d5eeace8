"""Sampling under a grammar: the chain's own choice if the grammar allows it, else its choice among what is allowed.

Owns the grammar, and a random stream for second choices; borrows the chain. Never lets chain or grammar learn of a
token that isn't the answer's. Runs in the work loop's thread.

A token takes one draw from the chain's random stream and one from the stream of second choices, used or not: so
where both are depends on seed and number of tokens alone, as it does without a grammar. Were the refused draw used
again, second choices would lean towards the tokens that lie where the refused one lay.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling
from infervisor.worker.engines.llama.grammar import Grammar, GrammarVocabulary

MOST_TOKEN_S = 0.5
"""Of computing for one token. Everybody in the batch waits meanwhile, and what an ambiguous grammar costs may
double with each character: the trial in the sandbox doesn't see how one behaves far into an answer."""


class DeadEnd(Exception):
    """No token is left, or none can be found in time: the sequence can't go on."""


class GrammarSampler:
    """Chooses the tokens of one answer. `close` frees all but the chain.

    chain: the native chain. shaping: how many of its samplers, from the first on, change logits one by one (bias,
    penalties). second: a sampler that draws, as the chain's last does, or None for a greedy chain; owned from now
    on, as the grammar is. greedy: returns the most probable token, for a chain that does nothing else.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        grammar: Grammar,
        sampling: Sampling,
        chain: Any,
        shaping: int,
        second: Any,
        greedy: Callable[[Any, int], int | None] | None,
    ) -> None:
        llama = vocabulary.llama
        self._llama = llama
        self._rows = vocabulary.rows
        self._candidates = vocabulary.candidates
        self._grammar = grammar
        self._chain = chain
        parts = [llama.llama_sampler_chain_get(chain, n) for n in range(llama.llama_sampler_chain_n(chain))]
        self._shaping, self._choosing = parts[:shaping], parts[shaping:-1]
        self._last = parts[-1] if second is None else second
        self._second = second
        self._greedy = greedy
        self._most = 1 if sampling.temperature == 0 else sampling.top_k
        self._banned = {token for token, value in sampling.logit_bias.items() if value == -math.inf}

    def sample(self, context: Any, output: int) -> int:
        """Choose the next token from the output row of the last decode. Raises `DeadEnd`."""
        row = self._rows.row(context, output)
        if row is None:
            raise RuntimeError(f"the last decode has no output {output}")
        began_s = time.thread_time()
        token = self._first_choice(context, output, row)
        if token is None or token in self._banned or not self._grammar.accept(token):
            token = self._second_choice(row)
            if not self._grammar.accept(token):
                raise RuntimeError(f"token {token} was chosen among allowed ones, and the grammar refuses it")
        elif self._second is not None:
            draw(self._llama, self._second, 1)
        self._llama.llama_sampler_accept(self._chain, token)
        took_s = time.thread_time() - began_s
        if took_s > MOST_TOKEN_S:
            raise DeadEnd(
                f"the grammar has become too ambiguous: one token took {took_s:.1f} s of computing; write it with "
                "fewer parts that can match the same text"
            )
        return token

    def _first_choice(self, context: Any, output: int, row: Any) -> int | None:
        if self._greedy is not None:
            token = self._greedy(context, output)
            if token is not None:
                return token
        self._candidates.fill(row)
        self._candidates.apply(self._chain)
        return self._candidates.chosen

    def _second_choice(self, row: Any) -> int:
        candidates = self._candidates
        candidates.fill(row)
        for part in self._shaping:
            candidates.apply(part)
        logits = candidates.logits.copy()
        tokens = self._grammar.choices(logits, self._most)
        if not len(tokens):
            raise DeadEnd(
                "no token can follow: the grammar allows none that the model has and logit_bias doesn't ban; "
                "loosen the grammar, or ban fewer tokens"
            )
        # From here on every candidate is allowed, so whatever is chosen is.
        candidates.take(tokens, logits[tokens])
        for part in (*self._choosing, self._last):
            candidates.apply(part)
        token = candidates.chosen
        if token is None:
            raise DeadEnd(
                "no token can follow: what the model computed for those that the grammar allows is no number"
            )
        return token

    def replay(self, tokens: Sequence[int]) -> None:
        """Bring grammar and second choices to where sampling `tokens` had brought them.

        Raises `InvalidRequest` if the grammar can't have led to them.
        """
        if self._second is not None:
            draw(self._llama, self._second, len(tokens))
        for index, token in enumerate(tokens):
            if not self._grammar.accept(token):
                raise InvalidRequest(
                    f"delivered doesn't follow the grammar: it doesn't allow token {token} at {index}",
                    "delivered",
                )

    def close(self) -> None:
        """Free grammar and random stream. Idempotent."""
        self._grammar.close()
        second, self._second = self._second, None
        if second is not None:
            self._llama.llama_sampler_free(second)


def draw(llama_cpp: Any, sampler: Any, times: int) -> None:
    """Let a sampler that draws at random do so, for nothing: it draws once per apply, whatever the candidates."""
    candidates = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(0, 0.0, 0.0))
    array = llama_cpp.llama_token_data_array(candidates, 1, -1, False)
    for _ in range(times):
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
