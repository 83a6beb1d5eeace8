"""What `worker.engine.KeepsSnapshots` promises, asked of every engine that does; and what resuming needs of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.messages import Submit
from infervisor.worker.engine import Engine, KeepsSnapshots, ModelFacts, Prefilled, Sampled
from tests.contract.conftest import Loader
from tests.helpers.engine_models import Answer, EngineCase, answer, open_in, request, run

Load = Callable[..., tuple[Engine, ModelFacts]]
TOKENS = 8
LOOSE: dict[str, Any] = {
    "temperature": 1.5, "top_k": 40, "top_p": 0.99, "min_p": 0.001, "typical_p": 0.99, "repeat_penalty": 1.3,
    "frequency_penalty": 0.2, "presence_penalty": 0.1, "repeat_last_n": 12, "logit_bias": {5: 1.5},
}  # fmt: skip
WIDE = LOOSE | {"temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""For models that are sure of each token: everything that narrows the choice would leave one."""


class Saved:
    """A snapshot and how the sequence went on in the engine that made it."""

    def __init__(self, engine: Engine, submit: Submit, said: int, slot: int = 0) -> None:
        assert isinstance(engine, KeepsSnapshots)
        open_in(engine, slot, submit)
        self.before = Answer()
        while len(self.before.tokens) < said or (not said and not self.is_read):
            self.before.take((engine.step([slot]) or pytest.fail("cut"))[0])
        self.count = engine.tokens_in_memory(slot)
        self.tokens = list(engine.tokens(slot))
        memory = bytearray(engine.snapshot_bytes(slot) + 100)
        size = engine.save(slot, memoryview(memory))
        assert 0 < size <= engine.snapshot_bytes(slot)
        self.data = memory[:size]
        assert memory[size:] == bytes(len(memory) - size), "it wrote no more than it said"
        self.after = run(engine, slot, TOKENS)
        engine.release(slot)

    @property
    def is_read(self) -> bool:
        """Whether the prompt was reported as read."""
        reads = self.before.prefills
        return bool(reads) and reads[-1].done_tokens >= reads[-1].total_tokens


@pytest.fixture(scope="module")
def cold(case: EngineCase, table_models: Path) -> Iterator[Engine]:
    """Return the case with two slots in which nothing is left of earlier requests."""
    loader = Loader(case, table_models, [])
    yield loader(slots=2, **case.cold)[0]
    loader.close()


@pytest.fixture
def keeper(cold: Engine) -> Engine:
    """Return the engine if it keeps snapshots."""
    engine = cold
    if not isinstance(engine, KeepsSnapshots):
        pytest.skip("this engine keeps none")
    return engine


def resumed(prompt: str, saved: Saved, **settings: Any) -> Submit:
    return request(prompt, delivered=saved.before.tokens, **settings)


@pytest.mark.parametrize("said", [0, 1, 3])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_fresh_engine_goes_on_from_a_snapshot(
    keeper: Engine, case: EngineCase, load: Load, said: int, drawn: bool
) -> None:
    settings: dict[str, Any] = {} if not drawn else LOOSE if case.model == "smollm2" else WIDE
    fresh, _ = load(slots=2, **case.cold)
    assert isinstance(fresh, KeepsSnapshots)
    for slot, prompt in enumerate(case.prompts):
        if said and len(answer(keeper, request(prompt, **settings), said + 1).tokens) <= said:
            continue  # it says no more than that
        saved = Saved(keeper, request(prompt, **settings), said)
        opened = open_in(fresh, slot, resumed(prompt, saved, **settings))
        assert list(fresh.tokens(slot))[: saved.count] == saved.tokens[: saved.count]
        assert fresh.tokens_in_memory(slot) == 0
        assert saved.count >= opened.prompt_tokens - 1
        assert fresh.restore(slot, memoryview(saved.data), saved.count)
        assert fresh.tokens_in_memory(slot) == saved.count
        assert isinstance((fresh.step([slot]) or pytest.fail("cut"))[0], Prefilled)
        said_then = run(fresh, slot, TOKENS)
        assert said_then.tokens == saved.after.tokens
        assert said_then.prefills == [], "all the rest was read in one step"
        fresh.release(slot)


def test_what_was_said_since_the_snapshot_is_read_again(keeper: Engine, case: EngineCase, load: Load) -> None:
    fresh, _ = load(slots=2, **case.cold)
    assert isinstance(fresh, KeepsSnapshots)
    for prompt in case.prompts:
        saved = Saved(keeper, request(prompt), 0)
        for more in range(1, len(saved.after.tokens)):
            open_in(fresh, 0, request(prompt, delivered=saved.after.tokens[:more]))
            assert fresh.restore(0, memoryview(saved.data), saved.count)
            said = run(fresh, 0, TOKENS - more)
            assert said.prefills
            assert said.tokens == saved.after.tokens[more:]
            fresh.release(0)


def test_a_snapshot_in_the_middle_of_the_prompt_goes_on_there(
    keeper: Engine, case: EngineCase, load: Load
) -> None:
    assert isinstance(keeper, KeepsSnapshots)
    fresh, _ = load(slots=2, **case.cold)
    assert isinstance(fresh, KeepsSnapshots)
    prompt = max(case.prompts, key=len)
    whole = answer(keeper, request(prompt), TOKENS)
    open_in(keeper, 0, request(prompt))
    (outcome,) = keeper.step([0]) or pytest.fail("cut")
    assert isinstance(outcome, Prefilled)
    count = keeper.tokens_in_memory(0)
    data = bytearray(keeper.snapshot_bytes(0))
    assert keeper.save(0, memoryview(data)) == len(data)
    keeper.release(0)
    open_in(fresh, 0, request(prompt))
    assert fresh.restore(0, memoryview(data), count)
    said = run(fresh, 0, TOKENS)
    assert said.tokens == whole.tokens
    if outcome.done_tokens < outcome.total_tokens:
        assert said.prefills[0].done_tokens > count


def test_a_neighbour_is_untouched_by_save_and_restore(keeper: Engine, case: EngineCase) -> None:
    assert isinstance(keeper, KeepsSnapshots)
    short, long = case.prompts
    alone = answer(keeper, request(short), 6)
    saved = Saved(keeper, request(long), 0)
    open_in(keeper, 0, request(short))
    said = Answer()
    for step in range(40):
        if said.ended or len(said.tokens) >= 6:
            break
        said.take((keeper.step([0]) or pytest.fail("cut"))[0])
        if step % 2:
            open_in(keeper, 1, request(long))
            assert keeper.restore(1, memoryview(saved.data), saved.count)
            keeper.release(1)
        keeper.save(0, memoryview(bytearray(keeper.snapshot_bytes(0))))
    keeper.release(0)
    assert said.tokens == alone.tokens


def test_memory_that_is_too_small_takes_nothing(keeper: Engine, case: EngineCase) -> None:
    assert isinstance(keeper, KeepsSnapshots)
    open_in(keeper, 0, request(max(case.prompts, key=len)))
    keeper.step([0])
    size = keeper.snapshot_bytes(0)
    assert keeper.save(0, memoryview(bytearray(size - 1))) == 0
    assert keeper.save(0, memoryview(bytearray(size))) == size
    keeper.release(0)


def test_what_does_not_come_out_right_is_read_again(keeper: Engine, case: EngineCase) -> None:
    assert isinstance(keeper, KeepsSnapshots)
    prompt = max(case.prompts, key=len)
    whole = answer(keeper, request(prompt), TOKENS)
    saved = Saved(keeper, request(prompt), 0)
    bad = {
        "cut": (saved.data[:-1], saved.count),
        "half": (saved.data[: len(saved.data) // 2], saved.count),
        "longer": (saved.data + bytes(8), saved.count),
        "garbage": (bytearray(b"\xff" * len(saved.data)), saved.count),
        "zeros": (bytearray(len(saved.data)), saved.count),
        "fewer tokens than it says": (saved.data, saved.count + 1),
        "more tokens than it says": (saved.data, saved.count - 1),
        "no tokens": (saved.data, 0),
        "more tokens than there are": (saved.data, 1 << 20),
    }
    for index, (what, (data, count)) in enumerate(bad.items()):
        open_in(keeper, 0, request(prompt))
        assert not keeper.restore(0, memoryview(bytearray(data)), count), what
        assert keeper.tokens_in_memory(0) == 0
        if case.model != "smollm2" or index % 4 == 0:
            assert run(keeper, 0, TOKENS).tokens == whole.tokens, what
        keeper.release(0)


def test_what_has_begun_is_not_overwritten(keeper: Engine, case: EngineCase) -> None:
    assert isinstance(keeper, KeepsSnapshots)
    prompt = max(case.prompts, key=len)
    saved = Saved(keeper, request(prompt), 0)
    open_in(keeper, 0, request(prompt))
    said = run(keeper, 0, 1)
    assert not keeper.restore(0, memoryview(saved.data), saved.count)
    assert (said.tokens + run(keeper, 0, TOKENS - 1).tokens)[: len(saved.after.tokens)] == saved.after.tokens
    keeper.release(0)


# --- resuming without a snapshot ------------------------------------------------------------------------


def test_delivered_tokens_have_the_bytes_that_were_sampled(engine: Engine, case: EngineCase) -> None:
    for prompt in case.prompts:
        open_in(engine, 0, request(prompt))
        sampled: list[Sampled] = []
        while len(sampled) < TOKENS and not (sampled and sampled[-1].end):
            (outcome,) = engine.step([0]) or pytest.fail("cut")
            if isinstance(outcome, Sampled):
                sampled.append(outcome)
        engine.release(0)
        said = [one for one in sampled if not one.end]
        for kept in range(len(said) + 1):
            opened = open_in(engine, 0, request(prompt, delivered=[one.token for one in said[:kept]]))
            assert list(opened.delivered_data) == [one.data for one in said[:kept]]
            engine.release(0)


def test_delivered_tokens_may_fill_the_context(case: EngineCase, load: Load) -> None:
    engine, facts = load(**case.context_options)
    prompt = next(iter(case.prompts))
    token = answer(engine, request(prompt), 1).tokens[0]
    prompt_tokens = open_in(engine, 0, request(prompt)).prompt_tokens
    engine.release(0)
    for more in (-1, 0, 5):
        delivered = [token] * (facts.context_tokens - prompt_tokens + more)
        opened = open_in(engine, 0, request(prompt, delivered=delivered))
        assert opened.prompt_tokens == prompt_tokens
        assert len(opened.delivered_data) == len(delivered)
        engine.release(0)
