"""A model that only embeds, behind the whole llama engine: a tiny BERT on real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.messages import Submit
from infervisor.worker.engine import Embedded, ModelFacts
from infervisor.worker.engines.llama.engine import LlamaEngine
from tests.helpers.encoder_model import SIZE, build_encoder
from tests.helpers.engine_models import no_progress, open_in, request
from tests.helpers.raw_worker import submit

Loaded = tuple[LlamaEngine, ModelFacts]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    engine = LlamaEngine()
    path = build_encoder(tmp_path_factory.mktemp("m") / "bert.gguf")
    yield engine, engine.load(str(path), {"threads": 1}, no_progress)
    engine.close()


def texts(*given: str) -> Submit:
    return submit(1, None, texts=given)


def test_it_says_what_it_is(loaded: Loaded) -> None:
    extra = loaded[1].extra
    assert extra["generates"] is False
    assert extra["embedding"]["dimensions"] == SIZE


def test_it_embeds(loaded: Loaded) -> None:
    engine = loaded[0]
    open_in(engine, 2, texts("hello", "a quick fox"))
    vectors: list[bytes] = []
    for _ in range(20):
        (outcome,) = engine.step([2], [64]) or pytest.fail("cut")
        assert isinstance(outcome, Embedded)
        vectors += outcome.vectors
        if outcome.is_last:
            break
    engine.release(2)
    assert [len(vector) for vector in vectors] == [4 * SIZE] * 2
    assert vectors[0] != vectors[1]


@pytest.mark.parametrize(
    "asked", [request("hello"), request(messages=[{"role": "user", "content": "hello"}])]
)
def test_it_generates_nothing(loaded: Loaded, asked: Submit) -> None:
    with pytest.raises(InvalidRequest, match="only embeds") as refused:
        loaded[0].prepare(asked)
    assert refused.value.field in ("prompt", "messages")
