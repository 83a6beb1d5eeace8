"""The guards of the HTTP service around an endpoint, asked in memory: no server, no socket."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
from starlette.requests import Request

from infervisor.supervisor.http_api.guards.order import guarded, read_body
from infervisor.supervisor.http_api.settings import HttpSettings

JSON = (b"content-type", b"application/json")
HOST = (b"host", b"127.0.0.1:8080")
TCP = ("127.0.0.1", 8080)
UNIX = ("/run/infervisor.sock", None)
DISCONNECT = {"type": "http.disconnect"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    messages: list[dict[str, Any]]

    @property
    def code(self) -> str | None:
        return json.loads(self.body)["error"]["code"]


class Endpoint:
    """An application that reads its body and says what it got."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.enter: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append((scope["method"], scope["path"]))
        if self.enter is not None:
            await self.enter(scope, send)
        self.bodies.append(await read_body(Request(scope, receive), self.settings))
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": b"{}"})


class Service:
    """The guards around an endpoint, asked without any server."""

    def __init__(self, **settings: Any) -> None:
        self.settings = HttpSettings(**settings)
        self.endpoint = Endpoint(self.settings)
        self.app = guarded(self.endpoint, SimpleNamespace(settings=self.settings))  # type: ignore[arg-type]

    async def ask(
        self,
        method: str = "GET",
        path: str = "/v1/models",
        headers: list[tuple[bytes, bytes]] | None = None,
        body: list[Any] | bytes = b"",
        server: tuple[str, int | None] | None = TCP,
        **scope: Any,
    ) -> Reply:
        """Return the answer. `body` may be a list of what the server hands over, pauses in seconds included."""
        sent: list[dict[str, Any]] = []
        pieces = iter(body if isinstance(body, list) else [body])
        more = body if isinstance(body, list) else [body]
        left = len([piece for piece in more if isinstance(piece, bytes)])

        async def receive() -> Any:
            nonlocal left
            for piece in pieces:
                if isinstance(piece, int | float):
                    await anyio.sleep(piece)
                elif isinstance(piece, bytes):
                    left -= 1
                    return {"type": "http.request", "body": piece, "more_body": left > 0}
                else:
                    return piece
            return await anyio.sleep_forever()

        async def send(message: Any) -> None:
            sent.append(message)

        whole = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [HOST] if headers is None else headers,
            "server": server,
            "client": ("127.0.0.1", 50000),
            **scope,
        }
        with anyio.fail_after(20):
            await self.app(whole, receive, send)
        if not sent:
            return Reply(0, {}, b"", sent)
        assert sent[0]["type"] == "http.response.start"
        assert [message for message in sent[1:] if not message.get("more_body", False)] == sent[-1:]
        headers_sent = [(k.decode().lower(), v.decode()) for k, v in sent[0]["headers"]]
        assert len(dict(headers_sent)) == len(headers_sent), "a header twice"
        return Reply(
            sent[0]["status"], dict(headers_sent), b"".join(m.get("body", b"") for m in sent[1:]), sent
        )
