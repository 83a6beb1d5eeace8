"""Supervisors for tests: short graces, the scripted engine, and a record of everything that was told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from infervisor import Escalation, Liveness, RestartPolicy, StopGraces, Supervisor

E = TypeVar("E")

QUICK_ESCALATION = Escalation(
    signal_after_s=0.2, signal_step_factor=0, kill_after_s=0.4, kill_step_factor=0, alert_after_s=0.3
)
QUICK_RESTART = RestartPolicy(backoff_initial_s=0.02, backoff_max_s=0.1, cooldown_s=0.5)
QUICK_GRACES = StopGraces(drain_s=2, exit_s=1, terminate_s=0.5)
QUICK_LIVENESS = Liveness(hang_after_s=0.5, step_factor=4, unmeasured_s=1.0, dump_s=0.2)


class Told:
    """Every event of a supervisor, with a way to wait for one."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._news = anyio.Event()

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def wait_for(
        self,
        kind: type[E],
        where: Callable[[E], bool] = lambda event: True,
        count: int = 1,
        within_s: float = 20,
    ) -> E:
        """Return the count-th event of a kind, waiting for it if need be."""
        with anyio.fail_after(within_s):
            while True:
                self._news = anyio.Event()
                found = [event for event in self.of(kind) if where(event)]
                if len(found) >= count:
                    return found[count - 1]
                await self._news.wait()


@asynccontextmanager
async def scripted(
    options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor of the scripted engine with short graces, and what it tells.

    A stream ends with its worker, as callers can choose, unless the test passes on_crash="resume".
    """
    told = Told()
    settings = {
        "escalation": QUICK_ESCALATION,
        "restart": QUICK_RESTART,
        "graces": QUICK_GRACES,
        "on_crash": "fail",
        **settings,
    }
    async with Supervisor(engine="scripted", options=options or {}, on_event=told, **settings) as supervisor:
        yield supervisor, told


async def answers(supervisor: Supervisor) -> int:
    """Return the pid of the worker that answers a short request."""
    answer = await supervisor.generate("hello", max_tokens=3)
    assert answer.text == "w0 w1 w2 "
    assert answer.report.worker_pid is not None
    return answer.report.worker_pid
