"""The same bytes from a real process: the stand-in hides nothing, and a flood leaves the loop to others."""

from __future__ import annotations

import contextlib
import itertools
import random
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest

from infervisor import EndReason, InfervisorError, RestartPolicy, Supervisor
from infervisor.protocol.codec import encode
from infervisor.supervisor import dispatcher
from infervisor.supervisor.events import WorkerExited
from tests.fuzz.mutations import FRAMES, mutated
from tests.fuzz.parent_side import KINDS, harness
from tests.fuzz.script import Do, Step, bytes_of, step, steps_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.lying_worker import lying
from tests.helpers.odd_worker import WORKER_ARGUMENTS, as_interpreter
from tests.helpers.supervised import Told

pytestmark = pytest.mark.anyio

SEQUENCES = 120
"""For each event loop."""
WINDOW = 4
CODE = 3
ONCE = RestartPolicy(max_restarts=0)
Outcome = tuple[Any, ...]
SHELL = """
shift {skipped}
while [ "$1" != --control ]; do shift; done; control=/dev/fd/$2
while [ "$1" != --frames ]; do shift; done; frames=/dev/fd/$2
cat {folder}/before >$frames
head -c "$(cat {folder}/heard)" <$control >/dev/null
cat {folder}/after >$frames
exit {code}
"""
"""A worker in a shell, since one in Python takes a hundred times as long to start."""


def script(seed: int) -> list[Step]:
    """Return steps of a worker alone, to be taken once a stream is open: half proper, half changed."""
    rng = random.Random(seed)
    steps = [step(Do.PROPER, KINDS.index("started"))]
    for _ in range(rng.randrange(6)):
        kind = rng.choice(["tokens", "tokens", "tokens", "beat", "log", "ended", "released"])
        steps.append(step(Do.PROPER, KINDS.index(kind), 0, rng.randrange(70)))
    if seed % 2:
        more = mutated(bytes_of([*steps, Step(Do.FRAME, msgpack.packb(rng.choice(FRAMES)))]), rng)
        steps = [each for each in steps_of(more) if each.do <= Do.STRETCH]
    return steps


def in_process(steps: Sequence[Step]) -> tuple[bytes, bytes, Outcome]:
    """Return what these steps make the stand-in say before and after the submit, and what came of it."""
    with harness() as one, one() as side:
        side.run([step(Do.PROPER, KINDS.index("hello")), step(Do.PROPER, KINDS.index("ready"))])
        before = bytes(side.said)
        side.run([step(Do.OPEN, WINDOW - 1), *steps, step(Do.EXIT, CODE)])
        after = bytes(side.said[len(before) :])
        side.conclude()
        opened = side.streams[0]
        return before, after, (opened.request.state.reason, "".join(opened.text), str(side.causes[0]))


async def in_a_process(folder: Path, before: bytes, after: bytes) -> Outcome:
    """Return what comes of the same bytes when a real process says them."""
    told = Told()
    # The bytes name attempts by the ids that the harness counted from 1.
    ids, dispatcher._attempt_ids = dispatcher._attempt_ids, itertools.count(1)
    (folder / "before").write_bytes(before)
    (folder / "after").write_bytes(after)
    text = ""
    try:
        supervisor = Supervisor(engine="lies", python=folder / "interpreter", restart=ONCE, on_event=told)
        # The submit has come when there is something behind the load.
        (folder / "heard").write_text(str(len(encode(supervisor._worker_settings.load)) + 1))
        async with supervisor:
            async with supervisor.stream("hello", window=WINDOW, seed=1) as stream:
                # Read when all is over, as in the harness: reading gives credit, and then the outcome is a race.
                await told.wait_for(WorkerExited)
                with contextlib.suppress(InfervisorError):
                    async for chunk in stream:
                        text += chunk.text
                assert stream.report.is_released
                return stream.end_reason, text, str(told.of(WorkerExited)[0].cause)
    finally:
        dispatcher._attempt_ids = ids


async def test_a_real_process_that_says_the_same_has_the_same_outcome(tmp_path: Path) -> None:
    # Each event loop gets other sequences.
    import sniffio

    first = SEQUENCES * (sniffio.current_async_library() == "trio")
    as_interpreter(
        tmp_path, SHELL.format(skipped=WORKER_ARGUMENTS, folder=shlex.quote(str(tmp_path)), code=CODE)
    )
    outcomes = set()
    with no_leftovers():
        for seed in range(first, first + SEQUENCES):
            before, after, expected = in_process(script(seed))
            outcome = await in_a_process(tmp_path, before, after)
            assert outcome == expected, f"seed {seed}"
            outcomes.add(outcome)
    reasons = {outcome[0] for outcome in outcomes}
    assert {EndReason.PROTOCOL_ERROR, EndReason.WORKER_CRASHED, EndReason.STOP} <= reasons
    assert len(outcomes) > 15


FLOOD = """
import os, sys
import msgpack
frames = int(sys.argv[sys.argv.index("--frames") + 1])
ready()
hear("submit")
payload = msgpack.packb(["beat", 1, 1, {}, 0, 0])
flood = (len(payload).to_bytes(4, "big") + payload) * 3000
end = now() + 12 * 10**9
while now() < end:
    os.write(frames, flood)
"""


async def test_a_worker_that_never_stops_sending_leaves_the_loop_to_others(tmp_path: Path) -> None:
    async with Supervisor(engine="lies", python=lying(tmp_path, FLOOD), restart=ONCE) as supervisor:
        async with supervisor.stream("hello") as stream:
            began, turns = time.monotonic(), 0
            # Once other tasks had no turn for as long as the flood lasted.
            while turns < 3 and time.monotonic() - began < 10:
                await anyio.sleep(0.01)
                turns += 1
            stream.kill()
        assert turns == 3
        assert stream.end_reason is EndReason.CANCELLED
