"""Four streams of one worker, side by side: whole lines as they come, one of them stopped, and what was shared.

python examples/side_by_side.py                       # the small model of the demo extra
python examples/side_by_side.py --engine scripted     # no model: the words are counted
python examples/side_by_side.py --slots 2             # two wait until there is room
"""

from __future__ import annotations

import argparse

import anyio

from infervisor import Report, Supervisor, default_model

SYSTEM = (
    "You are a patient teacher. You explain things in plain words, with one example, and you are brief. " * 3
)
QUESTIONS = ("What is a pipe?", "What is a queue?", "What is a lock?", "What is a signal?")
STOPPED = 2
"""The number of the one that is stopped, after so many tokens:"""
STOP_AFTER_TOKENS = 8
LINE_CHARACTERS = 60


async def tell(supervisor: Supervisor, number: int, reports: dict[int, Report]) -> None:
    """Print an answer line by line, with its number in front."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[number]}]
    line = ""
    stream = supervisor.stream(messages=chat, max_tokens=48, temperature=0)
    async with stream:
        async for chunk in stream:
            line += chunk.text.replace("\n", " ")
            if len(line) >= LINE_CHARACTERS:
                print(f"{number}  {line}")
                line = ""
            if number == STOPPED and chunk.index + len(chunk.token_ids) >= STOP_AFTER_TOKENS:
                stream.cancel()  # no token of another one changes, comes twice or is lost
    if line:
        print(f"{number}  {line}")
    reports[number] = stream.report


async def main(engine: str, slots: int) -> None:
    """Ask everything at once, and tell what became of it."""
    model = default_model() if engine == "llama" else None
    options = {} if engine == "llama" else {"pace_s": 0.005}
    reports: dict[int, Report] = {}
    async with Supervisor(model, engine=engine, options=options, slots=slots) as supervisor:
        async with anyio.create_task_group() as tasks:
            for number in range(len(QUESTIONS)):
                tasks.start_soon(tell, supervisor, number, reports)
        for number, report in sorted(reports.items()):
            print(f"[{number}: {report.to_line()}]")
        status = supervisor.status()
        print(f"[slots: {status.facts['slots']}; most requests that waited at once: {status.queue_peak}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stream several answers of one worker side by side.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--slots", type=int, default=4)
    arguments = parser.parse_args()
    anyio.run(main, arguments.engine, arguments.slots)
