"""The service as a real process, and a client of it. Its own port, and nothing of the surroundings' settings."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from tests.helpers.command_line import WITHIN_S, Running, environment, running, scripted

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Serving:
    """A service that runs. `command` has what it says; requests go through `ask` and `stream`."""

    def __init__(self, command: Running) -> None:
        self.command = command
        self.port = 0

    def listening(self) -> None:
        """Wait until it says where it listens; models may still load."""
        self.port = int(self.command.read_until("err", r"loading [^\n]*address=127\.0\.0\.1:(\d+)\n")[1])

    def ready(self) -> str:
        """Wait until it says that it is ready; return that line."""
        line = r"(?:supervise: |\"message\": \")(http://127\.0\.0\.1:(\d+) serves [^\n\"]*)\"?"
        said = self.command.read_until("err", line + r"[^\n]*\n")
        self.port = int(said[2])
        return said[1].decode()

    @property
    def log(self) -> str:
        """What was read of standard error so far."""
        return self.command.err.decode()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and body of a whole answer, JSON read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            given = {} if body is None else {"Content-Type": "application/json"}
            connection.request(
                method, path, None if body is None else json.dumps(body), {**given, **(headers or {})}
            )
            answer = connection.getresponse()
            raw = answer.read()
            is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
            return answer.status, json.loads(raw) if is_json else raw.decode()
        finally:
            connection.close()

    @contextmanager
    def stream(self, **body: Any) -> Iterator[Events]:
        """Ask for a chat as a stream; yield its events, once its head has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            given = json.dumps({**CHAT, "stream": True, **body})
            connection.request("POST", "/v1/chat/completions", given, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield Events(answer)
        finally:
            connection.close()

    def worker_pids(self) -> list[int]:
        """Return the workers that it has now."""
        _, told = self.ask("GET", "/api/worker")
        return [worker["pid"] for model in told["models"] for worker in model["workers"]]

    def until(self, path: str, wanted: int) -> Any:
        """Ask until a status comes, which depends on what happens meanwhile; return the body."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            status, body = self.ask("GET", path)
            if status == wanted:
                return body
            assert time.monotonic() < deadline, f"{path} says {status} and never {wanted}: {body}"
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask for the end, and return the exit code."""
        self.command.process.send_signal(number)
        return self.command.finish()


class Events:
    """The events of a stream, as they come."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.data: list[str] = []

    def next(self) -> str | None:
        """Return the data of the next event, or None at the end."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                self.data.append(line[len(b"data: ") :].decode().rstrip("\n"))
                return self.data[-1]
        return None

    def until(self, wanted: str) -> None:
        """Read until an event holds this."""
        while (event := self.next()) is not None:
            if wanted in event:
                return
        raise AssertionError(f"{wanted!r} never came: {self.data[-5:]}")

    def rest(self) -> list[str]:
        """Read all that is left; return all events."""
        while self.next() is not None:
            pass
        return self.data

    @property
    def text(self) -> str:
        """The answer so far."""
        pieces = [json.loads(event) for event in self.data if event != "[DONE]"]
        return "".join(
            choice["delta"].get("content") or "" for piece in pieces for choice in piece.get("choices", ())
        )


def service_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without settings of a service or a service manager."""
    names = re.compile(r"SUPERVISE_.*|NOTIFY_SOCKET|WATCHDOG_.*")
    return {name: value for name, value in environment().items() if not names.fullmatch(name)} | changes


@contextmanager
def serving(
    *arguments: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None, **options: Any
) -> Iterator[Serving]:
    """Start a service of the scripted engine at a free port; options are the engine's. It is killed at the end."""
    words = [*scripted(**options), "--port", "0", *arguments]
    with running("serve", *words, prefix=prefix, env=env or service_environment()) as command:
        yield Serving(command)


def family(pid: int) -> list[int]:
    """Return the pids of a process and all that it has started."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def kill(pid: int) -> None:
    """Kill a process at once."""
    os.kill(pid, signal.SIGKILL)
