"""The worker dies in the middle of an answer, and the answer goes on in the next one after a pause.

The application kills its own worker, as a crash in the native library or an out-of-memory kill would. Its pid is
printed, so that you can do it from another terminal instead: `--kill no`, then `kill -9 PID` while it talks.

    python examples/survive_a_crash.py                       # the small model of the demo extra
    python examples/survive_a_crash.py --engine scripted     # no model: the words are counted
    python examples/survive_a_crash.py --standby 1           # a second worker is loaded and takes over at once
    python examples/survive_a_crash.py --on-crash fail       # the answer ends instead, and says why
"""

from __future__ import annotations

import argparse
import os
import signal

import anyio

from infervisor import Event, InfervisorError, Supervisor, default_model
from infervisor.supervisor.events import RequestInterrupted, RequestResumed, WorkerBecameReady

PROMPT = "Once upon a time there was a village by the sea."
KILL_AFTER_TOKENS = 10


def tell(event: Event) -> None:
    """Print what becomes of the worker and of the answer that was in it."""
    if isinstance(event, WorkerBecameReady):
        print(f"[worker {event.pid} is ready after {event.startup_s:.2f} s]")
    elif isinstance(event, RequestInterrupted):
        print(f"\n[worker {event.pid} {event.cause}: {event.delivered_tokens} tokens have arrived]")
    elif isinstance(event, RequestResumed):
        print(f"[worker {event.pid} goes on after {event.resume.pause_s or 0:.2f} s]")


async def main(engine: str, on_crash: str, standby: int, *, kill: bool) -> None:
    """Stream an answer whose worker dies."""
    model = default_model() if engine == "llama" else None
    options = {} if engine == "llama" else {"pace_s": 0.01}
    async with Supervisor(
        model, engine=engine, options=options, on_event=tell, on_crash=on_crash, standby=standby
    ) as supervisor:
        stream = supervisor.stream(PROMPT, max_tokens=60, window=8, temperature=0, ignore_eos=True)
        try:
            async with stream:
                async for chunk in stream:
                    # Nothing here knows of crashes: a dead worker is a pause between two chunks.
                    print(chunk, end="", flush=True)
                    pid = stream.report.worker_pid
                    if kill and pid is not None and chunk.index == KILL_AFTER_TOKENS:
                        os.kill(pid, signal.SIGKILL)
        except InfervisorError as error:
            # What had arrived was printed; the error says that it isn't the whole answer, and why.
            print(f"\n[the answer ended: {error.code}]", end="")
        print(f"\n[{stream.report.to_line()}]")
        for resume in stream.report.resumes:
            print(f"[outlived worker {resume.worker_pid}: {resume.restored_tokens} tokens from a snapshot]")
        print(f"[this process is still {os.getpid()}; restarts: {supervisor.status().restarts}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show that an answer survives the crash of its model.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--on-crash", default="resume", choices=("resume", "fail"))
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--kill", default="yes", choices=("yes", "no"))
    arguments = parser.parse_args()
    anyio.run(
        lambda: main(arguments.engine, arguments.on_crash, arguments.standby, kill=arguments.kill == "yes")
    )
