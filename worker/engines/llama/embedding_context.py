"""The native context in which texts are embedded: its sequences, its calls and their outputs.

Knows nothing of texts or jobs. Flash attention is off, and each sequence has cells of its own: so a vector hardly
depends on the slices in which its text is read, or on what is read beside it. Runs in the work loop's thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infervisor.worker.engines.llama.library import AbortFlag, NativeLog
from infervisor.worker.engines.llama.options import LlamaOptions

_ABORTED = 2


class EmbeddingFailed(RuntimeError):
    """llama.cpp couldn't embed; what the context holds is to be forgotten."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a context is.

    tokens: that each sequence holds. batch_tokens: in a call. pooling: llama.cpp's number; 0 is one row for each
    token, and then sequences are read in slices.
    """

    tokens: int
    sequences: int
    batch_tokens: int
    pooling: int
    dimensions: int

    @property
    def total_tokens(self) -> int:
        """How many tokens the context holds."""
        return self.tokens * (1 if self.pooling else self.sequences)


class EmbeddingContext:
    """A context of one shape. `close` frees it; the model must outlive it."""

    def __init__(
        self, llama_cpp: Any, model: Any, abort: AbortFlag, log: NativeLog, options: LlamaOptions,
        shape: Shape, threads: tuple[int, int],
    ) -> None:  # fmt: skip
        """Raises `EmbeddingFailed` if it can't be made."""
        self.shape = shape
        self._llama = llama_cpp
        self._log = log
        self._free = list(range(shape.sequences))
        self._keeps_no_history = bool(
            llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = shape.total_tokens
        parameters.n_batch = parameters.n_ubatch = shape.batch_tokens
        parameters.n_seq_max = shape.sequences
        parameters.n_threads, parameters.n_threads_batch = threads
        parameters.embeddings = True
        parameters.pooling_type = shape.pooling
        parameters.flash_attn_type = 0
        parameters.rope_freq_base = options.rope_freq_base
        parameters.rope_freq_scale = options.rope_freq_scale
        parameters.offload_kqv = parameters.op_offload = options.n_gpu_layers != 0
        # What is read whole is forgotten after each call, and may share cells.
        parameters.kv_unified = shape.pooling != 0
        # So that an interrupted slice can be taken back.
        parameters.swa_full = True
        parameters.no_perf = True
        log.clear()
        # It warns of a pooling that isn't the model's own.
        log.quiet = True
        try:
            self.native = llama_cpp.llama_init_from_model(model, parameters)
        finally:
            log.quiet = False
        if not self.native:
            raise EmbeddingFailed(
                f"a context of {shape.total_tokens} tokens for embedding couldn't be made: embed shorter texts, "
                f"or fewer at once ({log.tail(3)})"
            )
        self._memory = llama_cpp.llama_get_memory(self.native) or None
        llama_cpp.llama_set_abort_callback(self.native, abort.callback, abort.argument)

    @property
    def has_memory(self) -> bool:
        """Whether a text can be read in slices."""
        return self._memory is not None

    def use_threads(self, threads: tuple[int, int]) -> None:
        """Compute with so many threads from the next call on: for one token, and for more."""
        self._llama.llama_set_n_threads(self.native, *threads)

    def close(self) -> None:
        """Free it. Idempotent."""
        native, self.native = self.native, None
        if native is not None:
            self._llama.llama_free(native)

    # --- sequences ---------------------------------------------------------------------------------

    def take_sequence(self) -> int | None:
        """Return the number of a sequence that holds nothing, or None if all are in use."""
        return self._free.pop() if self._free else None

    def forget(self, sequence: int) -> None:
        """Empty a sequence and let others have it."""
        if self._memory is not None:
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._free.append(sequence)

    def cut(self, sequence: int, position: int) -> bool:
        """Forget what a sequence holds from `position` on. False if its memory can't be cut there."""
        if self._memory is None or self._keeps_no_history:
            return False
        removed = self._llama.llama_memory_seq_rm(self._memory, sequence, position, -1)
        return bool(removed) and self._llama.llama_memory_seq_pos_max(self._memory, sequence) == position - 1

    # --- calls -------------------------------------------------------------------------------------

    def compute(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> bool:
        """Read (sequence, first position, tokens) of several sequences in one call. False if it was interrupted.

        Raises `EmbeddingFailed`.
        """
        pointer = ctypes.POINTER(ctypes.c_int32)
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[Any] = []
        for sequence, first, part in parts:
            tokens += part
            positions += range(first, first + len(part))
            owners += [ctypes.cast((ctypes.c_int32 * 1)(sequence), pointer)] * len(part)
        count = len(tokens)
        batch = self._llama.llama_batch(
            count,
            (ctypes.c_int32 * count)(*tokens),
            None,
            (ctypes.c_int32 * count)(*positions),
            (ctypes.c_int32 * count)(*([1] * count)),
            (pointer * count)(*owners),
            (ctypes.c_int8 * count)(*([1] * count)),
        )
        call = self._llama.llama_encode if self._memory is None else self._llama.llama_decode
        # llama.cpp warns of every abort; those are asked for here.
        self._log.quiet = True
        try:
            code = call(self.native, batch)
        finally:
            self._log.quiet = False
        if code not in (0, _ABORTED):
            raise EmbeddingFailed(f"llama.cpp failed to embed with code {code}: {self._log.tail(3)}")
        return bool(code == 0)

    def token_rows(self, count: int) -> Any:
        """Return the outputs of the last call, a row for each token, valid until the next call."""
        return self._rows(self._llama.llama_get_embeddings(self.native), count)

    def pooled_row(self, sequence: int) -> Any:
        """Return what llama.cpp made of a sequence in the last call, valid until the next call."""
        return self._rows(self._llama.llama_get_embeddings_seq(self.native, sequence), 1)[0]

    def _rows(self, pointer: Any, rows: int) -> Any:
        import numpy  # comes with llama-cpp-python

        if not pointer:
            raise EmbeddingFailed("llama.cpp gave no embeddings for this text")
        numbers = (ctypes.c_float * (rows * self.shape.dimensions)).from_address(
            ctypes.addressof(pointer.contents)
        )
        return numpy.frombuffer(memoryview(numbers), dtype=numpy.float32).reshape(rows, self.shape.dimensions)
