"""The options of the scripted engine. Every one is checked; unknown names are refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from infervisor.worker.engine import AbortGranularity, LoadRefused
from infervisor.worker.engines.scripted.faults import Fault

MODES = ("count", "echo", "random")
SPLITS = ("words", "characters", "bytes")
ENDS = ("stop", "cycle")


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """What the engine says, how fast, and how it fails.

    tokens: the answer's pieces, strings or bytes; or text, cut by `split` into words (with the white space
    before them), characters or bytes. end: after the last piece the model's end token ("stop") or the first
    piece again ("cycle"). Without either, `mode` decides: "count" says "w0 w1 w2 …" for ever; "echo" says the
    words of the prompt, then stops; "random" counts at temperature 0 and otherwise says words that depend on
    seed and index alone.

    pace_s: time of each decoding step. step_tokens: tokens that a sequence gets in one step, as from an engine with
    drafts; one where faults are planned. prefill_s: time for a whole prompt; or prefill_tokens_per_s. A prompt
    takes as many tokens as it has words, at least one, and is read in slices of slice_s. open_s: time spent
    while preparing, as a slow template would need. load_s: time to load, in load_steps.
    abort: "node" (waits end at once), "micro_batch" or "none" (waits run to their end).
    """

    tokens: tuple[bytes, ...] | None = None
    text: str | None = None
    split: str = "words"
    end: str = "stop"
    mode: str = "count"
    pace_s: float = 0.0
    step_tokens: int = 1
    prefill_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    slice_s: float = 0.1
    open_s: float = 0.0
    load_s: float = 0.0
    load_steps: int = 10
    slots: int = 1
    context_tokens: int = 1_000_000
    vocabulary_tokens: int = 32_000
    abort: AbortGranularity = AbortGranularity.NODE
    faults: tuple[Fault, ...] = field(default=())

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> ScriptedOptions:
        """Build from what `load` carried. Raises `LoadRefused` naming the option at fault."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise _refused(f"unknown option {unknown[0]!r:.80}; known are {', '.join(known)}")
        values = dict(options)
        if values.get("tokens") is not None:
            values["tokens"] = _tokens(values["tokens"])
        try:
            values["faults"] = tuple(Fault.from_mapping(fault) for fault in values.get("faults") or ())
            values["abort"] = AbortGranularity(values.get("abort", AbortGranularity.NODE))
        except (TypeError, ValueError) as error:
            raise _refused(str(error)) from error
        built = cls(**values)
        built._check()
        if built.faults:
            # A fault comes in its place: between two tokens, not behind several.
            built = replace(built, step_tokens=1)
        return built

    def _check(self) -> None:
        if self.tokens is not None and self.text is not None:
            raise _refused("tokens and text exclude each other")
        if not (self.text is None or isinstance(self.text, str)):
            raise _refused(f"text must be a string, not {self.text!r:.80}")
        for name, choices in (("split", SPLITS), ("end", ENDS), ("mode", MODES)):
            if getattr(self, name) not in choices:
                raise _refused(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r:.80}")
        for name in ("pace_s", "prefill_s", "slice_s", "open_s", "load_s"):
            _number(name, getattr(self, name), 0)
        if self.prefill_tokens_per_s is not None:
            _number("prefill_tokens_per_s", self.prefill_tokens_per_s, 1e-3)
        for name, low in (
            ("step_tokens", 1),
            ("load_steps", 1),
            ("slots", 1),
            ("context_tokens", 2),
            ("vocabulary_tokens", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise _refused(f"{name} must be a whole number of at least {low}, not {value!r:.80}")

    def pieces(self) -> tuple[bytes, ...] | None:
        """Return the answer's pieces, or None if `mode` makes them."""
        if self.tokens is not None:
            return self.tokens
        if self.text is None:
            return None
        if self.split == "words":
            return tuple(word.encode() for word in re.findall(r"\s*\S+|\s+$", self.text))
        if self.split == "characters":
            return tuple(character.encode() for character in self.text)
        return tuple(bytes([byte]) for byte in self.text.encode())

    def fingerprint(self) -> str:
        """Return what is equal for two engines that give the same answers."""
        says = (self.pieces(), self.end, self.mode, self.context_tokens, self.vocabulary_tokens)
        return "scripted-" + hashlib.blake2b(repr(says).encode(), digest_size=16).hexdigest()


def _refused(message: str) -> LoadRefused:
    return LoadRefused(f"scripted engine: {message}", "bad_option")


def _number(name: str, value: object, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < 1e9:
        raise _refused(f"{name} must be a number of at least {low:g}, not {value!r:.80}")


def _tokens(tokens: object) -> tuple[bytes, ...]:
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
        raise _refused(f"tokens must be a list of strings or bytes, not {tokens!r:.80}")
    pieces = []
    for token in tokens:
        if not isinstance(token, (str, bytes)):
            raise _refused(f"tokens must hold strings or bytes, not {token!r:.80}")
        pieces.append(token.encode() if isinstance(token, str) else token)
    return tuple(pieces)
