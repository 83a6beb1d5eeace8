"""Release latency of a cancel inside a 2,000-token prefill: from the caller's cancel until the slot is free.

SmolLM2, 2 threads, cancels spread over the prefill. Also checks that each came during the prefill.
"""

from __future__ import annotations

import argparse
import random

import anyio

from benchmarks.paired import percentiles, tell
from infervisor import Supervisor, default_model

PROMPT_TOKENS = 2000


async def measure(count: int) -> dict[str, object]:
    """Return the latencies in ms, and the stages that did it."""
    random.seed(1)
    latencies_ms: list[float] = []
    stages: dict[str, int] = {}
    async with Supervisor(default_model(), options={"n_ctx": 4096, "threads": 2}) as supervisor:
        prompt = "word " * PROMPT_TOKENS
        while len(latencies_ms) < count:
            async with supervisor.stream(prompt, max_tokens=1, temperature=0) as stream:
                await anyio.sleep(random.uniform(0.05, 1.5))
            report = stream.report
            if report.timeline.first_token_ns is not None or report.timeline.release_s is None:
                continue
            assert report.usage.prompt_tokens >= PROMPT_TOKENS, report.usage
            latencies_ms.append(report.timeline.release_s * 1000)
            stages[str(report.stage)] = stages.get(str(report.stage), 0) + 1
    return {"release_ms": {k: round(v, 3) for k, v in percentiles(latencies_ms).items()}, "stages": stages}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    tell("cancel inside a 2,000-token prefill", anyio.run(measure, parser.parse_args().count))
