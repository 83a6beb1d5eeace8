"""Whether an answer depends on its company: alone, and beside three others that join, pause and are cancelled.

SmolLM2 and Gemma, greedy and seeded, four slots. Each prompt is first answered alone. Then three of them share the
steps: the second joins when the first has some tokens, the third when the second has; the third has a small
window, and its reader stops until the others are further. In the fourth slot requests come and are cancelled all
the while, some in the middle of a prompt, some after a few tokens. Compared are token ids, text, end and count.
With the option `reproducible` all must be equal, and what that costs is measured with four plain streams. Without
it nothing is promised; the share is told.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from benchmarks.exactness import MODELS, PENALTIES, PROMPTS, SEEDED, Answer, Asked, Count
from benchmarks.figures import Figure, ratio
from benchmarks.streams import fresh_text, in_turn, rate_of, read_all
from infervisor import Stream, Supervisor, default_model

SLOTS = 4
TOKENS = 48
OPTIONS = {"n_ctx": 1024, "threads": 2}
SMALL_WINDOW = 4
LONG_TOKENS = 400
SPEED_TOKENS = 128


def _stream(supervisor: Supervisor, asked: Asked, window: int | None = None) -> Stream:
    kind, number = asked
    sampling: dict[str, Any] = {"temperature": 0}
    if kind == "seeded":
        sampling = {"seed": number, **SEEDED, **(PENALTIES if number % 2 else {})}
    return supervisor.stream(PROMPTS[number], max_tokens=TOKENS, ignore_eos=True, window=window, **sampling)


class Reader:
    """Reads one answer. tokens: so many so far."""

    def __init__(self, supervisor: Supervisor, asked: Asked) -> None:
        self._supervisor = supervisor
        self.asked = asked
        self._ids: list[int] = []
        self._ended = False
        self._news = anyio.Event()

    async def has(self, tokens: int) -> None:
        """Return when it has so many tokens, or no more are to come."""
        while len(self._ids) < tokens and not self._ended:
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def read(
        self, window: int | None = None, pause: Callable[[], Awaitable[None]] | None = None
    ) -> Answer:
        """Read all of it; with a pause, nothing is taken after a few tokens until that is over."""
        text = ""
        async with _stream(self._supervisor, self.asked, window) as stream:
            async for chunk in stream:
                self._ids += chunk.token_ids
                text += chunk.text
                self._tell()
                if pause is not None and len(self._ids) >= SMALL_WINDOW:
                    await pause()
                    pause = None
        self._ended = True
        self._tell()
        report = stream.report
        return Answer(tuple(self._ids), text, str(report.end_reason), report.usage.completion_tokens)


async def disturb(supervisor: Supervisor, cancels: Counter[str]) -> None:
    """Send requests and cancel them, until cancelled; count where that struck them."""
    while True:
        long = random.random() < 0.5
        async with supervisor.stream(fresh_text(LONG_TOKENS if long else 8), ignore_eos=True) as stream:
            if long:
                await anyio.sleep(random.uniform(0.01, 0.3))
            else:
                until = random.randint(1, 12)
                async for chunk in stream:
                    if chunk.index >= until:
                        break
        has_begun = stream.report.timeline.first_token_ns is not None
        cancels["while decoding" if has_begun else "in the prompt"] += 1


async def in_company(
    supervisor: Supervisor, three: Sequence[Asked], cancels: Counter[str]
) -> dict[Asked, Answer]:
    """Return the answers of three that share their steps with each other and with what is cancelled."""
    answers: dict[Asked, Answer] = {}
    first, second, third = (Reader(supervisor, asked) for asked in three)

    async def read(reader: Reader, begins: Callable[[], Awaitable[None]] | None, **how: Any) -> None:
        if begins is not None:
            await begins()
        answers[reader.asked] = await reader.read(**how)

    at, later, until = (
        random.randint(1, TOKENS // 2),
        random.randint(1, TOKENS // 2),
        random.randint(1, TOKENS),
    )
    async with anyio.create_task_group() as company:
        company.start_soon(disturb, supervisor, cancels)
        async with anyio.create_task_group() as readers:
            readers.start_soon(read, first, None)
            readers.start_soon(read, second, lambda: first.has(at))

            async def last() -> None:
                await read(
                    third,
                    lambda: second.has(later),
                    window=SMALL_WINDOW,
                    pause=lambda: second.has(until),
                )

            readers.start_soon(last)
        company.cancel_scope.cancel()
    return answers


async def compare(
    model: str, options: Mapping[str, Any], kinds: Sequence[str], rounds: int, cancels: Counter[str]
) -> Count:
    """Return how many answers were compared, and which differ: three a round, of each kind."""
    count = Count()
    async with Supervisor(MODELS[model](), slots=SLOTS, options={**OPTIONS, **options}) as supervisor:
        for kind in kinds:
            alone: dict[Asked, Answer] = {}
            for _ in range(rounds):
                three = [(kind, number) for number in random.sample(range(len(PROMPTS)), 3)]
                for asked in three:
                    if asked not in alone:
                        alone[asked] = await Reader(supervisor, asked).read()
                for asked, answer in (await in_company(supervisor, three, cancels)).items():
                    count.compared += 1
                    if answer != alone[asked]:
                        count.differing.append(f"{model}, {kind}, prompt {asked[1]} among {three}")
    return count


async def speeds(rounds: int) -> list[tuple[float, ...]]:
    """Return tokens/s of four streams a round: reproducible, and not."""
    async with (
        Supervisor(default_model(), slots=SLOTS, options={**OPTIONS, "reproducible": True}) as exact,
        Supervisor(default_model(), slots=SLOTS, options=OPTIONS) as plain,
    ):

        def side(supervisor: Supervisor) -> Callable[[], Awaitable[float]]:
            def measured() -> Awaitable[float]:
                prompts = [fresh_text(12) for _ in range(SLOTS)]
                return rate_of(
                    lambda prompt: read_all(supervisor, prompt, SPEED_TOKENS), prompts, SPEED_TOKENS
                )

            return measured

        return await in_turn([side(exact), side(plain)], rounds)


def measure(quick: bool) -> list[Figure]:
    """Compare with the promise, then without it; then what the promise costs."""
    random.seed(1)
    rounds = 1 if quick else 2
    figures: list[Figure] = []
    for model in MODELS:
        cancels: Counter[str] = Counter()
        count = anyio.run(compare, model, {"reproducible": True}, ("greedy", "seeded"), rounds, cancels)
        figures.append(
            Figure(
                f"same_in_company_{model.lower()}",
                "`reproducible`: texts that are the same alone and in company of 3, with joins, pauses and "
                f"cancels ({model}, greedy and seeded)",
                count.percent, "%", count.compared, ("≥", 100.0),
                details={"differing": count.differing, "cancelled": dict(cancels)},
            )
        )  # fmt: skip
    for model in MODELS:
        count = anyio.run(compare, model, {}, ("greedy",), rounds, Counter[str]())
        figures.append(
            Figure(
                f"alike_in_company_{model.lower()}",
                f"not `reproducible`: greedy texts that are the same all the same ({model})",
                count.percent, "%", count.compared, details={"differing": count.differing},
            )
        )  # fmt: skip
    rates = anyio.run(speeds, 2 if quick else 4)
    return [
        *figures,
        ratio(
            "reproducible_speed", f"{SLOTS} streams, tokens/s: `reproducible` ÷ not (SmolLM2)",
            [(exact, plain) for exact, plain in rates], ("≥", 0.9),
        ),
    ]  # fmt: skip
