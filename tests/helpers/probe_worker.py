"""A worker whose engine looks at its own process, or breaks the engine contract.

Run as a program instead of `-m infervisor.worker`: it adds an engine named "probe" and is a worker then.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infervisor.worker.__main__ import main
from infervisor.worker.engine import ModelFacts, Outcome, Sampled
from infervisor.worker.engines import ENGINES
from infervisor.worker.engines.scripted.engine import ScriptedEngine

PROGRAM = ("-P", str(Path(__file__)))
LIST_DESCRIPTORS = "import os; print(*sorted(int(fd) for fd in os.listdir('/dev/fd')))"


class ProbeEngine(ScriptedEngine):
    """Scripted, but option `probe` says what is odd about it."""

    _probe = ""

    def load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        self._probe = options["probe"]
        if self._probe == "import_error":
            raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
        facts = super().load(model, {}, progress)
        extra: dict[str, Any] = {"modules": sorted(sys.modules)}
        if self._probe == "descriptors":
            # Not closing is what a careless library does: only close-on-exec protects the pipes.
            listed = subprocess.run(
                [sys.executable, "-c", LIST_DESCRIPTORS], close_fds=False, stdout=subprocess.PIPE, check=True
            )
            extra["descriptors"] = [int(fd) for fd in listed.stdout.split()]
        if self._probe == "unsendable_facts":
            extra["unsendable"] = object()
        return replace(facts, extra=extra)

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        outcomes = super().step(slots, most)
        if outcomes is None or self._probe != "unsendable_tokens":
            return outcomes
        return [
            replace(outcome, logprobs=[object()])
            if isinstance(outcome, Sampled) and outcome.token == 2
            else outcome
            for outcome in outcomes
        ]


if __name__ == "__main__":
    ENGINES["probe"] = "__main__:ProbeEngine"
    main()
