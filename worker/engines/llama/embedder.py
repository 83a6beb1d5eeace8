"""Texts to vectors, in a native context of their own: made when first needed, and as large as its texts.

Owns which jobs there are and how large the context is. A causal model reads a text in slices, like a prompt, and
the vector is pooled here; any other one reads it whole, and llama.cpp pools. Knows nothing of requests. Runs in the
work loop's thread, but for `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engine import Broken, Embedded
from infervisor.worker.engines.llama.capacity import default_threads
from infervisor.worker.engines.llama.embedding_context import EmbeddingContext, EmbeddingFailed, Shape
from infervisor.worker.engines.llama.library import AbortFlag, NativeLog
from infervisor.worker.engines.llama.options import LlamaOptions
from infervisor.worker.engines.llama.pooling import Pool, Pooling, kind_of, packed
from infervisor.worker.engines.llama.tokenizer import Vocabulary

OUTPUT_BYTES = 16 << 20
"""What the outputs of one call may take: llama.cpp computes the whole vocabulary for every token it embeds."""
LEAST_SLICE_TOKENS, MOST_SLICE_TOKENS = 32, 512
TEXTS_A_STEP = 4
"""Of one job, if its texts are short; each of them needs memory for the longest."""
KEPT_CONTEXT_TOKENS = 4096
"""A larger context is made only if it must be, and freed as soon as nothing is embedded in it."""
PROBE_CHARACTERS = 16
"""Characters for each token that are tried of a very long text: four times what text takes."""
_Part = tuple[int, int, int, Sequence[int]]
"""What a call reads of one text: its number, its sequence, the first position, the tokens."""


class Embedder:
    """The embeddings of one loaded model, which must outlive it.

    longest_tokens: of one text. attach: called with each new native context, to put adapters on it.
    """

    def __init__(
        self, llama_cpp: Any, model: Any, abort: AbortFlag, log: NativeLog, options: LlamaOptions,
        longest_tokens: int, attach: Callable[[Any], None] = lambda native: None,
    ) -> None:  # fmt: skip
        self.kind = kind_of(llama_cpp, model)
        self.reads_whole = not self.kind.is_causal
        """Whether a text must be read in one call."""
        self.longest_tokens = longest_tokens
        self.jobs: list[Job] = []
        self.context: EmbeddingContext | None = None
        vocabulary_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        fitting = OUTPUT_BYTES // (4 * max(vocabulary_tokens, 1)) // 32 * 32
        self.slice_tokens = min(max(fitting, LEAST_SLICE_TOKENS), MOST_SLICE_TOKENS)
        threads = options.threads or default_threads()
        self._threads = (threads, options.threads_batch or threads)
        self._attach = attach
        self._make: Callable[[Shape], EmbeddingContext] = lambda shape: EmbeddingContext(
            llama_cpp, model, abort, log, options, shape, self._threads
        )

    def facts(self) -> dict[str, Any]:
        """Return what `ready` shows of embeddings."""
        return {
            "dimensions": self.kind.dimensions,
            "pooling": self.kind.pooling.name.lower(),
            "longest_text_tokens": self.longest_tokens,
        }

    def prepare(self, vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text. Raises `InvalidRequest` naming the text. Any thread."""
        if self.kind.pooling is Pooling.RANK:
            raise InvalidRequest(
                "this model ranks pairs of texts and gives no vectors: load an embedding model", "texts"
            )
        if not texts:
            raise InvalidRequest("texts is empty: there is nothing to embed", "texts")
        return [self._tokens(vocabulary, f"texts[{index}]", text) for index, text in enumerate(texts)]

    def _tokens(self, vocabulary: Vocabulary, name: str, text: str) -> list[int]:
        # Tokenising takes seconds per megabyte, so a text that is hopelessly long is refused by its beginning.
        probe = PROBE_CHARACTERS * self.longest_tokens
        tried = [text] if len(text) <= 2 * probe else [text[:probe], text]
        tokens: list[int] = []
        for part in tried:
            tokens = vocabulary.sequence(part)
            if len(tokens) > self.longest_tokens:
                count = f"{len(tokens)}" if part is text else f"more than {len(tokens)}"
                raise InvalidRequest(
                    f"{name} has {count} tokens; a text may have {self.longest_tokens}: cut it into pieces, "
                    "or load with a larger n_ctx",
                    name,
                )
        if not tokens:
            raise InvalidRequest(f"{name} has no token in this model: there is nothing to embed", name)
        return tokens

    def open(self, texts: Sequence[Sequence[int]], normalise: bool) -> Job:
        """Return the job of embedding texts, given as tokens; nothing is computed yet. Close it in any case."""
        job = Job(self, texts, normalise)
        self.jobs.append(job)
        return job

    def use_threads(self, threads: int, threads_batch: int) -> None:
        """Compute with so many threads from the next call on."""
        self._threads = (threads, threads_batch)
        if self.context is not None:
            self.context.use_threads(self._threads)

    def make_room(self) -> EmbeddingContext:
        """Return a context in which all open jobs find room: the one there is, or a new one that holds nothing yet.

        Raises `EmbeddingFailed`.
        """
        wanted = self._wanted()
        context = self.context
        if context is not None:
            has = context.shape
            fits = has.tokens >= wanted.tokens and has.batch_tokens >= wanted.batch_tokens
            # Each job holds at most one sequence between its steps.
            if fits and (self.reads_whole or has.sequences >= len(self.jobs)):
                return context
            self.close()
        context = self._make(wanted)
        if not self.reads_whole and not context.has_memory:
            # Its metadata don't say so, but it is no causal model.
            context.close()
            self.reads_whole = True
            return self.make_room()
        self.context = context
        self._attach(context.native)
        return context

    def _wanted(self) -> Shape:
        longest = -(-max(job.longest_tokens for job in self.jobs) // 256) * 256
        dimensions = self.kind.dimensions
        if self.reads_whole:
            # Nothing is held between calls, so this is enough for any number of jobs. llama.cpp aborts the process
            # where it pools, unless the sequences divide the batch.
            batch = max(self.slice_tokens, longest)
            return Shape(batch, TEXTS_A_STEP, batch, self.kind.pooling.value, dimensions)
        jobs = len(self.jobs)
        sequences = max(jobs, min(jobs - 1 + TEXTS_A_STEP, KEPT_CONTEXT_TOKENS // longest))
        return Shape(longest, sequences, self.slice_tokens, 0, dimensions)

    def left(self, job: Job) -> None:
        """A job is over: give back what only large texts need."""
        self.jobs.remove(job)
        context = self.context
        if not self.jobs and context is not None and context.shape.total_tokens > KEPT_CONTEXT_TOKENS:
            self.close()

    def close(self) -> None:
        """Free the context. Idempotent; the next step of a job makes another one."""
        context, self.context = self.context, None
        if context is not None:
            context.close()


class Job:
    """Some texts on their way to vectors. Between two steps at most one of them is partly read."""

    def __init__(self, embedder: Embedder, texts: Sequence[Sequence[int]], normalise: bool) -> None:
        self.total_tokens = sum(map(len, texts))
        self.longest_tokens = max(map(len, texts))
        self._embedder = embedder
        self._texts = texts
        self._normalise = normalise
        self._done_tokens = 0
        """Of texts that have their vector."""
        self._untold: list[bytes] = []
        self._failure: EmbeddingFailed | None = None
        self._next = 0
        self._context: EmbeddingContext | None = None
        """Where the tokens before `_position` of the text `_next` are, in `_sequence`."""
        self._sequence = -1
        self._position = 0
        self._pool = Pool(embedder.kind.pooling)

    def step(self, most_tokens: int) -> bool:
        """Read up to so many tokens, of several texts if they fit; a text that must be read whole is, in any case.

        Returns False if interrupted: no vector is lost, and the next step goes on. What it has done says `told`.
        """
        if self._failure is not None or self._next == len(self._texts):
            return True
        try:
            context = self._embedder.make_room()
            if context is not self._context:
                self._context = context
                self._begin_text()
            parts = self._parts(context, most_tokens)
            if not context.compute([part[1:] for part in parts]):
                self._take_back(context, parts)
                return False
            self._take(context, parts)
        except Exception as error:
            # What the context holds is unknown now; others' texts in it are read again.
            self._embedder.close()
            if not isinstance(error, EmbeddingFailed):
                error = EmbeddingFailed(f"embedding failed: {type(error).__name__}: {error}")
            self._failure = error
        return True

    def told(self) -> Embedded | Broken:
        """Return all that steps have done since this was asked last; a step that was cut for others isn't lost."""
        if self._failure is not None:
            return Broken(str(self._failure))
        vectors, self._untold = self._untold, []
        done = self._done_tokens + self._position
        return Embedded(done, self.total_tokens, vectors, self._next == len(self._texts))

    def _begin_text(self) -> None:
        self._sequence, self._position, self._pool = -1, 0, Pool(self._embedder.kind.pooling)

    def _parts(self, context: EmbeddingContext, most_tokens: int) -> list[_Part]:
        reads_whole = self._embedder.reads_whole
        room = max(1, min(most_tokens, context.shape.batch_tokens))
        parts: list[_Part] = []
        at, sequence = self._position, self._sequence
        for number in range(self._next, len(self._texts)):
            tokens = self._texts[number][at:]
            if reads_whole and parts and len(tokens) > room:
                break
            if sequence < 0:
                taken = context.take_sequence()
                if taken is None:
                    break
                sequence = taken
            part = tokens if reads_whole else tokens[:room]
            parts.append((number, sequence, at, part))
            room -= len(part)
            if room <= 0:
                break
            at, sequence = 0, -1
        return parts

    def _take(self, context: EmbeddingContext, parts: Sequence[_Part]) -> None:
        """Pool the outputs of a call, and keep the vectors of texts that are whole now."""
        pools_here = not self._embedder.reads_whole
        rows = context.token_rows(sum(len(part[3]) for part in parts)) if pools_here else None
        row = 0
        for number, sequence, at, tokens in parts:
            self._sequence, self._position = sequence, at + len(tokens)
            if rows is not None:
                self._pool.add(rows[row : row + len(tokens)])
                row += len(tokens)
            if self._position < len(self._texts[number]):
                continue
            vector = self._pool.vector() if pools_here else context.pooled_row(sequence)
            try:
                self._untold.append(packed(vector, self._normalise))
            except ValueError as error:
                raise EmbeddingFailed(f"texts[{number}]: {error}") from error
            context.forget(sequence)
            self._next, self._done_tokens = number + 1, self._done_tokens + self._position
            self._begin_text()

    def _take_back(self, context: EmbeddingContext, parts: Sequence[_Part]) -> None:
        """Forget what an interrupted call may have read; what was read before it stays."""
        for _, sequence, at, _ in parts:
            if at and context.cut(sequence, at):
                continue
            context.forget(sequence)
            if at:
                self._begin_text()

    def close(self) -> None:
        """Forget what it read. Idempotent."""
        embedder = self._embedder
        if self not in embedder.jobs:
            return
        if self._context is not None and self._context is embedder.context and self._sequence >= 0:
            self._context.forget(self._sequence)
        self._begin_text()
        embedder.left(self)
