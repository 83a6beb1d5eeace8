"""Deaths upon deaths: a request whose next worker goes before it has given a token."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from infervisor import Supervisor
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import RequestResumed, WorkerExited
from tests.helpers.inside import words
from tests.helpers.supervised import QUICK_GRACES, QUICK_RESTART, Told

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("at", ["open", "prefill"])
async def test_a_pause_lasts_until_a_worker_gives_a_token(at: str, tmp_path: Path) -> None:
    told = Told()
    armed = tmp_path / "armed"
    killed = {"kind": "signal", "number": signal.SIGKILL}
    faults = [
        {"at": "decode", "after": 5, **killed, "once_file": str(tmp_path / "once")},
        {"at": at, **killed, "armed_file": str(armed)},
    ]

    def on_event(event: Any) -> None:
        told(event)
        if isinstance(event, WorkerExited) and len(told.of(WorkerExited)) == 1:
            armed.touch()

    async with Supervisor(
        engine="scripted",
        options={"faults": faults},
        on_event=on_event,
        restart=QUICK_RESTART,
        graces=QUICK_GRACES,
    ) as supervisor:
        answer = await supervisor.generate("hello", max_tokens=20)
    assert answer.text == words(20)
    first, second = answer.report.resumes
    assert [first.cause, second.cause] == [DeathCause.CRASHED] * 2
    assert [first.delivered_tokens, second.delivered_tokens] == [5, 5]
    assert first.pause_s is not None
    assert second.pause_s is not None
    assert first.resumed_ns == second.resumed_ns, "one token ended both"
    assert first.pause_s > second.pause_s > 0
    assert [event.resume for event in told.of(RequestResumed)] == [second]
