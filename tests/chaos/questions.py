"""What a soak asks, and what the exact answer is: of the scripted engine, of a table model, of a real model.

A question is drawn from a random source of its own, so that it doesn't depend on how the machine runs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infervisor import EndReason, Supervisor
from tests.chaos.invariants import Exact
from tests.helpers.models import LOOP, TOKEN, build_model

POISON = "poison"


@dataclass(frozen=True)
class Question:
    """A request, and the whole answer to it."""

    prompt: str
    exact: Exact
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Speaker(Protocol):
    """An engine with answers that are known."""

    def settings(self) -> Mapping[str, Any]:
        """Return model, engine and options for a supervisor."""
        ...

    def question(self, draw: random.Random) -> Question:
        """Return something to ask."""
        ...


class Scripted:
    """Counts, or says random words that depend on seed and index alone."""

    def __init__(self, slots: int, faults: Sequence[Mapping[str, Any]]) -> None:
        self._options = {
            "mode": "random", "slots": slots, "pace_s": 0.001, "prefill_tokens_per_s": 5000, "slice_s": 0.002,
            "faults": [*faults, {"at": "decode", "after": 3, "kind": "segfault", "prompt_contains": POISON}],
        }  # fmt: skip

    def settings(self) -> Mapping[str, Any]:
        """The scripted engine needs no model."""
        return {"engine": "scripted", "options": self._options}

    def question(self, draw: random.Random) -> Question:
        """Most count; some draw, and some end at a stop string."""
        tokens = draw.choice((1, 2, 5, 10, 20, 40, 70))
        prompt = "word " * draw.choice((1, 3, 20, 60))
        kind = draw.random()
        if kind < 0.2:
            seed = draw.randrange(1 << 32)
            exact = _exact([_drawn(seed, index) for index in range(tokens)])
            return Question(prompt, exact, {"max_tokens": tokens, "temperature": 1.0, "seed": seed})
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
        exact = count(tokens)
        if kind < 0.35 and tokens > 5:
            # Over the border of two tokens: text is held back again and again.
            options["stop"] = [f"{tokens - 3} w{tokens - 2}"]
            text = exact.text.partition(options["stop"][0])[0]
            exact = Exact(text, tuple(range(tokens - 1)), EndReason.STOP_SEQUENCE)
        return Question(prompt, exact, options)


def count(tokens: int) -> Exact:
    """Return what the scripted engine says at temperature 0."""
    return _exact([f"w{index} " for index in range(tokens)])


def _drawn(seed: int, index: int) -> str:
    return f"r{int.from_bytes(hashlib.blake2b(f'{seed} {index}'.encode(), digest_size=4).digest(), 'big')} "


def _exact(words: Sequence[str]) -> Exact:
    return Exact("".join(words), tuple(range(len(words))), EndReason.LENGTH)


class Table:
    """A model of one layer in llama.cpp that says abcabc…, whatever it is asked."""

    def __init__(self, directory: Path, slots: int) -> None:
        self._path = build_model(directory / "loop.gguf", LOOP, context_tokens=512)
        self._options = {"slots": slots, "threads": 1, "n_ctx": 256, "reproducible": True}

    def settings(self) -> Mapping[str, Any]:
        """llama.cpp with snapshots of its KV."""
        return {"model": self._path, "engine": "llama", "options": self._options}

    def question(self, draw: random.Random) -> Question:
        """Prompts of many lengths, all of which end in c."""
        tokens = draw.choice((1, 3, 12, 30, 60))
        text = ("abc" * tokens)[:tokens]
        exact = Exact(text, tuple(TOKEN[letter] for letter in text), EndReason.LENGTH)
        return Question(
            "c" * draw.choice((1, 20, 90, 180)), exact, {"max_tokens": tokens, "temperature": 0.0}
        )


PROMPTS = (
    "Once upon a time",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. " * 12 + "Then",
    "A list of fruits:\n- apple\n- banana\n-",
    "In the beginning",
)
LENGTHS = (4, 12, 32)


class Real:
    """A real model, whose answers are those of a run in which nothing happens. Call `learn` first."""

    def __init__(self, path: Path, slots: int) -> None:
        self._path = path
        self._options = {"slots": slots, "threads": 1, "n_ctx": 512, "reproducible": True}
        self._known: dict[tuple[str, int], Exact] = {}

    def settings(self) -> Mapping[str, Any]:
        """With the same text whatever else runs."""
        return {"model": self._path, "engine": "llama", "options": self._options}

    async def learn(self) -> None:
        """Ask everything once, one after the other, of a worker that nothing happens to."""
        async with Supervisor(**self.settings()) as supervisor:
            for prompt in PROMPTS:
                for length in LENGTHS:
                    async with supervisor.stream(prompt, max_tokens=length, temperature=0.0) as stream:
                        chunks = [chunk async for chunk in stream]
                        reason = stream.end_reason
                    assert reason is not None
                    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
                    text = "".join(chunk.text for chunk in chunks)
                    self._known[prompt, length] = Exact(text, ids, reason)

    def question(self, draw: random.Random) -> Question:
        """One of the few whose answers are known."""
        prompt, length = draw.choice(PROMPTS), draw.choice(LENGTHS)
        return Question(prompt, self._known[prompt, length], {"max_tokens": length, "temperature": 0.0})
