"""The llama engine: a GGUF model on llama.cpp behind the engine contract.

Owns the model and the order of loading, stepping and freeing. What each part does is in the file named after it.
Every method but `interrupt`, `prepare` and `answer` runs in the work loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling, check_seed
from infervisor.protocol.messages import Submit
from infervisor.worker.engine import Broken, ModelFacts, Opened, Outcome, Sampled
from infervisor.worker.engines.llama.adapters import Adapters, check_adapters
from infervisor.worker.engines.llama.capacity import default_threads, free_memory
from infervisor.worker.engines.llama.decoder import Decoder
from infervisor.worker.engines.llama.embedder import Embedder, Job
from infervisor.worker.engines.llama.grammar import GrammarVocabulary
from infervisor.worker.engines.llama.greedy import Argmax, Rows
from infervisor.worker.engines.llama.library import AbortFlag, NativeLog, load_library
from infervisor.worker.engines.llama.loading import load_context, load_model, model_facts
from infervisor.worker.engines.llama.logprobs import Logprobs
from infervisor.worker.engines.llama.memory_estimate import fit_context
from infervisor.worker.engines.llama.model_file import check_model_file
from infervisor.worker.engines.llama.options import REPRODUCIBLE_SLICE_TOKENS, LlamaOptions
from infervisor.worker.engines.llama.prompt import Prompt, Prompts, chat_template
from infervisor.worker.engines.llama.sampler import DeadEnd, SamplerChain
from infervisor.worker.engines.llama.sandbox import Sandbox
from infervisor.worker.engines.llama.sequences import Sequences
from infervisor.worker.engines.llama.threads import CoreWatch
from infervisor.worker.engines.llama.tokenizer import Vocabulary, answer_query

SLICE_TOKENS = 64
"""The slice of whoever doesn't say how long it may be."""


@dataclass(frozen=True, slots=True)
class _Voice:
    """How a sequence chooses its tokens, and what is told of them.

    top: how many alternatives are told of each; None: no log-probability. marks: as in `Prompt`.
    """

    sampler: SamplerChain
    top: int | None
    marks: Mapping[int, bytes]


@dataclass(slots=True)
class _Parts:
    """What there is once a model is loaded."""

    vocabulary: Vocabulary
    decoder: Decoder
    sequences: Sequences
    prompts: Prompts
    embedder: Embedder
    argmax: Argmax
    grammars: GrammarVocabulary
    logprobs: Logprobs


class LlamaEngine:
    """One model and its slots. See `worker.engine.Engine` for what each method promises."""

    def __init__(self) -> None:
        self._llama: Any = None
        self._log: NativeLog | None = None
        self._abort: AbortFlag | None = None
        self._native_model: Any = None
        self._decoder: Decoder | None = None
        self._adapters: Adapters | None = None
        self._sandbox: Sandbox | None = None
        self._parts: _Parts | None = None
        self._watch: CoreWatch | None = None
        self._voices: dict[int, _Voice] = {}
        """Of each slot with a sequence."""
        self._jobs: dict[int, Job] = {}
        """Texts that are being embedded: they take a slot's turn, and none of its memory."""
        self._workers = 1
        self._threads_batch: int | None = None
        self._generates = True

    def use_share(self, workers: int) -> None:
        """Before `load`: so many workers share the cores."""
        self._workers = workers

    def load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        """Load the GGUF at `model` with `LlamaOptions`. Raises `LoadRefused` and leaves nothing behind."""
        if self._native_model is not None:
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
        lora = check_adapters(settings.lora, file)
        wanted_tokens = settings.wanted_context(file.header.number("{arch}.context_length"))
        free = free_memory() if settings.check_memory else None
        all_bytes = file.total_bytes + sum(each.file_bytes for each in lora)
        fitted = fit_context(file.header, all_bytes, settings, wanted_tokens, free)
        settings = replace(settings, slots=fitted.slots)

        progress("import", 0.0)
        llama, log = self._llama, self._log = load_library()
        abort = self._abort = AbortFlag(llama)
        progress("import", 1.0)

        native = self._native_model = load_model(llama, log, file, settings, progress)
        vocabulary = Vocabulary(llama, native)
        source, origin = chat_template(llama, native, settings)
        sandbox = self._sandbox = Sandbox(
            file.path, source, origin, vocabulary.text(vocabulary.bos), vocabulary.text(vocabulary.eos),
            list(vocabulary.control_tokens()) if source is not None else [],
        )  # fmt: skip
        sandbox.start()  # it compiles the template while the rest is loaded
        adapters = self._adapters = Adapters.load(llama, log, native, lora)
        threads = settings.threads or default_threads(self._workers)
        self._watch = CoreWatch(threads) if settings.threads is None else None
        self._threads_batch = settings.threads_batch
        context = load_context(llama, log, native, replace(settings, threads=threads), fitted.tokens)
        decoder = Decoder(llama, native, context, abort, log, slots=fitted.slots, swa_full=settings.swa_full)
        self._decoder = decoder
        adapters.attach(context)
        context_tokens = int(llama.llama_n_ctx_seq(context))
        rows = Rows(llama, vocabulary.size)
        embedder = Embedder(
            llama, native, abort, log, replace(settings, threads=threads), context_tokens, adapters.attach
        )
        slice_tokens = REPRODUCIBLE_SLICE_TOKENS if settings.reproducible else None
        grammars, logprobs = (
            GrammarVocabulary(llama, vocabulary.native, rows),
            Logprobs(rows),
        )
        self._parts = _Parts(
            vocabulary=vocabulary,
            decoder=decoder,
            sequences=Sequences(
                decoder, fitted.slots, slice_tokens=slice_tokens, reuses=settings.prefix_reuse
            ),
            prompts=Prompts(vocabulary, sandbox, embedder, grammars, logprobs, source, context_tokens),
            embedder=embedder,
            argmax=Argmax(rows),
            grammars=grammars,
            logprobs=logprobs,
        )
        progress("warm_up", 0.0)
        # What keeps no memory of what it read, as BERT, embeds and generates nothing.
        self._generates = bool(llama.llama_get_memory(context))
        if self._generates:
            decoder.warm_up(max(vocabulary.bos, 0))
        template_error = sandbox.template_error()
        progress("warm_up", 1.0)
        facts = model_facts(llama, log, native, context, file, settings, adapters, vocabulary)
        return replace(
            facts,
            has_chat_template=template_error is None,
            largest_slice_tokens=slice_tokens or decoder.batch_tokens,
            fixed_slices=slice_tokens is not None,
            extra={
                **facts.extra,
                **fitted.to_facts(),
                "threads_adapt": self._watch is not None and threads > 1,
                "template_error": template_error if sandbox.has_template else None,
                "generates": self._generates,
                "tool_format": self._parts.prompts.tool_format,
                "embedding": embedder.facts(),
            },
        )

    @property
    def _loaded(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("no model is loaded")
        return self._parts

    # --- requests ----------------------------------------------------------------------------------

    def prepare(self, submit: Submit) -> Prompt:
        """Render, tokenise and try. Any thread. Raises `InvalidRequest`."""
        if submit.texts is None and not self._generates:
            raise InvalidRequest(
                "this model only embeds: use embed(), or load one that generates text",
                "prompt" if submit.messages is None else "messages",
            )
        return self._loaded.prompts.of(submit)

    def answer(self, kind: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a question about text and tokens. Any thread. Raises `InvalidRequest`."""
        parts = self._loaded
        return answer_query(parts.vocabulary, kind, arguments, parts.prompts.count)

    def open(self, slots: Sequence[int], submit: Submit, prepared: Prompt) -> Opened:
        """Take the request into the slot that holds most of what it needs. Raises `InvalidRequest`."""
        parts = self._loaded
        if submit.texts is not None:
            slot = parts.sequences.least_held(slots)
            job = self._jobs[slot] = parts.embedder.open(prepared.texts, prepared.output.normalise)
            return Opened(slot, job.total_tokens)
        output, vocabulary = prepared.output, parts.vocabulary
        sampler = SamplerChain(
            self._llama, Sampling.from_wire(submit.sampling), check_seed(submit.seed), vocabulary.size,
            parts.argmax, grammar=prepared.grammar, vocab=parts.grammars,
        )  # fmt: skip
        try:
            sampler.accept_prompt(prepared.tokens)
            sampler.replay(submit.delivered)
            slot, tape, after = parts.sequences.open(slots, prepared.tokens, submit.delivered)
        except BaseException:
            sampler.close()
            raise
        voice = _Voice(sampler, output.top_logprobs if output.logprobs else None, prepared.marks)
        self._voices[slot] = voice
        return Opened(
            slot,
            len(prepared.tokens),
            cached_tokens=tape.position,
            after=after,
            delivered_data=[voice.marks.get(token) or vocabulary.piece(token) for token in submit.delivered],
        )

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        """Read a slice of each prompt, then one more token of every other sequence; None if interrupted."""
        parts = self._loaded
        self._mind_the_cores(parts)
        allowed = dict(zip(slots, most or [SLICE_TOKENS] * len(slots), strict=True))
        texts = [slot for slot in slots if slot in self._jobs]
        reading = [slot for slot in slots if slot not in self._jobs and parts.sequences[slot].reading]
        sampling = [slot for slot in slots if slot not in texts and slot not in reading]
        outcomes: dict[int, Outcome] = {}
        # Sampling comes last: a token, once sampled, couldn't be taken back if a later call were interrupted.
        for slot in reading:
            try:
                if not parts.sequences.read(slot, allowed[slot]):
                    return None
            except Exception as error:
                # A native call with nobody else in it: its failure is that one's.
                parts.sequences.doubt([slot])
                outcomes[slot] = Broken(f"reading the prompt failed: {type(error).__name__}: {error}")
        if not all(self._jobs[slot].step(allowed[slot]) for slot in texts):
            return None
        try:
            if sampling and not parts.sequences.decode(sampling):
                return None
        except Exception:
            parts.sequences.doubt(sampling)
            raise
        for output, slot in enumerate(sampling):
            try:
                outcomes[slot] = self._sample(parts, slot, output)
            except Exception as error:
                # As where memory runs out. The decode is done, and its neighbours' tokens are as good as ever.
                outcomes[slot] = Broken(f"choosing a token failed: {type(error).__name__}: {error}")
        # What was read is told only now: a step that is cut tells nothing.
        outcomes.update((slot, parts.sequences.told(slot)) for slot in reading if slot not in outcomes)
        outcomes.update((slot, self._jobs[slot].told()) for slot in texts)
        return [outcomes[slot] for slot in slots]

    def _sample(self, parts: _Parts, slot: int, output: int) -> Outcome:
        """Choose the next token of one sequence from its row of the last decode."""
        voice, context, vocabulary = self._voices[slot], parts.decoder.context, parts.vocabulary
        try:
            token = voice.sampler.sample(context, output)
        except DeadEnd as error:
            return Broken(str(error))
        parts.sequences[slot].tokens.append(token)
        data = voice.marks.get(token) or vocabulary.piece(token)
        logprobs = None
        if voice.top is not None:
            logprobs = [*parts.logprobs.of(context, output, token, voice.top, vocabulary.piece), data]
        return Sampled(token, data, vocabulary.is_end(token), logprobs)

    def _mind_the_cores(self, parts: _Parts) -> None:
        wanted = None if self._watch is None else self._watch.wanted(time.monotonic())
        if wanted is not None:
            # An explicit number for reading stays.
            parts.decoder.use_threads(wanted, self._threads_batch or wanted)
            parts.embedder.use_threads(wanted, self._threads_batch or wanted)

    def release(self, slot: int) -> None:
        """Free the slot. Does nothing for a slot that is free."""
        job = self._jobs.pop(slot, None)
        if job is not None:
            job.close()
        voice = self._voices.pop(slot, None)
        if voice is not None:
            voice.sampler.close()
        if self._parts is not None:
            self._parts.sequences.release(slot)

    # --- snapshots ---------------------------------------------------------------------------------

    def tokens(self, slot: int) -> Sequence[int]:
        """Return prompt, delivered and sampled tokens."""
        return self._loaded.sequences[slot].tokens

    def tokens_in_memory(self, slot: int) -> int:
        """Return how many of them have been read."""
        return self._loaded.sequences[slot].position

    def snapshot_bytes(self, slot: int) -> int:
        """Return how large a snapshot is now."""
        return self._loaded.decoder.state_bytes(slot)

    def save(self, slot: int, memory: memoryview) -> int:
        """Copy the sequence's KV memory, without its sampler, which is built again from its tokens."""
        return self._loaded.decoder.save(slot, memory)

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        """Copy the KV memory of the first `tokens` tokens back; the next step reads what follows."""
        return self._loaded.sequences.restore(slot, memory, tokens)

    # --- ends --------------------------------------------------------------------------------------

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
        """Free jobs, samplers, contexts, adapters, model and sandbox, in that order. Idempotent."""
        for slot in [*self._jobs, *self._voices]:
            self.release(slot)
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.embedder.close()
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()
        if self._adapters is not None:
            self._adapters.close()
        model, self._native_model = self._native_model, None
        if model is not None:
            self._llama.llama_model_free(model)
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()
