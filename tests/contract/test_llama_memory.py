"""The estimate against what llama.cpp really allocates, and what loading does when memory is short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama import engine as llama_engine
from infervisor.worker.engines.llama.engine import LlamaEngine
from infervisor.worker.engines.llama.memory_estimate import FreeMemory, estimate
from infervisor.worker.engines.llama.model_file import check_model_file
from infervisor.worker.engines.llama.options import LlamaOptions
from tests.helpers.adapters import build_adapter
from tests.helpers.engine_models import answer, no_progress, request
from tests.helpers.gemma import gemma_model
from tests.helpers.models import smollm2_path
from tests.helpers.native_buffers import native_buffers

LONG = "long_loop.gguf"
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (4096, {}),
    (1000, {"slots": 3, "ubatch": 64}),
    (8192, {"reproducible": True, "slots": 2}),
    (2048, {"swa_full": False, "slots": 4}),
    (4096, {"kv_type_k": "q8_0", "kv_type_v": "q8_0", "use_mmap": False}),
    (256, {"slots": 16, "batch_tokens": 8, "ubatch": 8}),
]


@pytest.fixture
def engine() -> Iterator[LlamaEngine]:
    fresh = LlamaEngine()
    yield fresh
    fresh.close()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that says how many bytes are free from now on."""

    def say(total: int) -> None:
        monkeypatch.setattr(llama_engine, "free_memory", lambda: FreeMemory(total, 1 << 50))

    return say


@pytest.mark.real_model
@pytest.mark.parametrize("model", [smollm2_path, gemma_model])
@pytest.mark.parametrize(
    ("context_tokens", "options"), SETTINGS, ids=[f"{tokens},{options}" for tokens, options in SETTINGS]
)
def test_estimates_are_near_what_is_allocated(
    model: Callable[[], Path], context_tokens: int, options: dict[str, Any]
) -> None:
    file = check_model_file(str(model()))
    said = estimate(file.header, file.total_bytes, LlamaOptions.from_mapping(options), context_tokens)
    real = native_buffers(model(), context_tokens, options)
    # It prints hundredths of a mebibyte.
    assert said.kv == pytest.approx(real["KV"], rel=0.01)
    compute = real["compute"] + real["output"]
    assert 0.95 * compute < said.compute < 1.25 * compute
    assert 0.95 * real["model"] < said.weights < 1.05 * (real["model"] + real.get("repacked", 0))


@pytest.mark.parametrize("n_ctx", [200_000_000, (1 << 31) - 1])
def test_a_context_beyond_memory_is_refused_at_once(
    engine: LlamaEngine, table_models: Path, n_ctx: int
) -> None:
    before = time.monotonic()
    with pytest.raises(LoadRefused, match=r"n_ctx=\d+ would fit") as refused:
        engine.load(str(table_models / "loop.gguf"), {"n_ctx": n_ctx}, no_progress)
    assert refused.value.code == "out_of_memory"
    assert refused.value.permanent, "it would take more than there is in all"
    assert time.monotonic() - before < 1, "nothing may be tried"


def test_a_context_is_made_smaller_on_request_and_serves(
    engine: LlamaEngine, table_models: Path, free: Callable[[int], None]
) -> None:
    path = str(table_models / LONG)
    file = check_model_file(path)
    free(estimate(file.header, file.total_bytes, LlamaOptions(slots=1), 1024).total)
    with pytest.raises(LoadRefused, match="n_ctx=1024 would fit") as refused:
        engine.load(path, {"n_ctx": 4096, "threads": 1}, no_progress)
    assert not refused.value.permanent, "memory may come back"
    facts = engine.load(path, {"n_ctx": 4096, "threads": 1, "fit_context": True}, no_progress)
    assert facts.context_tokens == 1024
    assert facts.extra["context_reduced_from"] == 4096
    assert (facts.slots, facts.extra["slots_reduced_from"]) == (1, 4)
    assert answer(engine, request("a" * 1000), 6).text == "bcabca"


@pytest.mark.parametrize("room", [4, 2, 1])
def test_there_are_four_slots_or_as_many_as_fit(
    engine: LlamaEngine, table_models: Path, free: Callable[[int], None], room: int
) -> None:
    path = str(table_models / LONG)
    file = check_model_file(path)
    free(estimate(file.header, file.total_bytes, LlamaOptions(slots=room), 4096).total)
    with pytest.raises(LoadRefused, match=r"5 slot.*lower slots"):
        engine.load(path, {"slots": 5, "threads": 1}, no_progress)
    facts = engine.load(path, {"threads": 1}, no_progress)
    assert (facts.slots, facts.extra["slots"], facts.context_tokens) == (room, room, 4096)
    assert facts.extra["n_ctx"] == room * 4096
    assert facts.extra.get("slots_reduced_from") == (4 if room < 4 else None)
    assert answer(engine, request("c"), 3, slot=room - 1).text == "abc"


def test_an_adapter_takes_memory_too(
    engine: LlamaEngine, table_models: Path, tmp_path: Path, free: Callable[[int], None]
) -> None:
    path = str(table_models / LONG)
    file = check_model_file(path)
    free(estimate(file.header, file.total_bytes, LlamaOptions(slots=1), 4096).total)
    adapter = str(build_adapter(tmp_path / "a.gguf", {}))
    with pytest.raises(LoadRefused) as refused:
        engine.load(path, {"threads": 1, "lora": adapter}, no_progress)
    assert refused.value.code == "out_of_memory"


def test_facts_hold_the_estimate(engine: LlamaEngine, table_models: Path) -> None:
    path = table_models / LONG
    facts = engine.load(str(path), {"n_ctx": 512, "threads": 1}, no_progress)
    parts = facts.extra["memory_estimate_bytes"]
    assert parts["weights"] == path.stat().st_size
    assert parts["kv"] > 0
    assert parts["compute"] > 0
    assert "context_reduced_from" not in facts.extra


def test_a_model_without_room_is_refused_unless_told_not_to_look(
    engine: LlamaEngine, table_models: Path, free: Callable[[int], None]
) -> None:
    free(1000)
    path = str(table_models / "loop.gguf")
    with pytest.raises(LoadRefused, match="smaller model") as refused:
        engine.load(path, {"threads": 1, "fit_context": True}, no_progress)
    assert refused.value.code == "out_of_memory"
    engine.load(path, {"threads": 1, "check_memory": False}, no_progress)
    assert answer(engine, request("c"), 3).text == "abc"
