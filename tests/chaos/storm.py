"""Lets things go wrong at random: kills from outside, faults that are armed in the engine, stops, replacements.

Faults of the scripted engine are armed by a file: the next request that gets there takes it away, and has it. Runs
in one task beside the clients; what it does next is drawn from its own random source.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from infervisor import Supervisor
from tests.chaos.invariants import History

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
PLACES: Mapping[str, Mapping[str, Any]] = {
    "prefill": {"at": "prefill", "after": 1},
    "decode": {"at": "decode", "after": 2},
    "later": {"at": "decode", "after": 15},
    "release": {"at": "release"},
    "load": {"at": "load"},
    "open": {"at": "open"},
    "prepare": {"at": "prepare"},
}
STALL = {"then": "stall"}
LETHAL: Mapping[str, Mapping[str, Any]] = {
    "exit": {"code": 1},
    "abort": {},
    "segfault": {},
    "bus_error": {},
    "out_of_memory": {},
    "garbage": STALL,
    "oversized_frame": STALL,
    "partial_frame": {"then": "exit"},
    "forged_id": STALL,
    "credit_violation": STALL,
}
SLOWLY_LETHAL: Mapping[str, Mapping[str, Any]] = {
    "hang": {},
    "hang_gil": {},
    "partial_frame": STALL,
    "close_frames": STALL,
}
"""They cost the patience of the watchdog, so they are rarer."""
CAUSE_OF: Mapping[str, str] = {
    **dict.fromkeys(
        ("garbage", "oversized_frame", "forged_id", "credit_violation", "close_frames"), "protocol_error"
    ),
    **dict.fromkeys(("hang", "hang_gil"), "unresponsive"),
}
"""What a worker's death is told with; crashed for all others."""
HARMLESS: Mapping[str, Mapping[str, Any]] = {
    "flood_stdout": {"bytes": 300_000},
    "flood_stderr": {"bytes": 300_000, "newlines": False},
    "burn": {"seconds": 0.02},
}
BLOCKED_S = 0.15


def planned_faults(directory: Path) -> list[dict[str, Any]]:
    """Return the options of the scripted engine with every fault that can be armed."""
    faults = []
    for kinds in (LETHAL, SLOWLY_LETHAL, HARMLESS):
        for kind, parts in kinds.items():
            for place, at in PLACES.items():
                if _exists(kind, place):
                    faults.append(
                        {**at, "kind": kind, **parts, "armed_file": str(_file(directory, kind, place))}
                    )
    return faults


def _exists(kind: str, place: str) -> bool:
    """Whether a kind makes sense in a place.

    A hang while loading costs the whole startup deadline; one while preparing isn't found out as long as others are
    served. Where a thread that prepares wrote frames, they would mix with the work loop's.
    """
    if place not in ("load", "prepare"):
        return True
    return kind not in ("forged_id", "credit_violation", *SLOWLY_LETHAL)


def _file(directory: Path, kind: str, place: str) -> Path:
    return directory / f"{kind}-{place}"


class Storm:
    """What happens to the workers of one supervisor. directory: of armed faults; None if there are none to arm."""

    def __init__(
        self, supervisor: Supervisor, history: History, draw: random.Random, directory: Path | None
    ) -> None:
        self._supervisor = supervisor
        self._history = history
        self._draw = draw
        self._directory = directory
        self.caused: Counter[str] = Counter()
        """Deaths that may follow from what was done, by cause."""
        self._stopped: list[int] = []
        self._is_replacing = False

    async def rage(self, wanted: Callable[[], int], over: Callable[[], bool]) -> None:
        """Task: cause as many deaths as are `wanted` by now, and other trouble in between, until it is over."""
        caused = 0
        async with anyio.create_task_group() as self._tasks:
            while not over():
                await anyio.sleep(self._draw.uniform(0.01, 0.06))
                self._continue_all()
                if caused < wanted():
                    caused += self._cause_death()
                elif self._draw.random() < 0.1:
                    self._cause_trouble()
            self._continue_all()
            self._disarm()
            self._tasks.cancel_scope.cancel()

    # --- deaths ------------------------------------------------------------------------------------

    def _cause_death(self) -> bool:
        if self._directory is not None and self._draw.random() < 0.5:
            return self._arm(SLOWLY_LETHAL if self._draw.random() < 0.1 else LETHAL)
        # Mostly those that serve or stand by: who is killed while loading each time never serves.
        alive = [
            pid for pid, is_ready in self._history.alive.items() if is_ready or self._draw.random() < 0.2
        ]
        if not alive:
            return False
        number: signal.Signals = signal.SIGSTOP if self._draw.random() < 0.04 else self._draw.choice(SIGNALS)
        self._signal(self._draw.choice(alive), number)
        self.caused["unresponsive" if number is signal.SIGSTOP else "crashed"] += 1
        return True

    def _arm(self, kinds: Mapping[str, Mapping[str, Any]]) -> bool:
        assert self._directory is not None
        kind = self._draw.choice(list(kinds))
        # Loading and opening are short: rarer, or most workers would never serve.
        place = self._draw.choices(list(PLACES), (4, 6, 4, 2, 1, 1, 2))[0]
        file = _file(self._directory, kind, place)
        if file.exists() or not _exists(kind, place):
            return False
        file.touch()
        if kinds is not HARMLESS:
            self.caused[CAUSE_OF.get(kind, "unresponsive" if kinds is SLOWLY_LETHAL else "crashed")] += 1
        return True

    def _disarm(self) -> None:
        for file in () if self._directory is None else list(self._directory.iterdir()):
            file.unlink(missing_ok=True)

    # --- trouble that kills nobody ------------------------------------------------------------------

    def _cause_trouble(self) -> None:
        kind = self._draw.randrange(5)
        if kind == 0 and self._history.alive:
            pid = self._draw.choice(list(self._history.alive))
            self._signal(pid, signal.SIGSTOP)
            self._stopped.append(pid)
        elif kind == 1:
            # The host stands still: nobody may be blamed for what comes late.
            time.sleep(BLOCKED_S)
        elif kind == 2 and self._directory is not None:
            self._arm(HARMLESS)
        elif kind == 3 and not self._is_replacing:
            self._tasks.start_soon(self._replace)
        elif kind == 4 and not self._is_replacing and self._draw.random() < 0.1:
            self._supervisor.restart_worker()

    async def _replace(self) -> None:
        self._is_replacing = True
        await self._supervisor.recycle()
        self._is_replacing = False

    def _continue_all(self) -> None:
        while self._stopped:
            self._signal(self._stopped.pop(), signal.SIGCONT)

    def _signal(self, pid: int, number: int) -> None:
        # Race "it was collected just now": events come in this thread, so what is listed isn't collected.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
