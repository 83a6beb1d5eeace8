"""200 clients that connect, leave and stay: every request is accounted for, health answers, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from infervisor.supervisor.http_api.exchange import Exchange
from tests.helpers.http_storm import Asked, probing, storm
from tests.helpers.real_service import get, service
from tests.helpers.serving import Serving, serving
from tests.helpers.waiting import until

CLIENTS = 200
SECONDS = float(os.environ.get("INFERVISOR_STORM_S", "8"))
"""A short storm shows that it works; a minute is the figure."""
ENGINE = {"pace_s": 0.004, "prefill_tokens_per_s": 20_000, "slice_s": 0.005}
FEW_BYTES = 16 << 20
"""What a service may have more in memory afterwards: the last requests' reports, and what an allocator keeps."""


class Log:
    """What the service writes to standard error, a JSON object a line."""

    def __init__(self) -> None:
        self.raw = bytearray()

    def requests(self) -> dict[str, dict[str, Any]]:
        """Return the lines of finished requests by their clients' names. Fails if a request has two."""
        lines = [json.loads(line) for line in self.raw.splitlines() if line.startswith(b"{")]
        assert [line for line in lines if line["level"] in ("warning", "error")] == []
        finished = [line for line in lines if line["message"] == "request"]
        by_name = {line["client_request_id"]: line for line in finished}
        assert len(by_name) == len(finished)
        return by_name


@contextmanager
def reading_log(service: Serving) -> Iterator[Log]:
    """Take what it writes until it ends, so that its pipe is never full."""
    pipe = service.command.process.stderr
    assert pipe is not None
    log = Log()

    def take() -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            log.raw += data

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield log
    finally:
        service.command.process.terminate()
        service.command.process.wait(60)
        thread.join()


class Held:
    """What the service's process holds when nobody asks it anything."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self.descriptors = process.num_fds()
        self.threads = process.num_threads()
        self.memory_bytes = process.memory_full_info().uss
        self.children = [child.pid for child in process.children(recursive=True)]


def assert_accounted_for(asked: list[Asked], log: Log) -> Counter[str]:
    """Compare what clients saw with what the service logged; return how many ended in which way."""
    logged = log.requests()
    for request in asked:
        line = logged.pop(request.name, None)
        if line is None:
            # Refused for what it was, or gone before all of it was there.
            assert request.status == (400 if request.fate == "ask_nonsense" else None), request
            assert request.ended in ("refused", "left"), request
            continue
        assert request.is_whole, "half a request was taken for a whole one"
        assert request.request_id in (None, line["id"])
        reasons = set(line["end_reason"].split(","))
        if request.ended == "success":
            assert reasons == {"length"}, (request, line)
            assert line["status"] == 200
            assert line["stage"] is None
        else:
            assert request.ended == "left", (request, line)
            # Race "it was whole before the leaving was seen": some of its answers, or all of them.
            assert reasons <= {"client_disconnected", "length"}, (request, line)
    assert logged == {}, "requests that nobody sent"
    return Counter(f"{request.fate}: {request.ended}" for request in asked)


def released(service: Serving) -> Counter[str]:
    """Return how many answers the service counted as released, by end reason."""
    _, text = service.ask("GET", "/metrics")
    found = re.findall(
        r'^infervisor_requests_total{.*?end_reason="(\w+)".*?} ([\d.e+]+)$', text, re.MULTILINE
    )
    return Counter({reason: int(float(count)) for reason, count in found})


def settle(service: Serving) -> None:
    """Wait until nothing is in progress, and nobody connected."""
    pid = service.command.process.pid
    asyncio.run(until(lambda: not in_progress(service)))
    asyncio.run(until(lambda: not connections(pid)))


def in_progress(service: Serving) -> list[Any]:
    _, told = service.ask("GET", "/api/requests")
    _, worker = service.ask("GET", "/api/worker")
    (model,) = worker["models"]
    return [entry for entry in told["requests"] if not entry["finished"]] + [1] * (
        model["in_flight"] + model["queue"]["depth"]
    )


def connections(pid: int) -> list[Any]:
    return [
        one for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED
    ]


def test_a_storm_of_clients_is_accounted_for_and_leaves_nothing() -> None:
    arguments = ("--log-format", "json", "--slots", "16", "--max-queue", "2000")
    with serving(*arguments, **ENGINE) as service:
        service.ready()
        pid = service.command.process.pid
        workers = service.worker_pids()
        with reading_log(service) as log:
            asked = asyncio.run(storm(service.port, CLIENTS, SECONDS / 4, "first"))
            settle(service)
            before = Held(pid)
            with probing(service.port) as health:
                asked += asyncio.run(storm(service.port, CLIENTS, SECONDS, "second"))
            settle(service)
            counted = released(service)
            # The connection of our own last question is on its way out.
            asyncio.run(until(lambda: Held(pid).descriptors <= before.descriptors))
            after = Held(pid)
            assert service.worker_pids() == workers
            _, told = service.ask("GET", "/api/worker")
            assert told["models"][0]["restarts"] == {}
        ended = assert_accounted_for(asked, log)
    choices = {request.name: request.choices for request in asked}
    # What is counted where requests are released, and what is logged where they are answered, is the same.
    assert sum(counted.values()) == sum(choices[name] for name in log.requests())
    assert set(counted) == {"length", "client_disconnected"}
    assert ended["stay: success"] > 0
    assert ended["leave_while_reading: left"] > 0
    assert ended["leave_after_a_while: left"] > 0
    assert ended["stop_reading_for_a_while: success"] > 0
    assert health.wrong == []
    assert health.answers > SECONDS
    assert health.slowest_s <= 1
    assert after.children == before.children
    assert after.threads <= before.threads
    assert after.memory_bytes <= before.memory_bytes + FEW_BYTES


def tasks() -> Counter[str]:
    """Return how many tasks there are of each kind; some are made anew every second."""
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_task_and_no_request_outlives_its_client() -> None:
    async with service(ENGINE, slots=16, max_queue=2000) as (server, supervisor, _):
        assert server.port is not None
        await get(server, "/api/requests")
        before = tasks()
        asked = await storm(server.port, 40, SECONDS / 4, "third")
        assert len(asked) > 40
        await until(lambda: server.server.open_connections == 0)
        await until(lambda: supervisor.status().in_flight == supervisor.status().queue_depth == 0)
        await until(lambda: tasks() == before)
        gc.collect()
        assert [each for each in gc.get_objects() if isinstance(each, Exchange)] == []
