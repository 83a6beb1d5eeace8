"""Find out whether llama.cpp can follow a grammar, and make grammars from JSON schemas.

Runs in a child of the sandbox process alone, under limits: a bad grammar ends or hangs whoever reads it. Owns
the vocabulary that grammars are tried on; has no weights. What it can't see is how a grammar behaves far into
an answer: it follows some of the paths, not all.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.quoting import printable
from infervisor.worker.engines.llama.library import load_library
from infervisor.worker.engines.llama.schema_grammar import gbnf_of_schema

MAX_GRAMMAR_BYTES = 4 << 20
"""Of a grammar that was made from a schema."""
MAX_TOKEN_S = 0.5
"""Everybody in the batch waits while one token is chosen; a grammar that takes longer for one is refused."""
WALKS, WALK_TOKENS, WALK_S = 4, 32, 0.03
RULES_AT_ONCE = 512

_NOT_CODE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
_REPEATED = re.compile(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}")
_COMPLAINT = re.compile(r"(?:parse: )?error parsing grammar: (.*)")


def rule_names(gbnf: str) -> list[str]:
    """Return the names of the rules in their order, each once."""
    return list(dict.fromkeys(_RULE.findall(_code_of(gbnf))))


def _code_of(gbnf: str) -> str:
    """Return the grammar without what its strings, character classes and comments hold."""
    return _NOT_CODE.sub(lambda found: {'"': '""', "[": "[]"}.get(found.group()[0], ""), gbnf)


def _check_repetitions(gbnf: str, field: str, subject: str) -> None:
    # llama.cpp counts from the least down to the most, through all 64-bit numbers.
    for found in _REPEATED.finditer(_code_of(gbnf)):
        least, most = (int(number[-20:]) for number in found.groups())
        if least > most:
            raise InvalidRequest(
                f"{subject} repeats {found.group():.60}: the least number is larger than the most; swap them",
                field,
            )


class GrammarTrial:
    """A vocabulary and the grammars tried on it."""

    def __init__(self, model_path: str) -> None:
        """Load the vocabulary of a checked file. Raises RuntimeError."""
        llama, log = load_library()
        log.quiet = True
        parameters = llama.llama_model_default_params()
        parameters.vocab_only = True
        parameters.n_gpu_layers = 0
        self._llama = llama
        self._model = llama.llama_model_load_from_file(os.fsencode(model_path), parameters)
        if not self._model:
            raise RuntimeError(f"the vocabulary of {model_path} can't be read: {log.tail()}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.size = int(llama.llama_vocab_n_tokens(self._vocab))
        # The first ones are single bytes or characters in most vocabularies: they take small steps.
        few = {*range(min(self.size, 512)), *range(0, self.size, max(self.size // 256, 1))}
        self._probes = array("i", sorted(few))
        self._all = array("i", range(self.size))

    def check(self, gbnf: str, field: str, subject: str = "the grammar") -> None:
        """Return if llama.cpp can follow the grammar. Raises `InvalidRequest`, or takes the process with it."""
        if "\0" in gbnf:
            raise InvalidRequest(f"{subject} holds a NUL character", field)
        names = rule_names(gbnf)
        if "root" not in names:
            raise InvalidRequest(f'{subject} has no rule named root: begin with "root ::= …"', field)
        _check_repetitions(gbnf, field, subject)
        sampler = self._start(gbnf, "root", field, subject)
        if not self._begins(sampler):
            raise InvalidRequest(
                f"{subject} allows nothing at its beginning but the end: the answer would be empty", field
            )
        # Endless recursion lies at the beginning of rules, and llama.cpp meets it when an answer gets there:
        # with all rules as beginnings it gets there now.
        first = "every"
        while first in names:
            first += "-"
        for cut in range(0, len(names), RULES_AT_ONCE):
            every = " | ".join(names[cut : cut + RULES_AT_ONCE])
            self._llama.llama_sampler_free(
                self._start(f"{gbnf}\n{first} ::= {every}\n", first, field, subject)
            )
        self._walk(sampler, field, subject)

    def of_schema(self, schema: str, field: str = "json_schema") -> str:
        """Return the grammar of a JSON schema (JSON text), tried. Raises `InvalidRequest`, or see `check`."""
        gbnf = self.converted(schema, field)
        self.check(gbnf, field, f"{field} is not supported by llama.cpp: the grammar made from it")
        return gbnf

    def converted(self, schema: str, field: str = "json_schema") -> str:
        """Return the grammar of a JSON schema, not tried. Raises `InvalidRequest`."""
        gbnf = gbnf_of_schema(schema)
        size = len(gbnf.encode("utf-8", "replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{field} makes a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken", field
            )
        return gbnf

    def _start(self, gbnf: str, root: str, field: str, subject: str) -> Any:
        try:
            source = gbnf.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{subject} is no text: {error}", field) from None
        with _overheard() as said:
            sampler = self._llama.llama_sampler_init_grammar(self._vocab, source, root.encode())
            if not sampler:
                raise InvalidRequest(f"{subject} can't be read by llama.cpp: {_complaint(said())}", field)
        return sampler

    def _begins(self, sampler: Any) -> bool:
        """Return whether an answer can have a first token."""
        return any(
            not self._is_end(token)
            for tokens in (self._probes, self._all)
            for token in self._allowed(sampler, tokens)
        )

    def _is_end(self, token: int) -> bool:
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def _allowed(self, sampler: Any, tokens: array[int]) -> list[int]:
        """Return which of `tokens` may come next."""
        import numpy as np  # llama_cpp has brought it along

        llama = self._llama
        entries = (llama.llama_token_data * len(tokens))()
        view = np.frombuffer(entries, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
        view["id"] = np.frombuffer(tokens, dtype="i4")
        candidates = llama.llama_token_data_array(entries, len(tokens), -1, False)
        llama.llama_sampler_apply(sampler, ctypes.byref(candidates))
        left: list[int] = view["id"][view["logit"] > -np.inf].tolist()
        return left

    def _walk(self, start: Any, field: str, subject: str) -> None:
        """Follow the grammar along some paths, and refuse it if that takes long."""
        chosen = random.Random(0)
        began_s = time.process_time()
        for _ in range(WALKS):
            sampler = self._llama.llama_sampler_clone(start)
            for _ in range(WALK_TOKENS):
                took_s, allowed = self._time_to_apply(sampler)
                token = chosen.choice(allowed) if allowed else None
                ended = token is None or self._is_end(token)
                before_s = time.process_time()
                if not ended:
                    self._llama.llama_sampler_accept(sampler, token)
                took_s += time.process_time() - before_s
                if took_s > MAX_TOKEN_S:
                    raise InvalidRequest(
                        f"{subject} is too ambiguous: one token takes {took_s:.1f} s of computing; write it with "
                        "fewer optional and repeated parts that can match the same text",
                        field,
                    )
                if ended or time.process_time() - began_s > WALK_S:
                    break
            self._llama.llama_sampler_free(sampler)

    def _time_to_apply(self, sampler: Any) -> tuple[float, list[int]]:
        """Return how many seconds the whole vocabulary takes, and which of the probes are allowed."""
        # Estimated from the probes; where that is much, a page fault may be to blame, so once more, then really.
        took_s, allowed = 0.0, list[int]()
        for tokens in (self._probes, self._probes, self._all):
            before_s = time.process_time()
            found = self._allowed(sampler, tokens)
            took_s = (time.process_time() - before_s) * self.size / len(tokens)
            allowed = allowed or found
            if took_s <= MAX_TOKEN_S:
                break
        return took_s, allowed


@contextmanager
def _overheard() -> Iterator[Callable[[], str]]:
    # The parser's complaint goes to standard error alone, with the whole grammar after it.
    with _memory_file() as heard:
        own = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield lambda: os.pread(heard.fileno(), 4096, 0).decode("utf-8", "replace")
        finally:
            os.dup2(own, 2)
            os.close(own)


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("complaint"), "w+b")
    return tempfile.TemporaryFile()


def _complaint(said: str) -> str:
    found = _COMPLAINT.search(said)
    if found is None:
        return "it gives no reason; left recursion (a rule that begins with itself) is one"
    if "bad_alloc" in found.group(1):
        raise MemoryError
    return printable(found.group(1))[:200]
