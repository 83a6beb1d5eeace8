"""One request for text over HTTP, from its body to its last byte: the heart of the service.

Watches the client while it pumps chunks: one that leaves cancels its streams at once, whatever they do. Waits with
the status until there is something to send, so that what fails before gets a status of its own. Sends exactly one
terminal. A client that doesn't read stops the pump, so that credit runs out and the worker pauses. Runs in the
request's task.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.abc
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from infervisor import (
    Answer,
    Chunk,
    EndClass,
    EndReason,
    InfervisorError,
    InvalidRequest,
    RequestCancelled,
    Stream,
    Streams,
)
from infervisor.supervisor.http_api import sse
from infervisor.supervisor.http_api.errors import error_answer, name_as_body
from infervisor.supervisor.http_api.ledger import Entry, Ledger
from infervisor.supervisor.http_api.request_headers import ReportPlace
from infervisor.supervisor.http_api.settings import HttpSettings
from infervisor.supervisor.http_api.writer import Writer

_log = logging.getLogger("infervisor.http")

LAST_WORDS_S = 10.0
"""How long a client may take to read the end of a stream that failed."""
MAX_REPORT_HEADER = 8192
"""Bytes: clients refuse longer header lines. A longer report is at /api/requests/{id}."""


class Exchange(Response):
    """An answer that is made while it is sent.

    groups: the streams of each prompt. place: where the report goes. unread_s: how long a client may take to read
    the end of an answer that is whole. field_of: names a field of the library as the body has it.
    """

    def __init__(
        self,
        entry: Entry,
        groups: Sequence[Streams],
        writer: Writer,
        ledger: Ledger,
        settings: HttpSettings,
        place: ReportPlace,
        unread_s: float | None,
        field_of: Callable[[str | None], str | None],
    ) -> None:
        self._entry = entry
        self._groups = groups
        self._streams = entry.streams
        self._writer = writer
        self._ledger = ledger
        self._settings = settings
        self._place = place
        self._unread_s = unread_s
        self._field_of = field_of
        self._has_left = False
        self._has_begun = False
        self._is_over = False
        self._sent_s = 0.0
        self._sending = anyio.Lock(fast_acquire=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or notice that nobody waits for it any more. Cancelled, it cancels its streams."""
        self._send_message = send
        abort = scope.get("state", {}).get("abort_connection")
        try:
            self._ledger.add(self._entry)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_client, receive)
                await self._answer(scope, tasks, abort)
                tasks.cancel_scope.cancel()
        finally:
            # Also what never came to be queued ends here.
            for stream in self._streams:
                stream.cancel(EndReason.CLIENT_DISCONNECTED)
            self._ledger.finished(self._entry)

    # --- the client --------------------------------------------------------------------------------

    async def _watch_client(self, receive: Receive) -> None:
        """Task: notice that the client is gone, in whatever phase its streams are."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                # Race "it closes as soon as it has everything": nothing is left to be cancelled.
                if not self._is_over:
                    self._leave()
                return

    def _leave(self) -> None:
        self._has_left = True
        for stream in self._streams:
            stream.cancel(EndReason.CLIENT_DISCONNECTED)

    async def _bound_reading(self, tasks: anyio.abc.TaskGroup, abort: Callable[[], None] | None) -> None:
        """Task: cut off a client that doesn't read what is left when its streams have ended."""
        natural = True
        for stream in self._streams:
            await stream.released()
            reason = stream.end_reason
            natural = natural and reason is not None and reason.is_natural
        bound_s = self._unread_s if natural else LAST_WORDS_S
        if bound_s is None:
            return
        await anyio.sleep(bound_s)
        self._has_left = True
        if abort is not None:
            abort()
        tasks.cancel_scope.cancel()

    # --- the answer --------------------------------------------------------------------------------

    async def _answer(
        self, scope: Scope, tasks: anyio.abc.TaskGroup, abort: Callable[[], None] | None
    ) -> None:
        error: Exception | None = None
        try:
            async with AsyncExitStack() as entered:
                for group in self._groups:
                    await entered.enter_async_context(group)
                tasks.start_soon(self._bound_reading, tasks, abort)
                if self._entry.is_streaming:
                    tasks.start_soon(self._keep_alive)
                    await self._each(self._pump)
                    self._is_over = not self._has_left
                    await self._say(self._writer.done(self._streams, self._report("body")), more=False)
                else:
                    answers: list[Answer | None] = [None] * len(self._streams)

                    async def read(index: int, stream: Stream) -> None:
                        answers[index] = await self._read(stream)

                    await self._each(read)
                    await self._whole([answer for answer in answers if answer is not None])
        except Exception as failure:
            error = failure
        if error is not None and not self._has_left:
            await self._fail(scope, error)

    async def _each(self, work: Callable[[int, Stream], Awaitable[None]]) -> None:
        """Do the same with each choice, side by side. Raises the first error; the others are stopped."""
        if len(self._streams) == 1:
            await work(0, self._streams[0])
            return
        failed: list[Exception] = []

        async def one(index: int, stream: Stream) -> None:
            try:
                await work(index, stream)
            except Exception as error:
                failed.append(error)
                choices.cancel_scope.cancel()

        async with anyio.create_task_group() as choices:
            for index, stream in enumerate(self._streams):
                choices.start_soon(one, index, stream)
        if failed:
            raise failed[0]

    async def _pump(self, index: int, stream: Stream) -> None:
        async for chunk in stream:
            if not self._has_begun:
                # By itself: a writer counts its events in the order in which it is asked for them.
                await self._say(b"")
            await self._say(self._writer.chunk(index, chunk))
        await self._ended(stream)
        if not self._has_begun:
            await self._say(b"")
        report = stream.report.to_dict() if self._place == "body" else None
        await self._say(self._writer.end(index, stream, report))

    async def _read(self, stream: Stream) -> Answer:
        chunks: list[Chunk] = [chunk async for chunk in stream]
        await self._ended(stream)
        return Answer(
            text="".join(chunk.text for chunk in chunks),
            report=stream.report,
            logprobs=tuple(told for chunk in chunks for told in chunk.logprobs),
            tool_calls=tuple(call for chunk in chunks for call in chunk.tool_calls),
        )

    async def _ended(self, stream: Stream) -> None:
        """Wait until its worker is free, for the report; raise if somebody stopped it."""
        report = await stream.released()
        reason = report.end_reason
        if reason is not None and reason.end_class is EndClass.CALLER:
            error = RequestCancelled("The request was cancelled.")
            error.code = reason.value
            raise error

    async def _whole(self, answers: Sequence[Answer]) -> None:
        body = sse.dumps(self._writer.whole(answers, self._report("body")))
        headers = self._ignored()
        if self._place == "header":
            told = sse.dumps(self._report("header"))
            if len(told) > MAX_REPORT_HEADER:
                told = sse.dumps({"see": f"/api/requests/{self._entry.id}"})
            headers["X-Infervisor-Report"] = told.decode("ascii")
        self._is_over = True
        self._entry.status = 200
        answer = Response(body, 200, headers, "application/json")
        await self._send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _fail(self, scope: Scope, error: Exception) -> None:
        """Tell the one terminal of a failure: a status while there is none yet, an event otherwise."""
        if isinstance(error, InvalidRequest):
            name_as_body(error, self._field_of)
        elif not isinstance(error, InfervisorError):
            _log.error("%s: unexpected error", self._entry.id, exc_info=error)
        self._is_over = True
        async with self._sending:
            if self._has_begun:
                event = self._writer.failed(error, self._report("body"))
                await self._send({"type": "http.response.body", "body": event})
                return
            self._has_begun = True
            answer = error_answer(error, request_id=self._entry.id, report=self._report("body"))
            self._entry.status = answer.status_code
            start = {"type": "http.response.start", "status": answer.status_code}
            await self._send({**start, "headers": answer.raw_headers})
            await self._send({"type": "http.response.body", "body": answer.body})

    def _report(self, place: str) -> list[dict[str, Any]] | None:
        """Return the reports of all choices, if this is where they go."""
        if self._place != place:
            return None
        return [stream.report.to_dict() for stream in self._streams]

    # --- sending -----------------------------------------------------------------------------------

    async def _say(self, event: bytes, *, more: bool = True) -> None:
        """Send events, after the status if that isn't told yet. A client that doesn't read makes this wait."""
        async with self._sending:
            if not self._has_begun:
                await self._begin()
            if event or not more:
                await self._send({"type": "http.response.body", "body": event, "more_body": more})
                self._sent_s = anyio.current_time()

    async def _begin(self) -> None:
        self._has_begun = True
        self._entry.status = 200
        # No charset: a stream of events is always UTF-8. Proxies are asked not to collect it.
        headers = {**self._ignored(), "X-Accel-Buffering": "no", "Content-Type": "text/event-stream"}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": self._writer.begin(), "more_body": True})

    def _ignored(self) -> dict[str, str]:
        """Return the header that names what of the body was ignored, if something was."""
        names = () if self._entry.asked is None else self._entry.asked.warnings
        return {"X-Infervisor-Ignored": ", ".join(names)} if names else {}

    async def _keep_alive(self) -> None:
        """Task: begin the answer at the latest after a while, and send comments while nothing else is."""
        await anyio.sleep(self._settings.header_after_s)
        while not self._is_over:
            silent_s = anyio.current_time() - self._sent_s
            if not self._has_begun or silent_s >= self._settings.heartbeat_s:
                await self._say(sse.comment(self._entry.phase()))
                silent_s = 0.0
            await anyio.sleep(self._settings.heartbeat_s - silent_s)

    async def _send(self, message: Message) -> None:
        if self._has_left:
            return
        try:
            await self._send_message(message)
        except OSError:
            # Some servers say it this way; nobody is there any more.
            self._leave()
