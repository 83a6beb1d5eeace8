"""Record real terminal sessions as pictures: python docs/pictures/record.py

Each session is a command on a pseudo-terminal, perhaps with a Ctrl-C in the middle of its answer. What the terminal
would show is written as SVG beside this file. Needs the extras demo and dev.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 124
WITHIN_S = 120.0
SESSIONS = {
    "run": (
        ["run", "--temperature", "0", "--seed", "1", "Write a long story about a lighthouse."],
        b"\x03",
    ),
    "probe": (["probe"], None),
}
INTERRUPT_AFTER_BYTES = 600


def session(arguments: list[str], interrupt: bytes | None) -> str:
    """Return what a terminal was sent. interrupt: typed once the answer is on its way."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, "-m", "infervisor.supervisor.cli", *arguments])
    sent = b""
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
            if interrupt is not None and len(sent.rpartition(b"\x1b[K")[2]) > INTERRUPT_AFTER_BYTES:
                os.write(terminal, interrupt)
                interrupt = None
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return sent.decode(errors="replace")


def visible(sent: str) -> str:
    """Return the lines as they stand in the end: what was drawn over is gone."""
    return "\n".join(re.split(r"\r\x1b\[K", line)[-1] for line in sent.replace("\r\n", "\n").split("\n"))


if __name__ == "__main__":
    for name, (arguments, interrupt) in SESSIONS.items():
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))
        console.print(Text(f"$ supervise {shlex.join(arguments)}", style="bold"))
        console.print(Text.from_ansi(visible(session(arguments, interrupt)).rstrip()))
        svg = console.export_svg(title="infervisor", unique_id=name)
        # The reader's own monospaced font: a picture fetches nothing from other hosts.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
        (HERE / f"{name}.svg").write_text(svg)
