"""The scripted engine meets the contract and says the same whatever the timing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import Sampling
from infervisor.worker.engine import LoadRefused, ModelFacts, Prefilled, Sampled
from infervisor.worker.engines import create_engine
from infervisor.worker.engines.scripted.engine import ScriptedEngine
from infervisor.worker.engines.scripted.faults import KINDS, Fault
from tests.helpers.engine_models import open_in
from tests.helpers.raw_worker import submit

PATIENCE_S = 20.0
GREEDY = Sampling(temperature=0)


def load(**options: Any) -> ScriptedEngine:
    engine = create_engine("scripted")
    assert isinstance(engine, ScriptedEngine)
    facts = engine.load(None, options, lambda phase, fraction: None)
    assert isinstance(facts, ModelFacts)
    return engine


def say(engine: ScriptedEngine, slot: int, count: int) -> str:
    """Return the text of at most `count` tokens; the end token shows as ‖."""
    text = b""
    while count:
        outcomes = engine.step([slot])
        assert outcomes is not None
        (outcome,) = outcomes
        if isinstance(outcome, Sampled):
            count -= 1
            if outcome.end:
                return text.decode() + "‖"
            text += outcome.data
    return text.decode()


def answer(
    prompt: str = "one two three", count: int = 50, sampling: Sampling = GREEDY, seed: int = 1, **options: Any
) -> str:
    engine = load(**options)
    open_in(engine, 0, submit(1, prompt, sampling=sampling, seed=seed))
    return say(engine, 0, count)


def test_it_counts_by_default() -> None:
    assert answer(count=4) == "w0 w1 w2 w3 "


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokens": ["a", "b"]}, "ab‖"),
        ({"tokens": ["a", "b"], "end": "cycle"}, "ab" * 3),
        ({"tokens": [b"\xf0\x9f", b"\xa6\x99"]}, "🦙‖"),
        ({"text": "to be or"}, "to be or‖"),
        ({"text": "ü🦙", "split": "characters"}, "ü🦙‖"),
        ({"text": "ü🦙", "split": "bytes"}, "ü🦙‖"),
        ({"mode": "echo"}, "one two three‖"),
        ({"tokens": []}, "‖"),
    ],
)
def test_it_says_what_it_was_told(options: dict[str, Any], expected: str) -> None:
    assert answer(count=7, **options)[: len(expected)] == expected


def test_a_step_gives_several_tokens_where_that_is_asked_for_and_allowed() -> None:
    engine = load(text="a b c d e", step_tokens=3)
    open_in(engine, 0, submit(1, "one", sampling=GREEDY, seed=1))
    assert engine.step([0], [10]) == [Prefilled(1, 1)]

    def several(most: int) -> list[bytes]:
        ((*outcome,),) = engine.step([0], [most]) or pytest.fail("cut")  # type: ignore[misc]
        return [sampled.data if not sampled.end else b"end" for sampled in outcome]

    assert several(2) == [b"a", b" b"]
    assert several(10) == [b" c", b" d", b" e"]
    assert several(10) == [b"end"]


def test_where_a_fault_is_planned_a_step_gives_one_token_so_that_it_comes_in_its_place() -> None:
    engine = load(text="a b", step_tokens=3, faults=[{"at": "decode", "after": 1, "kind": "raise"}])
    open_in(engine, 0, submit(1, "one", sampling=GREEDY, seed=1))
    engine.step([0], [10])
    assert engine.step([0], [10]) == [Sampled(0, b"a")]
    with pytest.raises(RuntimeError):
        engine.step([0], [10])


def test_random_words_depend_on_seed_and_index_alone() -> None:
    hot = Sampling(temperature=1)
    first = answer(mode="random", sampling=hot, seed=7, count=5)
    assert first == answer(mode="random", sampling=hot, seed=7, count=5, prompt="other")
    assert first != answer(mode="random", sampling=hot, seed=8, count=5)
    assert answer(mode="random", count=2) == "w0 w1 "


def test_a_resumed_answer_goes_on_where_it_was() -> None:
    engine = load(text="a b c d")
    open_in(engine, 0, submit(1, delivered=(0, 1)))
    assert say(engine, 0, 9) == " c d‖"


def test_slots_do_not_mix() -> None:
    engine = load(mode="echo", slots=2)
    open_in(engine, 0, submit(1, "a b c"))
    open_in(engine, 1, submit(2, "x y z"))
    engine.step([0, 1])
    said = [engine.step([0, 1]) for _ in range(3)]
    pieces = [[outcome.data for outcome in step or () if isinstance(outcome, Sampled)] for step in said]
    assert pieces == [[b"a", b"x"], [b" b", b" y"], [b" c", b" z"]]


def test_a_prompt_is_read_in_slices() -> None:
    engine = load(prefill_tokens_per_s=1000, slice_s=0.004)
    opened = open_in(engine, 0, submit(1, "w " * 10))
    assert opened.prompt_tokens == 10
    done = [engine.step([0]) for _ in range(3)]
    assert done == [[Prefilled(4, 10)], [Prefilled(8, 10)], [Prefilled(10, 10)]]
    assert isinstance((engine.step([0]) or [None])[0], Sampled)


@pytest.mark.parametrize("options", [{"prefill_s": 3600, "slice_s": 3600}, {"pace_s": 3600}])
def test_an_interrupt_ends_a_wait_and_changes_nothing(options: dict[str, Any]) -> None:
    engine = load(**options)
    open_in(engine, 0, submit(1))
    if "pace_s" in options:
        engine.step([0])  # the prompt
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(engine.step([0])))
    thread.start()
    engine.interrupt()
    thread.join(PATIENCE_S)
    assert results == [None]
    engine.clear_interrupt()
    engine.release(0)
    open_in(engine, 0, submit(2))


def test_an_engine_without_abort_ends_its_step() -> None:
    engine = load(abort="none")
    open_in(engine, 0, submit(1))
    engine.interrupt()
    assert engine.step([0]) == [Prefilled(3, 3)]


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    engine = load(context_tokens=4)
    with pytest.raises(InvalidRequest, match=r"4 tokens.*4") as caught:
        open_in(engine, 0, submit(1, "a b c d"))
    assert caught.value.field == "prompt"
    assert open_in(engine, 0, submit(2, "a b c")).prompt_tokens == 3


def test_an_empty_prompt_has_one_token() -> None:
    assert open_in(load(), 0, submit(1, "")).prompt_tokens == 1


def test_equal_scripts_have_equal_fingerprints() -> None:
    def fingerprint(**options: Any) -> str:
        return ScriptedEngine().load(None, options, lambda phase, fraction: None).fingerprint

    assert fingerprint(text="a", pace_s=1) == fingerprint(text="a")
    assert fingerprint(text="a") != fingerprint(text="b")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speed": 1}, "speed"),
        ({"pace_s": -1}, "pace_s"),
        ({"pace_s": "fast"}, "pace_s"),
        ({"pace_s": float("nan")}, "pace_s"),
        ({"slots": 0}, "slots"),
        ({"slots": True}, "slots"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [1]}, "tokens"),
        ({"tokens": ["a"], "text": "a"}, "exclude"),
        ({"text": 5}, "text"),
        ({"mode": "shout"}, "mode"),
        ({"abort": "never"}, "never"),
        ({"faults": ["exit"]}, "mapping"),
        ({"faults": [{"at": "decode"}]}, "kind"),
        ({"faults": [{"at": "noon", "kind": "exit"}]}, "at of a fault"),
        ({"faults": [{"at": "decode", "kind": "exit", "often": 1}]}, "often"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadRefused, match=named) as caught:
        load(**options)
    assert caught.value.permanent


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(LoadRefused, match="known engines: llama, scripted"):
        create_engine("oracle")


# --- faults that this process survives ---------------------------------------------------------------


def test_a_fault_waits_for_its_moment_and_its_prompt() -> None:
    fault = {"at": "decode", "after": 2, "kind": "raise", "prompt_contains": "bomb", "message": "boom"}
    engine = load(faults=[fault], slots=2)
    open_in(engine, 0, submit(1, "no danger"))
    open_in(engine, 1, submit(2, "a bomb"))
    assert say(engine, 0, 5) == "w0 w1 w2 w3 w4 "
    assert say(engine, 1, 2) == "w0 w1 "
    with pytest.raises(RuntimeError, match="boom"):
        engine.step([1])


def test_a_fault_with_a_file_happens_once(tmp_path: Path) -> None:
    fault = {
        "at": "load",
        "kind": "load_refused",
        "once_file": str(tmp_path / "done"),
        "code": "x",
        "permanent": False,
    }
    with pytest.raises(LoadRefused) as caught:
        load(faults=[fault])
    assert (caught.value.code, caught.value.permanent) == ("x", False)
    load(faults=[fault])


def test_a_fault_counts_requests_when_opening() -> None:
    engine = load(faults=[{"at": "open", "after": 1, "kind": "raise"}])
    open_in(engine, 0, submit(1))
    engine.release(0)
    with pytest.raises(RuntimeError):
        open_in(engine, 0, submit(2))


def test_every_kind_can_be_planned() -> None:
    for kind in KINDS:
        assert Fault.from_mapping({"at": "decode", "kind": kind}).kind == kind
