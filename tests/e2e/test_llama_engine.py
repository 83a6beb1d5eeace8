"""The real model: exact answers, interrupts from another thread, and what they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infervisor.worker.engines.llama.engine import LlamaEngine
from tests.helpers.engine_models import Answer, answer, no_progress, open_in, request, run
from tests.helpers.models import smollm2_path

pytestmark = pytest.mark.real_model

SENTENCE = "The quick brown fox jumps over the lazy dog. "
HUGE = SENTENCE * 200
"""About 2,000 tokens: seconds of prefill, to be cut and never finished."""
LONG = SENTENCE * 30
"""About 300 tokens: long enough to be cut several times, short enough to be finished."""
GENEROUS_S = 60.0


def load(**options: Any) -> LlamaEngine:
    engine = LlamaEngine()
    engine.load(str(smollm2_path()), {"threads": 2, **options}, no_progress)
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    """Return the model under the reproducible recipe, with two slots."""
    loaded = load(reproducible=True, slots=2)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def long_answer(engine: LlamaEngine) -> list[int]:
    """Return how the long prompt goes on, uninterrupted."""
    return answer(engine, request(LONG), 8).tokens


def test_facts() -> None:
    fresh = LlamaEngine()
    seen: list[tuple[str, float]] = []
    facts = fresh.load(str(smollm2_path()), {}, lambda phase, fraction: seen.append((phase, fraction)))
    fresh.close()
    assert facts.context_tokens == 4096
    assert facts.vocabulary_tokens == 49_152
    assert facts.has_chat_template
    assert facts.extra["trained_context_tokens"] == 8192
    assert facts.extra["parameters"] > 134_000_000
    assert len({fraction for phase, fraction in seen if phase == "load"}) > 3


def test_chat_gives_a_sensible_answer(engine: LlamaEngine) -> None:
    said = answer(engine, request(messages=[{"role": "user", "content": "What is 2+2?"}]), 40)
    assert "4" in said.text
    assert said.ended


def test_greedy_agrees_with_the_binding() -> None:
    import llama_cpp

    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
    binding = llama_cpp.Llama(str(smollm2_path()), n_ctx=512, n_threads=2, verbose=False)
    reference = binding(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"]
    binding.close()
    engine = load()
    try:
        assert answer(engine, request(prompt), 12).text == reference
    finally:
        engine.close()


class Interrupter:
    """Interrupts from a thread of its own once a step runs, and says when."""

    def __init__(self, engine: LlamaEngine, after_s: float) -> None:
        self.at_s = 0.0
        self._engine = engine
        self._go = threading.Event()
        self._after_s = after_s
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Interrupter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(GENEROUS_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        # The wait spreads the interrupts over the graph; nothing depends on where they fall.
        self._go.wait(self._after_s)
        self.at_s = time.monotonic()
        self._engine.interrupt()


def step_until_cut(engine: LlamaEngine, slot: int, after_s: float) -> float:
    """Step until an interrupt from another thread cuts a step; return the seconds it took to come back."""
    with Interrupter(engine, after_s) as interrupter:
        until = time.monotonic() + GENEROUS_S
        while engine.step([slot]) is not None:
            assert time.monotonic() < until, "no step was cut"
        returned_s = time.monotonic()
    engine.clear_interrupt()
    return returned_s - interrupter.at_s


def finish(engine: LlamaEngine, slot: int, tokens: int) -> list[int]:
    said = run(engine, slot, tokens).tokens
    engine.release(slot)
    return said


def test_long_prefill_is_cut_at_once_and_goes_on_exactly(engine: LlamaEngine, long_answer: list[int]) -> None:
    open_in(engine, 0, request(LONG))
    took_s = [step_until_cut(engine, 0, 0.02 * (1 + count)) for count in range(4)]
    assert max(took_s) < 1.0
    assert finish(engine, 0, 8) == long_answer


def test_default_recipe_goes_on_after_a_cut_too() -> None:
    plain = load(prefix_reuse=False)
    try:
        alone = answer(plain, request(LONG), 8)
        open_in(plain, 0, request(LONG))
        assert step_until_cut(plain, 0, 0.1) < 1.0
        assert finish(plain, 0, 8) == alone.tokens
    finally:
        plain.close()


def test_storm_of_interrupts_still_progresses() -> None:
    # Slices of many micro-batches: those that were finished before the interrupt are kept.
    engine = load(ubatch=8, batch_tokens=64)
    try:
        open_in(engine, 0, request(HUGE))
        sequence = engine._loaded.sequences[0]
        cuts = 0
        while sequence.position < 24:
            # Longer waits on a busy machine, where one micro-batch takes its time.
            step_until_cut(engine, 0, 0.03 * 1.2**cuts)
            assert sequence.position % 8 == 0
            cuts += 1
        assert cuts > 1
        engine.release(0)
    finally:
        engine.close()


def test_next_request_is_exact_after_a_cancelled_prefill(engine: LlamaEngine, long_answer: list[int]) -> None:
    short = request("The capital of France is")
    alone = answer(engine, short, 8).tokens
    open_in(engine, 0, request(HUGE))
    assert step_until_cut(engine, 0, 0.2) < 1.0
    engine.release(0)
    assert answer(engine, short, 8).tokens == alone
    assert answer(engine, request(LONG), 8).tokens == long_answer


def test_cut_decode_goes_on_exactly(engine: LlamaEngine) -> None:
    prompt = request("Once upon a time")
    alone = answer(engine, prompt, 24).tokens
    open_in(engine, 0, prompt)
    said = Answer()
    for count in range(6):
        with Interrupter(engine, 0.002 * count):
            for _ in range(3):
                outcomes = engine.step([0])
                if outcomes is None:
                    engine.clear_interrupt()
                else:
                    said.take(outcomes[0])
        engine.clear_interrupt()
    said.tokens += finish(engine, 0, 24 - len(said.tokens))
    assert said.tokens == alone


def test_decoding_neighbour_is_exact_beside_cut_prefills(engine: LlamaEngine) -> None:
    prompt = request("In the year 2050, people")
    alone = answer(engine, prompt, 12).tokens
    open_in(engine, 0, prompt)
    said = Answer()
    while len(said.tokens) < 12:
        said.take((engine.step([0]) or pytest.fail("cut"))[0])
        if len(said.tokens) % 4 == 1:
            open_in(engine, 1, request(HUGE))
            step_until_cut(engine, 1, 0.05)
            engine.release(1)
    engine.release(0)
    assert said.tokens == alone


def test_small_cache_types_work_on_a_real_model() -> None:
    engine = load(kv_type_k="q8_0", kv_type_v="q8_0", flash_attention=True)
    try:
        assert "Paris" in answer(engine, request("The capital of France is"), 8).text
    finally:
        engine.close()


def test_prefill_slices_stay_short() -> None:
    # Ten times the contract's 250 ms: other work shares the machine.
    plain = load()
    try:
        open_in(plain, 0, request(LONG))
        longest_s = 0.0
        while True:
            began = time.monotonic()
            outcome = (plain.step([0]) or pytest.fail("cut"))[0]
            longest_s = max(longest_s, time.monotonic() - began)
            if hasattr(outcome, "token"):
                break
        assert longest_s < 2.5
    finally:
        plain.close()


def test_memory_comes_back_after_close() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    load().close()
    before = resident_bytes()
    for _ in range(3):
        engine = load()
        answer(engine, request("Hello"), 3)
        engine.close()
    assert resident_bytes() - before < 60_000_000
