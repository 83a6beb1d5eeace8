"""The steps of `supervise probe`. Each returns a sentence and figures, or raises `Failed` or `Skipped`.

Figures are in the units of their names. What is measured at the worker comes from its own reports.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import anyio

from infervisor import EndReason, Event, ModelLoadError, Report, Stream, Supervisor
from infervisor.supervisor.cli.probe_threads import NotHere, compare
from infervisor.supervisor.events import (
    BreakerOpened,
    LoadProgress,
    RequestReleased,
    RequestStarted,
    WorkerBecameReady,
    WorkerExited,
)

E = TypeVar("E")
Outcome = tuple[str, Mapping[str, Any]]

COUNTING = "One, two, three, four, five, six, seven, eight, nine, ten, eleven,"
SLOW_WINDOW = 2
SLOW_READS = 4
STILL_S = 0.3
"""A worker that may go on does so within this time, or within ten of its own tokens' times."""
PREFILL_WORDS = 1500
INTO_PREFILL_S = 0.02


class Failed(Exception):
    """The step showed something wrong."""


class Skipped(Exception):
    """The step can't show anything here."""


class Told:
    """The supervisor's events, with a way to wait for one. Passes each on to `also`."""

    def __init__(self, also: Callable[[Event], None]) -> None:
        self._also = also
        self._events: list[Event] = []
        self._news = anyio.Event()

    def __call__(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()
        self._also(event)

    async def wait_for(self, kind: type[E], *, after: int = 0) -> E:
        """Return the first event of a kind, of those from number `after` on."""
        event = await self.wait_for_any(kind, after=after)
        assert isinstance(event, kind)
        return event

    async def wait_for_any(self, *kinds: type[object], after: int = 0) -> Event:
        """Return the first event of several kinds."""
        while True:
            self._news = anyio.Event()
            for event in self._events[after:]:
                if isinstance(event, kinds):
                    return event
            await self._news.wait()

    def last(self, kind: type[E]) -> E | None:
        """Return the last event of a kind so far."""
        return next((event for event in reversed(self._events) if isinstance(event, kind)), None)

    @property
    def count(self) -> int:
        """How many events there were."""
        return len(self._events)


class Probe:
    """One supervised worker and what is known of it so far.

    another: makes a supervisor like this one, with further options of the engine. step_timeout_s: the longest time
    of a step.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        told: Told,
        another: Callable[[Mapping[str, Any]], Supervisor],
        step_timeout_s: float,
    ) -> None:
        self.supervisor = supervisor
        self.told = told
        self.facts: Mapping[str, Any] = {}
        self._another = another
        self._step_timeout_s = step_timeout_s
        self._began_s = time.monotonic()
        self._load_s = 0.0

    async def spawn(self) -> Outcome:
        """The process is there and speaks."""
        event = await self.told.wait_for_any(LoadProgress, WorkerBecameReady, WorkerExited, BreakerOpened)
        if isinstance(event, BreakerOpened):
            raise Failed(event.reason)
        if isinstance(event, WorkerExited):
            return await self._ended_early(event)
        status = self.supervisor.status()
        told = ", ".join(f"{name} {version}" for name, version in status.versions.items())
        return f"pid {status.worker_pid}: {told}", {"pid": status.worker_pid, "versions": status.versions}

    async def _ended_early(self, event: WorkerExited) -> Outcome:
        try:
            await self.supervisor.wait_ready()
        except ModelLoadError as error:
            if error.code == "interpreter_without_package":
                raise
        return f"pid {event.pid}: it spoke, but did not load at once", {"pid": event.pid}

    async def load(self) -> Outcome:
        """The model is loaded."""
        self.facts = facts = await self.supervisor.wait_ready()
        self._load_s = time.monotonic() - self._began_s
        extra = facts.get("extra", {})
        device = "GPU offload possible" if extra.get("gpu_offload") else "CPU"
        threads = f", {extra['threads']} threads" if "threads" in extra else ""
        template = "chat template" if facts.get("has_chat_template") else "no chat template"
        return (
            f"{facts.get('library')} on {device}{threads}; context {facts['context_tokens']} tokens, "
            f"{facts['slots']} slot{'s' if facts['slots'] != 1 else ''}, {template}",
            {"facts": dict(facts)},
        )

    async def first_token(self) -> Outcome:
        """A short prompt is answered."""
        async with self._stream(max_tokens=1) as stream:
            await stream.text()
        report = stream.report
        ttft_s = report.timeline.ttft_s
        if ttft_s is None:
            raise Failed("the request ended without a token")
        return f"after {_ms(ttft_s)} for {report.usage.prompt_tokens} prompt tokens", {
            "ttft_s": ttft_s,
            "prompt_tokens": report.usage.prompt_tokens,
        }

    async def slow_reader(self) -> Outcome:
        """A reader that stops makes the worker stop within the window."""
        taken = 0
        async with self._stream(window=SLOW_WINDOW) as stream:
            for _ in range(SLOW_READS):
                chunk = await anext(stream, None)
                if chunk is None:
                    raise Skipped("the answer ended before the reader could be slow")
                taken += len(chunk.token_ids)
            await anyio.sleep(max(STILL_S, 10 * (stream.report.timeline.tpot_s or 0)))
        computed = (await stream.released()).usage.computed_tokens
        figures = {"taken_tokens": taken, "computed_tokens": computed, "window": SLOW_WINDOW}
        if computed > taken + SLOW_WINDOW:
            raise Failed(f"the worker computed {computed} tokens for a reader that took {taken}")
        return f"took {taken} tokens, the worker computed {computed} (window {SLOW_WINDOW})", figures

    async def cancel_in_prefill(self) -> Outcome:
        """A cancel in the middle of a long prompt."""
        # Sized in words; a word is one to a few tokens, and the prompt must leave room in the context.
        words = min(PREFILL_WORDS, int(self.facts["context_tokens"]) // 4)
        seen = self.told.count
        async with self._stream("word " * words, window=1) as stream:
            await self.told.wait_for_any(RequestStarted, RequestReleased, after=seen)
            await anyio.sleep(INTO_PREFILL_S)
            if stream.report.timeline.first_token_ns is not None:
                raise Skipped(f"the prompt of {stream.report.usage.prompt_tokens} tokens was read at once")
            if stream.end_reason is not None:
                await stream.text()  # raises what ended it
            stream.cancel()
            return _cancelled(await stream.released())

    async def cancel_in_decode(self) -> Outcome:
        """A cancel in the middle of an answer."""
        async with self._stream() as stream:
            for _ in range(3):
                if await anext(stream, None) is None:
                    raise Skipped("the answer ended before it could be cancelled")
            stream.cancel()
            return _cancelled(await stream.released())

    async def release(self) -> Outcome:
        """After all that, nothing is held and the next request is answered."""
        status = self.supervisor.status()
        if status.in_flight or status.queue_depth:
            raise Failed(f"{status.in_flight} requests are still in the worker, {status.queue_depth} wait")
        answer = await self.supervisor.generate(COUNTING, max_tokens=1, temperature=0, ignore_eos=True)
        ttft_s = answer.report.timeline.ttft_s
        return f"nothing is held; the next request had its token after {_ms(ttft_s)}", {"ttft_s": ttft_s}

    async def kill_and_resume(self) -> Outcome:
        """kill -9 in the middle of an answer: it goes on in a new worker, and nothing is lost or said twice."""
        whole = await self._stream(max_tokens=RESUMED_TOKENS, seed=1).text()
        async with self._stream(max_tokens=RESUMED_TOKENS, seed=1, window=RESUMED_WINDOW) as stream:
            first = await anext(stream, None)
            if first is None or stream.end_reason is not None:
                raise Skipped("the answer ended before the worker could be killed")
            pid = self.supervisor.status().worker_pid
            if pid is None:
                raise Failed("the worker is gone before it was killed")
            # As an operator or the system would: from outside. It is our own child and was seen alive just
            # now in this thread, which is the only one that collects it: the number can't be a stranger's.
            os.kill(pid, signal.SIGKILL)
            text = first.text + await stream.text()
        report = stream.report
        if not report.resumes:
            raise Failed("the worker was killed, and the answer doesn't know of it")
        if report.usage.completion_tokens != RESUMED_TOKENS:
            raise Failed(
                f"the answer has {report.usage.completion_tokens} tokens instead of {RESUMED_TOKENS}"
            )
        pause_s, same = report.resumes[0].pause_s, text == whole
        return (
            f"pid {pid} killed; pid {report.worker_pid} went on after {pause_s or 0:.2f} s "
            f"with {'the same' if same else 'another'} text",
            {"pause_s": pause_s, "pid": report.worker_pid, "same_text": same},
        )

    async def threads(self) -> Outcome:
        """How many threads are best, each number tried in a worker of its own."""
        try:
            return await compare(
                self.facts, self._another, load_s=self._load_s, within_s=self._step_timeout_s
            )
        except NotHere as reason:
            raise Skipped(str(reason)) from None

    async def exit(self) -> Outcome:
        """The worker is stopped and collected."""
        await self.supervisor.stop()
        gone = self.told.last(WorkerExited)
        if gone is None:
            raise Skipped("no worker ran")
        if gone.cause.value == "stopped" and not gone.status.startswith("exit code"):
            raise Failed(f"pid {gone.pid} didn't end when it was asked to: {gone.status}")
        return f"pid {gone.pid}: {gone.status}", {"pid": gone.pid, "status": gone.status}

    def _stream(self, prompt: str = COUNTING, **options: Any) -> Stream:
        return self.supervisor.stream(prompt, temperature=0, ignore_eos=True, **options)


def _cancelled(report: Report) -> Outcome:
    release_s = report.timeline.release_s
    if report.end_reason is not EndReason.CANCELLED:
        raise Failed(f"the request ended as {report.end_reason}")
    if release_s is None:
        raise Failed("the request is not released")
    if report.stage is not None and report.stage.value == "kill":
        raise Failed(f"released only by killing the worker, after {_ms(release_s)}")
    return f"released {_ms(release_s)} after the cancel ({report.stage})", {
        "release_s": release_s,
        "stage": report.stage,
    }


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f} ms"


RESUMED_TOKENS = 24
RESUMED_WINDOW = 4
LOAD = "load"
EXIT = "exit"
STEPS: tuple[tuple[str, Callable[[Probe], Awaitable[Outcome]]], ...] = (
    ("spawn", Probe.spawn),
    (LOAD, Probe.load),
    ("first token", Probe.first_token),
    ("slow reader", Probe.slow_reader),
    ("cancel in prefill", Probe.cancel_in_prefill),
    ("cancel in decode", Probe.cancel_in_decode),
    ("release", Probe.release),
    ("kill and resume", Probe.kill_and_resume),
    ("threads", Probe.threads),
    (EXIT, Probe.exit),
)
