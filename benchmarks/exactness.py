"""How many texts are the same across a `kill -9` as undisturbed: 20 prompts, SmolLM2 and Gemma, greedy and seeded.

Each answer is first read undisturbed, then once more while its worker is killed after a random number of tokens.
Compared are token ids, text, end and count. With the option `reproducible` all of them must be equal, whether the
next worker begins from a snapshot or reads everything again. Without it nothing is promised; the share is told.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from benchmarks.figures import Figure
from benchmarks.workers import NO_BACKOFF, NO_LIMIT
from infervisor import Snapshots, Supervisor, default_model
from tests.helpers.gemma import gemma_model

TOKENS = 32
WINDOW = 4
PARAGRAPH = "The harbour lay still under the morning fog, and the boats had not gone out. "
PROMPTS = (
    "Once upon a time",
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Die Hauptstadt von Frankreich ist",
    "日本の首都は",
    "El gato se sentó en",
    "😀 😀 😀",
    "SELECT name, COUNT(*) FROM",
    "<html>\n<head>\n<title>",
    "Q: What is the boiling point of water?\nA:",
    "In the beginning",
    "A list of fruits:\n- apple\n- banana\n-",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "import numpy as np\n\n",
    "Мой дядя самых честных правил,",
    PARAGRAPH * 4,
    PARAGRAPH * 8,
    PARAGRAPH * 14 + "Then",
)
SEEDED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95}
PENALTIES: Mapping[str, Any] = {"repeat_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
"""For every other seeded prompt."""
MODELS: Mapping[str, Callable[[], Path]] = {"SmolLM2": default_model, "Gemma": gemma_model}


@dataclass(frozen=True, slots=True)
class Answer:
    """What has to be the same."""

    ids: tuple[int, ...]
    text: str
    end: str
    completion_tokens: int


Asked = tuple[str, int]
"""greedy or seeded, and the number of the prompt."""


async def answer(supervisor: Supervisor, asked: Asked, kill_at: int | None = None) -> Answer:
    """Return an answer; its worker is killed when so many tokens were read."""
    kind, number = asked
    sampling: dict[str, Any] = {"temperature": 0}
    if kind == "seeded":
        sampling = {"seed": number, **SEEDED, **(PENALTIES if number % 2 else {})}
    ids: list[int] = []
    text, deaths = "", 0 if kill_at is None else 1
    async with supervisor.stream(
        PROMPTS[number], max_tokens=TOKENS, ignore_eos=True, window=WINDOW, **sampling
    ) as stream:
        async for chunk in stream:
            ids += chunk.token_ids
            text += chunk.text
            if kill_at is not None and len(ids) >= kill_at:
                pid, kill_at = stream.report.worker_pid, None
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
    report = stream.report
    if len(report.resumes) != deaths:
        raise RuntimeError(f"{deaths} kills and {len(report.resumes)} resumes: {report}")
    return Answer(tuple(ids), text, str(report.end_reason), report.usage.completion_tokens)


@dataclass(slots=True)
class Count:
    """How many answers were compared, and where they differ."""

    compared: int = 0
    differing: list[str] = field(default_factory=list[str])

    @property
    def percent(self) -> float:
        """The share of those that are the same."""
        return round(100 * (1 - len(self.differing) / self.compared), 1)


async def compare(
    model: str,
    options: Mapping[str, Any],
    kinds: Sequence[str],
    ways: Mapping[str, Snapshots | None],
    prompts: int,
) -> dict[str, Count]:
    """Return a count for each kind: every prompt is asked undisturbed, and once with a kill in each way."""
    counts = {kind: Count() for kind in kinds}
    undisturbed: dict[Asked, Answer] = {}
    for way, snapshots in ways.items():
        async with Supervisor(
            MODELS[model](), options=options, restart=NO_BACKOFF, max_resumes=NO_LIMIT, on_crash="resume",
            standby=1, snapshots=snapshots,
        ) as supervisor:  # fmt: skip
            for asked in ((kind, number) for kind in kinds for number in range(prompts)):
                if asked not in undisturbed:
                    undisturbed[asked] = await answer(supervisor, asked)
                kill_at = random.randint(1, TOKENS - 2 * WINDOW)
                count = counts[asked[0]]
                count.compared += 1
                if await answer(supervisor, asked, kill_at) != undisturbed[asked]:
                    count.differing.append(
                        f"{model}, {way}, prompt {asked[1]}, killed after {kill_at} tokens"
                    )
    return counts


def measure(quick: bool) -> list[Figure]:
    """Compare with the promise, then without it."""
    random.seed(1)
    prompts = 2 if quick else len(PROMPTS)
    options = {"n_ctx": 1024, "threads": 2}
    both = {"with snapshots": Snapshots(), "without snapshots": None}

    async def all_of_them() -> list[Figure]:
        promised = {kind: Count() for kind in ("greedy", "seeded")}
        figures: list[Figure] = []
        for model in MODELS:
            kept = {**options, "reproducible": True}
            for kind, count in (await compare(model, kept, tuple(promised), both, prompts)).items():
                promised[kind].compared += count.compared
                promised[kind].differing += count.differing
        for kind, count in promised.items():
            figures.append(
                Figure(
                    f"exact_{kind}",
                    f"`reproducible`: {kind} texts that are the same across a `kill -9` "
                    f"({prompts} prompts × 2 models, with and without snapshots)",
                    count.percent, "%", count.compared, ("≥", 100.0), details={"differing": count.differing},
                )
            )  # fmt: skip
        for model in MODELS:
            ways = {"with snapshots": both["with snapshots"]}
            count = (await compare(model, options, ("greedy",), ways, prompts))["greedy"]
            figures.append(
                Figure(
                    f"same_greedy_{model.lower()}",
                    f"not `reproducible`: greedy texts that are the same all the same ({model})",
                    count.percent, "%", count.compared, details={"differing": count.differing},
                )
            )  # fmt: skip
        return figures

    return anyio.run(all_of_them)
