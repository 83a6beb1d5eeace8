"""The real models, several sequences in one step: a cancel of one changes, repeats or loses no token of another.

Each disturbed run writes down who was in each finished step, and with how much; an undisturbed run then makes the
same steps. Whoever was not cancelled must have said the same, to the token. And what slots hold of earlier
sequences gives the same answers as an empty slot.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.messages import Submit
from infervisor.worker.engine import Broken, Prefilled, Sampled
from infervisor.worker.engines.llama.engine import LlamaEngine
from tests.helpers.engine_models import answer, no_progress, open_in, request, run
from tests.helpers.gemma import gemma_model
from tests.helpers.models import smollm2_path

pytestmark = pytest.mark.real_model

MODELS: dict[str, Callable[[], Path]] = {"smollm2": smollm2_path, "gemma": gemma_model}
PROMPTS = (
    "Once upon a time there was a",
    "The three primary colours are",
    "1, 2, 3, 5, 8, 13,",
    "The harbour lay still under the morning fog, and the boats had not gone out. " * 3,
)
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
STEPS = 24
PATIENCE_S = 60.0
Step = tuple[list[int], list[int]]
"""Who was in it, and how many tokens each of them might read or compute."""


def load(model: str, **options: Any) -> LlamaEngine:
    engine = LlamaEngine()
    engine.load(str(MODELS[model]()), {"threads": 2, "n_ctx": 1024, "slots": 4, **options}, no_progress)
    return engine


@dataclass
class Run:
    """Four sequences in one engine. steps: those that were finished."""

    engine: LlamaEngine
    said: dict[int, list[int]] = field(default_factory=dict)
    reading: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)

    def open(self, slot: int, submit: Submit) -> None:
        open_in(self.engine, slot, submit)
        self.said[slot] = []
        self.reading.add(slot)

    def step(self, slots: list[int], most: list[int]) -> bool:
        """Make a step; return whether it was finished."""
        outcomes = self.engine.step(slots, most)
        if outcomes is None:
            return False
        self.steps.append((slots, most))
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, Prefilled):
                if outcome.done_tokens >= outcome.total_tokens:
                    self.reading.discard(slot)
            else:
                assert isinstance(outcome, Sampled)
                self.said[slot].append(outcome.token)
        return True

    def cut_a_step(self, slots: list[int], most: list[int], after_s: float) -> None:
        """Make steps until an interrupt from another thread cuts one."""
        for attempt in range(100):
            timer = threading.Timer(after_s * 0.8**attempt, self.engine.interrupt)
            timer.start()
            finished = self.step(slots, most)
            timer.join(PATIENCE_S)
            self.engine.clear_interrupt()
            if not finished:
                return
        pytest.fail("no step was cut")

    def leave(self, slot: int) -> None:
        self.engine.release(slot)
        self.said.pop(slot, None)
        self.reading.discard(slot)

    def leave_all(self) -> None:
        for slot in list(self.said):
            self.leave(slot)


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    """Return each model under its default recipe, nothing taken over from earlier sequences."""
    loaded = load(request.param, prefix_reuse=False)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_cancel_in_a_shared_decode_changes_nobody_else(engine: LlamaEngine, seed: int) -> None:
    chance = random.Random(seed)
    disturbed = Run(engine)
    for slot, prompt in enumerate(PROMPTS):
        disturbed.open(slot, request(prompt))
    victim, when = chance.randrange(4), chance.randrange(2, STEPS - 4)
    for number in range(STEPS):
        slots = list(disturbed.said)
        if number == when:
            disturbed.cut_a_step(slots, [64] * 4, chance.uniform(0.0005, 0.01))
            disturbed.leave(victim)
            slots.remove(victim)
        assert disturbed.step(slots, [64] * len(slots))
    others = dict(disturbed.said)
    disturbed.leave_all()

    undisturbed = Run(engine)
    for slot, prompt in enumerate(PROMPTS):
        undisturbed.open(slot, request(prompt))
    for slots, most in disturbed.steps:
        if victim in undisturbed.said and victim not in slots:
            undisturbed.leave(victim)
        assert undisturbed.step(slots, most)
    assert undisturbed.said == others
    assert all(len(tokens) >= STEPS - 3 for tokens in others.values())
    undisturbed.leave_all()


def test_a_cancel_inside_a_prompt_beside_streams_changes_nobody_else(engine: LlamaEngine) -> None:
    disturbed = Run(engine)
    for slot, prompt in enumerate(PROMPTS[:3]):
        disturbed.open(slot, request(prompt))
    while disturbed.reading:
        assert disturbed.step([0, 1, 2], [64] * 3)
    disturbed.open(3, request(LONG))
    assert disturbed.step([0, 1, 2, 3], [1, 1, 1, 32])
    disturbed.cut_a_step([0, 1, 2, 3], [1, 1, 1, 64], 0.03)
    disturbed.leave(3)
    for _ in range(12):
        assert disturbed.step([0, 1, 2], [1] * 3)
    others = dict(disturbed.said)
    disturbed.leave_all()

    undisturbed = Run(engine)
    for slot, prompt in enumerate(PROMPTS[:3]):
        undisturbed.open(slot, request(prompt))
    for slots, most in disturbed.steps:
        if 3 in slots and 3 not in undisturbed.said:
            undisturbed.open(3, request(LONG))
        assert undisturbed.step(slots, most)
    undisturbed.leave(3)
    assert undisturbed.said == others
    undisturbed.leave_all()


def test_a_window_that_lost_cells_is_read_again_and_goes_on_right() -> None:
    engine = load("gemma", reproducible=True, swa_full=False, prefix_reuse=False)
    try:
        # Beyond the window of 512 tokens, so that a roll-back needs cells that are gone.
        prompt = LONG * 3
        whole = answer(engine, request(prompt), 12).tokens
        cut = Run(engine)
        cut.open(0, request(prompt))
        cut.open(1, request(PROMPTS[0]))
        while cut.reading:
            assert cut.step([0, 1], [32, 32] if 0 in cut.reading else [1, 32])
        for _ in range(3):
            assert cut.step([0, 1], [1, 1])
        cut.cut_a_step([0, 1], [1, 1], 0.005)
        cut.leave(1)
        while len(cut.said[0]) < 12:
            assert cut.step([0], [32])
        assert cut.said[0][:12] == whole
        cut.leave_all()
    finally:
        engine.close()


# --- what slots hold ------------------------------------------------------------------------------------

SYSTEM = "You are a helpful assistant in a harbour town, and you answer in one short sentence. " * 6
FIRST = SYSTEM + "Once upon a time there was a"
OTHER = SYSTEM + "The three primary colours are"


@pytest.fixture(scope="module", params=MODELS)
def exact(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    """Return each model under the reproducible recipe, with prefix reuse."""
    loaded = load(request.param, reproducible=True)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def cold(exact: LlamaEngine) -> dict[str, list[int]]:
    """Return the answers of an empty slot; all slots are then full of something else."""
    answers = {}
    for prompt in (FIRST, OTHER):
        answers[prompt] = answer(exact, request(prompt), 16).tokens
        forget_all(exact)
    return answers


def forget_all(engine: LlamaEngine) -> None:
    """Fill all slots with something that no prompt here begins with."""
    for slot in range(4):
        answer(engine, request(f"{slot} is a number, and"), 1, slot)


def ask(engine: LlamaEngine, prompt: str, slots: list[int]) -> tuple[list[int], int, int]:
    """Return the answer, its slot, and how many tokens needn't be read."""
    submit = request(prompt)
    opened = engine.open(slots, submit, engine.prepare(submit))
    said = run(engine, opened.slot, 16)
    engine.release(opened.slot)
    return said.tokens, opened.slot, opened.cached_tokens + sum(each.copied_tokens for each in said.prefills)


def test_the_next_turn_goes_on_in_its_slot(exact: LlamaEngine, cold: dict[str, list[int]]) -> None:
    forget_all(exact)
    _, slot, cached = ask(exact, FIRST, [0, 1, 2, 3])
    assert cached == 0
    assert ask(exact, FIRST, [0, 1, 2, 3]) == (cold[FIRST], slot, cached_of(exact, FIRST))


def cached_of(engine: LlamaEngine, prompt: str) -> int:
    """Return how much of a prompt can be taken over: whole slices of all but its last token."""
    return (len(engine.prepare(request(prompt)).tokens) - 1) // 32 * 32


def test_a_shared_beginning_is_copied_from_a_running_slot(
    exact: LlamaEngine, cold: dict[str, list[int]]
) -> None:
    forget_all(exact)
    open_in(exact, 2, request(FIRST))
    run(exact, 2, 2)
    tokens, slot, cached = ask(exact, OTHER, [0, 1, 3])
    assert tokens == cold[OTHER]
    assert slot != 2
    assert cached >= 64
    assert run(exact, 2, 14).tokens == cold[FIRST][2:16]
    exact.release(2)


def test_who_waits_for_a_leader_answers_right_though_the_leader_is_cancelled(
    exact: LlamaEngine, cold: dict[str, list[int]]
) -> None:
    forget_all(exact)
    leader, follower = request(FIRST), request(OTHER)
    opened = exact.open([0, 1, 2, 3], leader, exact.prepare(leader))
    assert opened.after is None
    waiting = exact.open(
        [slot for slot in range(4) if slot != opened.slot], follower, exact.prepare(follower)
    )
    assert waiting.after is not None
    assert waiting.after[0] == opened.slot
    # It is cut in its second slice, and goes.
    assert exact.step([opened.slot], [32]) is not None
    exact.interrupt()
    assert exact.step([opened.slot], [32]) is None
    exact.clear_interrupt()
    exact.release(opened.slot)
    said = run(exact, waiting.slot, 16)
    exact.release(waiting.slot)
    assert said.tokens == cold[OTHER]
    assert sum(each.copied_tokens for each in said.prefills) == 32


def test_after_a_failed_step_nothing_is_taken_over(
    exact: LlamaEngine, cold: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_all(exact)
    open_in(exact, 0, request(FIRST))
    run(exact, 0, 2)

    def fail(*_: Any, **__: Any) -> bool:
        raise RuntimeError("llama_decode failed")

    with monkeypatch.context() as patched:
        patched.setattr(exact._loaded.decoder, "decode", fail)
        with pytest.raises(RuntimeError):
            exact.step([0])
    exact.release(0)
    tokens, _, cached = ask(exact, FIRST, [0, 1, 2, 3])
    assert (tokens, cached) == (cold[FIRST], 0)


def saved(engine: LlamaEngine, prompt: str) -> tuple[bytearray, int]:
    """Return a snapshot of a prompt with one token said, and how many tokens it holds; slots are full of others."""
    open_in(engine, 0, request(prompt))
    run(engine, 0, 1)
    count, memory = engine.tokens_in_memory(0), bytearray(engine.snapshot_bytes(0))
    assert engine.save(0, memoryview(memory)) == len(memory) > 0
    engine.release(0)
    forget_all(engine)
    return memory, count


def resumed(prompt: str, said: list[int]) -> Submit:
    """Return the request of somebody who has heard the first token."""
    return request(prompt, delivered=said[:1])


def test_a_snapshot_outlasts_the_copy_that_its_slot_was_to_get(
    exact: LlamaEngine, cold: dict[str, list[int]]
) -> None:
    # llama.cpp only notes a copy, and makes it in the next decode.
    memory, count = saved(exact, OTHER)
    open_in(exact, 0, request(FIRST))
    run(exact, 0, 2)
    submit = resumed(OTHER, cold[OTHER])
    opened = exact.open([1, 2, 3], submit, exact.prepare(submit))
    assert 0 < opened.cached_tokens < count, "nothing is copied, or more than the snapshot has"
    assert exact.restore(opened.slot, memoryview(memory), count)
    assert run(exact, opened.slot, 15).tokens == cold[OTHER][1:16]
    assert run(exact, 0, 14).tokens == cold[FIRST][2:16]
    exact.release(opened.slot)
    exact.release(0)


def test_a_snapshot_restored_over_the_source_of_a_copy_leaves_the_copy_right(
    exact: LlamaEngine, cold: dict[str, list[int]]
) -> None:
    other = PROMPTS[3]
    whole = answer(exact, request(other), 16).tokens
    memory, count = saved(exact, other)
    answer(exact, request(FIRST), 2)
    follower = request(OTHER)
    opened = exact.open([1], follower, exact.prepare(follower))
    assert opened.cached_tokens > 0
    open_in(exact, 0, resumed(other, whole))
    assert exact.restore(0, memoryview(memory), count)
    assert run(exact, 1, 16).tokens == cold[OTHER]
    assert run(exact, 0, 15).tokens == whole[1:16]
    exact.release(0)
    exact.release(1)


def test_what_is_copied_is_saved_only_when_it_is_there(
    exact: LlamaEngine, cold: dict[str, list[int]]
) -> None:
    forget_all(exact)
    open_in(exact, 0, request(FIRST))
    run(exact, 0, 2)
    follower = request(OTHER)
    slot = exact.open([1], follower, exact.prepare(follower)).slot
    memory = memoryview(bytearray(1 << 24))
    assert (exact.snapshot_bytes(slot), exact.save(slot, memory)) == (0, 0)
    exact.step([slot], [32])
    assert exact.save(slot, memory) == exact.snapshot_bytes(slot) > 0
    exact.release(slot)
    exact.release(0)


def test_a_prompt_that_fails_ends_nobody_else(
    exact: LlamaEngine, cold: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_all(exact)
    open_in(exact, 0, request(FIRST))
    said = run(exact, 0, 2).tokens
    open_in(exact, 1, request("Something else entirely, which is never read"))

    def fail(*_: Any) -> tuple[int, bool]:
        raise RuntimeError("llama_decode failed")

    with monkeypatch.context() as patched:
        patched.setattr(exact._loaded.decoder, "prefill", fail)
        outcomes = exact.step([0, 1], [1, 32])
    assert outcomes is not None
    assert isinstance(outcomes[0], Sampled)
    assert isinstance(outcomes[1], Broken)
    exact.release(1)
    rest = run(exact, 0, 13).tokens
    exact.release(0)
    assert [*said, outcomes[0].token, *rest] == cold[FIRST]


def test_switched_off_nothing_is_taken_over() -> None:
    engine = load("smollm2", prefix_reuse=False)
    try:
        for _ in range(2):
            assert ask(engine, FIRST, [0, 1])[2] == 0
    finally:
        engine.close()


def test_by_default_the_answer_is_taken_over_too() -> None:
    engine = load("smollm2")
    try:
        submit = request(FIRST)
        opened = engine.open([0, 1, 2, 3], submit, engine.prepare(submit))
        said = run(engine, opened.slot, 16)
        engine.release(opened.slot)
        turn = FIRST + said.text + " And now something else."
        assert ask(engine, turn, [0, 1, 2, 3])[2] > opened.prompt_tokens
    finally:
        engine.close()
