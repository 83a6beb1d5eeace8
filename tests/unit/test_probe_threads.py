"""Which numbers of threads `supervise probe` tries, and what it says about what it measured."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from infervisor import Supervisor
from infervisor.supervisor.cli.probe_threads import (
    NotHere,
    Rate,
    compare,
    recommended,
    threads_to_try,
    verdict,
)


@pytest.mark.parametrize(
    ("cores", "current", "tried"),
    [
        (1, 1, [1]),
        (2, 2, [2, 1]),
        (2, 1, [2, 1]),
        (8, 8, [8, 4, 1]),
        (8, 2, [8, 4, 2, 1]),
        (4, 16, [16, 4, 2, 1]),
    ],
)
def test_at_most_four_numbers_are_tried(cores: int, current: int, tried: list[int]) -> None:
    assert threads_to_try(cores, current) == tried


IDLE = [Rate(2, 295.0, 123.0, 0.1), Rate(1, 172.0, 90.0, 0.0)]
"""Measured on two cores, nobody else there, and below beside a busy process."""
BUSY = [Rate(2, 178.0, 36.0, 1.0), Rate(1, 169.0, 90.0, 0.9)]


def test_what_is_clearly_better_is_recommended() -> None:
    assert recommended(IDLE, 1) == 2
    assert recommended(BUSY, 2) == 1


def test_what_is_as_good_as_the_best_stays() -> None:
    assert recommended(IDLE, 2) is None
    assert recommended([Rate(4, 300.0, 100.0, 0.0), Rate(2, 297.0, 98.0, 0.0)], 4) is None
    assert recommended([Rate(4, 300.0, 100.0, 0.0), Rate(2, 297.0, 98.0, 0.0)], 2) is None


def test_of_equals_the_fewest_threads_are_recommended() -> None:
    equals = [Rate(8, 300.0, 100.0, 0.0), Rate(4, 300.0, 99.0, 0.0), Rate(1, 50.0, 20.0, 0.0)]
    assert recommended(equals, 1) == 4


def test_the_verdict_tells_numbers_and_the_flag() -> None:
    told, figures = verdict(IDLE, 1)
    assert told.startswith("--option threads=2 is better than 1 (")
    assert "2: reads 295, writes 123 tokens/s" in told
    assert figures["recommended_threads"] == 2
    assert figures["rates"][1]["threads"] == 1
    assert verdict(IDLE, 2)[0].startswith("2 is right (")


def test_a_disturbed_measurement_recommends_nothing_and_says_so() -> None:
    told, figures = verdict(BUSY, 2)
    assert told.startswith("other processes kept 1.0 cores busy meanwhile")
    assert "threads=" not in told
    assert figures["recommended_threads"] is None
    assert figures["others_cores"] == 1.0


@pytest.mark.parametrize(
    ("facts", "load_s", "said"),
    [
        ({"engine": "scripted", "extra": {}}, 0.1, "scripted engine has no threads"),
        ({"engine": "llama", "extra": {"cores": 1, "threads": 1}}, 0.1, "one core"),
        ({"engine": "llama", "extra": {"cores": 8, "threads": 8}}, 40.0, r"40.0 s: .*--step-timeout"),
    ],
)
def test_nothing_is_started_where_nothing_can_be_compared(
    facts: dict[str, Any], load_s: float, said: str
) -> None:
    def another(_options: object) -> Supervisor:
        raise AssertionError("no worker may be started")

    async def tried() -> None:
        await compare(facts, another, load_s=load_s, within_s=60.0)

    with pytest.raises(NotHere, match=said):
        anyio.run(tried)
