"""A fast producer and a slow reader: how far the worker runs ahead, and what stopping costs.

With a window of 2 the reader takes five tokens and stops. However fast the model is, it has computed at most
5 + 2 tokens by then.

    python examples/slow_reader.py                       # the small model of the demo extra
    python examples/slow_reader.py --engine scripted     # no model: the words are counted
"""

from __future__ import annotations

import argparse

import anyio

from infervisor import Supervisor, default_model

WINDOW_TOKENS = 2
TAKEN_TOKENS = 5
PAUSE_S = 0.1


async def main(engine: str) -> None:
    """Take five tokens slowly, stop, and print the engine's own count of computed tokens."""
    model = default_model() if engine == "llama" else None
    async with Supervisor(model, engine=engine, window=WINDOW_TOKENS) as supervisor:
        taken = 0
        async with supervisor.stream("Once upon a time", temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                taken = chunk.index + len(chunk.token_ids)
                print(f"took {taken}: {chunk.text!r}")
                if taken >= TAKEN_TOKENS:
                    break
                await anyio.sleep(PAUSE_S)
        report = stream.report
        print(f"computed: {report.usage.computed_tokens} (at most {taken} taken + {WINDOW_TOKENS} window)")
        print(report.to_line())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show that a slow reader slows the model down.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    anyio.run(main, parser.parse_args().engine)
