"""The scripted engine: the whole engine contract, without a model.

Text depends on index, seed and prompt, never on timing. Faults come from `faults`.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling
from infervisor.protocol.messages import Submit
from infervisor.protocol.output import Output
from infervisor.worker.engine import (
    AbortGranularity,
    ModelFacts,
    Opened,
    Outcome,
    Prefilled,
    Sampled,
)
from infervisor.worker.engines.scripted.faults import KINDS, Fault, Situation
from infervisor.worker.engines.scripted.options import ScriptedOptions
from infervisor.worker.fault_hooks import FaultHooks

NO_FRAMES = -1
_MEMORY = struct.Struct("<Q")


@dataclass(slots=True)
class Script:
    """One sequence: what was asked, and how far the answer is.

    answer: ids of the tokens said, delivered ones included. reading: the prompt isn't read, or that isn't told yet.
    """

    submit: Submit
    prompt: str
    words: list[bytes]
    prompt_tokens: int
    temperature: float
    index: int
    answer: array[int]
    read_tokens: int = 0
    reading: bool = True
    fired: set[Fault] = field(default_factory=set[Fault])


class ScriptedEngine:
    """Meets `worker.engine.Engine`."""

    def __init__(self) -> None:
        self._options = ScriptedOptions()
        self._pieces: tuple[bytes, ...] | None = None
        self._scripts: dict[int, Script] = {}
        self._interrupted = threading.Event()
        self._situation = Situation(FaultHooks(NO_FRAMES))
        self._prepared = itertools.count()
        self._opened = 0
        self._released = 0

    def use_fault_hooks(self, hooks: FaultHooks) -> None:
        """Take what faults need of the worker."""
        self._situation.hooks = hooks

    def load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        """Check the options and pretend to load. `model` is only a name here."""
        self._options = chosen = ScriptedOptions.from_mapping(options)
        self._pieces = chosen.pieces()
        progress("import", 0.0)
        self._misbehave("import", 0)
        progress("import", 1.0)
        for done in range(chosen.load_steps):
            progress("load", done / chosen.load_steps)
            self._misbehave("load", done)
            time.sleep(chosen.load_s / chosen.load_steps)
        progress("load", 1.0)
        progress("warm_up", 0.0)
        self._misbehave("warm_up", 0)
        progress("warm_up", 1.0)
        return ModelFacts(
            engine="scripted",
            library="scripted 1",
            fingerprint=chosen.fingerprint(),
            context_tokens=chosen.context_tokens,
            vocabulary_tokens=chosen.vocabulary_tokens,
            has_chat_template=True,
            slots=chosen.slots,
            abort=chosen.abort,
            largest_slice_tokens=chosen.context_tokens,
            extra={"model": model},
        )

    def prepare(self, submit: Submit) -> str:
        """Return the prompt. A chat's is the texts of its messages, one a line."""
        _refuse_what_needs_a_model(submit)
        prompt = submit.prompt
        if prompt is None:
            prompt = "\n".join(_content(message) for message in submit.messages or ())
        self._misbehave("prepare", next(self._prepared), prompt=prompt)
        time.sleep(self._options.open_s)
        return prompt

    def open(self, slots: Sequence[int], submit: Submit, prepared: str) -> Opened:
        """Take a request into the first of `slots`."""
        prompt = prepared
        words = re.findall(r"\s*\S+", prompt)
        prompt_tokens = max(1, len(words))
        context = self._options.context_tokens
        if prompt_tokens >= context:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens and the context holds {context}: "
                f"at most {context - 1} leave room for an answer",
                "prompt",
            )
        script = Script(
            submit=submit,
            prompt=prompt,
            words=[word.encode() for word in words],
            prompt_tokens=prompt_tokens,
            temperature=Sampling.from_wire(submit.sampling).temperature,
            index=len(submit.delivered),
            answer=array("Q", submit.delivered),
        )
        self._misbehave("open", self._opened, script)
        self._opened += 1
        self._scripts[slots[0]] = script
        delivered = [self._piece(script, index) or b"" for index in range(script.index)]
        return Opened(slots[0], prompt_tokens, delivered_data=delivered)

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        """Read a slice of each unread prompt, then compute the next tokens of each other sequence."""
        outcomes: list[Outcome] = []
        scripts = [self._scripts[slot] for slot in slots]
        for script in scripts if self._options.faults else ():
            phase, count = ("prefill", script.read_tokens) if script.reading else ("decode", script.index)
            self._misbehave(phase, count, script)
        prefilling = [script for script in scripts if script.reading]
        done = {id(script): script.read_tokens for script in prefilling}
        allowed = dict(zip(slots, most, strict=False))
        for slot, script in zip(slots, scripts, strict=True):
            if not script.reading:
                continue
            tokens, seconds = self._slice(script, allowed.get(slot))
            if not self._spend(seconds):
                return None
            done[id(script)] += tokens
        if len(prefilling) < len(scripts) and not self._spend(self._options.pace_s):
            return None
        # Nothing was changed up to here, so that a cut step can simply run again.
        for position, script in enumerate(scripts):
            if id(script) in done:
                script.read_tokens = done[id(script)]
                script.reading = script.read_tokens < script.prompt_tokens
                outcomes.append(
                    Prefilled(min(script.read_tokens, script.prompt_tokens), script.prompt_tokens)
                )
            elif self._options.step_tokens == 1 or not most:
                outcomes.append(self._sample(script))
            else:
                outcomes.append(self._sample_several(script, most[position]))
        return outcomes

    def release(self, slot: int) -> None:
        """Free the slot."""
        script = self._scripts.pop(slot)
        self._misbehave("release", self._released, script)
        self._released += 1
        if self._situation.never_releases:
            print("scripted fault: release never returns", flush=True)
            threading.Event().wait()

    def interrupt(self) -> None:
        """End the waits of the running step."""
        if self._options.abort is AbortGranularity.NODE and not self._situation.ignores_interrupts:
            self._interrupted.set()

    def clear_interrupt(self) -> None:
        """Forget an interrupt."""
        self._interrupted.clear()

    def close(self) -> None:
        """Forget everything."""
        self._scripts.clear()

    # --- what it remembers: here the memory of a sequence is the number of tokens read ---------------

    def tokens(self, slot: int) -> Sequence[int]:
        """Return stand-ins for the prompt's tokens, and those of the answer."""
        script = self._scripts[slot]
        return [*(zlib.crc32(word) for word in script.words or (b"",)), *script.answer]

    def tokens_in_memory(self, slot: int) -> int:
        """Return how many of them have been read."""
        script = self._scripts[slot]
        return script.read_tokens if script.reading else script.prompt_tokens + len(script.answer)

    def snapshot_bytes(self, slot: int) -> int:
        """Return the size of a number."""
        return _MEMORY.size

    def save(self, slot: int, memory: memoryview) -> int:
        """Write the number of tokens read."""
        if len(memory) < _MEMORY.size:
            return 0
        _MEMORY.pack_into(memory, 0, self.tokens_in_memory(slot))
        return _MEMORY.size

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        """Skip reading what was read; if all was, the next step says so in no time."""
        script = self._scripts[slot]
        if script.read_tokens or not 0 < tokens <= script.prompt_tokens + len(script.answer):
            return False
        if len(memory) != _MEMORY.size or _MEMORY.unpack(memory) != (tokens,):
            return False
        script.read_tokens = tokens
        return True

    # --- what it says ------------------------------------------------------------------------------

    def _sample(self, script: Script) -> Sampled:
        index = script.index
        script.index += 1
        data = self._piece(script, index)
        vocabulary = self._options.vocabulary_tokens
        token = vocabulary - 1 if data is None else index % vocabulary
        script.answer.append(token)
        return Sampled(token, data or b"", end=data is None)

    def _sample_several(self, script: Script, most: int) -> list[Sampled]:
        sampled: list[Sampled] = []
        for _ in range(min(most, self._options.step_tokens)):
            sampled.append(self._sample(script))
            if sampled[-1].end:
                break
        return sampled

    def _piece(self, script: Script, index: int) -> bytes | None:
        mode = self._options.mode
        pieces = self._pieces
        if pieces is None and mode == "echo":
            pieces = tuple(script.words)
        if pieces is not None:
            if index < len(pieces):
                return pieces[index]
            # A model that may not end goes on somehow; this one begins again.
            cycles = (self._options.end == "cycle" or bool(script.submit.limits.get("ignore_eos"))) and bool(
                pieces
            )
            return pieces[index % len(pieces)] if cycles else None
        if mode == "random" and script.temperature > 0:
            draw = hashlib.blake2b(f"{script.submit.seed} {index}".encode(), digest_size=4)
            return b"r%d " % int.from_bytes(draw.digest(), "big")
        return b"w%d " % index

    # --- how long it takes -------------------------------------------------------------------------

    def _slice(self, script: Script, most: int | None) -> tuple[int, float]:
        """Return how many prompt tokens the next slice reads, at most `most`, and in how many seconds."""
        options = self._options
        rate = options.prefill_tokens_per_s
        if rate is None and options.prefill_s:
            rate = script.prompt_tokens / options.prefill_s
        left = max(0, script.prompt_tokens - script.read_tokens)
        left = left if most is None else min(left, most)
        if rate is None:
            return left, 0.0
        tokens = min(left, max(1, int(rate * options.slice_s)))
        return tokens, tokens / rate

    def _spend(self, seconds: float) -> bool:
        """Let time pass; return whether the step may go on."""
        if self._options.abort is AbortGranularity.NODE and not self._situation.ignores_interrupts:
            return not self._interrupted.wait(seconds) if seconds else not self._interrupted.is_set()
        if seconds:
            time.sleep(seconds)
        return True

    # --- how it fails ------------------------------------------------------------------------------

    def _misbehave(
        self, phase: str, count: int, script: Script | None = None, prompt: str | None = None
    ) -> None:
        about = prompt if script is None else script.prompt
        for fault in self._options.faults:
            if fault.at != phase or count < fault.after:
                continue
            if about is not None and fault.prompt_contains is not None and fault.prompt_contains not in about:
                continue
            if script is not None:
                if fault in script.fired:
                    continue
                script.fired.add(fault)
                self._situation.attempt_id = script.submit.id
                self._situation.index = script.index
            if fault.claim():
                # Whoever drains the output can wait for this line and knows where the worker is.
                print(f"scripted fault: {fault.kind} at {phase}", flush=True)
                KINDS[fault.kind](fault, self._situation)


def _refuse_what_needs_a_model(submit: Submit) -> None:
    output = Output.from_wire(submit.output)
    for name, is_asked in (
        ("texts", submit.texts is not None),
        ("logprobs", output.logprobs),
        ("grammar", output.grammar is not None),
        ("json_schema", output.json_schema is not None),
        ("tool_choice", output.must_call),
    ):
        if is_asked:
            raise InvalidRequest(
                f"the scripted engine has no model behind it, so {name} has no meaning", name
            )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest(f"content of a message must be text, not {content!r:.80}", "messages")
    return content
