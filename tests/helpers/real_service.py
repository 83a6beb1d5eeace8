"""The service's application behind its real server and a real worker, in the test's loop; and ways to leave it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from infervisor import Supervisor
from infervisor.supervisor.http_api import HttpSettings, create_app
from tests.helpers.raw_http import WITHIN_S, Client, Served, request, served
from tests.helpers.supervised import Told, scripted

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    EMBEDDINGS: {"input": "hi"},
}


@asynccontextmanager
async def service(
    options: dict[str, Any] | None = None,
    *,
    http: HttpSettings | None = None,
    server: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Served, Supervisor, Told]]:
    """Yield a service of the scripted engine. server: for `served`; settings: the supervisor's."""
    async with scripted(options, **settings) as (supervisor, told):
        async with served(create_app(supervisor, settings=http), **(server or {})) as running:
            yield running, supervisor, told


def asking(path: str = CHAT, body: dict[str, Any] | None = None, *, name: str = "", **more: Any) -> bytes:
    """Return the bytes of a request. name: by which `entry_of` finds it; more: further fields of the body."""
    raw = json.dumps({**(body or BODIES[path]), **more}).encode()
    return request(path, raw, *([f"X-Client-Request-Id: {name}".encode()] if name else []))


async def get(server: Served, path: str) -> Any:
    """Return JSON."""
    return json.loads((await server.exchange(request(path))).body)


async def entry_of(server: Served, name: str) -> dict[str, Any] | None:
    """Return what is told of the request with this name, by its id; None if it isn't known."""
    listed = (await get(server, "/api/requests"))["requests"]
    ids = [entry["id"] for entry in listed if entry["client_request_id"] == name]
    assert len(ids) <= 1
    entry: dict[str, Any] | None = await get(server, f"/api/requests/{ids[0]}") if ids else None
    return entry


async def entry_when(server: Served, name: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return it as soon as it is so."""
    entry = None
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                entry = await entry_of(server, name)
                if entry is not None and is_so(entry):
                    return entry
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{name} never was so: {json.dumps(entry)}") from None


# --- leaving -------------------------------------------------------------------------------------------


async def close(client: Client) -> None:
    """Leave as a program does that ends: nothing more is read or sent."""
    client.writer.close()


async def reset(client: Client) -> None:
    """Leave as a program does that crashes, or whose connection a router forgets."""
    sock = client.writer.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


async def half_close(client: Client) -> None:
    """End the sending alone. What is read afterwards ends, too."""
    client.writer.write_eof()
    client.writer.transport.resume_reading()
    assert b"[DONE]" not in await client.rest()


WAYS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "close": close,
    "reset": reset,
    "half_close": half_close,
}
