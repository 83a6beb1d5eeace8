"""Streams through a real worker: order, credit, counts, the end."""

from __future__ import annotations

import pytest

from infervisor import EndReason
from tests.helpers.host_process import Host
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio


async def test_a_stream_ends_at_max_tokens_with_every_token_in_order() -> None:
    async with scripted() as (supervisor, _), supervisor.stream("count", max_tokens=300) as stream:
        chunks = [chunk async for chunk in stream]
        report = await stream.released()
    assert "".join(map(str, chunks)) == "".join(f"w{i} " for i in range(300))
    assert [chunk.index for chunk in chunks] == list(range(300))
    assert report.end_reason is EndReason.LENGTH
    assert report.usage.completion_tokens == 300
    assert report.is_released


async def test_a_fast_producer_computes_at_most_one_window_ahead_of_a_slow_reader() -> None:
    async with scripted() as (supervisor, _):
        async with supervisor.stream("count", window=2) as stream:
            taken = []
            async for chunk in stream:
                taken.append(chunk.text)
                if len(taken) == 5:
                    break
        report = stream.report
    assert taken == ["w0 ", "w1 ", "w2 ", "w3 ", "w4 "]
    assert report.usage.computed_tokens <= 7
    assert report.end_reason is EndReason.CANCELLED
    assert report.timeline.release_s is not None


PARENT = """
import asyncio, sys
from infervisor import Supervisor, default_model

async def main():
    async with Supervisor(default_model()) as supervisor:
        print(await supervisor.generate("One, two,", max_tokens=3, temperature=0))
        print(sorted({"llama_cpp", "numpy", "jinja2", "infervisor.worker"} & sys.modules.keys()))

asyncio.run(main())
"""


@pytest.mark.real_model
def test_the_parent_never_loads_the_model_library_or_the_worker() -> None:
    host = Host(PARENT)
    code, said, errors = host.finish()
    assert code == 0, errors
    assert said.splitlines()[-1] == "[]"
