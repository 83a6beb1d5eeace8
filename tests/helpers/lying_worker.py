"""A worker that says what its script tells it to say, in raw frames. Run as the interpreter of a supervisor.

The script is Python; it sees `say(name, *fields)`, `hear(name)` (the fields of the next such message), `now()`,
`greet()`, which says hello as it should be said, `ready(**facts)`, which says it and loads, and `done()`, which
waits to be killed or told to go.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from infervisor.protocol.messages import PROTOCOL_VERSION
from tests.helpers.odd_worker import WORKER_ARGUMENTS, as_interpreter

ROOT = Path(__file__).parents[2]


def lying(directory: Path, script: str) -> Path:
    """Return an interpreter whose worker runs `script`."""
    path = directory / "script.py"
    path.write_text(script)
    return as_interpreter(
        directory,
        f"shift {WORKER_ARGUMENTS}\nPYTHONPATH={shlex.quote(str(ROOT))} "
        f'exec "$PYTHON" {shlex.quote(__file__)} {shlex.quote(str(path))} "$@"',
    )


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    for name in ("--control", "--frames", "--urgent", "--parent", "--snapshots"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = os.read(arguments.control, count - len(data))
            if not piece:
                os._exit(0)
            data += piece
        return data

    def hear(name: str) -> list[Any]:
        while True:
            message = msgpack.unpackb(read(int.from_bytes(read(4), "big")), strict_map_key=False)
            if message[0] == name:
                return list(message[1:])
            if message[0] == "shutdown":
                os._exit(0)

    def say(name: str, *fields: object) -> None:
        payload = msgpack.packb([name, *fields])
        os.write(arguments.frames, len(payload).to_bytes(4, "big") + payload)

    def greet() -> None:
        say("hello", now(), PROTOCOL_VERSION, os.getpid(), {})

    def ready(**facts: object) -> None:
        greet()
        hear("load")
        say("ready", now(), "print", {"slots": 1, "context_tokens": 1000, **facts})

    now = time.monotonic_ns
    done = partial(hear, "never")
    names = {"say": say, "hear": hear, "now": now, "greet": greet, "ready": ready, "done": done}
    exec(Path(arguments.script).read_text(), names)


if __name__ == "__main__":
    sys.exit(main())
