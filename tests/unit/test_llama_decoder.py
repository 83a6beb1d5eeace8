"""Memory after an interrupted step, with a native library that is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from infervisor.worker.engines.llama.decoder import DecodeFailed, Decoder
from infervisor.worker.engines.llama.library import NativeLog


class Batch(ctypes.Structure):
    """The layout of `llama_batch`."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class Abort:
    """Stands in for `AbortFlag`."""

    callback = None
    argument = None


class Native:
    """A KV memory of positions per sequence. codes: what the next decodes return; 0 when used up.

    kept: how many tokens of an aborted call stay in memory. recurrent, window: the model's kind; lost: the
    positions below it were dropped by the sliding window. can_cut: whether seq_rm takes a partial range.
    """

    llama_batch = Batch

    def __init__(self, *, recurrent: bool = False, window: int = 0, can_cut: bool = True) -> None:
        self.memory: dict[int, set[int]] = {}
        self.codes: list[int] = []
        self.kept = 0
        self.lost = 0
        self.calls: list[list[tuple[int, int, int, int]]] = []
        self.recurrent = recurrent
        self.window = window
        self.can_cut = can_cut

    def llama_get_memory(self, _context: Any) -> str:
        return "memory"

    def llama_set_abort_callback(self, *_: Any) -> None:
        pass

    def llama_n_batch(self, _context: Any) -> int:
        return 64

    def llama_model_is_recurrent(self, _model: Any) -> bool:
        return self.recurrent

    def llama_model_is_hybrid(self, _model: Any) -> bool:
        return False

    def llama_model_n_swa(self, _model: Any) -> int:
        return self.window

    def llama_decode(self, _context: Any, batch: Batch) -> int:
        code = self.codes.pop(0) if self.codes else 0
        call = [
            (batch.seq_id[i][0], batch.token[i], batch.pos[i], batch.logits[i]) for i in range(batch.n_tokens)
        ]
        self.calls.append(call)
        assert all(batch.n_seq_id[i] == 1 for i in range(batch.n_tokens))
        for slot, _, position, _ in call if code == 0 else call[: self.kept]:
            self.memory.setdefault(slot, set()).add(position)
        return code

    def llama_memory_seq_rm(self, _memory: Any, slot: int, start: int, _end: int) -> bool:
        if start > 0 and not self.can_cut:
            return False
        self.memory[slot] = {position for position in self.memory.get(slot, set()) if position < start}
        return True

    def llama_memory_seq_cp(self, _memory: Any, source: int, slot: int, start: int, end: int) -> None:
        assert (start, end) == (-1, -1), "a range aborts the process"
        self.memory[slot] = set(self.memory.get(source, ()))

    def llama_memory_seq_pos_max(self, _memory: Any, slot: int) -> int:
        return max(self.memory.get(slot, ()), default=-1)

    def llama_memory_seq_pos_min(self, _memory: Any, slot: int) -> int:
        return max(self.lost, min(self.memory.get(slot, ()), default=-1))


def decoder(native: Native, *, swa_full: bool = True, slots: int = 3) -> Decoder:
    return Decoder(
        native, "model", "context", Abort(), NativeLog(),  # type: ignore[arg-type]
        slots=slots, swa_full=swa_full,
    )  # fmt: skip


TOKENS = list(range(100, 150))


def test_prefill_slice_wants_no_output() -> None:
    native = Native()
    assert decoder(native).prefill(2, TOKENS, 8, 16) == (16, True)
    assert native.calls == [[(2, 108 + i, 8 + i, 0) for i in range(8)]]


def test_decode_carries_a_token_of_each_slot_with_output() -> None:
    native = Native()
    assert decoder(native).decode([2, 0], [7, 8], [30, 40])
    assert native.calls == [[(2, 7, 30, 1), (0, 8, 40, 1)]]


def test_decode_after_prefill_leaves_no_trace_in_the_batch() -> None:
    native = Native()
    under_test = decoder(native)
    under_test.decode([1], [5], [0])
    under_test.prefill(2, TOKENS, 0, 8)
    assert {(slot, output) for slot, _, _, output in native.calls[1]} == {(2, 0)}


@pytest.mark.parametrize("kept", range(9))
def test_finished_micro_batches_of_a_cut_prefill_stay(kept: int) -> None:
    native = Native()
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    native.codes, native.kept = [2], kept
    assert under_test.prefill(0, TOKENS, 8, 16) == (8 + kept, False)
    assert native.memory[0] == set(range(8 + kept))


def test_cut_decode_is_rolled_back() -> None:
    native = Native()
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    native.codes, native.kept = [2], 1
    assert not under_test.decode([0], [1], [8])
    assert under_test.roll_back(0, 8) == 8
    assert native.memory[0] == set(range(8))


@pytest.mark.parametrize(
    "native", [Native(recurrent=True), Native(can_cut=False)], ids=["recurrent", "refused"]
)
def test_memory_that_cannot_be_cut_is_emptied(native: Native) -> None:
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    native.codes = [2]
    assert under_test.prefill(0, TOKENS, 8, 16) == (0, False)
    assert native.memory[0] == set()


@pytest.mark.parametrize(("lost", "position"), [(0, 8), (4, 8), (5, 0)])
def test_sliding_window_that_lost_cells_is_read_again(lost: int, position: int) -> None:
    native = Native(window=4)
    under_test = decoder(native, swa_full=False)
    under_test.prefill(0, TOKENS, 0, 8)
    native.lost = lost
    assert under_test.roll_back(0, 8) == position


def test_full_window_cache_never_lacks_cells() -> None:
    native = Native(window=4)
    under_test = decoder(native, swa_full=True)
    under_test.prefill(0, TOKENS, 0, 8)
    native.lost = 7
    assert under_test.roll_back(0, 8) == 8


def test_memory_shorter_than_believed_is_emptied() -> None:
    native = Native()
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    assert under_test.roll_back(0, 20) == 0


@pytest.mark.parametrize(("code", "words"), [(1, "no room"), (-1, "code -1"), (-3, "code -3")])
def test_failures_are_told(code: int, words: str) -> None:
    native = Native()
    native.codes = [code]
    with pytest.raises(DecodeFailed, match=words) as failed:
        decoder(native).decode([0], [1], [0])
    assert failed.value.code == code


def test_a_copy_is_cut_to_what_is_wanted() -> None:
    native = Native()
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    under_test.prefill(1, TOKENS, 0, 3)
    assert under_test.copy(0, 1, 5) == 5
    assert native.memory == {0: set(range(8)), 1: set(range(5))}


def test_recurrent_memory_is_copied_whole_or_not_at_all() -> None:
    native = Native(recurrent=True)
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    assert under_test.copy(0, 1, 5) == 0
    assert native.memory[1] == set()
    assert under_test.copy(0, 1, 8) == 8
    assert native.memory[1] == set(range(8))


def test_recurrent_memory_stays_where_nothing_is_cut_but_not_after_an_interrupt() -> None:
    native = Native(recurrent=True)
    under_test = decoder(native)
    under_test.prefill(0, TOKENS, 0, 8)
    assert under_test.keep(0, 8) == 8
    assert under_test.roll_back(0, 8) == 0
    under_test.prefill(0, TOKENS, 0, 8)
    assert under_test.keep(0, 7) == 0


@pytest.mark.parametrize(("lost", "position"), [(1, 5), (2, 0)])
def test_a_copy_from_a_window_that_lost_cells_is_empty(lost: int, position: int) -> None:
    native = Native(window=4)
    under_test = decoder(native, swa_full=False)
    under_test.prefill(0, TOKENS, 0, 8)
    native.lost = lost
    assert under_test.copy(0, 1, 5) == position
