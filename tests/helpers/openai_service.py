"""A real server of real workers, and OpenAI's own client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from openai import AsyncOpenAI, OpenAI

from infervisor import Supervisor
from infervisor.supervisor.http_api import HttpSettings, create_app
from tests.helpers.models import CHATML, build_model, byte_token, chain
from tests.helpers.raw_http import served
from tests.helpers.supervised import Told, scripted

HI: Any = [{"role": "user", "content": "hi"}]
KEY = "sk-right"


class Service:
    """A server of some models, and clients of it."""

    def __init__(self, port: int, client: AsyncOpenAI) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.client = client

    async def blocking(self, ask: Callable[[OpenAI], Any], **options: Any) -> Any:
        """Return what somebody gets who blocks."""

        def run() -> Any:
            settings = {"api_key": KEY, "max_retries": 0, **options}
            with OpenAI(base_url=self.url, **settings) as client:
                return ask(client)

        return await anyio.to_thread.run_sync(run)


@asynccontextmanager
async def serving(models: dict[str, Supervisor], **settings: Any) -> AsyncIterator[Service]:
    app = create_app(models, settings=HttpSettings(**settings))
    async with AsyncExitStack() as entered:
        service = await entered.enter_async_context(served(app))
        assert service.port is not None
        url = f"http://127.0.0.1:{service.port}/v1"
        client = AsyncOpenAI(api_key=KEY, base_url=url, max_retries=0)
        await entered.enter_async_context(client)
        yield Service(service.port, client)


@asynccontextmanager
async def saying(
    options: dict[str, Any] | None = None, http: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, Told]]:
    async with scripted(options, **settings) as (supervisor, told):
        async with serving({"m": supervisor}, **(http or {})) as service:
            yield service, told


@asynccontextmanager
async def table_model(directory: Path) -> AsyncIterator[Service]:
    """Serve a tiny model of llama.cpp, whose answers follow grammars, and which says "hi" otherwise."""
    path = build_model(directory / "hi.gguf", chain(*map(byte_token, b"hi")), CHATML, context_tokens=1024)
    async with Supervisor(path, options={"n_ctx": 1024}) as supervisor, serving({"m": supervisor}) as service:
        yield service
