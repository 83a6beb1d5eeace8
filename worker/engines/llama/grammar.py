"""A GBNF grammar on its way through an answer: which tokens may come next.

Owns the native grammar and its place in the answer. llama.cpp ends the whole process when a grammar is told of a
token that it forbids, so nothing is accepted here that hasn't been tried. That the grammar is harmless (it might
hang the parser or exhaust memory) was found out in another process, never here. Runs in the work loop's thread, but
for `GrammarVocabulary.learn`.
"""

from __future__ import annotations

import codecs
import ctypes
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.candidates import Candidates
from infervisor.worker.engines.llama.greedy import Rows, largest

FIRST_LOOK = 64
"""How many of the most probable tokens are tried before all are."""
_BREATH_TOKENS, _BREATH_S = 256, 5e-5
"""While a vocabulary is learnt beside steps: how often the interpreter is left to them."""
_LITERALS = re.compile(r'#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
"""Comments, strings and character classes of GBNF."""


@dataclass(frozen=True, slots=True)
class _Beginnings:
    """What grammars must know of a vocabulary; arrays.

    silent: for each token whether it adds nothing to the text, and isn't an end either. partial: whether it isn't
    whole characters. parent: for each token the longest other one that it begins with, −1 if there is none. levels:
    the tokens without a parent, those whose parents these are, and so on.
    """

    silent: Any
    partial: Any
    parent: Any
    levels: Sequence[Any]


class GrammarVocabulary:
    """A model's vocabulary as grammars see it, and the room in which they try tokens. One for each engine."""

    def __init__(self, llama_cpp: Any, vocab: Any, rows: Rows) -> None:
        self.llama = llama_cpp
        self.vocab = vocab
        self.rows = rows
        self._beginnings: _Beginnings | None = None
        self._candidates: Candidates | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` if grammars can't be followed here. Any thread."""
        if self.rows.numpy is None:
            raise InvalidRequest(
                "a grammar needs numpy, which this installation lacks: pip install numpy, "
                "or leave the grammar out",
                "grammar",
            )

    @property
    def candidates(self) -> Candidates:
        """The room for a whole vocabulary. Of the work loop's thread."""
        if self._candidates is None:
            self._candidates = Candidates(self.llama, self.rows.numpy, self.rows.size)
        return self._candidates

    def learn(self) -> _Beginnings:
        """Look at every token once: 0.15 s for 49,000 of them, a second for 262,000. Any thread.

        Race "two threads learn at once": both find the same, and the later replaces the earlier.
        """
        if self._beginnings is None:
            self._beginnings = self._learn()
        return self._beginnings

    def _learn(self) -> _Beginnings:
        numpy = self.rows.numpy
        pieces = list(self.pieces(range(self.rows.size)))
        ends = [bool(self.llama.llama_vocab_is_eog(self.vocab, token)) for token in range(self.rows.size)]
        token_of: dict[bytes, int] = {}
        for token, piece in enumerate(pieces):
            if piece and not ends[token]:
                token_of.setdefault(piece, token)
        parent = numpy.full(self.rows.size, -1, numpy.int32)
        depth = numpy.zeros(self.rows.size, numpy.int32)
        # The shorter come first, so that a parent's depth is known.
        for count, token in enumerate(sorted(token_of.values(), key=lambda token: len(pieces[token]))):
            if count % _BREATH_TOKENS == 0:
                time.sleep(_BREATH_S)
            piece = pieces[token]
            for length in range(len(piece) - 1, 0, -1):
                found = token_of.get(piece[:length])
                if found is not None:
                    parent[token], depth[token] = found, depth[found] + 1
                    break
        silent = [not piece and not end for piece, end in zip(pieces, ends, strict=True)]
        return _Beginnings(
            silent=numpy.array(silent, bool),
            partial=numpy.array([not _is_text(piece) for piece in pieces], bool),
            parent=parent,
            levels=[numpy.flatnonzero(depth == level) for level in range(depth.max() + 1)],
        )

    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes of each token. Any thread."""
        room = 256
        buffer = ctypes.create_string_buffer(room)
        to_piece = self.llama.llama_token_to_piece
        for token in tokens:
            used = to_piece(self.vocab, token, buffer, room, 0, False)
            if used < 0:
                room = -used
                buffer = ctypes.create_string_buffer(room)
                used = to_piece(self.vocab, token, buffer, room, 0, False)
            yield buffer.raw[:used]


class Grammar:
    """One answer's grammar. Raises `InvalidRequest` if llama.cpp doesn't take it.

    Two things are never allowed though llama.cpp would take them: control tokens, whose spelling isn't in the
    answer, and bytes that are no UTF-8, as a character in more bytes than it needs.
    """

    def __init__(self, vocabulary: GrammarVocabulary, text: str) -> None:
        vocabulary.check()
        self._vocabulary = vocabulary
        llama = vocabulary.llama
        self._accept = llama.llama_sampler_accept
        self._apply = llama.llama_sampler_apply
        self._free = llama.llama_sampler_free
        self._has_token_rules = "<" in _LITERALS.sub("", text)
        self._one = (llama.llama_token_data * 1)()
        self._array = llama.llama_token_data_array(self._one, 1, -1, False)
        self._beginnings = vocabulary.learn()
        self._tail = b""
        """What has been said of a character that isn't whole yet."""
        self._pointer = None
        if text and "\0" not in text:  # llama.cpp takes an empty one for none
            self._pointer = llama.llama_sampler_init_grammar(vocabulary.vocab, text.encode(), b"root")
        if not self._pointer:
            raise InvalidRequest(
                "llama.cpp can't read the grammar: check its syntax, and that it has a rule named root",
                "grammar",
            )

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        if not 0 <= token < self._vocabulary.rows.size:
            return False
        if self._beginnings.silent[token] or not self._is_spelled(token):
            return False
        candidate = self._one[0]
        candidate.id, candidate.logit = token, 0.0
        self._array.size, self._array.selected = 1, -1
        self._apply(self._pointer, ctypes.byref(self._array))
        return bool(candidate.logit == 0)

    def accept(self, token: int) -> bool:
        """Go on past `token`. Returns False for one that isn't allowed, and then stays where it is."""
        if not self.allows(token):
            return False
        self._accept(self._pointer, token)
        if self._tail or self._beginnings.partial[token]:
            data = self._tail + self._piece(token)
            self._tail = data[codecs.utf_8_decode(data, "strict", False)[1] :]
        return True

    def choices(self, logits: Any, most: int) -> Any:
        """Return the allowed tokens whose logits aren't −∞, as an array, ascending.

        most: 0 for all of them; otherwise as many with the largest logits are certain to be among what is returned.
        """
        numpy, known = self._vocabulary.rows.numpy, self._beginnings
        usable = (logits > -numpy.inf) & ~known.silent
        look = max(FIRST_LOOK, 2 * most)
        if most and look < len(logits):
            # Trying a whole vocabulary takes longer than a step of a small model.
            first = numpy.sort(largest(numpy, numpy.where(usable, logits, -numpy.inf), look))
            found = self._allowed(first[usable[first]])
            if len(found) >= most:
                return found
        if self._has_token_rules:
            return self._allowed(numpy.flatnonzero(usable))
        # A grammar reads characters: where a token is refused, so is every other that begins with it.
        may = numpy.zeros(len(logits) + 1, bool)
        may[-1] = True
        for level in known.levels:
            level = level[may[known.parent[level]]]
            if not len(level):
                break
            may[level] = self._tried(level)
        return self._spelled(numpy.flatnonzero(may[:-1] & usable))

    def _allowed(self, tokens: Any) -> Any:
        return self._spelled(tokens[self._tried(tokens)])

    def _spelled(self, tokens: Any) -> Any:
        """Return those of `tokens` with which the answer stays UTF-8."""
        doubtful = tokens if self._tail else tokens[self._beginnings.partial[tokens]]
        wrong = [token for token in doubtful if not self._is_spelled(int(token))]
        return tokens[~self._vocabulary.rows.numpy.isin(tokens, wrong)] if wrong else tokens

    def _tried(self, tokens: Any) -> Any:
        """Return for each of `tokens` whether it may come next."""
        candidates = self._vocabulary.candidates
        if not len(tokens):
            return tokens != tokens
        candidates.take(tokens, 0.0)
        candidates.apply(self._pointer)
        return candidates.logits == 0

    def _is_spelled(self, token: int) -> bool:
        """Whether the answer stays UTF-8 with `token`, or the beginning of it."""
        if not self._tail and not self._beginnings.partial[token]:
            return True
        return _is_text(self._tail + self._piece(token), whole=False)

    def _piece(self, token: int) -> bytes:
        return next(self._vocabulary.pieces((token,)))

    def close(self) -> None:
        """Free it. Idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._free(pointer)


def _is_text(data: bytes, *, whole: bool = True) -> bool:
    try:
        codecs.utf_8_decode(data, "strict", whole)
    except UnicodeDecodeError:
        return False
    return True
