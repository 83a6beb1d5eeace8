"""What a running stream feels of its company: a prompt of 1,500 tokens that is read beside it, and a cancel.

SmolLM2, greedy, 2 threads, four slots. A gap is the time between two tokens of a stream as they arrive in the
parent; a chunk of several tokens counts as so many equal gaps. Each round has a fresh prompt beside a fresh stream,
and one as long alone; which comes first alternates. The same again for several step budgets is the curve in the
details of `company_gap`, which docs/pictures/curves.py draws.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from benchmarks.figures import Figure, percentile, ratio, spread
from benchmarks.streams import check_length, fresh_text
from infervisor import Stream, Supervisor, default_model

OPTIONS = {"n_ctx": 4096, "threads": 2}
SLOTS = 4
LONG_TOKENS = 1500
WARM_TOKENS = 8
"""Not looked at: the first ones of a stream."""
USUAL_TOKENS = 72
"""Of a running stream before anything happens to it."""
BUDGETS_S = (0.03, 0.05, 0.075, 0.1, 0.15, 0.25)
AFTER_TOKENS = 12
"""Read by the others after a cancel."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two tokens of a stream that followed each other."""

    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """How long it was."""
        return (self.end_ns - self.start_ns) / 1e6

    def touches(self, start_ns: int, end_ns: int) -> bool:
        """Whether a part of it lies between these."""
        return self.end_ns > start_ns and self.start_ns < end_ns


def gaps(arrivals: Sequence[tuple[int, int]]) -> list[Gap]:
    """Return the gaps between tokens, given (ns, tokens) of each chunk that arrived."""
    found: list[Gap] = []
    for (before_ns, _), (now_ns, count) in itertools.pairwise(arrivals):
        length = (now_ns - before_ns) / count
        edges = [before_ns + round(length * step) for step in range(count + 1)]
        found += [Gap(start, end) for start, end in itertools.pairwise(edges)]
    return found


# --- a long prompt ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One long prompt beside a running stream, and one alone."""

    usual_ms: float
    during_ms: tuple[float, ...]
    beside_s: float
    alone_s: float

    @property
    def gap(self) -> tuple[float, float]:
        """p95 of the stream's gaps meanwhile, and the median of its usual ones, in ms."""
        return percentile(self.during_ms, 95), self.usual_ms

    @property
    def prefill(self) -> tuple[float, float]:
        """Seconds until the prompt's first token beside the stream, and alone."""
        return self.beside_s, self.alone_s


async def _long_prompt(supervisor: Supervisor) -> tuple[int, int]:
    """Have a fresh prompt read; return when it was asked for and when its first token came, in monotonic ns."""
    answer = await supervisor.generate(fresh_text(LONG_TOKENS), max_tokens=1, temperature=0, ignore_eos=True)
    check_length(answer.report.usage.prompt_tokens, LONG_TOKENS)
    timeline = answer.report.timeline
    assert timeline.first_token_ns is not None
    return timeline.queued_ns, timeline.first_token_ns


async def _beside(supervisor: Supervisor) -> tuple[float, tuple[float, ...], float]:
    """Return the usual gap of a stream, its gaps while a long prompt is read, and how long that took."""
    arrivals: list[tuple[int, int]] = []
    span: list[tuple[int, int]] = []

    async def disturb() -> None:
        span.append(await _long_prompt(supervisor))

    async with (
        supervisor.stream(fresh_text(12), temperature=0, ignore_eos=True) as running,
        anyio.create_task_group() as tasks,
    ):
        begun = False
        async for chunk in running:
            arrivals.append((chunk.t_ns, len(chunk.token_ids)))
            if not begun and len(arrivals) >= USUAL_TOKENS:
                begun = True
                tasks.start_soon(disturb)
            if span:
                break
    if not span:
        raise RuntimeError(f"the running stream ended before the prompt was read: {running.report}")
    (start_ns, end_ns) = span[0]
    found = gaps(arrivals)
    usual = [gap.ms for gap in found[WARM_TOKENS:] if gap.end_ns <= start_ns]
    during = tuple(gap.ms for gap in found if gap.touches(start_ns, end_ns))
    return statistics.median(usual), during, (end_ns - start_ns) / 1e9


async def long_prompts(rounds: int, step_budget_s: float | None) -> list[Round]:
    """Measure so many rounds with this budget."""
    found: list[Round] = []
    async with Supervisor(
        default_model(), slots=SLOTS, options=OPTIONS, step_budget_s=step_budget_s
    ) as supervisor:
        await supervisor.generate("Once upon a time", max_tokens=16, temperature=0)
        for turn in range(rounds):
            alone = await _long_prompt(supervisor) if turn % 2 else None
            usual_ms, during_ms, beside_s = await _beside(supervisor)
            start_ns, end_ns = await _long_prompt(supervisor) if alone is None else alone
            found.append(Round(usual_ms, during_ms, beside_s, (end_ns - start_ns) / 1e9))
    return found


def _point(step_budget_s: float | None, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return one point of the curve: both ratios, as in the figures."""
    return {
        "step_budget_ms": None if step_budget_s is None else round(step_budget_s * 1000),
        "gap": round(statistics.median(a / b for a, b in (one.gap for one in rounds)), 2),
        "prefill": round(statistics.median(a / b for a, b in (one.prefill for one in rounds)), 3),
        "gap_ms": round(statistics.median(statistics.median(one.during_ms) for one in rounds), 1),
        "rounds": len(rounds),
    }


async def of_long_prompts(rounds: int, budgets_s: Sequence[float], few: int) -> list[Figure]:
    """Measure the default, then the curve."""
    measured = await long_prompts(rounds, None)
    curve = [_point(None, measured)]
    for budget_s in budgets_s:
        curve.append(_point(budget_s, await long_prompts(few, budget_s)))
    pooled = [ms for one in measured for ms in one.during_ms]
    return [
        ratio(
            "company_gap",
            f"gap between a stream's tokens while a {LONG_TOKENS:,}-token prompt is read, p95 ÷ median alone",
            [one.gap for one in measured], ("≤", 7.0), during_ms=spread(pooled), curve=curve,
        ),
        ratio(
            "company_prefill", "that prompt: time to first token beside the stream ÷ alone",
            [one.prefill for one in measured], ("≤", 1.5),
        ),
    ]  # fmt: skip


# --- a cancel --------------------------------------------------------------------------------------


async def delay_in_steps(supervisor: Supervisor, *, cancels: bool) -> float:
    """Return how much longer than usual the longest gap of three streams was when a fourth was cancelled.

    In usual gaps, of the stream that waited most. Without a cancel it tells what gaps do by themselves.
    """
    after = random.randint(24, 40)
    moment: list[tuple[int, int]] = []
    rests: list[float] = []

    async def cancelled() -> None:
        async with supervisor.stream(fresh_text(12), temperature=0, ignore_eos=True) as stream:
            await _read(stream, after)
            await anyio.sleep(random.uniform(0, 0.03))
            now_ns = time.monotonic_ns()
            if cancels:
                stream.cancel()
                report = await stream.released()
                assert report.timeline.released_ns is not None, report
                moment.append((now_ns, report.timeline.released_ns))
            else:
                moment.append((now_ns, now_ns))
                await done.wait()

    async def other() -> None:
        arrivals: list[tuple[int, int]] = []
        left = AFTER_TOKENS
        async with supervisor.stream(fresh_text(12), temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                arrivals.append((chunk.t_ns, len(chunk.token_ids)))
                left -= bool(moment)
                if not left:
                    break
            asked_ns, released_ns = moment[0]
            usual_ms = statistics.median(
                gap.ms for gap in gaps(arrivals)[WARM_TOKENS:] if gap.end_ns <= asked_ns
            )
            # What the cancel cost may be felt in the step after it.
            until_ns = released_ns + round(usual_ms * 1e6)
            longest_ms = max(gap.ms for gap in gaps(arrivals) if gap.touches(asked_ns, until_ns))
            rests.append((longest_ms - usual_ms) / usual_ms)
            if len(rests) == SLOTS - 1:
                done.set()
            # Nobody leaves before all have seen what they look at: that, too, would be a cancel.
            await done.wait()

    done = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for _ in range(SLOTS - 1):
            tasks.start_soon(other)
        tasks.start_soon(cancelled)
    return max(rests)


async def _read(stream: Stream, chunks: int) -> None:
    async for chunk in stream:
        if chunk.index + 1 >= chunks:
            return


async def of_cancels(rounds: int) -> Figure:
    """Measure with a cancel and without, in turn."""
    disturbed: list[float] = []
    undisturbed: list[float] = []
    async with Supervisor(default_model(), slots=SLOTS, options=OPTIONS) as supervisor:
        await delay_in_steps(supervisor, cancels=True)
        for _ in range(rounds):
            disturbed.append(await delay_in_steps(supervisor, cancels=True))
            undisturbed.append(await delay_in_steps(supervisor, cancels=False))
    return Figure(
        "cancel_in_company_p95", f"one of {SLOTS} streams is cancelled: delay of the one that waits most, p95",
        round(percentile(disturbed, 95), 2), "steps", rounds, ("≤", 1.0),
        details={"with_cancel": spread(disturbed), "without": spread(undisturbed)},
    )  # fmt: skip


def measure(quick: bool) -> list[Figure]:
    """Measure prompts, then cancels."""
    random.seed(1)

    async def both() -> list[Figure]:
        figures = await (of_long_prompts(2, BUDGETS_S[::5], 1) if quick else of_long_prompts(4, BUDGETS_S, 1))
        return [*figures, await of_cancels(3 if quick else 16)]

    return anyio.run(both)
