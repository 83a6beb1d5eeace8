"""Models that read a text whole, and generate nothing: llama.cpp pools, and every text fits one call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engine import Embedded
from infervisor.worker.engines.llama.embedder import Embedder
from infervisor.worker.engines.llama.options import LlamaOptions
from infervisor.worker.engines.llama.pooling import Pooling
from tests.helpers.encoder_model import CONTEXT_TOKENS, SIZE, build_encoder
from tests.helpers.native_model import NativeModel, native_model

TEXTS = ["hello", "abc " * 60, "x y z", "z", "the quick brown fox"]
OPTIONS = LlamaOptions.from_mapping({"threads": 1, "slots": 2})


@pytest.fixture(scope="module", params=[1, 2], ids=["mean", "cls"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_encoder(tmp_path_factory.mktemp("m") / "bert.gguf", request.param)


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    with native_model(path) as loaded:
        yield loaded


@pytest.fixture
def embedder(model: NativeModel) -> Iterator[Embedder]:
    made = Embedder(model.llama, model.native, model.abort, model.log, OPTIONS, CONTEXT_TOKENS)
    yield made
    made.close()


def embed(
    embedder: Embedder, model: NativeModel, texts: list[str], most: int = 10_000
) -> list[npt.NDArray[np.float32]]:
    job = embedder.open(embedder.prepare(model.vocabulary, texts), True)
    vectors: list[npt.NDArray[np.float32]] = []
    try:
        while True:
            assert job.step(most)
            outcome = job.told()
            assert isinstance(outcome, Embedded), outcome
            vectors += [np.frombuffer(one, dtype="<f4") for one in outcome.vectors]
            if outcome.is_last:
                return vectors
    finally:
        job.close()


def bare(path: Path, texts: list[str]) -> list[npt.NDArray[np.float32]]:
    import llama_cpp

    library = llama_cpp.Llama(
        str(path), embedding=True, n_ctx=CONTEXT_TOKENS, n_batch=CONTEXT_TOKENS, n_ubatch=CONTEXT_TOKENS,
        n_threads=1, n_threads_batch=1, verbose=False,
    )  # fmt: skip
    found = [np.array(library.embed(text), dtype="f4") for text in texts]
    library.close()
    return [one / np.linalg.norm(one) for one in found]


def test_vectors_are_those_of_the_bare_library(path: Path, embedder: Embedder, model: NativeModel) -> None:
    assert embedder.reads_whole
    found = embed(embedder, model, TEXTS)
    assert [len(one) for one in found] == [SIZE] * len(TEXTS)
    for one, other in zip(found, bare(path, TEXTS), strict=True):
        assert np.abs(one - other).max() < 1e-4


def test_a_batch_gives_what_one_by_one_gives(embedder: Embedder, model: NativeModel) -> None:
    together = embed(embedder, model, TEXTS)
    for most in (1, 40):
        for one, other in zip(together, embed(embedder, model, TEXTS, most), strict=True):
            assert np.abs(one - other).max() < 1e-4
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.abs(embed(embedder, model, [text])[0] - vector).max() < 1e-4


def test_an_interrupt_loses_no_text(embedder: Embedder, model: NativeModel) -> None:
    expected = embed(embedder, model, TEXTS)
    job = embedder.open(embedder.prepare(model.vocabulary, TEXTS), True)
    model.abort.set()
    assert not job.step(1000)
    model.abort.clear()
    assert job.step(1000)
    outcome = job.told()
    assert isinstance(outcome, Embedded)
    assert outcome.vectors
    for one, other in zip(outcome.vectors, expected, strict=False):
        assert np.abs(np.frombuffer(one, "<f4") - other).max() < 1e-4
    job.close()


def test_the_longest_text_fits_and_a_longer_one_is_named(embedder: Embedder, model: NativeModel) -> None:
    assert len(embed(embedder, model, ["a " * (CONTEXT_TOKENS - 2)])) == 1
    with pytest.raises(InvalidRequest) as caught:
        embedder.prepare(model.vocabulary, ["a", "a " * (CONTEXT_TOKENS - 1)])
    assert caught.value.field == "texts[1]"


def test_a_ranking_model_gives_no_vectors(tmp_path: Path) -> None:
    path = build_encoder(tmp_path / "rank.gguf", Pooling.RANK.value)
    with native_model(path, vocabulary_only=True) as model:
        embedder = Embedder(model.llama, model.native, model.abort, model.log, OPTIONS, CONTEXT_TOKENS)
        with pytest.raises(InvalidRequest, match="ranks"):
            embedder.prepare(model.vocabulary, ["a"])
