"""What must hold for every request, whatever was done to its workers. Pure but for what events tell it.

`History` takes the events of one supervisor and keeps what is needed to judge: who was released, who was alone in a
worker when it died. `violations` judges one answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from infervisor import Chunk, EndClass, EndReason
from infervisor.protocol.blame import POISONED_AFTER
from infervisor.supervisor.events import (
    BreakerOpened,
    RequestReleased,
    RequestResumed,
    WorkerBecameReady,
    WorkerExited,
    WorkerSpawned,
)
from infervisor.supervisor.report import Report


@dataclass(frozen=True)
class Exact:
    """The whole answer as it must be. ids: of its tokens."""

    text: str
    ids: tuple[int, ...]
    reason: EndReason


@dataclass(frozen=True)
class Asked:
    """One request as it was made. allowed: ends that what was done to it may cause, beyond its natural one.

    resumes: whether it goes on when its worker dies. reads_all: whether its reader stays to the end. poison:
    whether it kills every worker that it is in.
    """

    number: int
    kind: str
    exact: Exact
    allowed: frozenset[EndReason] = frozenset()
    resumes: bool = True
    reads_all: bool = True
    poison: bool = False


@dataclass
class Got:
    """What its reader got. code: of the error that ended it, or None."""

    texts: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    gaps: int = 0
    """Chunks that don't begin where the one before ended."""
    code: str | None = None

    def take(self, chunk: Chunk) -> None:
        """Note a chunk."""
        self.gaps += chunk.index != len(self.ids)
        self.texts.append(chunk.text)
        self.ids.extend(chunk.token_ids)


class History:
    """What the events of one supervisor told. Give it to `on_event`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.resumes: Counter[str] = Counter()
        self.restored_tokens = 0
        self.alive: dict[int, bool] = {}
        """Pid → whether it is ready, of workers that are not collected."""
        self.released: set[int] = set()
        self.alone: Counter[int] = Counter()
        """How often a request was the only one in a worker that died, by request."""
        self.pauses_s: list[float] = []
        self.wrong: list[str] = []
        """What no event may ever say."""

    def __call__(self, event: object) -> None:
        """Take an event."""
        self.counts[type(event).__name__] += 1
        match event:
            case WorkerSpawned(pid):
                self.alive[pid] = False
            case WorkerBecameReady(pid=pid):
                self.alive[pid] = True
            case WorkerExited():
                if event.pid not in self.alive:
                    self.wrong.append(f"worker {event.pid} exited twice, or was never started")
                self.alive.pop(event.pid, None)
                self.deaths[str(event.cause)] += 1
                if len(event.requests) == 1:
                    self.alone[event.requests[0]] += 1
            case RequestReleased(report):
                if report.request_id in self.released:
                    self.wrong.append(f"request {report.request_id} was released twice")
                self.released.add(report.request_id)
                self.ends[str(report.end_reason)] += 1
            case RequestResumed(resume=resume):
                self.resumes[str(resume.cause)] += 1
                self.restored_tokens += resume.restored_tokens
                if resume.pause_s is None:
                    self.wrong.append(f"{event} tells of a pause that isn't over")
                else:
                    self.pauses_s.append(resume.pause_s)
            case BreakerOpened(reason):
                self.wrong.append(f"the breaker opened: {reason}")
            case _:
                pass


def violations(asked: Asked, got: Got, report: Report, history: History, max_resumes: int) -> list[str]:
    """Return what is wrong with one answer, in words."""
    wrong: list[str] = []
    reason = report.end_reason
    text, exact = "".join(got.texts), asked.exact

    def must(condition: object, message: str) -> None:
        if not condition:
            wrong.append(f"request {asked.number} ({asked.kind}): {message}; {report.to_line()}")

    must(report.is_released, "it isn't released")
    must(report.request_id in history.released, "its release wasn't told")
    must(reason is not None, "it has no end")
    if reason is None:
        return wrong
    must(_is_allowed(asked, report, history, max_resumes), f"it ended as {reason}")
    must(got.gaps == 0, "a chunk's index isn't the number of tokens before it")
    must(exact.text.startswith(text), f"its text isn't a beginning of the exact one: …{text[-60:]!r}")
    must(
        tuple(got.ids) == exact.ids[: len(got.ids)], "a token came twice, never, or another one in its place"
    )
    if reason.is_natural:
        must(text == exact.text or not asked.reads_all, f"its text is cut: …{text[-60:]!r}")
        is_cut = reason is EndReason.LENGTH and tuple(got.ids) != exact.ids
        must(not is_cut or not asked.reads_all, "tokens are missing at its end")
        must(report.usage.completion_tokens == len(exact.ids), "its usage doesn't count its tokens")
        must(got.code is None, f"its reader got the error {got.code}")
    elif reason.end_class is EndClass.CALLER:
        must(got.code in (None, str(reason)), f"its reader got the error {got.code}")
    else:
        must(got.code == reason, f"its reader got {got.code}")
    must(asked.resumes or not report.resumes, "it was resumed against its caller's will")
    delivered = [resume.delivered_tokens for resume in report.resumes]
    must(delivered == sorted(delivered), f"tokens went lost between resumes: {delivered}")
    if reason.is_natural:
        must(all(resume.pause_s is not None for resume in report.resumes), "a pause has no end")
    return wrong


def _is_allowed(asked: Asked, report: Report, history: History, max_resumes: int) -> bool:
    reason = report.end_reason
    assert reason is not None
    if reason is EndReason.POISONED:
        # Nobody is to blame who wasn't alone each time.
        return history.alone[report.request_id] >= POISONED_AFTER
    if reason in asked.allowed:
        return True
    if asked.poison:
        return False
    if reason is asked.exact.reason:
        return True
    is_workers_fault = reason.end_class is EndClass.FAULT and reason is not EndReason.ENGINE_ERROR
    return is_workers_fault and (not asked.resumes or len(report.resumes) >= max_resumes)
