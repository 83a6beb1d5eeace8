"""A small ASGI application that counts what happens to its requests, and waits where a test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.helpers.raw_http import WITHIN_S


def event(index: int) -> bytes:
    """Return one event of the endless stream: 256 bytes, numbered."""
    return b"data: %08d " % index + b"x" * 239 + b"\n\n"


class App:
    """A small application that counts what happens to its requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left: list[str] = []
        self.events_sent = 0
        self.bodies: list[bytes] = []
        self.release = asyncio.Event()
        self.news = asyncio.Event()
        self.state: dict[str, Any] = {}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at after each call and each leaving."""
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                self.news.clear()
                await self.news.wait()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.calls.append(path)
        self.state = scope["state"]
        self.news.set()
        if path == "/body":
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self._leave(path)
                    return
                body, more = body + message["body"], message["more_body"]
            self.bodies.append(body)
        elif path == "/wait":
            waits = asyncio.create_task(self.release.wait())
            goes = asyncio.create_task(self._disconnect(receive))
            done, rest = await asyncio.wait({waits, goes}, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            if goes in done:
                self._leave(path)
                return
        elif path == "/early":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": event(0), "more_body": True})
            await self._disconnect(receive)
            self._leave(path)
            return
        elif path == "/endless":
            await self._stream(receive, send)
            return
        elif path == "/broken":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": event(0), "more_body": True})
            raise RuntimeError("in mid-answer")
        size = int(scope["query_string"] or 2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"k" * size})

    async def _stream(self, receive: Any, send: Any) -> None:
        gone = asyncio.create_task(self._disconnect(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": event(self.events_sent), "more_body": True})
            self.events_sent += 1
            await asyncio.sleep(0)
        self._leave("/endless")

    async def _disconnect(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def _leave(self, path: str) -> None:
        self.left.append(path)
        self.news.set()
