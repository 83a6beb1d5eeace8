"""A model and a bare native context, for tests of what stands on one: sampling, grammars, log-probabilities."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.generation import Sampling
from infervisor.worker.engines.llama.grammar import GrammarVocabulary
from infervisor.worker.engines.llama.greedy import Argmax, Rows
from infervisor.worker.engines.llama.sampler import SamplerChain
from infervisor.worker.engines.llama.tokenizer import Vocabulary


class NativeContext:
    """One sequence in one context. `close` frees both."""

    def __init__(self, path: Path, context_tokens: int = 512) -> None:
        llama = self.llama = pytest.importorskip("llama_cpp")
        parameters = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        assert self.model, path
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = context_tokens
        options.n_threads = options.n_threads_batch = 1  # two get in each other's way on a busy machine
        self.context = llama.llama_init_from_model(self.model, options)
        self.native = llama.llama_model_get_vocab(self.model)
        self.words = Vocabulary(llama, self.model)
        self.rows = Rows(llama, self.words.size)
        self.argmax = Argmax(self.rows)
        self.grammars = GrammarVocabulary(llama, self.native, self.rows)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a raw prompt."""
        return self.words.raw_prompt(text, special=True)

    def text(self, tokens: Sequence[int]) -> str:
        """Return what they say."""
        return b"".join(self.words.piece(token) for token in tokens).decode()

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget everything and read these; output −1 is of the last one."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        self.read(tokens)

    def read(self, tokens: Sequence[int]) -> None:
        """Read these after what is there; output −1 is of the last one."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(array, len(tokens))) == 0

    def chain(self, sampling: Sampling, seed: int = 1, grammar: str | None = None) -> SamplerChain:
        """Return a chain as the engine makes it. The caller closes it."""
        return SamplerChain(
            self.llama, sampling, seed, self.words.size, self.argmax, grammar=grammar, vocab=self.grammars
        )

    def answer(
        self, prompt: str, sampling: Sampling, most: int, seed: int = 1, grammar: str | None = None
    ) -> list[int]:
        """Return the answer's tokens: at most so many, an end token included."""
        chain = self.chain(sampling, seed, grammar)
        try:
            tokens = self.tokens(prompt)
            chain.accept_prompt(tokens)
            self.begin(tokens)
            said: list[int] = []
            while True:
                said.append(chain.sample(self.context, -1))
                if len(said) == most or self.words.is_end(said[-1]):
                    return said
                self.read(said[-1:])
        finally:
            chain.close()

    def close(self) -> None:
        """Free context and model."""
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


class GivenLogits:
    """The library, but its output row is what the test says, and no context is needed."""

    def __init__(self, llama_cpp: Any, size: int, least: float = -20.0) -> None:
        self._llama = llama_cpp
        self.row = (ctypes.c_float * size)(*([least] * size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def llama_get_logits_ith(self, context: object, output: int) -> Any:
        """Return the row, whatever the output."""
        return ctypes.cast(self.row, ctypes.POINTER(ctypes.c_float))
