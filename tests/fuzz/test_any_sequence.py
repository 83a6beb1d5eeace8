"""Whatever a worker says, in whatever order: what must hold on the parent's side holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from infervisor import EndReason
from infervisor.protocol.machines.process import DeathCause
from tests.fuzz.grammar import embedding, proper_scripts, scripts, serving
from tests.fuzz.parent_side import DIMENSIONS, KINDS, ParentSide, harness
from tests.fuzz.script import Do, Step, bytes_of, step, steps_of

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())
Harness = Any

# Always the same examples: what is new is looked for by `make fuzz`, and never by a test that others wait for.
same = settings(derandomize=True, deadline=None, phases=[Phase.generate, Phase.shrink])


@pytest.fixture(scope="module")
def one() -> Iterator[Harness]:
    with harness() as one:
        yield one


def proper(kind: str, which: int = 0, count: int = 0) -> Step:
    return step(Do.PROPER, KINDS.index(kind), which, count)


def run(one: Any, steps: list[Step]) -> ParentSide:
    context: AbstractContextManager[ParentSide] = one()
    with context as side:
        side.run(steps)
        side.conclude()
    return side


@settings(same, max_examples=800)
@given(steps=scripts)
def test_no_sequence_of_frames_hangs_a_stream_piles_up_or_raises_anything_unexpected(
    one: Harness, steps: list[Step]
) -> None:
    run(one, steps)


@settings(same, max_examples=500)
@given(steps=proper_scripts)
def test_a_worker_that_keeps_the_rules_is_never_accused_of_breaking_them(
    one: Harness, steps: list[Step]
) -> None:
    side = run(one, steps)
    assert not side.errors
    assert DeathCause.PROTOCOL_ERROR not in side.causes


def test_scripts_reach_embeddings_queries_calls_and_log_probabilities(one: Harness) -> None:
    vectors, answered, taken = proper("vectors", 0, 1), proper("answered"), step(Do.TAKE, 0, 40)
    embedded = run(one, [*embedding(4, 0), vectors, answered, vectors, proper("ended"), proper("released")])
    assert [len(vector) for vector in embedded.streams[0].request.vectors] == [DIMENSIONS] * 4
    assert embedded.streams[0].request.state.reason is EndReason.STOP
    assert [query.value for _, query in embedded.queries] == ["text"]
    called = run(one, [*serving(63, 0, 6), proper("tokens", 0, 63), taken, proper("ended"), taken])
    assert len(called.streams[0].stream.tool_calls) > 1
    assert not embedded.errors
    assert not called.errors


@settings(same, max_examples=30)
@given(steps=scripts)
def test_a_script_is_the_same_after_bytes(steps: list[Step]) -> None:
    assert list(steps_of(bytes_of(steps))) == steps


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_a_fuzzer_once_found_interesting_holds(one: Harness, path: Path) -> None:
    run(one, list(steps_of(path.read_bytes())))


def test_the_corpus_is_there_and_small() -> None:
    assert CORPUS
    assert sum(path.stat().st_size for path in CORPUS) < 200_000
