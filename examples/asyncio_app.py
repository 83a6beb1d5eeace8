"""An application that embeds a model: several answers, one of them stopped, and the report of each.

python examples/asyncio_app.py                       # the small model of the demo extra
python examples/asyncio_app.py --model path.gguf
python examples/asyncio_app.py --engine scripted     # no model: the words are counted
"""

from __future__ import annotations

import argparse
import asyncio

from infervisor import Deadlines, InfervisorError, Supervisor, default_model

QUESTIONS = ("Name three colours.", "What is a pipe?", "Count to ten.")
STOP_AFTER_TOKENS = 8


async def ask(supervisor: Supervisor, question: str) -> None:
    """Print a whole answer, or why there is none."""
    try:
        answer = await supervisor.generate(
            messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0
        )
    except InfervisorError as error:
        # Every end that isn't natural is an error with a stable code; its report tells the rest.
        print(f"{question}\n  failed: {error.code}: {error}\n")
    else:
        print(f"{question}\n  {answer.text.strip()}\n  [{answer.report.to_line()}]\n")


async def ask_and_stop(supervisor: Supervisor, question: str) -> None:
    """Print an answer as it comes, and stop it after a few tokens, as a Stop button would."""
    print(question, end="\n  ")
    stream = supervisor.stream(messages=[{"role": "user", "content": question}], temperature=0)
    async with stream:
        async for chunk in stream:
            print(chunk, end="", flush=True)
            if chunk.index + len(chunk.token_ids) >= STOP_AFTER_TOKENS:
                stream.cancel()
    # Leaving the stream waited until the worker was free again; the report says how long that took.
    print(f"\n  [{stream.report.to_line()}]\n")


async def main() -> None:
    """Start the worker, ask, and leave nothing behind."""
    arguments = parse()
    model = arguments.model
    if model is None and arguments.engine == "llama":
        model = default_model()
    deadlines = Deadlines(first_token_s=30, stall_s=30, total_s=120)
    async with Supervisor(model, engine=arguments.engine, deadlines=deadlines) as supervisor:
        # Requests that come at once are served side by side; those beyond the worker's slots wait in the queue.
        async with asyncio.TaskGroup() as tasks:
            for question in QUESTIONS:
                tasks.create_task(ask(supervisor, question))
        await ask_and_stop(supervisor, "Tell me a long story.")
        status = supervisor.status()
        print(
            f"most requests that waited at once: {status.queue_peak}; restarts: {sum(status.restarts.values())}"
        )


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="Embed a model in an asyncio application.")
    parser.add_argument("--model", help="path of a .gguf file")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
