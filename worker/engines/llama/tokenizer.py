"""Text to tokens and back, by the model's own vocabulary.

Owns the rules around llama.cpp's tokeniser: exactly one BOS, byte-exact input (NUL included), and which
spellings may become control tokens. Any thread, several at once: nothing in it changes but tables that are filled
in, and native calls let other threads go on.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infervisor.protocol.arrays import NUMBER_BYTES, pack_ids, unpack_ids
from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.quoting import quoted
from infervisor.worker.engines.llama.literal_text import ControlTexts, Markers

_UNKNOWN, _CONTROL, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 7, 1 << 8


class Vocabulary:
    """The vocabulary of a loaded model, which it must not outlive. native: llama.cpp's pointer to it."""

    def __init__(self, llama_cpp: Any, model: Any) -> None:
        self._llama = llama_cpp
        self.native = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self.native)
        self.bos: int = llama_cpp.llama_vocab_bos(self.native)
        self.eos: int = llama_cpp.llama_vocab_eos(self.native)
        self.add_bos = bool(llama_cpp.llama_vocab_get_add_bos(self.native)) and self.bos >= 0
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
            end = self._ends[token] = bool(self._llama.llama_vocab_is_eog(self.native, token))
        return end

    def _read_piece(self, token: int) -> bytes:
        room = 128
        while True:
            buffer = ctypes.create_string_buffer(room)
            used = self._llama.llama_token_to_piece(self.native, token, buffer, room, 0, False)
            if used >= 0:
                return buffer.raw[:used]
            room = -used

    def text(self, token: int) -> str:
        """Return the spelling of `token` in the vocabulary, or an empty string for none (−1)."""
        if not 0 <= token < self.size:
            return ""
        raw: bytes = self._llama.llama_vocab_get_text(self.native, token) or b""
        return raw.decode("utf-8", "replace")

    def control_tokens(self) -> dict[str, tuple[int, int]]:
        """Return spelling → (token, attributes) of the control tokens. Collected on first use."""
        if self._control is None:
            attributes_of = self._llama.llama_vocab_get_attr
            self._control = {}
            for token in range(self.size):
                attributes = int(attributes_of(self.native, token))
                if attributes & (_CONTROL | _UNKNOWN):
                    self._control.setdefault(self.text(token), (token, attributes))
            self._control.pop("", None)
        return self._control

    def tokenise(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of `text`, without BOS. special: spellings of control tokens become those.

        Raises `InvalidRequest` if llama.cpp can't (more than 2 GiB of text).
        """
        return self._tokenise(text, whole=False, special=special)

    def sequence(self, text: str) -> list[int]:
        """Return the tokens of a text that stands by itself, to be embedded: literal text, between the tokens with
        which the model wants a sequence to begin and to end."""
        return self._tokenise(text, whole=True, special=False)

    def detokenise(self, tokens: Sequence[int]) -> bytes:
        """Return the text of `tokens`, control tokens spelled out: what `tokenise` was given.

        Raises `InvalidRequest` for a token that there isn't.
        """
        count = len(tokens)
        if count and not (0 <= min(tokens) and max(tokens) < self.size):
            bad = min(tokens) if min(tokens) < 0 else max(tokens)
            raise InvalidRequest(f"the model has the tokens 0 to {self.size - 1}, and not {bad}", "tokens")
        ids = (ctypes.c_int32 * count)(*tokens)
        room = 8 * count + 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            used = self._llama.llama_detokenize(self.native, ids, count, buffer, room, False, True)
            if used >= 0:
                return buffer.raw[:used]
            room = -used

    def _tokenise(self, text: str, *, whole: bool, special: bool) -> list[int]:
        data = text.encode()
        room = len(data) + 16
        while True:
            buffer = (ctypes.c_int32 * room)()
            used = self._llama.llama_tokenize(self.native, data, len(data), buffer, room, whole, special)
            if used >= 0:
                return buffer[:used]
            if used == -(1 << 31):
                raise InvalidRequest("the prompt is too long to tokenise", "prompt")
            room = -used

    def raw_prompt(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a raw prompt with exactly one BOS, if the model wants one."""
        return self._with_bos(self.tokenise(text, special=special))

    def rendered_prompt(self, rendered: str, control: ControlTexts, literals: Markers) -> list[int]:
        """Return the tokens of a rendered chat template with exactly one BOS, if the model wants one.

        The template's own control tokens count; those that the caller's text spells are ordinary text.
        """
        if not literals.marks(rendered):
            return self._with_bos(self.tokenise(rendered, special=True))
        return self._with_bos(self._tokenise_marked(rendered, control.pattern, literals))

    def _tokenise_marked(
        self, rendered: str, pattern: re.Pattern[str] | None, literals: Markers
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


def answer_query(
    vocabulary: Vocabulary,
    kind: str,
    arguments: Mapping[str, Any],
    count_prompt: Callable[[Mapping[str, Any]], int],
) -> Any:
    """Answer a query as `AnswersQueries` wants it. count_prompt: how many tokens a request's prompt has."""
    match kind:
        case "tokenize":
            text, special = arguments.get("text"), arguments.get("special")
            if not isinstance(text, str) or not isinstance(special, bool):
                raise InvalidRequest("tokenize takes a text, and whether control tokens count in it", "text")
            return pack_ids(vocabulary.tokenise(text, special=special))
        case "detokenize":
            packed = arguments.get("tokens")
            if not isinstance(packed, bytes) or len(packed) % NUMBER_BYTES:
                raise InvalidRequest("detokenize takes token ids as bytes, four each", "tokens")
            return vocabulary.detokenise(unpack_ids(packed))
        case "count":
            return count_prompt(arguments)
    raise InvalidRequest(f"there is no query {quoted(kind, 40)}: ask tokenize, detokenize or count")
