"""How a cell of the chaos table is made: what the engine is told to do wrong, and the supervisor's settings.

Pure but for the script of an interpreter that it writes. Runs before there is a supervisor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infervisor import Deadlines, Escalation, Liveness, MemoryLimits, StopGraces
from infervisor.protocol.machines.process import DeathCause
from tests.chaos.faults import FAULTS
from tests.chaos.table import End, Expected, Phase
from tests.helpers.inside import PATIENT
from tests.helpers.odd_worker import as_interpreter
from tests.helpers.supervised import QUICK_RESTART

WINDOW = 16
"""Of an answer: less than the whole, so that no worker is done before the fault comes."""
READ_FIRST = 5
"""Tokens, before something happens."""
READ_BEFORE_DRAINING = 3
STARTUP_S = 2.5
LADDER = Escalation(signal_after_s=0.1, signal_step_factor=0, kill_after_s=0.3, kill_step_factor=0)
WATCHFUL = Liveness(hang_after_s=0.8, step_factor=4, unmeasured_s=1.2, dump_s=0.2)
GRACES = StopGraces(drain_s=0.3, exit_s=0.3, terminate_s=0.3)
MEMORY_BYTES = 160 << 20
"""Above what an idle worker has, below what it has after the leak."""

FRAMES = """\
frames() { while [ "$1" != --frames ]; do shift; done; echo "$2"; }
frames=$(frames "$@")
python() { exec "$PYTHON" -c "import os, time; frames = $frames; $1"; }
"""
"""What the scripts of faults may use: Python code that knows the number of the frames pipe."""

AT: dict[Phase, dict[str, Any]] = {
    Phase.LOAD: {"at": "load"},
    Phase.PREPARING: {"at": "prepare", "prompt_contains": "keeps"},
    Phase.PREFILL: {"at": "prefill", "after": 8},
    Phase.DECODE: {"at": "decode", "after": READ_FIRST},
    Phase.ENDING: {"at": "release"},
    Phase.CANCELLING: {"at": "decode", "after": 2, "prompt_contains": "subject"},
    # Beyond what a reader can get that has taken a few and holds on.
    Phase.DRAINING: {"at": "decode", "after": READ_BEFORE_DRAINING + WINDOW},
    Phase.CLOSING: {"at": "decode", "after": 2},
}
"""Where the engine is in each phase."""


class Making:
    """One cell before it happens."""

    def __init__(self, name: str, phase: Phase, expected: Expected, directory: Path) -> None:
        self.name, self.phase, self.expected = name, phase, expected
        self.fault = FAULTS[name]
        self.directory = directory
        self.happened = directory / "happened"
        """The file that says that the fault, or what holds the worker in its phase, has begun."""

    @property
    def is_from_inside(self) -> bool:
        """Whether the engine does it: wherever it can, and isn't held in a step already."""
        is_held = self.phase in (Phase.CANCELLING, Phase.CLOSING) and self.fault.number is not None
        return self.fault.kind is not None and self.phase in AT and not is_held

    @property
    def is_by_signal(self) -> bool:
        """Whether a signal from outside does it."""
        return self.fault.number is not None and (not self.is_from_inside or self.name == "grandchild")

    def options(self) -> dict[str, Any]:
        """Return the options of the engine."""
        return {
            "slots": 3, "pace_s": 0.002, "prefill_tokens_per_s": 200 if self.phase is Phase.PREFILL else 1000,
            "slice_s": 0.004, "load_s": 0.05, "faults": self.planned(),
        }  # fmt: skip

    def planned(self) -> list[dict[str, Any]]:
        """Return what the scripted engine is told to do wrong: the fault, or what holds it in the phase."""
        once = {"once_file": str(self.happened)}
        if self.is_from_inside:
            assert self.fault.kind is not None
            if self.name == "ignored_sigterm":
                ignores = {"at": "open", "kind": "ignore_sigterm"}
                return [ignores, {**AT[self.phase], "kind": "hang", **once}]
            forever = self.name in ("poison", "load_refused")
            parts = {**self.fault.parts, **({} if forever else once)}
            if self.expected.end is End.FAILED:
                # Prompts are prepared side by side and read one after the other: the one it hits has to be named.
                parts["prompt_contains"] = "keeps"
            return [{**AT[self.phase], "kind": self.fault.kind, **parts}]
        if (self.phase is Phase.LOAD and self.is_by_signal) or self.phase in (Phase.PREPARING, Phase.ENDING):
            seconds = 0.5 if self.expected.end is End.UNHARMED else None
            return [{**AT[self.phase], "kind": "hang", "seconds": seconds, **once}]
        if self.phase in (Phase.CANCELLING, Phase.CLOSING) and self.expected.end is not End.UNHARMED:
            return [{**AT[self.phase], "kind": "ignore_cancel", **once}]
        return []

    def settings(self) -> dict[str, Any]:
        """Return the supervisor's settings. Short patience only where it is what decides."""
        chosen: dict[str, Any] = {"restart": QUICK_RESTART, "graces": GRACES, "escalation": PATIENT}
        if self.phase in (Phase.CANCELLING, Phase.CLOSING) and self.expected.end is not End.UNHARMED:
            chosen["escalation"] = LADDER
        if self.expected.cause is DeathCause.UNRESPONSIVE:
            chosen["liveness"] = WATCHFUL
        if self.expected.cause is DeathCause.STARTUP_TIMEOUT:
            chosen["deadlines"] = Deadlines(startup_s=STARTUP_S)
        if self.name == "memory_limit":
            chosen["memory"] = MemoryLimits(hard_bytes=MEMORY_BYTES)
        if self.phase is Phase.HANDSHAKE:
            chosen["python"] = self.interpreter()
        if self.phase in (Phase.SPAWN, Phase.HANDSHAKE, Phase.LOAD):
            chosen["wait_until_ready"] = False
        return chosen

    def interpreter(self) -> Path:
        """Return an interpreter that misbehaves the first time, and is a worker from then on."""
        assert self.fault.shell is not None
        once = f"if mkdir {self.happened} 2>/dev/null; then\n{self.fault.shell or ':'}\nfi\n"
        return as_interpreter(self.directory, f'{FRAMES}{once}exec "$PYTHON" "$@"')
