"""The worker dies in the middle of an answer; the application goes on, and the next answer comes.

The application kills its own worker, as a crash in the native library or an out-of-memory kill would. Its pid is
printed, so that you can do it from another terminal instead: `--kill no`, then `kill -9 PID` while it talks.

    python examples/survive_a_crash.py                       # the small model of the demo extra
    python examples/survive_a_crash.py --engine scripted     # no model: the words are counted
"""

from __future__ import annotations

import argparse
import os
import signal

import anyio

from infervisor import Event, InfervisorError, Supervisor, default_model
from infervisor.supervisor.events import WorkerBecameReady, WorkerExited

PROMPT = "Once upon a time there was a village by the sea."
KILL_AFTER_TOKENS = 10


def tell(event: Event) -> None:
    """Print what becomes of the worker."""
    if isinstance(event, WorkerExited):
        print(f"\n[worker {event.pid} is gone: {event.message}]")
    elif isinstance(event, WorkerBecameReady):
        print(f"[worker {event.pid} is ready after {event.startup_s:.2f} s]")


async def main(engine: str, *, kill: bool) -> None:
    """Stream an answer whose worker dies, then ask again."""
    model = default_model() if engine == "llama" else None
    options = {} if engine == "llama" else {"pace_s": 0.01}
    async with Supervisor(model, engine=engine, options=options, on_event=tell) as supervisor:
        try:
            async with supervisor.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True) as stream:
                async for chunk in stream:
                    print(chunk, end="", flush=True)
                    pid = stream.report.worker_pid
                    if kill and pid is not None and chunk.index == KILL_AFTER_TOKENS:
                        os.kill(pid, signal.SIGKILL)
        except InfervisorError as error:
            # What had arrived was printed; the error says that it isn't the whole answer, and why.
            print(f"[the answer ended: {error.code}]")
        answer = await supervisor.generate(PROMPT, max_tokens=20, temperature=0)
        print(f"[asked again]\n{answer}")
        print(f"[this process is still {os.getpid()}; restarts: {supervisor.status().restarts}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show that an application survives the crash of its model.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--kill", default="yes", choices=("yes", "no"))
    arguments = parser.parse_args()
    anyio.run(lambda: main(arguments.engine, kill=arguments.kill == "yes"))
