"""A client of an ASGI application without a server between: it decides when it reads, and when it leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.types import ASGIApp, Message

WITHIN_S = 20


class Call:
    """One request. Messages of the answer lie in `messages`; `reading` False makes the application wait."""

    def __init__(self, app: ASGIApp, path: str, body: Any, headers: Mapping[str, str], method: str) -> None:
        self._app = app
        path, _, query = path.partition("?")
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {
                    "Host": "localhost",
                    "Content-Type": "application/json",
                    "Content-Length": str(len(self._body)),
                    **headers,
                }.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self.messages: list[Message] = []
        self.is_over = False
        self._asked = False
        self._left = anyio.Event()
        self._done = anyio.Event()
        self._news = anyio.Event()
        self._may_send = anyio.Event()
        self._may_send.set()

    async def run(self) -> None:
        """Task: let the application answer."""
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self.is_over = True
            self._done.set()
            self._news.set()

    def abort_with(self, abort: Any) -> None:
        """Offer what a server offers to cut off the connection."""
        self._scope["state"]["abort_connection"] = abort

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._may_send.wait()
        if self._left.is_set():
            return
        self.messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            # As servers do: from now on `receive` says that it is over.
            self._left.set()
        self._news.set()

    # --- what the client does ----------------------------------------------------------------------

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()
        self._may_send.set()

    def stop_reading(self) -> None:
        """Read nothing more."""
        self._may_send = anyio.Event()

    def go_on_reading(self) -> None:
        """Read again."""
        self._may_send.set()

    async def until(self, text: str) -> None:
        """Return when the answer so far holds a text."""
        with anyio.fail_after(WITHIN_S):
            while text not in self.text:
                assert not self.is_over, f"over without {text!r}: {self.text}"
                self._news = anyio.Event()
                await self._news.wait()

    async def over(self) -> None:
        """Return when the application is done with it."""
        with anyio.fail_after(WITHIN_S):
            await self._done.wait()

    # --- what it got -------------------------------------------------------------------------------

    @property
    def status(self) -> int | None:
        """The status, or None while there is none."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(m.get("body", b"") for m in self.messages if m["type"].endswith("body")).decode()

    @property
    def json(self) -> Any:
        """The whole body."""
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of all events, JSON read where it is JSON. Comments are left out."""
        data = [part.split("data: ", 1)[1] for part in self.text.split("\n\n") if "data: " in part]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    @property
    def said(self) -> str:
        """The text of the first choice of a streamed chat."""
        pieces = [
            event["choices"][0]["delta"]
            for event in self.events
            if event != "[DONE]" and event.get("choices")
        ]
        return "".join(piece.get("content") or "" for piece in pieces)


@asynccontextmanager
async def calling(
    app: ASGIApp,
    path: str,
    body: Any,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
    abort: Any = None,
) -> AsyncIterator[Call]:
    """Yield a request that is being answered; leave when the block is left."""
    call = Call(app, path, body, headers or {}, method)
    if abort is not None:
        call.abort_with(abort)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call.run)
        yield call
        call.leave()
        await call.over()


async def ask(
    app: ASGIApp, path: str, body: Any, headers: Mapping[str, str] | None = None, *, method: str = "POST"
) -> Call:
    """Return a request that is answered."""
    async with calling(app, path, body, headers, method=method) as call:
        await call.over()
    return call
