"""Faults that are armed from outside, and kinds that the test's own process survives."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from infervisor.worker.engines.scripted.faults import KINDS, Fault, Situation
from infervisor.worker.fault_hooks import FaultHooks

NO_FRAMES = -1


def planned(kind: str, **parts: object) -> Fault:
    return Fault.from_mapping({"at": "decode", "kind": kind, **parts})


def happen(fault: Fault) -> Situation:
    situation = Situation(FaultHooks(NO_FRAMES))
    KINDS[fault.kind](fault, situation)
    return situation


def test_a_fault_that_is_armed_happens_once_for_each_time_it_is_armed(tmp_path: Path) -> None:
    file = tmp_path / "armed"
    fault = planned("raise", armed_file=str(file))
    assert not fault.claim(), "nobody armed it"
    for _ in range(2):
        file.touch()
        assert fault.claim()
        assert not fault.claim()
        assert not file.exists()


def test_a_fault_that_is_armed_and_happens_once_isnt_disarmed_by_having_happened(tmp_path: Path) -> None:
    armed, once = tmp_path / "armed", tmp_path / "once"
    fault = planned("raise", armed_file=str(armed), once_file=str(once))
    armed.touch()
    assert fault.claim()
    armed.touch()
    assert not fault.claim()


def test_memory_that_python_cant_have_is_python_s_error() -> None:
    with pytest.raises(MemoryError):
        happen(planned("memory_error"))


def test_a_leak_is_kept_as_long_as_the_engine() -> None:
    assert [len(kept) for kept in happen(planned("leak", bytes=5000)).leaked] == [5000]


def test_sigterm_is_ignored_from_then_on() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        happen(planned("ignore_sigterm"))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
