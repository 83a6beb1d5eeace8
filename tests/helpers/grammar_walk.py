"""llama.cpp's own view of a grammar: whether it parses, which texts it takes, and random texts that follow it.

Walked byte by byte over the byte tokens of a table model's vocabulary.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from infervisor.worker.engines.llama.library import load_library
from tests.helpers.models import EOS, byte_token

_END = 256
_BEGINS = [*range(0x80), 0xC3, 0xE6]
_CONTINUES = [*range(0x80, 0xC0)]
"""Of characters of two and three bytes. llama.cpp lets a grammar begin bytes that are no UTF-8 too."""


class GrammarWalk:
    """Tries grammars on one vocabulary. Close it."""

    def __init__(self, model: Path) -> None:
        self._llama, _ = load_library()
        parameters = self._llama.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._llama.llama_model_load_from_file(str(model).encode(), parameters)
        assert self._model
        self._vocab = self._llama.llama_model_get_vocab(self._model)

    def close(self) -> None:
        """Give the model back."""
        self._llama.llama_model_free(self._model)

    def parses(self, gbnf: str) -> bool:
        """Whether llama.cpp takes the grammar."""
        sampler = self._llama.llama_sampler_init_grammar(self._vocab, gbnf.encode(), b"root")
        if sampler:
            self._llama.llama_sampler_free(sampler)
        return bool(sampler)

    def takes(self, gbnf: str, text: str) -> bool:
        """Whether `text` is a whole answer under the grammar."""
        sampler = self._begun(gbnf)
        try:
            for byte in text.encode():
                if not self._allowed(sampler, [byte]):
                    return False
                self._llama.llama_sampler_accept(sampler, byte_token(byte))
            return bool(self._allowed(sampler, [_END]))
        finally:
            self._llama.llama_sampler_free(sampler)

    def answer(self, gbnf: str, seed: int, most: int = 400) -> str | None:
        """Return a random text that follows the grammar, or None if none ended within `most` bytes."""
        rng = random.Random(seed)
        said = bytearray()
        missing = 0
        sampler = self._begun(gbnf)
        try:
            while len(said) < most:
                allowed = self._allowed(sampler, _CONTINUES if missing else [*_BEGINS, _END])
                assert allowed, f"a dead end after {bytes(said)!r}"
                if _END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                    return said.decode()
                # Closing characters are favoured, so that what may go on for ever ends some time.
                closing = (
                    [byte for byte in allowed if byte in (0x22, 0x5D, 0x7D)] if rng.random() < 0.3 else []
                )
                byte = rng.choice(closing or [byte for byte in allowed if byte != _END])
                missing = missing - 1 if missing else {0xC3: 1, 0xE6: 2}.get(byte, 0)
                said.append(byte)
                self._llama.llama_sampler_accept(sampler, byte_token(byte))
            return None
        finally:
            self._llama.llama_sampler_free(sampler)

    def _begun(self, gbnf: str) -> Any:
        sampler = self._llama.llama_sampler_init_grammar(self._vocab, gbnf.encode(), b"root")
        assert sampler, gbnf
        return sampler

    def _allowed(self, sampler: Any, wanted: list[int]) -> list[int]:
        data = (self._llama.llama_token_data * len(wanted))(
            *((EOS if byte == _END else byte_token(byte), 0.0, 0.0) for byte in wanted)
        )
        array = self._llama.llama_token_data_array(data, len(wanted), -1, False)
        self._llama.llama_sampler_apply(sampler, array)
        return [byte for byte, entry in zip(wanted, data, strict=True) if entry.logit == 0.0]
