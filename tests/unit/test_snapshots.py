"""Snapshots of a worker on the scripted engine: which slot gets one, what fits, and what becomes of a failure."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from infervisor.protocol.codec import Decoder
from infervisor.protocol.messages import Log
from infervisor.worker.engines.scripted.engine import ScriptedEngine
from infervisor.worker.outbox import Outbox
from infervisor.worker.snapshots import Snapshots
from tests.helpers.engine_models import open_in
from tests.helpers.raw_worker import submit

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")

AREA_BYTES = 64 << 10
PROMPT = "w " * 40


class Counting(ScriptedEngine):
    """Says how large its snapshots are as it is told to, and notes each one."""

    size_bytes = 8
    fails = False
    fails_early = False

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[int] = []
        self.asked = 0

    def snapshot_bytes(self, slot: int) -> int:
        self.asked += 1
        if self.fails_early:
            raise OSError("lost")
        return self.size_bytes

    def save(self, slot: int, memory: memoryview) -> int:
        self.saved.append(slot)
        if self.fails:
            raise OSError("lost")
        return super().save(slot, memory) and self.size_bytes


class Bench:
    """An engine with two open slots, both read, and its worker's snapshots."""

    def __init__(self, share: float) -> None:
        self.engine = Counting()
        self.engine.load(None, {"slots": 2}, lambda phase, fraction: None)
        self.name = f"test-{id(self)}"
        self.fd = os.memfd_create(self.name)
        os.ftruncate(self.fd, 2 * AREA_BYTES)
        self._logs, log = os.pipe()
        self._open = (self.fd, self._logs, log)
        self.snapshots = Snapshots(self.engine, "model", self.fd, share, Outbox(log))
        for slot in (0, 1):
            self.open(slot)
            self.engine.step([slot])

    def open(self, slot: int, delivered: tuple[int, ...] = ()) -> int:
        open_in(self.engine, slot, submit(slot, PROMPT, delivered=delivered))
        return self.snapshots.open(slot, (slot * AREA_BYTES, AREA_BYTES))

    def close(self, slot: int) -> None:
        self.engine.release(slot)
        self.snapshots.close(slot)

    def worked(self, slots: list[int], seconds: float, steps: int = 1) -> list[int]:
        """Work so long in each step; return the slots that got a snapshot."""
        before = len(self.engine.saved)
        for _ in range(steps):
            self.engine.step(slots)
            self.snapshots.worked([(slot, False) for slot in slots], seconds)
        return self.engine.saved[before:]

    def logs(self) -> list[str]:
        os.set_blocking(self._logs, False)
        try:
            data = os.read(self._logs, 1 << 16)
        except BlockingIOError:
            return []
        return [message.text for message in Decoder.from_worker().feed(data) if isinstance(message, Log)]

    def end(self) -> None:
        for fd in self._open:
            os.close(fd)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(0.5)
    yield made
    made.end()


def test_at_most_one_is_taken_after_a_step_the_one_who_waited_longest_first(bench: Bench) -> None:
    assert bench.worked([1], 0.1) == [1]
    assert bench.worked([0, 1], 0.1, steps=1) == [0], "8 tokens haven't passed for the other one"
    assert bench.worked([0, 1], 0.1, steps=7) == [1]
    assert bench.worked([0, 1], 0.1, steps=1) == [0]


def test_after_the_one_of_the_prompt_what_is_not_worth_its_time_is_not_taken(bench: Bench) -> None:
    assert sorted(bench.worked([0, 1], 1e-7, steps=50)) == [0, 1]
    assert bench.worked([0, 1], 1e-7, steps=50) == []


def test_while_a_prompt_is_read_pages_are_made_ready_for_the_end(bench: Bench) -> None:
    def used_bytes() -> int:
        return os.fstat(bench.fd).st_blocks * 512

    before = used_bytes()
    bench.engine.size_bytes = 20 * mmap.PAGESIZE
    bench.engine.step([0])
    for _ in range(40):
        # So little that a snapshot isn't worth it.
        bench.snapshots.worked([(0, True)], 2e-5)
    assert bench.engine.saved == []
    assert used_bytes() > before


def test_what_does_not_fit_is_not_tried_and_the_engine_is_not_asked_after_every_step(bench: Bench) -> None:
    bench.engine.size_bytes = AREA_BYTES
    assert bench.worked([0, 1], 0.1, steps=50) == []
    assert bench.engine.asked <= 4


def test_a_failure_is_told_once_and_costs_the_slots_snapshots_alone(bench: Bench) -> None:
    bench.engine.fails = True
    assert sorted(bench.worked([0, 1], 0.1, steps=30)) == [0, 1], "neither is tried again"
    assert ["OSError: lost" in text for text in bench.logs()] == [True]
    bench.engine.fails = False
    bench.close(0)
    bench.open(0)
    bench.engine.step([0])
    assert bench.worked([0], 0.1, steps=9) == [0, 0]


def test_an_engine_that_cannot_say_how_large_its_snapshot_is_goes_on_without(bench: Bench) -> None:
    bench.engine.fails_early = True
    assert bench.worked([0, 1], 0.1, steps=30) == []
    assert bench.engine.asked == 2
    assert len(bench.logs()) == 1


def test_a_slot_goes_on_from_what_its_area_holds_and_the_next_snapshot_is_soon(bench: Bench) -> None:
    assert bench.worked([0], 0.1) == [0]
    bench.close(0)
    assert bench.open(0) == 0, "prompt and one token, which this request doesn't have"
    bench.close(0)
    assert bench.open(0, (0, 1)) == 41
    bench.engine.step([0])
    assert bench.worked([0], 1e-9, steps=6) == []
    assert bench.worked([0], 1e-9, steps=1) == [0], "after 8 tokens, whatever it costs"
    assert bench.worked([0], 1e-9, steps=8) == [0], "and once more, in the other buffer"
    assert bench.worked([0], 1e-9, steps=20) == []


def test_without_a_place_nothing_is_kept(bench: Bench) -> None:
    bench.close(0)
    open_in(bench.engine, 0, submit(0, PROMPT))
    assert bench.snapshots.open(0, None) == 0
    bench.engine.step([0])
    assert bench.worked([0], 1.0, steps=20) == []
    bench.snapshots.close(0)
    bench.snapshots.close(0)


def test_a_mapping_stays_for_the_next_request_and_goes_for_another_area(bench: Bench) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum(f"memfd:{bench.name}" in line for line in file)

    assert mapped() == 2
    bench.close(0)
    bench.close(1)
    assert mapped() == 2
    bench.open(1)
    assert mapped() == 2
    open_in(bench.engine, 0, submit(0, PROMPT))
    assert bench.snapshots.open(0, (0, AREA_BYTES // 2)) == 0
    assert mapped() == 2, "the old one of that slot is gone"


def test_engines_without_snapshots_and_workers_without_a_share_have_none(bench: Bench) -> None:
    class Plain:
        pass

    facts = bench.engine.load(None, {}, lambda phase, fraction: None)
    outbox = Outbox(bench.fd)
    assert Snapshots.of(Plain(), facts, bench.fd, 0.1, outbox) is None  # type: ignore[arg-type]
    assert Snapshots.of(bench.engine, facts, bench.fd, None, outbox) is None
    assert Snapshots.of(bench.engine, facts, bench.fd, 0.0, outbox) is None
    assert Snapshots.of(bench.engine, facts, bench.fd, 0.1, outbox) is not None
