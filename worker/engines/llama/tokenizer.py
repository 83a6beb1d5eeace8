"""Text to tokens and back, by the model's own vocabulary.

Owns the rules around llama.cpp's tokeniser: exactly one BOS, byte-exact input (NUL included), and which
spellings may become control tokens. Runs in the work loop's thread.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.literal_text import ControlTexts, Literals

_UNKNOWN, _CONTROL, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 7, 1 << 8


class Vocabulary:
    """The vocabulary of a loaded model. Must not outlive it."""

    def __init__(self, llama_cpp: Any, model: Any) -> None:
        self._llama = llama_cpp
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.bos: int = llama_cpp.llama_vocab_bos(self._vocab)
        self.eos: int = llama_cpp.llama_vocab_eos(self._vocab)
        self.add_bos = bool(llama_cpp.llama_vocab_get_add_bos(self._vocab)) and self.bos >= 0
        self._pieces: list[bytes | None] = [None] * self.size
        self._ends: list[bool | None] = [None] * self.size
        self._control: dict[str, tuple[int, int]] | None = None

    def piece(self, token: int) -> bytes:
        """Return what `token` adds to the answer: its bytes; none for control tokens."""
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer with `token`."""
        end = self._ends[token]
        if end is None:
            end = self._ends[token] = bool(self._llama.llama_vocab_is_eog(self._vocab, token))
        return end

    def _read_piece(self, token: int) -> bytes:
        room = 128
        while True:
            buffer = ctypes.create_string_buffer(room)
            used = self._llama.llama_token_to_piece(self._vocab, token, buffer, room, 0, False)
            if used >= 0:
                return buffer.raw[:used]
            room = -used

    def text(self, token: int) -> str:
        """Return the spelling of `token` in the vocabulary, or an empty string for none (−1)."""
        if not 0 <= token < self.size:
            return ""
        raw: bytes = self._llama.llama_vocab_get_text(self._vocab, token) or b""
        return raw.decode("utf-8", "replace")

    def control_tokens(self) -> dict[str, tuple[int, int]]:
        """Return spelling → (token, attributes) of the control tokens. Collected on first use."""
        if self._control is None:
            attributes_of = self._llama.llama_vocab_get_attr
            self._control = {}
            for token in range(self.size):
                attributes = int(attributes_of(self._vocab, token))
                if attributes & (_CONTROL | _UNKNOWN):
                    self._control.setdefault(self.text(token), (token, attributes))
            self._control.pop("", None)
        return self._control

    def tokenise(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of `text`, without BOS. special: spellings of control tokens become those.

        Raises `InvalidRequest` if llama.cpp can't (more than 2 GiB of text).
        """
        data = text.encode()
        room = len(data) + 16
        while True:
            buffer = (ctypes.c_int32 * room)()
            used = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, room, False, special)
            if used >= 0:
                return buffer[:used]
            if used == -(1 << 31):
                raise InvalidRequest("the prompt is too long to tokenise", "prompt")
            room = -used

    def raw_prompt(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a raw prompt with exactly one BOS, if the model wants one."""
        return self._with_bos(self.tokenise(text, special=special))

    def rendered_prompt(self, rendered: str, control: ControlTexts, literals: Literals) -> list[int]:
        """Return the tokens of a rendered chat template with exactly one BOS, if the model wants one.

        The template's own control tokens count; those that the caller's text spells are ordinary text.
        """
        if not literals.marks(rendered):
            return self._with_bos(self.tokenise(rendered, special=True))
        return self._with_bos(self._tokenise_marked(rendered, control.pattern, literals))

    def _tokenise_marked(
        self, rendered: str, pattern: re.Pattern[str] | None, literals: Literals
    ) -> list[int]:
        # llama.cpp finds control tokens first and tokenises the text between two of them as one piece. The
        # same is done here, so that ordinary text becomes the same tokens as in an unmarked prompt: only the
        # marked spellings stay in the pieces.
        tokens: list[int] = []
        position, strip_next = 0, False
        found = [*pattern.finditer(rendered)] if pattern else []
        for match in [*found, None]:
            piece = rendered[position : match.start() if match else len(rendered)]
            token, attributes = self.control_tokens()[match.group()] if match else (-1, 0)
            piece = piece.lstrip() if strip_next else piece
            piece = piece.rstrip() if attributes & _LSTRIP else piece
            if piece:
                tokens += self.tokenise(literals.restore(piece), special=False)
            if match:
                tokens.append(token)
                position, strip_next = match.end(), bool(attributes & _RSTRIP)
        return tokens

    def _with_bos(self, tokens: list[int]) -> list[int]:
        if not self.add_bos or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]
