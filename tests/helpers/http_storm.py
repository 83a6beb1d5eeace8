"""A crowd of HTTP clients that come, stay, go and misbehave by a fixed seed, and what each of them saw.

Owns its sockets alone. Judges nothing: what may have become of a request is the test's to say.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FATES = (
    *("stay",) * 6,
    *("leave_while_reading",) * 4,
    *("leave_after_a_while",) * 4,
    *("stop_reading_for_a_while",) * 2,
    "leave_at_once",
    "leave_in_the_body",
    "say_nothing",
    "ask_nonsense",
)
LEAVING = ("close", "reset", "half_close")
PATIENCE_S = 60.0


@dataclass
class Asked:
    """One request and what its client saw of it.

    ended: "success", "error CODE", "left", "cut off" (the service ended it without a terminal), or "refused" (a
    status other than 200). choices: answers that were asked for. is_whole: whether all of it was sent.
    """

    name: str
    fate: str
    choices: int = 1
    is_whole: bool = True
    status: int | None = None
    request_id: str | None = None
    raw: bytearray = field(default_factory=bytearray)
    ended: str = "left"


async def storm(port: int, clients: int, seconds: float, seed: str) -> list[Asked]:
    """Let so many clients ask again and again for so long; return everything that they asked for a model."""
    asked: list[Asked] = []
    until_s = time.monotonic() + seconds

    async def one(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        await asyncio.sleep(chance.random() * min(1.0, seconds / 4))
        turn = 0
        while time.monotonic() < until_s:
            request = Asked(f"{seed}-{number}-{turn}", chance.choice(FATES))
            asked.append(request)
            async with asyncio.timeout(PATIENCE_S):
                await _ask(port, request, chance)
            turn += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(one(number))
    return asked


async def _ask(port: int, asked: Asked, chance: random.Random) -> None:
    path = chance.choice((CHAT, CHAT, COMPLETIONS, RESPONSES))
    stream = chance.random() < 0.7
    raw = _request(path, asked, stream, chance)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    try:
        if asked.fate == "leave_in_the_body":
            raw, asked.is_whole = raw[: -chance.randrange(1, 40)], False
        if asked.fate == "say_nothing":
            raw, asked.is_whole = raw[: chance.randrange(60)], False
        writer.write(raw)
        await writer.drain()
        if asked.fate == "leave_while_reading":
            await _read(reader, asked, at_most=chance.randrange(1, 4000))
        elif asked.fate in ("leave_after_a_while", "say_nothing"):
            await asyncio.sleep(chance.random() * 0.3)
        elif asked.fate == "stop_reading_for_a_while":
            await _read(reader, asked, at_most=chance.randrange(1, 2000))
            await asyncio.sleep(chance.random())
            await _read(reader, asked)
        elif asked.fate in ("stay", "ask_nonsense"):
            await _read(reader, asked)
    except ConnectionError:
        asked.ended = "cut off"
    finally:
        await _leave(reader, writer, chance.choice(LEAVING))


def _request(path: str, asked: Asked, stream: bool, chance: random.Random) -> bytes:
    words = "word " * chance.randrange(1, 200)
    most = chance.choice((1, 5, 20, 60)) if asked.fate != "leave_while_reading" else 1_000_000
    body: dict[str, Any] = {"stream": stream}
    if path == RESPONSES:
        body |= {"input": words, "max_output_tokens": most}
    elif path == COMPLETIONS:
        asked.choices = chance.choice((1, 1, 3))
        body |= {"prompt": [words] * asked.choices, "max_tokens": most}
    else:
        asked.choices = chance.choice((1, 1, 1, 2))
        body |= {"messages": [{"role": "user", "content": words}], "n": asked.choices, "max_tokens": most}
    if asked.fate == "leave_while_reading":
        body["stream"] = True
    if asked.fate == "ask_nonsense":
        body = {"stream": stream, "messages": "none", "prompt": 7, "input": {}}
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Client-Request-Id: {asked.name}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


async def _read(reader: asyncio.StreamReader, asked: Asked, at_most: int | None = None) -> None:
    """Read so many bytes, or to the end; take down what was seen."""
    while at_most is None or len(asked.raw) < at_most:
        data = await reader.read(1 << 12)
        asked.raw += data
        head, found, body = bytes(asked.raw).partition(b"\r\n\r\n")
        if found and asked.status is None:
            asked.status = int(head.split()[1])
            told = re.search(rb"(?i)\r\nx-request-id: ([^\r]+)", head)
            asked.request_id = told[1].decode() if told else None
        if not data:
            asked.ended = _end(asked.status, head, body)
            return


def _end(status: int | None, head: bytes, body: bytes) -> str:
    if status is None:
        return "cut off"
    if status != 200:
        return "refused"
    if b"text/event-stream" not in head.lower():
        return "success" if b'"x_infervisor"' in body and body.endswith(b"}") else "cut off"
    if not body.endswith(b"0\r\n\r\n"):
        return "cut off"
    if failed := re.search(rb'data: {"error".*?"code":"(\w+)"', body):
        return f"error {failed[1].decode()}"
    completed = b"data: [DONE]" in body or b"event: response.completed" in body
    return "success" if completed or b"event: response.incomplete" in body else "cut off"


async def _leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
    sock = writer.transport.get_extra_info("socket")
    try:
        if way == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way == "half_close" and not writer.transport.is_closing():
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
    except OSError:
        pass
    writer.transport.abort()


# --- health --------------------------------------------------------------------------------------------

PROBE = """
import http.client, json, select, sys, time
answers, slowest_s, wrong = 0, 0.0, []
while not select.select([sys.stdin], [], [], 0.05)[0]:
    for path in ("/health/live", "/health/ready"):
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
            if status != 200:
                wrong.append(f"{path}: {status}")
        except OSError as error:
            wrong.append(f"{path}: {error!r}")
        finally:
            connection.close()
        answers += 1
        slowest_s = max(slowest_s, time.monotonic() - began)
print(json.dumps({"answers": answers, "slowest_s": slowest_s, "wrong": wrong}))
"""


@dataclass
class Health:
    """What the probes said. slowest_s: of all of them; wrong: those that weren't answered with 200."""

    answers: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def probing(port: int) -> Iterator[Health]:
    """Ask for health again and again while the block runs, from a process of its own, as an orchestrator does.

    What is yielded is filled in when the block ends.
    """
    health = Health()
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield health
        finally:
            out, _ = process.communicate(timeout=PATIENCE_S)
        health.__dict__.update(json.loads(out))
