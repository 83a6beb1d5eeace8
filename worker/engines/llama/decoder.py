"""One native context: prefill slices, decode steps, and putting memory right after an interrupted one.

Owns the batch and the KV memory; knows nothing of requests or text. Sequence numbers
are slots. Prefill and decode are separate native calls and one sequence prefills per call, so an abort in
one sequence's prefill can't touch another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from infervisor.worker.engines.llama.library import AbortFlag, NativeLog

_NO_ROOM, _ABORTED = 1, 2
_ANY_TOKEN = 0


class Decoder:
    """The context of a loaded model. `close` frees it; the model must outlive it."""

    def __init__(
        self, llama_cpp: Any, model: Any, context: Any, abort: AbortFlag, log: NativeLog,
        *, slots: int, swa_full: bool,
    ) -> None:  # fmt: skip
        self._llama = llama_cpp
        self.context = context
        self._abort = abort
        self._log = log
        self._memory = llama_cpp.llama_get_memory(context)
        self._copies_wait = False
        """Whether copies between slots wait for the next decode: until then llama.cpp has only noted them."""
        llama_cpp.llama_set_abort_callback(context, abort.callback, abort.argument)
        self.batch_tokens: int = llama_cpp.llama_n_batch(context)
        self._recurrent = bool(
            llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        )
        self._window = 0 if swa_full else int(llama_cpp.llama_model_n_swa(model))
        self._make_batch(slots)

    def _make_batch(self, slots: int) -> None:
        # Allocated once: a step fills in numbers and builds nothing.
        count = self.batch_tokens
        self._tokens = (ctypes.c_int32 * count)()
        self._positions = (ctypes.c_int32 * count)()
        self._outputs = (ctypes.c_int8 * count)()
        counts = (ctypes.c_int32 * count)(*([1] * count))
        self._slot_ids = [(ctypes.c_int32 * 1)(slot) for slot in range(slots)]
        self._slot_pointers = [ctypes.cast(ids, ctypes.POINTER(ctypes.c_int32)) for ids in self._slot_ids]
        self._sequences = (ctypes.POINTER(ctypes.c_int32) * count)()
        self._batch = self._llama.llama_batch(
            0, self._tokens, None, self._positions, counts, self._sequences, self._outputs
        )
        self._keep = counts

    def prefill(self, slot: int, tokens: list[int], start: int, stop: int) -> tuple[int, bool]:
        """Read tokens[start:stop] into memory at those positions; at most `batch_tokens`.

        Returns (how many tokens the sequence now has in memory, whether the slice was finished). After an
        interrupt the finished micro-batches are kept; the number may also be 0 when memory couldn't be
        rolled back and all has to be read again.
        """
        count = stop - start
        wanted: list[Any] = tokens[start:stop]
        self._tokens[:count] = wanted
        self._positions[:count] = list(range(start, stop))
        self._outputs[:count] = [0] * count
        self._sequences[:count] = [self._slot_pointers[slot]] * count
        if self._call(count):
            return stop, True
        # A finished micro-batch stays: so a storm of interrupts can't keep a prompt from being read.
        kept = int(self._llama.llama_memory_seq_pos_max(self._memory, slot)) + 1
        return self.roll_back(slot, min(max(kept, start), stop)), False

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int], *, outputs: bool = True
    ) -> bool:
        """Decode one token of each slot in one call; outputs are then numbered as the slots are.

        outputs: False computes what goes into memory alone, the same in a fifth less time. Returns False if
        interrupted: memory is then to be put right with `roll_back` for each slot.
        """
        for index, slot in enumerate(slots):
            self._tokens[index] = tokens[index]
            self._positions[index] = positions[index]
            self._outputs[index] = outputs
            self._sequences[index] = self._slot_pointers[slot]
        return self._call(len(slots))

    def _call(self, count: int) -> bool:
        self._batch.n_tokens = count
        # llama.cpp warns of every abort; those are asked for here.
        self._log.quiet = True
        self._copies_wait = False  # it makes them first, whatever becomes of the rest
        try:
            code = self._llama.llama_decode(self.context, self._batch)
        finally:
            self._log.quiet = False
        if code == 0:
            return True
        if code == _ABORTED:
            return False
        if code == _NO_ROOM:
            raise DecodeFailed("the KV cache has no room for this step: raise n_ctx or use fewer slots", code)
        raise DecodeFailed(f"llama_decode failed with code {code}: {self._log.tail(3)}", code)

    def roll_back(self, slot: int, position: int) -> int:
        """Forget everything of `slot` from `position` on. Returns the position that memory really has.

        That is 0 when memory can't be cut there: recurrent models keep no history, and a sliding window may
        have lost cells that the cut would need.
        """
        llama, memory = self._llama, self._memory
        if position > 0 and not self._recurrent and llama.llama_memory_seq_rm(memory, slot, position, -1):
            if self._holds(slot, position):
                return position
        self.forget(slot)
        return 0

    def keep(self, slot: int, position: int) -> int:
        """Keep what `slot` has in memory before `position`, after steps that were not interrupted; as `roll_back`.

        What recurrent models keep can't be cut, but it can stay as it is. Not after an interrupt, which may have
        changed some layers' state and not others'.
        """
        return position if position > 0 and self._holds(slot, position) else self.roll_back(slot, position)

    def _holds(self, slot: int, position: int) -> bool:
        """Whether memory has what the token at `position` needs, and nothing from there on."""
        last = self._llama.llama_memory_seq_pos_max(self._memory, slot)
        first = self._llama.llama_memory_seq_pos_min(self._memory, slot)
        window_whole = not self._window or first <= max(0, position - self._window)
        return bool(last == position - 1 and window_whole)

    def forget(self, slot: int) -> None:
        """Empty the slot's memory."""
        self._llama.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def copy(self, source: int, slot: int, position: int) -> int:
        """Copy what `source` has in memory before `position` into another slot; return its position then.

        That is 0, and the slot is empty, where memory can't be cut there.
        """
        llama, memory = self._llama, self._memory
        self.forget(slot)
        # Each slot has cells of its own: only a whole sequence can be copied, a range would abort the process.
        llama.llama_memory_seq_cp(memory, source, slot, -1, -1)
        self._copies_wait = True
        return self.keep(slot, position)

    def use_threads(self, threads: int, threads_batch: int) -> None:
        """Compute with so many threads from now on: for decoding, and for prefill."""
        self._llama.llama_set_n_threads(self.context, threads, threads_batch)

    def state_bytes(self, slot: int) -> int:
        """Return how many bytes `save` writes now; 0 if it can't."""
        # What was copied may not be there yet: what would be saved is what lay there before.
        return 0 if self._copies_wait else int(self._llama.llama_state_seq_get_size(self.context, slot))

    def save(self, slot: int, memory: memoryview) -> int:
        """Copy the slot's memory into `memory`. Returns the bytes that took, 0 if they don't fit or it can't."""
        return 0 if self._copies_wait else self._copy(self._llama.llama_state_seq_get_data, slot, memory)

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        """Copy back what `save` wrote when the slot had `tokens` tokens; if that fails, empty the slot."""
        if self._copies_wait:
            # Made later, a copy from this slot would take what is restored, and one into it would overwrite that.
            self.forget(slot)
            self.decode([slot], [_ANY_TOKEN], [0], outputs=False)
            self.forget(slot)
        read = self._copy(self._llama.llama_state_seq_set_data, slot, memory)
        if read == len(memory) and self._holds(slot, tokens):
            return True
        self.forget(slot)
        return False

    def _copy(self, function: Any, slot: int, memory: memoryview) -> int:
        first = ctypes.c_uint8.from_buffer(memory)
        # llama.cpp complains of what doesn't fit; here that is an answer.
        self._log.quiet = True
        try:
            return int(function(self.context, ctypes.byref(first), len(memory), slot))
        finally:
            self._log.quiet = False

    def warm_up(self, token: int) -> None:
        """Compute one token and forget it: pages are read in and buffers made before the first request."""
        if not self.decode([0], [token], [0]):
            raise DecodeFailed("the warm-up was interrupted", _ABORTED)
        self._llama.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free the context. Idempotent."""
        context, self.context = self.context, None
        if context is not None:
            self._llama.llama_free(context)


class DecodeFailed(RuntimeError):
    """llama.cpp refused or failed a step; the sequences in it are to be released."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
