"""Thousands of requests, hundreds of deaths, and nothing lost: `python -m tests.chaos.soak`, or `make soak`.

Three stages, each with a pool of two workers and one that stands by: the scripted engine, which fails in every way
that it can, a table model in llama.cpp, and the real model. Every answer is compared with the exact one
(`invariants.py`); afterwards nothing may be left. Prints figures, and exits 1 with what is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil

from infervisor import Escalation, Liveness, RestartPolicy, StopGraces, Supervisor
from tests.chaos.clients import CANCELS, Client
from tests.chaos.invariants import History
from tests.chaos.questions import Real, Scripted, Speaker, Table
from tests.chaos.storm import Storm, planned_faults
from tests.helpers.leaks import no_leftovers

ALL_REQUESTS = 10_000
CLIENTS = 32
REAL_CLIENTS = 8
"""Where a token takes long, more of them would only wait."""
WORKERS, STANDBY, SLOTS = 2, 1, 4
MAX_RESUMES = 20
DEATHS_OF_POISON = 4
"""Of each prompt that kills workers, at most: one with others in it, two alone, one more by a coincidence."""
MEMORY_GROWTH_BYTES = 5 << 20
WARM_UP = 0.25
"""The share of requests after which memory should be what it stays at."""
MOST_TOLD = 20
NO_LIMIT = RestartPolicy(
    max_restarts=1_000_000, max_failed_starts=1_000_000, backoff_initial_s=0.005, backoff_max_s=0.05
)
SHORT = Escalation(signal_after_s=0.5, signal_step_factor=0, kill_after_s=1.0, kill_step_factor=0)
WATCHFUL = Liveness(hang_after_s=1.5, step_factor=4, unmeasured_s=2.5, dump_s=0.2)
PATIENT_WATCH = Liveness(hang_after_s=6, step_factor=4, unmeasured_s=12, dump_s=0.2)
"""For real steps, on a machine with other things to do."""
GRACES = StopGraces(drain_s=2, exit_s=1, terminate_s=1)


@dataclass(frozen=True)
class Load:
    """How much is asked of one stage. seconds: end it by then, however much is done. clients: at once."""

    requests: int
    deaths: int
    cancels: int
    poison: int = 0
    seconds: float | None = None
    clients: int = CLIENTS
    liveness: Liveness = WATCHFUL

    def deaths_by(self, share: float) -> int:
        """How many deaths are to be caused when this share of the requests is done: none in the last moments."""
        return round(self.deaths * min(1.0, share / 0.95))


@dataclass
class Outcome:
    """What a stage came to."""

    name: str
    seconds: float = 0.0
    requests: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    caused: Counter[str] = field(default_factory=Counter[str])
    history: History = field(default_factory=History)
    restarts: Mapping[str, int] = field(default_factory=dict[str, int])
    before_bytes: int = 0
    after_bytes: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def totals(self) -> list[str]:
        """Return what is wrong with the whole."""
        wrong = []
        if len(self.history.released) != self.requests:
            wrong.append(f"{self.requests} requests were accepted, {len(self.history.released)} released")
        if self.history.alive:
            wrong.append(f"workers that never exited: {list(self.history.alive)}")
        for cause in ("crashed", "protocol_error", "unresponsive", "startup_timeout", "load_failed", "deaf"):
            most = self.caused[cause] + (DEATHS_OF_POISON * self.kinds["poison"] if cause == "crashed" else 0)
            if self.history.deaths[cause] > most:
                wrong.append(
                    f"{self.history.deaths[cause]} workers went as {cause}, and {most} of that were caused"
                )
        growth = self.after_bytes - self.before_bytes
        if self.before_bytes and growth > MEMORY_GROWTH_BYTES:
            wrong.append(f"the parent's memory grew by {growth / 1e6:.1f} MB")
        return wrong

    def table(self) -> str:
        """Return the figures for people."""
        history = self.history
        pauses = sorted(history.pauses_s)
        rows = [
            ("requests", f"{self.requests} in {self.seconds:.1f} s"),
            ("cancels", str(sum(self.kinds[kind] for kind in CANCELS))),
            ("kinds", _counts(self.kinds)),
            ("ends", _counts(history.ends)),
            ("deaths", f"{sum(history.deaths.values())}: {_counts(history.deaths)}"),
            ("restarts", _counts(Counter(self.restarts))),
            ("promoted", str(history.counts["WorkerPromoted"])),
            ("resumes", f"{sum(history.resumes.values())}: {_counts(history.resumes)}"),
            ("restored", f"{history.restored_tokens} tokens from snapshots"),
        ]
        if pauses:
            figures = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
            at = [f"{name} {pauses[min(len(pauses) - 1, int(len(pauses) * p))]:.3f} s" for name, p in figures]
            rows.append(("pauses", ", ".join(at)))
        rows.append(
            (
                "memory",
                f"{self.before_bytes / 1e6:.1f} MB after the warm-up, {self.after_bytes / 1e6:.1f} MB at the end",
            )
        )
        rows.append(("wrong", str(len(self.wrong))))
        return "\n".join([f"{self.name}", *(f"  {name:10} {value}" for name, value in rows)])


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


async def stage(name: str, speaker: Speaker, load: Load, seed: str, directory: Path | None) -> Outcome:
    """Run one stage to its end."""
    outcome = Outcome(name)
    history = outcome.history
    began = time.monotonic()
    warm = max(1, int(load.requests * WARM_UP))
    cancels = min(0.9, load.cancels / load.requests)
    poison = set(range(load.requests // 3, load.requests, max(1, load.requests // 2 // max(1, load.poison))))
    numbers = iter(range(load.requests))

    def is_over() -> bool:
        late = load.seconds is not None and time.monotonic() - began > load.seconds
        return late or outcome.requests >= load.requests

    async with Supervisor(
        **speaker.settings(), on_event=history, workers=WORKERS, standby=STANDBY, max_queue=4 * CLIENTS,
        max_resumes=MAX_RESUMES, restart=NO_LIMIT, escalation=SHORT, liveness=load.liveness, graces=GRACES,
    ) as supervisor:  # fmt: skip

        async def ask_on() -> None:
            for number in numbers:
                if is_over():
                    return
                kills = load.poison > 0 and number in poison
                client = Client.drawn(seed, number, speaker, cancels, kills)
                outcome.kinds[client.asked.kind] += 1
                outcome.wrong += await client.ask(supervisor, history, MAX_RESUMES)
                outcome.requests += 1
                if outcome.requests == warm:
                    outcome.before_bytes = _memory_bytes()

        storm = Storm(supervisor, history, random.Random(f"{seed} storm"), directory)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(storm.rage, lambda: load.deaths_by(outcome.requests / load.requests), is_over)
            for _ in range(load.clients):
                tasks.start_soon(ask_on)
        outcome.caused = storm.caused
        status = supervisor.status()
        if status.queue_depth or status.in_flight:
            outcome.wrong.append(f"left in it: {status.queue_depth} queued, {status.in_flight} in workers")
        memory = supervisor._snapshot_memory
        if memory is not None:
            # What is kept for next requests goes back when nothing has run for a while; here at once.
            memory.trim()
            if memory.used_bytes():
                outcome.wrong.append(
                    f"{memory.used_bytes()} bytes of snapshots are left of nobody's requests"
                )
        outcome.restarts = status.restarts
        outcome.after_bytes = _memory_bytes()
    outcome.seconds = time.monotonic() - began
    outcome.wrong += history.wrong + outcome.totals()
    return outcome


def _memory_bytes() -> int:
    gc.collect()
    # What the C library keeps for later isn't in use.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


# --- the command ---------------------------------------------------------------------------------------


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=ALL_REQUESTS, help="to the scripted engine")
    parser.add_argument("--table", type=int, default=1_000, help="requests to a table model in llama.cpp")
    parser.add_argument("--real", type=int, default=500, help="requests to the real model")
    parser.add_argument(
        "--deaths", type=int, default=200, help="of the scripted engine's workers; the others in proportion"
    )
    parser.add_argument("--cancels", type=int, default=1_000, help="likewise")
    parser.add_argument("--seconds", type=float, help="for each stage at most")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--quick", action="store_true", help="20 seconds: 200 and 30 requests, no real model")
    chosen = parser.parse_args(given)
    if chosen.quick:
        chosen.requests, chosen.table, chosen.real, chosen.deaths, chosen.cancels = 200, 30, 0, 8, 24
        chosen.seconds = chosen.seconds or 8.0
    if chosen.seed is None:
        chosen.seed = random.SystemRandom().randrange(1 << 32)
    return chosen


async def soak(chosen: argparse.Namespace, directory: Path) -> list[Outcome]:
    """Run the stages that were asked for."""
    of = chosen.requests or ALL_REQUESTS
    deaths, cancels = chosen.deaths / of, chosen.cancels / of
    outcomes = []
    for name, requests in (("scripted", chosen.requests), ("table", chosen.table), ("real", chosen.real)):
        if not requests:
            continue
        armed = directory / "armed" if name == "scripted" else None
        speaker: Speaker
        if armed is not None:
            armed.mkdir()
            speaker = Scripted(SLOTS, planned_faults(armed))
        elif name == "table":
            speaker = Table(directory, SLOTS)
        else:
            from infervisor import default_model

            speaker = Real(default_model(), SLOTS)
            await speaker.learn()
        load = Load(
            requests, max(1, round(deaths * requests)), round(cancels * requests),
            poison=max(1, requests // 1000) if armed is not None else 0, seconds=chosen.seconds,
            clients=REAL_CLIENTS if name == "real" else CLIENTS,
            liveness=WATCHFUL if armed is not None else PATIENT_WATCH,
        )  # fmt: skip
        outcome = await stage(name, speaker, load, f"{chosen.seed} {name}", armed)
        outcomes.append(outcome)
        print(outcome.table(), flush=True)
    return outcomes


def main(given: list[str] | None = None) -> int:
    """Run the soak; return the exit code."""
    chosen = _arguments(given)
    print(f"seed {chosen.seed}, {chosen.backend}", flush=True)
    with tempfile.TemporaryDirectory() as directory, no_leftovers():
        outcomes = anyio.run(soak, chosen, Path(directory), backend=chosen.backend)
    wrong = [f"{outcome.name}: {message}" for outcome in outcomes for message in outcome.wrong]
    for message in wrong[:MOST_TOLD]:
        print(message, file=sys.stderr)
    if len(wrong) > MOST_TOLD:
        print(f"… and {len(wrong) - MOST_TOLD} more", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
