"""Record real terminal sessions as pictures: python docs/pictures/record.py [NAME …]

Each session is a command on a pseudo-terminal, and perhaps something that is done to it in the middle of its
answer: a Ctrl-C, or `kill -9` for its worker from another terminal. What the terminal would show is written as SVG
beside this file. Needs the extras demo and dev.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 124
WITHIN_S = 120.0


def interrupt(pid: int, terminal: int) -> str:
    """Type Ctrl-C, which the terminal shows by itself."""
    os.write(terminal, b"\x03")
    return ""


def kill_worker(pid: int, terminal: int) -> str:
    """Kill the worker with the answer, the older child of the command; return what was typed for that."""
    # The command runs and has collected neither: what its list of children names is still its own.
    serving, *_ = sorted(psutil.Process(pid).children(), key=lambda child: child.create_time())
    command = ["kill", "-9", str(serving.pid)]
    subprocess.run(command, check=True)
    return shlex.join(command)


@dataclass(frozen=True)
class Session:
    """A command's arguments, and what is done once so many bytes of the answer have come."""

    arguments: tuple[str, ...]
    act: Callable[[int, int], str] | None = None
    after_bytes: int = 600


STORY = ("--temperature", "0", "--seed", "1", "Write a long story about a lighthouse.")
SESSIONS = {
    "run": Session(("run", *STORY), interrupt),
    "survive": Session(("run", "--standby", "1", "--max-tokens", "220", *STORY), kill_worker),
    "probe": Session(("probe",)),
}


def record(session: Session) -> tuple[str, str]:
    """Return what a terminal was sent, and what was typed into another one meanwhile."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, "-m", "infervisor.supervisor.cli", *session.arguments])
    sent, typed = b"", ""
    act = session.act
    deadline = time.monotonic() + WITHIN_S
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break  # the program has ended
            if not data:
                break
            sent += data
            if act is not None and len(sent.rpartition(b"\x1b[K")[2]) > session.after_bytes:
                typed = act(pid, terminal)
                act = None
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return sent.decode(errors="replace"), typed


def visible(sent: str) -> str:
    """Return the lines as they stand in the end: what was drawn over is gone."""
    return "\n".join(re.split(r"\r\x1b\[K", line)[-1] for line in sent.replace("\r\n", "\n").split("\n"))


def draw(name: str) -> None:
    """Record a session and write its picture."""
    session = SESSIONS[name]
    sent, typed = record(session)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))
    console.print(Text(f"$ supervise {shlex.join(session.arguments)}", style="bold"))
    console.print(Text.from_ansi(visible(sent).rstrip()))
    if typed:
        console.print(Text(f"\nmeanwhile in another terminal: $ {typed}", style="bold"))
    svg = console.export_svg(title="infervisor", unique_id=name)
    # The reader's own monospaced font: a picture fetches nothing from other hosts.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (HERE / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SESSIONS:
        draw(chosen)
