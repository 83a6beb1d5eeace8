"""When a worker is looked at closely, and what its memory figures lead to. Pure: the clock is passed in."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor import ConfigurationError
from infervisor.supervisor.memory import (
    FULL_COST_FACTOR,
    SETTLE_NS,
    Footprint,
    Grown,
    MemoryWatch,
    Verdict,
    kill_message,
    parse_rollup,
    too_small_message,
    verdict,
)
from infervisor.supervisor.settings import MemoryLimits

S = 1_000_000_000
MIB = 1 << 20
LIMITS = MemoryLimits(soft_bytes=200 * MIB, hard_bytes=300 * MIB)
OLD = SETTLE_NS


# --- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"soft_bytes": 16 * MIB - 1}, r"memory\.soft_bytes.*make it larger"),
        ({"hard_bytes": 1}, r"memory\.hard_bytes.*make it larger"),
        ({"hard_bytes": 0}, r"memory\.hard_bytes must be a whole number"),
        ({"soft_bytes": 1e9}, r"memory\.soft_bytes must be a whole number"),
        ({"soft_bytes": True}, r"memory\.soft_bytes"),
        ({"soft_bytes": 100 * MIB, "hard_bytes": 100 * MIB}, r"hard_bytes.*more than.*soft_bytes.*make it larger"),
        ({"cgroup": True}, r"memory\.cgroup needs memory\.hard_bytes"),
        ({"cgroup": 1, "hard_bytes": 100 * MIB}, r"memory\.cgroup must be true or false"),
    ],
    ids=str,
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(limits: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        MemoryLimits(**limits)  # type: ignore[arg-type]


def test_the_lower_limit() -> None:
    assert MemoryLimits().lowest_bytes is None
    assert LIMITS.lowest_bytes == 200 * MIB
    assert MemoryLimits(hard_bytes=16 * MIB, cgroup=True).lowest_bytes == 16 * MIB


# --- the decision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "fresh", "ready_ns", "now_ns", "decided"),
    [
        (None, None, 0, OLD, None),
        (200, 100, 0, OLD, None),
        (201, 100, 0, OLD, Verdict.RECYCLE),
        (201, 200, 0, OLD, Verdict.RECYCLE),
        (201, 100, 0, OLD - 1, None),
        (201, 201, 0, 1, Verdict.TOO_SMALL),
        (250, 201, 0, OLD, Verdict.TOO_SMALL),
        (300, 100, 0, OLD, Verdict.RECYCLE),
        (301, 100, 0, OLD, Verdict.KILL),
        (301, 301, 0, 1, Verdict.KILL),
        (301, None, None, 1, Verdict.KILL),
        (250, None, None, OLD, None),
    ],
)
def test_what_follows_from_the_figures(
    used: int | None, fresh: int | None, ready_ns: int | None, now_ns: int, decided: Verdict | None
) -> None:
    grown = Grown(ready_ns, None if used is None else used * MIB, None if fresh is None else fresh * MIB)
    assert verdict(grown, LIMITS, now_ns) is decided


def test_one_limit_alone() -> None:
    grown = Grown(0, 1000 * MIB, 1 * MIB)
    assert verdict(grown, MemoryLimits(), OLD) is None
    assert verdict(grown, MemoryLimits(soft_bytes=200 * MIB), OLD) is Verdict.RECYCLE
    assert verdict(grown, MemoryLimits(hard_bytes=200 * MIB), OLD) is Verdict.KILL


# --- a worker's life ---------------------------------------------------------------------------------


def test_a_leak_ends_in_one_replacement_then_in_a_kill() -> None:
    watch = MemoryWatch(LIMITS)
    told = [
        (second, decided)
        for second, used in enumerate(range(100, 320, 2))
        if (decided := watch.take(used * MIB, second * S, ready_ns=2 * S)) is not None
    ]
    # It passes 200 MiB after 51 s, and 300 after 101; a replacement that hasn't come by then is asked for again.
    assert told[:2] == [(51, Verdict.RECYCLE), (81, Verdict.RECYCLE)]
    assert told[2] == (101, Verdict.KILL)


def test_the_first_figure_after_ready_is_what_a_fresh_worker_takes() -> None:
    watch = MemoryWatch(LIMITS)
    watch.take(250 * MIB, 1 * S, ready_ns=None)
    assert watch.grown.fresh_bytes is None, "while it loads, it isn't what it will be"
    assert watch.take(150 * MIB, 2 * S, ready_ns=2 * S) is None
    assert watch.grown.fresh_bytes == 150 * MIB


def test_a_limit_that_no_worker_can_keep_is_told_once() -> None:
    watch = MemoryWatch(LIMITS)
    decided = [watch.take(250 * MIB, second * S, ready_ns=0) for second in range(100)]
    assert decided == [Verdict.TOO_SMALL, *[None] * 99]
    assert "make it larger" in too_small_message(LIMITS, 250 * MIB)
    assert str(LIMITS.soft_bytes) in too_small_message(LIMITS, 250 * MIB)
    assert str(LIMITS.hard_bytes) in kill_message(LIMITS, 400 * MIB)


@given(st.lists(st.integers(0, 200), max_size=60))
def test_nothing_is_decided_below_the_soft_limit(figures: list[int]) -> None:
    watch = MemoryWatch(LIMITS)
    assert [watch.take(used * MIB, at * S, ready_ns=0) for at, used in enumerate(figures)] == [None] * len(
        figures
    )


@pytest.mark.parametrize(
    ("limits", "rss", "cost_ns", "due_ns"),
    [
        (None, 1000, 0, 5 * S),
        (MemoryLimits(), 1000, 0, 5 * S),
        (LIMITS, 200, 0, 5 * S),
        (LIMITS, 201, 0, 1 * S),
        (LIMITS, 201, S // 10, FULL_COST_FACTOR * S // 10),
        (None, 1000, S // 10, FULL_COST_FACTOR * S // 10),
    ],
)
def test_exact_looks_are_paced_by_need_and_cost(
    limits: MemoryLimits | None, rss: int, cost_ns: int, due_ns: int
) -> None:
    watch = MemoryWatch(limits)
    assert watch.is_full_due(7, rss_bytes=0, ready_ns=None)
    watch.take(100 * MIB, 1000, ready_ns=500, cost_ns=cost_ns)
    assert not watch.is_full_due(1000 + due_ns - 1, rss_bytes=rss * MIB, ready_ns=500)
    assert watch.is_full_due(1000 + due_ns, rss_bytes=rss * MIB, ready_ns=500)


def test_a_worker_that_has_just_become_ready_is_looked_at_at_once() -> None:
    watch = MemoryWatch(None)
    watch.take(100 * MIB, 0, ready_ns=None)
    assert not watch.is_full_due(1, rss_bytes=0, ready_ns=None)
    assert watch.is_full_due(1, rss_bytes=0, ready_ns=1)


# --- what the kernel says ----------------------------------------------------------------------------

ROLLUP = """55f00000-7ff00000 ---p 00000000 00:00 0                          [rollup]
Rss:              900 kB
Pss:              700 kB
Pss_Dirty:        112 kB
Pss_Anon:         400 kB
Pss_File:         200 kB
Pss_Shmem:        100 kB
Shared_Clean:     200 kB
Private_Clean:     50 kB
Private_Dirty:    450 kB
Private_Hugetlb:    8 kB
Locked:             0 kB
"""


def test_shared_memory_is_no_part_of_a_footprint() -> None:
    assert parse_rollup(ROLLUP) == Footprint(600 << 10, 408 << 10)
    older = "\n".join(line for line in ROLLUP.splitlines() if "Shmem" not in line)
    assert parse_rollup(older) == Footprint(700 << 10, 508 << 10)


@pytest.mark.parametrize("text", ["", "x\nRss: 5 kB\n"])
def test_what_is_no_rollup_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no Pss"):
        parse_rollup(text)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs /proc/PID/smaps_rollup")
def test_the_kernels_own_text_is_understood() -> None:
    with open("/proc/self/smaps_rollup") as file:
        seen = parse_rollup(file.read())
    assert seen.pss is not None
    assert seen.uss is not None
    assert 1 * MIB < seen.uss <= seen.pss
