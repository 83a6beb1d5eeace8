"""How many threads, while others want the cores: the decision, the watch over it, and the kernel's counts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.worker.engines.llama import threads as module
from infervisor.worker.engines.llama.threads import (
    LOOK_S,
    QUIET_LOOKS,
    STALE_S,
    Choice,
    CoreWatch,
    Sample,
    choose,
    read_sample,
)


def settle(most: int, processors: int, others: float, start: int | None = None) -> list[int]:
    """Return the threads after each of some looks at the same load."""
    choice, seen = Choice(start or most), []
    for _ in range(3 * QUIET_LOOKS):
        choice = choose(choice, most, processors, others)
        seen.append(choice.threads)
    return seen


# --- the decision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "processors", "others", "threads"),
    [
        (2, 2, 0.0, 2), (2, 2, 0.45, 2), (2, 2, 0.6, 1), (2, 2, 1.0, 1), (2, 2, 2.0, 1),
        (8, 8, 0.9, 7), (8, 8, 3.2, 5), (8, 8, 7.9, 1), (8, 8, 40.0, 1),
        (4, 8, 4.4, 4), (4, 8, 5.0, 3), (4, 64, 30.0, 4),
    ],
)  # fmt: skip
def test_never_more_threads_than_processors_left(
    most: int, processors: int, others: float, threads: int
) -> None:
    seen = settle(most, processors, others)
    assert seen == [threads] * len(seen), "one look takes threads away, and then nothing changes"


def test_threads_come_back_after_some_quiet_looks_at_once() -> None:
    assert settle(6, 6, 0.1, start=2)[:QUIET_LOOKS] == [2] * (QUIET_LOOKS - 1) + [6]
    assert settle(6, 6, 2.0, start=2)[QUIET_LOOKS - 1 :] == [4] * (2 * QUIET_LOOKS + 1)


def test_a_busy_look_starts_the_count_again() -> None:
    choice = Choice(1)
    for others in (0.1, 0.1, 1.0, 0.1, 0.1):
        choice = choose(choice, 2, 2, others)
        assert choice.threads == 1
    assert choose(choice, 2, 2, 0.1).threads == 2


def test_a_load_between_the_limits_changes_nothing() -> None:
    for start in (1, 2):
        assert set(settle(2, 2, 0.45, start=start)) == {start}


@given(
    most=st.integers(1, 64), processors=st.integers(1, 128), start=st.integers(1, 64),
    loads=st.lists(st.floats(0, 200), max_size=30),
)  # fmt: skip
def test_any_load_keeps_it_in_range_and_a_constant_one_settles(
    most: int, processors: int, start: int, loads: list[float]
) -> None:
    choice = Choice(min(start, most))
    for others in loads:
        choice = choose(choice, most, processors, others)
        assert 1 <= choice.threads <= most
        assert choice.threads == 1 or choice.threads <= processors - others + module.TOLERATED
    if loads:
        later = settle(most, processors, loads[-1], start=choice.threads)
        assert later[QUIET_LOOKS:] == [later[-1]] * len(later[QUIET_LOOKS:])


def fair_shares(wanted: list[float], processors: int) -> list[float]:
    """Return what each gets of the processors: all of it, or in proportion if that is too much."""
    return [want * min(1.0, processors / sum(wanted)) for want in wanted]


@pytest.mark.parametrize(
    ("workers", "outsiders", "threads"), [(2, 0, 4), (2, 2, 3), (4, 0, 2), (4, 1, 2), (2, 4, 2), (1, 1, 7)]
)
def test_siblings_give_up_their_part_and_no_more(workers: int, outsiders: int, threads: int) -> None:
    share = 8 // workers
    choices = [Choice(share)] * workers
    for _ in range(20):
        got = fair_shares([*(float(choice.threads) for choice in choices), float(outsiders)], 8)
        choices = [
            choose(choice, share, 8, sum(got) - own)
            for choice, own in zip(choices, got[:workers], strict=True)
        ]
    assert {choice.threads for choice in choices} == {threads}
    # When the outsiders leave, all come back.
    for _ in range(4 * QUIET_LOOKS):
        total = sum(choice.threads for choice in choices)
        choices = [choose(choice, share, 8, total - choice.threads) for choice in choices]
    assert {choice.threads for choice in choices} == {share}


# --- the watch ---------------------------------------------------------------------------------------


class Machine:
    """Two processors, with a load that can be set. `pass_time` moves the clock on."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reads = 0
        self.processors = 2
        self._busy_s = self._own_s = 0.0

    def pass_time(self, seconds: float, own: float = 1.0, others: float = 0.0) -> float:
        self.now_s += seconds
        self._busy_s += (own + others) * seconds
        self._own_s += own * seconds
        return self.now_s

    def __call__(self) -> Sample:
        self.reads += 1
        return Sample(self.processors, self._busy_s, self._own_s)


def follow(watch: CoreWatch, moments: Iterable[float]) -> list[int | None]:
    return [watch.wanted(now_s) for now_s in moments]


def test_the_own_work_is_not_others_work() -> None:
    machine = Machine()
    watch = CoreWatch(2, machine)
    said = follow(watch, (machine.pass_time(LOOK_S, own=2.0) for _ in range(10)))
    assert said == [None] * 10
    assert watch.threads == 2


def test_a_change_is_said_once_and_undone_when_the_other_leaves() -> None:
    machine = Machine()
    watch = CoreWatch(2, machine)
    assert watch.wanted(machine.now_s) is None
    said = follow(watch, (machine.pass_time(LOOK_S, others=1.0) for _ in range(4)))
    assert said == [1, None, None, None]
    said = follow(watch, (machine.pass_time(LOOK_S) for _ in range(QUIET_LOOKS + 2)))
    assert said == [*[None] * (QUIET_LOOKS - 1), 2, None, None]


def test_it_looks_only_when_due() -> None:
    machine = Machine()
    watch = CoreWatch(2, machine)
    follow(watch, (machine.pass_time(LOOK_S / 50) for _ in range(501)))
    assert 10 <= machine.reads <= 11


def test_a_count_from_before_a_long_pause_says_nothing() -> None:
    machine = Machine()
    watch = CoreWatch(2, machine)
    watch.wanted(machine.now_s)
    assert watch.wanted(machine.pass_time(STALE_S + 1, own=0.0, others=2.0)) is None
    assert watch.wanted(machine.pass_time(LOOK_S)) is None
    assert watch.wanted(machine.pass_time(LOOK_S, others=1.0)) == 1


def test_a_change_of_the_affinity_starts_again() -> None:
    machine = Machine()
    watch = CoreWatch(2, machine)
    watch.wanted(machine.now_s)
    machine.processors = 4
    assert watch.wanted(machine.pass_time(LOOK_S, others=9.0)) is None
    assert watch.wanted(machine.pass_time(LOOK_S, others=3.5)) == 1


def test_where_nothing_is_counted_nothing_changes_and_it_is_asked_once() -> None:
    asked: list[None] = []
    watch = CoreWatch(2, lambda: asked.append(None))
    assert follow(watch, (100.0 + second for second in range(50))) == [None] * 50
    assert len(asked) == 1


def test_one_thread_is_not_watched() -> None:
    machine = Machine()
    follow(CoreWatch(1, machine), (machine.pass_time(1.0, others=2.0) for _ in range(5)))
    assert machine.reads == 0


# --- the counts --------------------------------------------------------------------------------------

STAT = """\
cpu  999999 0 0 0 0 0 0 0 0 0
cpu0 100 10 200 5000 70 1 2 3 40 50
cpu1 9000 0 0 0 0 0 0 0 0 0
cpu12 1000 1 0 0 0 0 0 0 0 0
intr 1 2 3
cpu0 5 5 5 5 5 5 5 5 5 5
"""


@pytest.fixture
def stat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where to write counts; this process may use processors 0 and 12, at 100 ticks a second."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 12})
    monkeypatch.setattr(os, "sysconf", lambda _name: 100)
    return tmp_path / "stat"


@pytest.mark.parametrize(("nice", "ticks"), [(0, 1306), (5, 1317)])
def test_what_counts_as_busy(monkeypatch: pytest.MonkeyPatch, stat: Path, nice: int, ticks: int) -> None:
    monkeypatch.setattr(os, "getpriority", lambda _which, _who: nice)
    stat.write_text(STAT)
    sample = read_sample(str(stat))
    assert sample is not None
    assert (sample.processors, sample.busy_s) == (2, ticks / 100)
    assert sample.own_s == pytest.approx(time.process_time(), abs=5)


@pytest.mark.parametrize(
    "text", ["", "cpu0 1 2\n", "cpu0 a b c d e f g h\n", "cpu7 1 2 3 4 5 6 7 8\n", "intr\n"]
)
def test_counts_that_say_nothing(stat: Path, text: str) -> None:
    stat.write_text(text)
    assert read_sample(str(stat)) is None


def test_a_system_without_counts(monkeypatch: pytest.MonkeyPatch, stat: Path) -> None:
    assert read_sample(str(stat)) is None
    monkeypatch.delattr(os, "sched_getaffinity")
    assert read_sample() is None


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
def test_a_busy_process_here_is_seen_as_others_and_the_own_work_is_not() -> None:
    before = read_sample()
    assert before is not None
    assert before.processors == len(os.sched_getaffinity(0))
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass",
        ]
    ) as other:
        other.wait(60)
    middle = read_sample()
    assert middle is not None
    # The kernel counts in ticks: half a second is fifty of them.
    assert middle.busy_s - before.busy_s > 0.3
    assert middle.own_s - before.own_s < 0.3
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    after = read_sample()
    assert after is not None
    assert after.own_s - middle.own_s >= 0.3
