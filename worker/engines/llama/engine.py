"""The llama engine: a GGUF model on llama.cpp behind the engine contract.

Owns the model, the sequences in its slots, and the order of loading. What each part does is in the file named
after it. Every method but `interrupt` runs in the work loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling, check_seed
from infervisor.protocol.messages import Submit
from infervisor.worker.engine import ModelFacts, Opened, Outcome, Prefilled, Sampled, Stoppable
from infervisor.worker.engines.llama.capacity import free_memory
from infervisor.worker.engines.llama.decoder import Decoder
from infervisor.worker.engines.llama.greedy import Argmax
from infervisor.worker.engines.llama.library import AbortFlag, NativeLog, load_library
from infervisor.worker.engines.llama.loading import load_context, load_model, model_facts
from infervisor.worker.engines.llama.memory_estimate import fit_context
from infervisor.worker.engines.llama.model_file import check_model_file
from infervisor.worker.engines.llama.options import REPRODUCIBLE_SLICE_TOKENS, LlamaOptions
from infervisor.worker.engines.llama.sampler import SamplerChain
from infervisor.worker.engines.llama.template import ChatTemplate
from infervisor.worker.engines.llama.tokenizer import Vocabulary

REPLAY_SECONDS = 0.2
"""How long one step may decode delivered tokens again."""

PROBE_CHARACTERS = 16
"""Characters for each token of context that are tried of a very long text: four times what text takes."""


@dataclass(slots=True)
class _Sequence:
    """A request in a slot.

    tokens: prompt, then delivered and sampled tokens. prompt_end: how many of them are prefilled in slices:
    all of the prompt but its last token, which is decoded by the first sampling step, because its output is
    wanted then and other sequences' steps may come between. position: tokens in memory. reading: not all
    of `tokens` but the last are in memory, or that hasn't been reported yet.
    """

    tokens: list[int]
    prompt_end: int
    sampler: SamplerChain
    position: int = 0
    reading: bool = True

    @property
    def missing(self) -> int:
        """Tokens that must be read before the next one can be sampled."""
        return len(self.tokens) - 1 - self.position


class LlamaEngine:
    """One model and its slots. See `worker.engine.Engine` for what each method promises."""

    def __init__(self) -> None:
        self._llama: Any = None
        self._log: NativeLog | None = None
        self._model: Any = None
        self._abort: AbortFlag | None = None
        self._decoder: Decoder | None = None
        self._vocabulary: Vocabulary | None = None
        self._argmax: Argmax | None = None
        self._template: ChatTemplate | None = None
        self._sequences: list[_Sequence | None] = []
        self._context_tokens = 0

    def load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        """Load the GGUF at `model` with `LlamaOptions`. Raises `LoadRefused` and leaves nothing behind."""
        if self._model is not None:
            raise RuntimeError("this engine has loaded a model already")
        try:
            return self._load(model, options, progress)
        except BaseException:
            self.close()
            raise

    def _load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        settings = LlamaOptions.from_mapping(options)
        file = check_model_file(model)
        wanted_tokens = settings.wanted_context(file.header.number("{arch}.context_length"))
        free = free_memory() if settings.check_memory else None
        fitted = fit_context(file.header, file.total_bytes, settings, wanted_tokens, free)

        progress("import", 0.0)
        self._llama, self._log = load_library()
        self._abort = AbortFlag(self._llama)
        progress("import", 1.0)

        self._model = load_model(self._llama, self._log, file, settings, progress)
        self._vocabulary = Vocabulary(self._llama, self._model)
        self._argmax = Argmax(self._llama, self._vocabulary.size)
        self._template = self._make_template(settings)
        context = load_context(self._llama, self._log, self._model, settings, fitted.tokens)
        self._decoder = Decoder(
            self._llama, self._model, context, self._abort, self._log,
            slots=settings.slots,
            fixed_slice_tokens=REPRODUCIBLE_SLICE_TOKENS if settings.reproducible else None,
            swa_full=settings.swa_full,
        )  # fmt: skip
        self._context_tokens = int(self._llama.llama_n_ctx_seq(context))
        self._sequences = [None] * settings.slots

        progress("warm_up", 0.0)
        self._decoder.warm_up(max(self._vocabulary.bos, 0))
        progress("warm_up", 1.0)
        facts = model_facts(
            self._llama, self._model, context, file, settings, self._vocabulary, self._template
        )
        return replace(facts, extra={**facts.extra, **fitted.to_facts()})

    def _make_template(self, settings: LlamaOptions) -> ChatTemplate:
        assert self._vocabulary is not None
        vocabulary = self._vocabulary
        source, origin = settings.chat_template, "the chat_template option"
        if source is None:
            stored: bytes | None = self._llama.llama_model_chat_template(self._model, None)
            source = stored.decode("utf-8", "replace") if stored else None
            origin = "the model's chat template"
        spellings = list(vocabulary.control_tokens()) if source is not None else []
        return ChatTemplate(
            source, origin, vocabulary.text(vocabulary.bos), vocabulary.text(vocabulary.eos), spellings
        )

    def open(self, slot: int, submit: Submit, stoppable: Stoppable) -> Opened:
        """Take the request into `slot`. Raises `InvalidRequest`; the slot is then still free."""
        vocabulary, _ = self._loaded()
        if self._sequences[slot] is not None:
            raise RuntimeError(f"slot {slot} is taken")
        sampling = Sampling.from_wire(submit.sampling)
        seed = check_seed(submit.seed)
        prompt = self._prompt_tokens(submit, stoppable)
        delivered = list(submit.delivered)
        try:
            self._check_length(len(prompt))
        except InvalidRequest as error:
            error.field = "prompt" if submit.messages is None else "messages"
            raise
        for token in delivered:
            if token >= vocabulary.size:
                raise InvalidRequest(
                    f"delivered holds token {token}, which the model doesn't have", "delivered"
                )
        sampler = SamplerChain(self._llama, sampling, seed, vocabulary.size, self._argmax)
        sampler.accept_prompt(prompt)
        sampler.replay(delivered)
        self._sequences[slot] = _Sequence([*prompt, *delivered], len(prompt) - 1, sampler)
        return Opened(len(prompt), delivered_data=[vocabulary.piece(token) for token in delivered])

    def _prompt_tokens(self, submit: Submit, stoppable: Stoppable) -> list[int]:
        vocabulary, template = self._loaded()
        if (submit.prompt is None) == (submit.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed", "prompt")
        if submit.prompt is not None:
            self._check_text_length(submit.prompt)
            return vocabulary.raw_prompt(submit.prompt, special=submit.special)
        messages = submit.messages or ()
        rendered, literals = stoppable(lambda: template.render(messages, submit.template_clock_s))
        self._check_text_length(rendered)
        return vocabulary.rendered_prompt(rendered, template.control, literals)

    def _check_text_length(self, text: str) -> None:
        # Tokenising can't be interrupted and takes seconds per megabyte, so a text that is hopelessly long
        # is refused by its beginning.
        probe = PROBE_CHARACTERS * self._context_tokens
        if len(text) <= 2 * probe:
            return
        vocabulary, _ = self._loaded()
        tokens = len(vocabulary.tokenise(text[:probe], special=False))
        if tokens > self._context_tokens:
            raise InvalidRequest(
                f"the prompt has more than {tokens} tokens, and the context holds {self._context_tokens}: "
                "shorten the prompt or load with a larger n_ctx",
                "prompt",
            )

    def _check_length(self, prompt_tokens: int) -> None:
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty, and this model has no token to begin with", "prompt")
        if prompt_tokens >= self._context_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens, and the context holds {self._context_tokens}, "
                "of which the answer needs at least one: shorten the prompt or load with a larger n_ctx",
                "prompt",
            )

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        """Advance each slot by one prefill slice or one token, whatever `most` allows; None if interrupted."""
        outcomes: dict[int, Outcome] = {}
        sequences = [(slot, self._sequence(slot)) for slot in slots]
        reading = [(slot, sequence) for slot, sequence in sequences if sequence.reading]
        sampling = [(slot, sequence) for slot, sequence in sequences if not sequence.reading]
        # Prefill first: a token, once sampled, couldn't be taken back if a later call were interrupted.
        for slot, sequence in reading:
            if not self._read(slot, sequence):
                return None
        if sampling and not self._sample(sampling, outcomes):
            return None
        # A sequence counts as read once that is reported, not before: a step that is cut after its slice
        # reports nothing, and the next one must not answer with a token that nobody had asked for.
        for slot, sequence in reading:
            total = len(sequence.tokens)
            sequence.reading = sequence.missing > 0
            outcomes[slot] = Prefilled(sequence.position if sequence.reading else total, total)
        return [outcomes[slot] for slot in slots]

    def _read(self, slot: int, sequence: _Sequence) -> bool:
        """Advance a sequence that isn't all in memory. Returns whether the slice was finished."""
        assert self._decoder is not None
        if sequence.position < sequence.prompt_end:
            sequence.position, finished = self._decoder.prefill(
                slot, sequence.tokens, sequence.position, sequence.prompt_end
            )
            if not finished:
                return False
        else:
            # Delivered tokens go in one by one, as they did when they were first computed: read as a slice,
            # they would leave slightly different numbers in memory, and another answer after them.
            until = time.monotonic() + REPLAY_SECONDS
            while sequence.missing and time.monotonic() < until:
                if not self._decode([(slot, sequence)], outputs=False):
                    return False
        return True

    def _decode(self, members: Sequence[tuple[int, _Sequence]], *, outputs: bool = True) -> bool:
        """Decode the next token of each sequence. If interrupted, put memory right and return False."""
        assert self._decoder is not None
        decoder = self._decoder
        slots = [slot for slot, _ in members]
        tokens = [sequence.tokens[sequence.position] for _, sequence in members]
        positions = [sequence.position for _, sequence in members]
        finished = decoder.decode(slots, tokens, positions, outputs=outputs)
        for slot, sequence in members:
            if finished:
                sequence.position += 1
                continue
            sequence.position = decoder.roll_back(slot, sequence.position)
            sequence.reading = sequence.reading or sequence.missing > 0
        return finished

    def _sample(self, members: Sequence[tuple[int, _Sequence]], outcomes: dict[int, Outcome]) -> bool:
        """Decode each sequence's last token in one call and choose its next one."""
        assert self._decoder is not None
        assert self._vocabulary is not None
        if not self._decode(members):
            return False
        context, vocabulary = self._decoder.context, self._vocabulary
        for output, (slot, sequence) in enumerate(members):
            token = sequence.sampler.sample(context, output)
            sequence.tokens.append(token)
            outcomes[slot] = Sampled(token, vocabulary.piece(token), vocabulary.is_end(token))
        return True

    def release(self, slot: int) -> None:
        """Free the slot and its memory. Does nothing for a slot that is free."""
        sequence = self._sequences[slot]
        if sequence is None:
            return
        self._sequences[slot] = None
        sequence.sampler.close()
        if self._decoder is not None:
            self._decoder.forget(slot)

    def tokens(self, slot: int) -> Sequence[int]:
        """Return prompt, delivered and sampled tokens."""
        return self._sequence(slot).tokens

    def tokens_in_memory(self, slot: int) -> int:
        """Return how many of them have been read."""
        return self._sequence(slot).position

    def snapshot_bytes(self, slot: int) -> int:
        """Return how large a snapshot is now."""
        assert self._decoder is not None
        return self._decoder.state_bytes(slot)

    def save(self, slot: int, memory: memoryview) -> int:
        """Copy the sequence's KV memory, without its sampler, which is built again from its tokens."""
        assert self._decoder is not None
        return self._decoder.save(slot, memory)

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        """Copy the KV memory of the first `tokens` tokens back; the next step reads what follows."""
        assert self._decoder is not None
        sequence = self._sequence(slot)
        if sequence.position or not 0 < tokens < len(sequence.tokens):
            return False
        if not self._decoder.restore(slot, memory, tokens):
            return False
        sequence.position = tokens
        return True

    def interrupt(self) -> None:
        """Make the running step return None within one graph node. Any thread."""
        abort = self._abort
        if abort is not None:
            abort.set()

    def clear_interrupt(self) -> None:
        """Forget an interrupt."""
        if self._abort is not None:
            self._abort.clear()

    def close(self) -> None:
        """Free samplers, context and model, in that order. Idempotent."""
        for sequence in self._sequences:
            if sequence is not None:
                sequence.sampler.close()
        self._sequences = []
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()
        self._vocabulary = self._argmax = None
        model, self._model = self._model, None
        if model is not None:
            self._llama.llama_model_free(model)

    def _loaded(self) -> tuple[Vocabulary, ChatTemplate]:
        if self._vocabulary is None or self._template is None:
            raise RuntimeError("no model is loaded")
        return self._vocabulary, self._template

    def _sequence(self, slot: int) -> _Sequence:
        sequence = self._sequences[slot]
        if sequence is None:
            raise RuntimeError(f"slot {slot} is free: nothing was opened in it")
        return sequence
