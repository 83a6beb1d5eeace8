"""Vectors of texts: the numbers of the bare library, whatever is read together, in slices or after an interrupt."""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engine import Broken, Embedded
from infervisor.worker.engines.llama.embedder import KEPT_CONTEXT_TOKENS, Embedder, Job
from infervisor.worker.engines.llama.library import AbortFlag
from infervisor.worker.engines.llama.options import LlamaOptions
from infervisor.worker.engines.llama.pooling import Pool, Pooling, packed
from tests.helpers.models import smollm2_path
from tests.helpers.native_model import NativeModel, native_model

pytestmark = pytest.mark.real_model

Vector = npt.NDArray[np.float64]
TEXTS = [
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "import sys\nprint(sys.argv)\n" * 6,
    "Ein Text mit Umlauten: äöü, und einem 🦙. " * 8,
    "x",
]
OPTIONS = LlamaOptions.from_mapping({"threads": 1, "slots": 4})


@pytest.fixture(scope="module")
def model() -> Iterator[NativeModel]:
    with native_model(smollm2_path()) as loaded:
        yield loaded


@pytest.fixture
def embedder(model: NativeModel) -> Iterator[Embedder]:
    made = Embedder(model.llama, model.native, model.abort, model.log, OPTIONS, 8192)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected() -> list[Vector]:
    """What the bare library says, one text at a time."""
    import llama_cpp

    bare = llama_cpp.Llama(
        str(smollm2_path()), embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, n_threads_batch=1,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN, flash_attn=False, verbose=False,
    )  # fmt: skip
    vectors = [np.array(bare.embed(text), dtype="f8") for text in TEXTS]
    bare.close()
    return vectors


def floats(data: bytes) -> Vector:
    return np.frombuffer(data, dtype="<f4").astype("f8")


def run(job: Job, most: int = 10_000) -> list[Vector]:
    """Step a job to its end; return its vectors."""
    vectors: list[Vector] = []
    read = 0
    while True:
        assert job.step(most)
        outcome = job.told()
        assert isinstance(outcome, Embedded), outcome
        assert read < outcome.done_tokens <= outcome.total_tokens == job.total_tokens
        read = outcome.done_tokens
        vectors += map(floats, outcome.vectors)
        if outcome.is_last:
            assert read == job.total_tokens
            return vectors


def embed(
    embedder: Embedder,
    model: NativeModel,
    texts: Sequence[str],
    most: int = 10_000,
    *,
    normalise: bool = False,
) -> list[Vector]:
    job = embedder.open(embedder.prepare(model.vocabulary, texts), normalise)
    try:
        return run(job, most)
    finally:
        job.close()


def alike(one: Sequence[Vector], other: Sequence[Vector], within: float) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        left, right = left / np.linalg.norm(left), right / np.linalg.norm(right)
        assert 1 - left @ right < within
        assert np.abs(left - right).max() < within


def test_vectors_are_those_of_the_bare_library(
    embedder: Embedder, model: NativeModel, expected: list[Vector]
) -> None:
    found = embed(embedder, model, TEXTS)
    alike(found, expected, 1e-4)
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("most", [7, 64])
def test_a_vector_depends_on_neither_slices_nor_company(
    embedder: Embedder, model: NativeModel, expected: list[Vector], most: int
) -> None:
    alike(embed(embedder, model, TEXTS, most), expected, 1e-3)
    alike([embed(embedder, model, [text], most)[0] for text in TEXTS[:3]], expected[:3], 1e-4)


def test_normalised_vectors_have_the_length_1(embedder: Embedder, model: NativeModel) -> None:
    raw = embed(embedder, model, TEXTS[:2])
    normalised = embed(embedder, model, TEXTS[:2], normalise=True)
    alike(raw, normalised, 1e-6)
    assert [round(float(np.linalg.norm(one)), 6) for one in normalised] == [1, 1]
    assert all(np.linalg.norm(one) > 2 for one in raw)


def test_jobs_side_by_side_dont_mix(embedder: Embedder, model: NativeModel, expected: list[Vector]) -> None:
    jobs = [embedder.open(embedder.prepare(model.vocabulary, TEXTS[i:]), False) for i in range(3)]
    vectors: list[list[Vector]] = [[] for _ in jobs]
    open_ones = set(range(3))
    while open_ones:
        for index in sorted(open_ones):
            assert jobs[index].step(9)
            outcome = jobs[index].told()
            assert isinstance(outcome, Embedded)
            vectors[index] += map(floats, outcome.vectors)
            if outcome.is_last:
                jobs[index].close()
                open_ones.remove(index)
    for index in range(3):
        alike(vectors[index], expected[index:], 1e-3)


def test_a_job_that_needs_a_larger_context_costs_others_only_time(
    embedder: Embedder, model: NativeModel, expected: list[Vector]
) -> None:
    job = embedder.open(embedder.prepare(model.vocabulary, TEXTS[2:4]), False)
    assert job.step(20)
    first = embedder.context
    long = embedder.open([[5] * 2000], False)
    assert long.step(8)
    assert embedder.context is not first
    assert long._position == 8
    alike(run_on(job), expected[2:4], 1e-4)
    long.close()
    job.close()


def run_on(job: Job) -> list[Vector]:
    vectors: list[Vector] = []
    while True:
        assert job.step(50)
        outcome = job.told()
        assert isinstance(outcome, Embedded)
        vectors += map(floats, outcome.vectors)
        if outcome.is_last:
            return vectors


def test_an_interrupted_step_loses_and_changes_nothing(
    embedder: Embedder, model: NativeModel, expected: list[Vector]
) -> None:
    chance = random.Random(4)
    job = embedder.open(embedder.prepare(model.vocabulary, TEXTS), False)
    vectors: list[Vector] = []
    cut = 0
    for _ in range(1000):
        is_cut = chance.random() < 0.4
        if is_cut:
            model.abort.set()
        finished = job.step(30)
        model.abort.clear()
        assert finished is not is_cut
        cut += is_cut
        if chance.random() < 0.5:  # what isn't asked for now comes later
            outcome = job.told()
            assert isinstance(outcome, Embedded)
            vectors += map(floats, outcome.vectors)
            if outcome.is_last:
                break
        elif job._next == len(TEXTS):
            assert job.step(30)  # nothing is left to do, and nothing is done twice
    assert cut > 3
    alike(vectors, expected, 1e-3)
    job.close()


def test_a_long_text_goes_on_after_interrupts_where_it_was(embedder: Embedder, model: NativeModel) -> None:
    job = embedder.open([[7] * 90], False)
    assert job.step(40)
    model.abort.set()
    assert not job.step(40)
    model.abort.clear()
    outcome = job.told()
    assert isinstance(outcome, Embedded)
    assert (outcome.done_tokens, outcome.vectors, outcome.is_last) == (40, [], False)
    job.close()


class Countdown:
    """An abort flag that is set when llama.cpp has asked so many times."""

    def __init__(self, llama: Any) -> None:
        self.asks_left = 1 << 30
        self.callback = llama.ggml_abort_callback(self._ask)
        self.argument = None

    def _ask(self, _data: object) -> bool:
        self.asks_left -= 1
        return self.asks_left < 0


def test_an_interrupt_after_part_of_a_call_is_taken_back_as_a_whole(model: NativeModel) -> None:
    # Sequences of different lengths are computed one part after the other: the parts before the cut have been.
    countdown = Countdown(model.llama)
    embedder = Embedder(model.llama, model.native, cast(AbortFlag, countdown), model.log, OPTIONS, 8192)
    texts = [[7] * 30, [8] * 5, [9] * 3]

    def begun() -> Job:
        job = embedder.open(texts, False)
        assert job.step(20)
        return job

    job = begun()
    countdown.asks_left = 1 << 30
    expected = [*gathered(job, 18)]
    asks = (1 << 30) - countdown.asks_left
    job.close()
    for share in (0.05, 0.3, 0.5, 0.7, 0.9, 0.99):
        job = begun()
        countdown.asks_left = int(share * asks)
        assert not job.step(18)
        countdown.asks_left = 1 << 30
        alike([floats(one) for one in gathered(job, 18)], [floats(one) for one in expected], 1e-3)
        job.close()
    embedder.close()


def test_closing_gives_back_every_sequence_and_what_only_long_texts_need(
    embedder: Embedder, model: NativeModel
) -> None:
    job = embedder.open([[7] * 500], False)
    assert job.step(8)
    context = embedder.context
    assert context is not None
    assert len(context._free) == context.shape.sequences - 1
    job.close()
    job.close()
    assert embedder.context is context
    assert sorted(context._free) == list(range(context.shape.sequences))

    large = embedder.open([[7] * (KEPT_CONTEXT_TOKENS + 1)], False)
    assert large.step(8)
    large.close()
    assert embedder.context is None


def test_what_llama_cpp_refuses_breaks_the_job_and_no_other(
    embedder: Embedder, model: NativeModel, expected: list[Vector]
) -> None:
    good = embedder.open(embedder.prepare(model.vocabulary, TEXTS[:3]), False)
    assert good.step(20)
    bad = embedder.open([[model.vocabulary.size + 5]], False)  # no such token: llama.cpp refuses the batch
    assert bad.step(20)
    broken = bad.told()
    assert isinstance(broken, Broken)
    assert "code -1" in str(broken)
    bad.close()
    assert len([*gathered(good)]) == 3
    good.close()


def test_what_fails_in_a_job_breaks_it_and_no_step(
    embedder: Embedder, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = embedder.open(embedder.prepare(model.vocabulary, TEXTS[:1]), False)

    def run_out(_shape: object) -> Any:
        raise MemoryError("no room for a context")

    with monkeypatch.context() as patched:
        patched.setattr(embedder, "_make", run_out)
        assert job.step(20)
    broken = job.told()
    assert isinstance(broken, Broken)
    assert "MemoryError: no room" in str(broken)
    job.close()


def gathered(job: Job, most: int = 20) -> Iterator[bytes]:
    while True:
        outcome = job.told()
        assert isinstance(outcome, Embedded)
        yield from outcome.vectors
        if outcome.is_last:
            return
        assert job.step(most)


def test_the_context_is_made_late_and_small(embedder: Embedder, model: NativeModel) -> None:
    assert embedder.context is None
    embed(embedder, model, ["Hello"])
    assert embedder.context is not None
    assert embedder.context.shape.total_tokens == 1024
    embedder.close()
    assert embedder.context is None
    assert len(embed(embedder, model, ["Hello"])) == 1
    gc.collect()


@pytest.mark.parametrize(("texts", "field", "said"), [
    (["a", "b " * 9000], "texts[1]", "8192"),
    (["a", "", "b"], "texts[1]", "no token"),
    (["many words " * 200_000], "texts[0]", "more than"),
    ([], "texts", "empty"),
])  # fmt: skip
def test_texts_that_cant_be_embedded_are_named(
    embedder: Embedder, model: NativeModel, texts: list[str], field: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        embedder.prepare(model.vocabulary, texts)
    assert caught.value.field == field


def test_facts_say_what_vectors_there_will_be(embedder: Embedder) -> None:
    assert embedder.facts() == {"dimensions": 576, "pooling": "mean", "longest_text_tokens": 8192}


# --- pooling ---------------------------------------------------------------------------------------

ROWS: Any = np.array([[1, 2], [3, 5], [5, 5]], dtype=np.float32)


@pytest.mark.parametrize(("pooling", "vector"), [
    (Pooling.MEAN, [3, 4]), (Pooling.CLS, [1, 2]), (Pooling.LAST, [5, 5]),
])  # fmt: skip
def test_pooling_in_pieces_gives_the_same_as_at_once(pooling: Pooling, vector: list[float]) -> None:
    at_once, in_pieces = Pool(pooling), Pool(pooling)
    at_once.add(ROWS)
    in_pieces.add(ROWS[:1])
    in_pieces.add(ROWS[1:])
    assert at_once.vector().tolist() == in_pieces.vector().tolist() == vector


def test_packed_vectors() -> None:
    assert array("f", packed(np.array([3.0, 4.0]), normalise=True)).tolist() == pytest.approx([0.6, 0.8])
    assert array("f", packed(np.array([3.0, 4.0]), normalise=False)).tolist() == [3, 4]
    assert array("f", packed(np.zeros(2), normalise=True)).tolist() == [0, 0]
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="no number"):
            packed(np.array([1.0, bad]), normalise=True)
