"""Which workers are loaded, as their supervisor tells; and a stream that loses its worker while it is read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import anyio

from infervisor import RestartPolicy, Stream, Supervisor
from infervisor.supervisor.events import Event, WorkerBecameReady, WorkerExited
from infervisor.supervisor.resume import Resume
from infervisor.worker.snapshot_area import ALIGNMENT, HEADER_BYTES, Header

WITHIN_S = 120
NO_BACKOFF = RestartPolicy(max_restarts=100_000, backoff_initial_s=0, backoff_max_s=0)
"""As many deaths as a benchmark wants, each replaced at once."""
NO_LIMIT = 100_000
"""For `max_resumes`."""


class Workers:
    """Takes a supervisor's events. `ready` are the pids of the loaded workers, in the order of their readiness."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self._news = anyio.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerBecameReady):
            self.ready.append(event.pid)
            self._news.set()
        elif isinstance(event, WorkerExited) and event.pid in self.ready:
            self.ready.remove(event.pid)

    async def wait_for(self, count: int) -> None:
        """Return when so many are loaded at the same time."""
        with anyio.fail_after(WITHIN_S):
            while len(self.ready) < count:
                self._news = anyio.Event()
                await self._news.wait()


@dataclass(frozen=True, slots=True)
class Interruption:
    """One loss of a worker as the reader met it. again_tokens: computed anew before the first new token."""

    pause_ms: float
    resume: Resume
    again_tokens: int


async def read_tokens(stream: Stream, tokens: int) -> None:
    """Read at least so many tokens."""
    taken = 0
    while taken < tokens:
        taken += len((await stream.__anext__()).token_ids)


async def interrupt(stream: Stream, number: int) -> Interruption:
    """Send the stream's worker this signal, and read on until a token comes that another worker computed."""
    before = stream.report
    assert before.worker_pid is not None
    struck_ns = time.monotonic_ns()
    os.kill(before.worker_pid, number)
    with anyio.fail_after(WITHIN_S):
        while True:
            chunk = await stream.__anext__()
            now_ns = time.monotonic_ns()
            report = stream.report
            if len(report.resumes) > len(before.resumes):
                # What the dead worker had sent is read first; it is no sign of life.
                resume = report.resumes[-1]
                if chunk.index + len(chunk.token_ids) > resume.delivered_tokens:
                    break
    known = report.usage.prompt_tokens + resume.delivered_tokens
    return Interruption((now_ns - struck_ns) / 1e6, resume, known - resume.restored_tokens)


def snapshots_taken(supervisor: Supervisor, stream: Stream) -> int:
    """Return how many snapshots of a running stream were taken: the newest one's number, where it was written."""
    memory, area = supervisor._snapshot_memory, stream._request.snapshots
    assert memory is not None
    assert area is not None
    half = area.size_bytes // 2 // ALIGNMENT * ALIGNMENT
    headers = [Header.unpack(os.pread(memory.fd, HEADER_BYTES, area.offset + start)) for start in (0, half)]
    return max((header.generation for header in headers if header is not None), default=0)
