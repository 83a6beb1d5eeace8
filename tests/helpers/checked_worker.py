"""A real worker that ends itself as soon as an interrupt hits a step in which nobody was cancelled.

Such a step is simply run again, so that no text and no count would ever tell of it. Used as the interpreter of a
supervisor: it gets a worker's command line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infervisor.protocol.messages import Message
from infervisor.worker import __main__ as worker
from infervisor.worker.abort import Abort
from infervisor.worker.engine import Engine, Outcome
from infervisor.worker.work_loop import WorkLoop
from tests.helpers.odd_worker import WORKER_ARGUMENTS, as_interpreter

ROOT = Path(__file__).parents[2]
LATE_FLAG = 77
"""Its exit code then."""


class CheckedEngine:
    """An engine whose cut steps are looked at. Counts them, to show that steps are cut at all."""

    def __init__(self, engine: Engine, abort: Abort) -> None:
        self._engine = engine
        self._abort = abort
        self.cut_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        """Step, and see to it that who is cut is cancelled."""
        outcomes = self._engine.step(slots, most)
        if outcomes is None:
            self.cut_steps += 1
            # The cancel is noted under the same lock, before it interrupts.
            cancelled = [i for i in self._abort._members if self._abort.noticed_ns(i) is not None]
            if not cancelled and not self._abort._stopping:
                print(f"a step of {sorted(self._abort._members)} was cut, and none is cancelled", flush=True)
                os._exit(LATE_FLAG)
        return outcomes


class CheckedLoop(WorkLoop):
    """The work loop on a checked engine. It tells at its end how many steps were cut."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._engine = self._checked = CheckedEngine(self._engine, self._abort)

    def _take(self, message: Message) -> None:
        super()._take(message)
        if self._shutting_down:
            self._outbox.log("info", f"cut steps: {self._checked.cut_steps}")


def checked(directory: Path) -> Path:
    """Return the interpreter."""
    return as_interpreter(
        directory,
        f"shift {WORKER_ARGUMENTS}\nPYTHONPATH={shlex.quote(str(ROOT))} "
        f'exec "$PYTHON" -P {shlex.quote(__file__)} "$@"',
    )


if __name__ == "__main__":
    worker.WorkLoop = CheckedLoop  # type: ignore[attr-defined]
    worker.main()
