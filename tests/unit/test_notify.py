"""What a service manager is told, over a real datagram socket."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from infervisor.supervisor.http_api.service.notify import Notifier


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(20)
        self._socket.bind(b"\0" + address[1:].encode() if address.startswith("@") else address)

    def heard(self) -> list[str]:
        """Return the lines of the next datagram, waiting for it if need be."""
        return self._socket.recv(4096).decode().split("\n")

    def has_news(self) -> bool:
        """Whether a datagram waits."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """Return a service manager that listens at a path, or at a name without one."""
    is_path = request.param == "path"
    made = Manager(str(tmp_path / "notify") if is_path else f"@infervisor-test-{os.getpid()}")
    yield made
    made.close()


def test_everything_that_is_told(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address})
    assert notifier.is_wanted
    notifier.status("loading a")
    assert manager.heard() == ["STATUS=loading a"]
    notifier.extend_timeout(1.5)
    assert manager.heard() == ["EXTEND_TIMEOUT_USEC=1500000"]
    notifier.ready("http://127.0.0.1:1 serves a")
    assert manager.heard() == ["READY=1", "STATUS=http://127.0.0.1:1 serves a"]
    notifier.reloading(lambda: 5_000_000_999)
    assert manager.heard() == ["RELOADING=1", "MONOTONIC_USEC=5000000", "STATUS=replacing workers"]
    notifier.stopping("draining")
    assert manager.heard() == ["STOPPING=1", "STATUS=draining"]
    notifier.close()
    notifier.close()
    notifier.ready("too late")
    assert not manager.has_news()


def test_a_reload_is_told_with_the_time_of_the_clock_that_systemd_reads(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address})
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    (line,) = [line for line in manager.heard() if line.startswith("MONOTONIC_USEC=")]
    assert before <= int(line.partition("=")[2]) <= time.monotonic_ns() // 1000
    notifier.close()


def test_a_status_stays_one_line_that_is_not_long(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address})
    notifier.status("a\nREADY=1\r\n" + "x" * 9999)
    (line,) = manager.heard()
    assert line.startswith("STATUS=a READY=1 xxx")
    assert len(line) < 400
    notifier.close()


@pytest.mark.anyio
async def test_signs_of_life_come_again_and_again(anyio_backend: str, manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "20000"})
    assert notifier.watchdog_s == 0.02
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(notifier.keep_alive)
        for _ in range(3):
            assert await anyio.to_thread.run_sync(manager.heard) == ["WATCHDOG=1"]
        tasks.cancel_scope.cancel()
    notifier.close()


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ""}, 30),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_answered_if_it_asks_this_process(
    environment: dict[str, str], watchdog_s: float | None, tmp_path: Path
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "s"), **environment}, pid=7)
    assert notifier.watchdog_s == watchdog_s
    notifier.close()


@pytest.mark.anyio
@pytest.mark.parametrize("address", [None, "", "relative", "@"])
async def test_without_a_service_manager_nothing_is_told(anyio_backend: str, address: str | None) -> None:
    environment = {} if address is None else {"NOTIFY_SOCKET": address}
    notifier = Notifier({**environment, "WATCHDOG_USEC": "1000"})
    assert not notifier.is_wanted
    assert notifier.watchdog_s is None
    notifier.ready("nobody hears it")
    with anyio.fail_after(20):
        await notifier.keep_alive()
    notifier.close()


def test_a_service_manager_that_is_gone_or_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    notifier = Notifier({"NOTIFY_SOCKET": str(address)})
    notifier.ready("nobody is there")
    deaf = Manager(str(address))
    for _ in range(10_000):
        notifier.status("x" * 200)
    assert deaf.heard()[0].startswith("STATUS=")
    deaf.close()
    notifier.ready("it has gone")
    notifier.close()
