"""An application on trio: answers side by side in a nursery, and one that a cancel scope ends.

Needs trio besides (`pip install trio`); everything else is the same as on asyncio.

    python examples/trio_app.py                       # the small model of the demo extra
    python examples/trio_app.py --engine scripted     # no model: the words are counted
"""

from __future__ import annotations

import argparse

import trio

from infervisor import Supervisor, default_model

QUESTIONS = ("Name three colours.", "What is a pipe?")
PATIENCE_S = 0.5


async def ask(supervisor: Supervisor, question: str) -> None:
    """Print a whole answer."""
    answer = await supervisor.generate(
        messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0
    )
    print(f"{question}\n  {answer.text.strip()}\n  [{answer.report.to_line()}]")


async def ask_for_a_moment(supervisor: Supervisor, question: str) -> None:
    """Take what comes within a moment. Cancelling the scope cancels the request in the worker."""
    stream = supervisor.stream(
        messages=[{"role": "user", "content": question}], temperature=0, ignore_eos=True
    )
    pieces = 0
    with trio.move_on_after(PATIENCE_S):
        async with stream:
            async for _ in stream:
                pieces += 1
    # Leaving the stream waited, shielded from the cancellation, until the worker was free again.
    print(f"{question}\n  {pieces} pieces within {PATIENCE_S} s\n  [{stream.report.to_line()}]")


async def main(engine: str) -> None:
    """Start the worker, ask, and leave nothing behind."""
    model = default_model() if engine == "llama" else None
    options = {} if engine == "llama" else {"pace_s": 0.01}
    async with Supervisor(model, engine=engine, options=options) as supervisor:
        async with trio.open_nursery() as nursery:
            for question in QUESTIONS:
                nursery.start_soon(ask, supervisor, question)
        await ask_for_a_moment(supervisor, "Tell me a long story.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Embed a model in a trio application.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    trio.run(main, parser.parse_args().engine)
