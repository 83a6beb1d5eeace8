"""One request while it lives: its state, buffer, clocks and credit. Changed only in the loop's thread.

The dispatcher and the attempt drive it; the stream reads from it. It never knows its stream, so that a
forgotten stream can be collected.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from infervisor.protocol.blame import Suspicion
from infervisor.protocol.credit import Window
from infervisor.protocol.deadlines import Budget, Clocks
from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import InfervisorError, RemoteProtocolError
from infervisor.protocol.ladder import Ladder, Stage
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.machines.request import RequestPhase, RequestState
from infervisor.protocol.timeline import Timeline
from infervisor.supervisor.logprobs import TokenLogprob, read_logprobs
from infervisor.supervisor.notice import Notice
from infervisor.supervisor.report import ErrorInfo, Report, Usage
from infervisor.supervisor.request_input import RequestInput
from infervisor.supervisor.resume import OnCrash, Resume
from infervisor.supervisor.settings import Deadlines
from infervisor.supervisor.timers import Alarm

if TYPE_CHECKING:
    from infervisor.protocol.tool_calls import ToolCall
    from infervisor.supervisor.snapshot_memory import Area

MOST_SILENT_LOGPROBS = 1 << 18
"""Of tokens in a row that have no text: they need no reader, so credit doesn't bound what is kept of them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer: text that is safe to show, never half a character, empty only if it brings calls.

    index: number of the first token in it. token_ids: the tokens that it stands for; several where text was
    held back. t_ns: when it arrived (monotonic). logprobs: one for each token, if they were asked for. tool_calls:
    those that are complete with it; their text isn't in any chunk. `str(chunk)` is its text.
    """

    text: str
    index: int
    token_ids: tuple[int, ...]
    t_ns: int
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    def __str__(self) -> str:
        return self.text


class Request:
    """State of one request. `news` wakes the reader, `released` whoever waits for the release."""

    def __init__(
        self, request_id: int, given: RequestInput, deadlines: Deadlines, on_crash: OnCrash, now: int
    ) -> None:
        self.id = request_id
        self.group: int | None = None
        """The same for requests that begin alike: they go to the same worker if they can."""
        self.tool_format: str | None = None
        """How its model writes tool calls, as the worker that has it says."""
        self.input = given
        self.on_crash = on_crash
        self.state = RequestState()
        self.timeline = Timeline(queued_ns=now)
        self.clocks = Clocks.of(deadlines.budgets_ns())
        self.window = Window(given.window)
        self.usage = Usage()
        self.ladder: Ladder | None = None
        self.stage: Stage | None = None
        self.signalled_ns: int | None = None
        self.error: ErrorInfo | None = None
        self.make_error: Callable[[], InfervisorError] | None = None
        self.warnings: list[str] = []
        self.worker_pid: int | None = None
        self.fingerprint: str | None = None
        """Of the model that its first worker had: only an equal one can go on with its answer."""
        self.delivered = array("Q")
        """The ids of all tokens that have arrived: what the next worker goes on from."""
        self.vectors: list[array[float]] = []
        """The embeddings that have arrived, one for each text, in their order."""
        self.resumes: list[Resume] = []
        self.loss: tuple[EndReason, ErrorInfo] | None = None
        """What it ends with if no worker can be had to go on: why it lost the last one."""
        self.suspicion = Suspicion()
        self.snapshots: Area | None = None
        """Where its KV snapshots lie, from its first submit to its release."""
        self.news = Notice()
        self.released = anyio.Event()
        self.deadline_alarm: Alarm | None = None
        self.ladder_alarm: Alarm | None = None
        self.late_alarm: Alarm | None = None
        self._buffer: deque[Chunk] = deque()
        self._leftover: Chunk | None = None
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._first_index = 0

    @property
    def has_ended(self) -> bool:
        """Whether its end reason is fixed."""
        return self.state.phase is RequestPhase.ENDED

    @property
    def progress(self) -> int:
        """How many tokens, or embeddings, have arrived."""
        return len(self.delivered) + len(self.vectors)

    @property
    def has_chunk(self) -> bool:
        """Whether something can be read without waiting."""
        return bool(self._buffer)

    def aim(self) -> None:
        """Let the deadline alarm ring when the next budget is used up."""
        if self.deadline_alarm is not None:
            due = None if self.has_ended else self.clocks.next_due()
            self.deadline_alarm.aim(None if due is None else due[0])

    def restart_clock(self, budget: Budget, now: int) -> None:
        """Give the whole budget again and let its clock run.

        Aims the alarm only if it would ring too late: one that rings too early looks at all clocks and aims anew.
        """
        due_ns = self.clocks.restart(budget, now)
        alarm = self.deadline_alarm
        if due_ns is None or alarm is None or self.has_ended:
            return
        if alarm.due_ns is None or due_ns < alarm.due_ns:
            alarm.aim(due_ns)

    # --- the buffer ------------------------------------------------------------------------------

    def put(self, tokens: Sequence[Sequence[Any]], now: int) -> int:
        """Buffer tokens `[id, text, logprobs]`; return how many of them had no text and count as taken.

        Raises `RemoteProtocolError` if log-probabilities were asked for, and these are none.
        """
        chunks: list[Chunk] = []
        ids, first, delivered, waiting = self._ids, self._first_index, self.delivered, self._logprobs
        output = self.input.output
        told = read_logprobs(tokens, output.top_logprobs) if output.logprobs else None
        for position, (token, text, _) in enumerate(tokens):
            ids.append(token)
            delivered.append(token)
            if told is not None:
                waiting.append(told[position])
            if text:
                chunks.append(Chunk(text, first, tuple(ids), now, tuple(waiting)))
                first += len(ids)
                ids.clear()
                waiting.clear()
        self._first_index = first
        self._put_chunks(chunks, now)
        if len(waiting) * (1 + output.top_logprobs) > MOST_SILENT_LOGPROBS:
            raise RemoteProtocolError(f"tokens: {len(waiting)} in a row have log-probabilities and no text")
        return len(tokens) - len(chunks)

    @property
    def silent_tokens(self) -> int:
        """Tokens without text since the last chunk; the next one stands for them."""
        return len(self._ids)

    def put_leftover(self, text: str, now: int) -> None:
        """Buffer text that was held back until the end; its tokens have been counted."""
        if text:
            told = tuple(self._logprobs)
            self._leftover = Chunk(text, self._first_index, tuple(self._ids), now, told)
            self._put_chunks([self._leftover], now)

    def _put_chunks(self, chunks: Sequence[Chunk], now: int) -> None:
        if not chunks:
            return
        if not self._buffer:
            self.restart_clock(Budget.CONSUMER, now)
        self._buffer.extend(chunks)
        self.news.ring()

    def take(self, now: int) -> tuple[Chunk, int]:
        """Return the next chunk and how many tokens the reader takes with it (0 or 1)."""
        chunk = self._buffer.popleft()
        if self._buffer:
            self.clocks.restart(Budget.CONSUMER, now)
        else:
            self.clocks.stop(Budget.CONSUMER)
        return chunk, 0 if chunk is self._leftover else 1

    def drop_buffer(self) -> None:
        """Forget what nobody will read."""
        self._buffer.clear()

    def goes_on_with(self, facts: Mapping[str, Any]) -> bool:
        """Whether a worker with these facts can go on with its answer; if nothing has arrived, any can."""
        return not self.progress or self.fingerprint == facts["fingerprint"]

    # --- when a worker is lost -------------------------------------------------------------------

    def lose_worker(self, cause: DeathCause, pid: int, lost_ns: int) -> None:
        """Note that it goes on in another worker than this one."""
        self.resumes.append(
            Resume(cause, pid, delivered_tokens=len(self.delivered), restored_tokens=0, lost_ns=lost_ns)
        )

    def restored(self, tokens: int) -> None:
        """Note how many tokens the next worker took from a snapshot."""
        self.resumes[-1] = replace(self.resumes[-1], restored_tokens=tokens)

    @property
    def is_resuming(self) -> bool:
        """Whether it has lost its worker and not gone on yet, though its reader could take something."""
        resumes, window = self.resumes, self.window
        return (
            bool(resumes)
            and resumes[-1].resumed_ns is None
            and not self.has_ended
            and window.worker_may_compute
        )

    def went_on(self, now: int) -> Resume | None:
        """Note that its next token, or its end, has come; return the resume that is over now, or None."""
        if not self.resumes or self.resumes[-1].resumed_ns is not None:
            return None
        # Race "the next worker goes, too, before it gave a token": its loss is within the pause of the one before.
        self.resumes = [
            resume if resume.resumed_ns is not None else replace(resume, resumed_ns=now)
            for resume in self.resumes
        ]
        return self.resumes[-1]

    def report(self) -> Report:
        """Return the report as of now."""
        return Report(
            request_id=self.id,
            end_reason=self.state.reason,
            timeline=self.timeline,
            usage=self.usage,
            stage=self.stage,
            seed=self.input.seed,
            window=self.input.window,
            worker_pid=self.worker_pid,
            error=self.error,
            warnings=tuple(self.warnings),
            resumes=tuple(self.resumes),
            priority=self.input.priority,
        ).snapshot()
