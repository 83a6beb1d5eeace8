"""What `worker.engine.Engine` promises, asked of every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infervisor.protocol.codec import encode
from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.messages import Ready, Submit
from infervisor.worker.engine import AbortGranularity, Engine, LoadRefused, ModelFacts, Prefilled, Sampled
from infervisor.worker.engines import create_engine
from tests.helpers.engine_models import Answer, EngineCase, answer, no_progress, open_in, request, run

Load = Callable[..., tuple[Engine, ModelFacts]]


def test_load_reports_each_phase_in_order(case: EngineCase, load: Load) -> None:
    seen: list[tuple[str, float]] = []
    engine = create_engine(case.engine)
    path = load()[1].extra.get("model_path")
    engine.load(path, case.options, lambda phase, fraction: seen.append((phase, fraction)))
    engine.close()
    phases = list(dict.fromkeys(phase for phase, _ in seen))
    assert phases == ["import", "load", "warm_up"]
    for phase in phases:
        fractions = [fraction for name, fraction in seen if name == phase]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        assert all(0.0 <= fraction <= 1.0 for fraction in fractions)


def test_facts_are_complete_and_can_travel(loaded: tuple[Engine, ModelFacts], case: EngineCase) -> None:
    facts = loaded[1]
    assert facts.engine == case.engine
    assert facts.library
    assert facts.fingerprint
    assert facts.context_tokens > 0
    assert facts.vocabulary_tokens > 0
    assert facts.slots == 2
    assert isinstance(facts.abort, AbortGranularity)
    assert encode(Ready(1, facts.fingerprint, dict(facts.extra)))


def test_same_load_has_the_same_fingerprint(load: Load) -> None:
    assert load()[1].fingerprint == load()[1].fingerprint


def test_greedy_text_is_exact(engine: Engine, case: EngineCase) -> None:
    for prompt, expected in case.prompts.items():
        first = answer(engine, request(prompt), case.max_tokens)
        again = answer(engine, request(prompt), case.max_tokens)
        assert first.tokens == again.tokens
        assert first.tokens
        if expected is not None:
            assert first.text == expected


def test_prefill_grows_until_all_is_read(engine: Engine, case: EngineCase) -> None:
    for prompt in case.prompts:
        opened = open_in(engine, 0, request(prompt))
        said = run(engine, 0, 1)
        engine.release(0)
        done = [prefilled.done_tokens for prefilled in said.prefills]
        assert done == sorted(set(done))
        assert done[-1] == opened.prompt_tokens
        assert {prefilled.total_tokens for prefilled in said.prefills} == {opened.prompt_tokens}


def test_step_gives_one_token_a_slot_in_the_order_asked(engine: Engine, case: EngineCase) -> None:
    alone = [answer(engine, request(prompt), 6) for prompt in case.prompts]
    for slot, prompt in enumerate(case.prompts):
        open_in(engine, slot, request(prompt))
    said = [Answer(), Answer()]
    order = [0, 1]
    while any(not one.ended and len(one.tokens) < 6 for one in said):
        members = [slot for slot in order if not said[slot].ended and len(said[slot].tokens) < 6]
        outcomes = engine.step(members)
        assert outcomes is not None
        assert len(outcomes) == len(members)
        for slot, outcome in zip(members, outcomes, strict=True):
            said[slot].take(outcome)
        order.reverse()
    for slot in (0, 1):
        engine.release(slot)
    assert [one.tokens for one in said] == [one.tokens for one in alone]


def test_a_step_gives_no_more_tokens_than_are_allowed(engine: Engine, case: EngineCase) -> None:
    for prompt in case.prompts:
        alone = answer(engine, request(prompt), 6)
        open_in(engine, 0, request(prompt))
        said = Answer()
        most = 1
        while not said.ended and len(said.tokens) < len(alone.tokens):
            (outcome,) = engine.step([0], [most]) or pytest.fail("cut")
            several = [outcome] if isinstance(outcome, (Prefilled, Sampled)) else list(outcome)
            assert 1 <= len(several) <= most
            for one in several:
                assert not said.ended, "nothing follows an end token"
                said.take(one)
            most = 1 + most % 3
        engine.release(0)
        assert said.tokens[: len(alone.tokens)] == alone.tokens


def test_interrupted_steps_lose_and_gain_nothing(engine: Engine, case: EngineCase) -> None:
    if case.options.get("abort", AbortGranularity.NODE) != AbortGranularity.NODE:
        pytest.skip("this engine's steps can't be cut")
    for prompt in case.prompts:
        alone = answer(engine, request(prompt), 5)
        open_in(engine, 0, request(prompt))
        said = Answer()
        while not said.ended and len(said.tokens) < 5:
            engine.interrupt()
            assert engine.step([0]) is None
            engine.clear_interrupt()
            outcomes = engine.step([0])
            assert outcomes is not None
            said.take(outcomes[0])
        engine.release(0)
        assert said.tokens == alone.tokens


def test_interrupt_between_steps_is_forgotten_when_cleared(engine: Engine, case: EngineCase) -> None:
    open_in(engine, 0, request(next(iter(case.prompts))))
    engine.interrupt()
    engine.clear_interrupt()
    assert engine.step([0]) is not None
    engine.release(0)


def test_released_slot_serves_the_next_request_exactly(engine: Engine, case: EngineCase) -> None:
    short, long = case.prompts
    alone = answer(engine, request(short), 5)
    for steps in range(4):
        open_in(engine, 0, request(long))
        for _ in range(steps):
            engine.step([0])
        engine.release(0)
        assert answer(engine, request(short), 5).tokens == alone.tokens


def test_cut_prefill_leaves_nothing_to_the_next_request(engine: Engine, case: EngineCase) -> None:
    short, long = case.prompts
    alone = answer(engine, request(short), 5)
    open_in(engine, 0, request(long))
    engine.interrupt()
    assert engine.step([0]) is None
    engine.clear_interrupt()
    engine.release(0)
    assert answer(engine, request(short), 5).tokens == alone.tokens


def test_a_neighbour_is_untouched_by_a_cut_prefill(engine: Engine, case: EngineCase) -> None:
    short, long = case.prompts
    alone = answer(engine, request(short), 5)
    open_in(engine, 0, request(short))
    said = Answer()
    while not said.tokens:
        said.take((engine.step([0]) or pytest.fail("cut"))[0])
    open_in(engine, 1, request(long))
    engine.interrupt()
    assert engine.step([1]) is None
    engine.clear_interrupt()
    engine.release(1)
    while not said.ended and len(said.tokens) < 5:
        said.take((engine.step([0]) or pytest.fail("cut"))[0])
    engine.release(0)
    assert said.tokens == alone.tokens


def test_resumed_answer_goes_on_after_the_delivered_tokens(engine: Engine, case: EngineCase) -> None:
    for prompt in case.prompts:
        whole = answer(engine, request(prompt), 6)
        for kept in range(1, len(whole.tokens) - 1):
            rest = answer(engine, request(prompt, delivered=whole.tokens[:kept]), 6 - kept)
            assert rest.tokens == whole.tokens[kept:]


def test_seed_alone_decides_random_answers(engine: Engine, case: EngineCase) -> None:
    prompt = next(iter(case.prompts))
    loose: dict[str, Any] = {"temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    said = [answer(engine, request(prompt, seed=seed, **loose), 5).tokens for seed in (7, 7, 8, 9, 10)]
    assert said[0] == said[1]
    if case.engine == "llama":
        assert len({tuple(tokens) for tokens in said}) > 1


BAD_REQUESTS = {
    "temperature": lambda good: _with(good, sampling={**good.sampling, "temperature": -1}),
    "unknown sampling option": lambda good: _with(good, sampling={**good.sampling, "no_such": 1}),
}


def _with(submit: Submit, **changes: Any) -> Submit:
    values = {name: getattr(submit, name) for name in Submit.__slots__} | changes
    return Submit(**values)


@pytest.mark.parametrize("fault", BAD_REQUESTS)
def test_invalid_request_leaves_the_slot_free(engine: Engine, case: EngineCase, fault: str) -> None:
    good = request(next(iter(case.prompts)))
    with pytest.raises(InvalidRequest):
        open_in(engine, 0, BAD_REQUESTS[fault](good))
    assert answer(engine, good, 3).tokens


def test_prompt_must_leave_room_for_an_answer(case: EngineCase, load: Load) -> None:
    engine, facts = load(**case.context_options)
    with pytest.raises(InvalidRequest) as refused:
        open_in(engine, 0, request(case.long_prompt))
    assert refused.value.field == "prompt"
    assert str(facts.context_tokens) in str(refused.value)
    assert answer(engine, request(next(iter(case.prompts))), 3).tokens


def test_unknown_options_are_refused_by_name(case: EngineCase, load: Load) -> None:
    with pytest.raises(LoadRefused, match="no_such_option") as refused:
        load(no_such_option=1)
    assert "slots" in str(refused.value)
    assert refused.value.permanent


def test_close_twice_does_nothing(load: Load) -> None:
    engine, _ = load()
    engine.close()
    engine.close()


def test_close_with_an_open_slot(case: EngineCase, load: Load) -> None:
    engine, _ = load()
    open_in(engine, 0, request(next(iter(case.prompts))))
    engine.step([0])
    engine.close()


def test_refused_load_can_be_closed(case: EngineCase) -> None:
    engine = create_engine(case.engine)
    with pytest.raises(LoadRefused):
        engine.load(None, {"no_such_option": 1}, no_progress)
    engine.close()


def test_resumed_random_answer_draws_on_where_it_was(engine: Engine, case: EngineCase) -> None:
    prompt = next(iter(case.prompts))
    loose: dict[str, Any] = {
        "temperature": 100.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.3,
    }
    whole = answer(engine, request(prompt, **loose), 6)
    rest = answer(engine, request(prompt, delivered=whole.tokens[:3], **loose), len(whole.tokens) - 3)
    assert rest.tokens == whole.tokens[3:]
