"""The step of `supervise probe` that tries numbers of threads: a worker of its own for each, a short request to it.

Measures and recommends, changes nothing. Needs the real engine's facts about cores; other engines are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from infervisor import ModelLoadError, Supervisor

TURN_TOKENS = 100
"""Numbers of threads are compared by a turn of a chat: so many tokens are read, and as many written."""
ALIKE = 1.05
"""What takes so many times as long as the best is as good."""
DISTURBED_CORES = 0.5
"""More than that of others' work, and the figures say little."""
PREFILL_TOKENS = 64
DECODE_TOKENS = 24
DECODE_S = 1.0
"""A slow model is measured by fewer tokens."""
LEAST_DECODE_TOKENS = 4
_BUSY = ("user", "system", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True)
class Rate:
    """What a number of threads gave. others_cores: how many processors other processes kept busy meanwhile."""

    threads: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    others_cores: float

    @property
    def turn_s(self) -> float:
        """Seconds of a turn."""
        return TURN_TOKENS / self.prefill_tokens_per_s + TURN_TOKENS / self.decode_tokens_per_s


def threads_to_try(cores: int, current: int) -> list[int]:
    """Return at most four numbers, the largest first: all cores, half of them, one, and what is used now."""
    return sorted({1, max(1, cores // 2), cores, current}, reverse=True)


def recommended(rates: Sequence[Rate], current: int) -> int | None:
    """Return how many threads are clearly better than `current`, or None if that is as good as any."""
    limit_s = ALIKE * min(rate.turn_s for rate in rates)
    good = [rate.threads for rate in rates if rate.turn_s <= limit_s]
    return None if current in good else min(good)


def verdict(rates: Sequence[Rate], current: int) -> tuple[str, Mapping[str, Any]]:
    """Return the sentence and the figures for what was measured."""
    disturbed = max(rate.others_cores for rate in rates)
    advice: int | None = None
    if disturbed > DISTURBED_CORES:
        told = (
            f"other processes kept {disturbed:.1f} cores busy meanwhile, so this says little: "
            "probe again when the machine is quiet"
        )
    else:
        advice = recommended(rates, current)
        told = f"--option threads={advice} is better than {current}" if advice else f"{current} is right"
    measured = "; ".join(
        f"{rate.threads}: reads {rate.prefill_tokens_per_s:.0f}, writes {rate.decode_tokens_per_s:.0f} tokens/s"
        for rate in rates
    )
    figures = {
        "rates": [asdict(rate) for rate in rates],
        "current_threads": current,
        "recommended_threads": advice,
        "others_cores": disturbed,
    }
    return f"{told} ({measured})", figures


async def measure(another: Callable[[Mapping[str, Any]], Supervisor], threads: int) -> Rate | None:
    """Return what `threads` threads give in a worker of their own, or None if the answer is too short to tell.

    another: returns a supervisor with these options of the engine besides the probe's own. Raises what loading
    raises. Safe to cancel: the worker is stopped.
    """
    options = {"threads": threads, "threads_batch": threads, "slots": 1, "n_ctx": 4 * PREFILL_TOKENS}
    async with another(options) as supervisor:
        pid = supervisor.status().worker_pid
        before = _others_cpu_s(pid)
        started = time.monotonic()
        tokens = 0
        prompt = "word " * PREFILL_TOKENS
        async with supervisor.stream(
            prompt, max_tokens=DECODE_TOKENS, temperature=0, ignore_eos=True
        ) as stream:
            async for chunk in stream:
                tokens += len(chunk.token_ids)
                if tokens >= LEAST_DECODE_TOKENS and (stream.report.timeline.tpot_s or 0) * tokens > DECODE_S:
                    break
        elapsed_s = time.monotonic() - started
        others = max(0.0, _others_cpu_s(pid) - before) / elapsed_s
        report = stream.report
    first, begun = report.timeline.first_token_ns, report.timeline.started_ns
    if first is None or begun is None or first <= begun or not report.timeline.tpot_s:
        return None
    read = report.usage.prompt_tokens * 1e9 / (first - begun)
    return Rate(threads, read, 1 / report.timeline.tpot_s, others)


def _others_cpu_s(worker_pid: int | None) -> float:
    """Return the processor seconds so far of everybody but this process and that worker, nice ones left out."""
    times = psutil.cpu_times()
    busy = sum(float(getattr(times, name, 0.0)) for name in _BUSY)
    for pid in (None, worker_pid):
        try:
            own = psutil.Process(pid).cpu_times()
            busy -= own.user + own.system
        except psutil.Error:
            continue
    return busy


class NotHere(Exception):
    """Numbers of threads can't be compared here."""


async def compare(
    facts: Mapping[str, Any],
    another: Callable[[Mapping[str, Any]], Supervisor],
    *,
    load_s: float,
    within_s: float,
) -> tuple[str, Mapping[str, Any]]:
    """Measure each number of threads and return the verdict. Raises `NotHere`.

    facts: of the loaded model. load_s: how long a worker takes to load. within_s: no further one is begun if it
    isn't likely to be done by then.
    """
    extra = facts.get("extra", {})
    if "cores" not in extra:
        raise NotHere(f"the {facts.get('engine')} engine has no threads to choose")
    current = int(extra["threads"])
    tried = threads_to_try(int(extra["cores"]), current)
    if len(tried) == 1:
        raise NotHere("there is one core, so there is nothing to choose")
    rates: list[Rate] = []
    started, longest_s = time.monotonic(), load_s
    for threads in tried:
        begun = time.monotonic()
        # Fewer threads take longer.
        if begun - started + 2 * longest_s > within_s:
            break
        try:
            rate = await measure(another, threads)
        except ModelLoadError as error:
            raise NotHere(f"a second worker can't be loaded: {error}") from None
        if rate is None:
            raise NotHere("the answer ended before it could be measured")
        rates.append(rate)
        longest_s = max(longest_s, time.monotonic() - begun)
    if len(rates) < 2:
        raise NotHere(f"a worker takes {longest_s:.1f} s: comparing needs a longer --step-timeout")
    return verdict(rates, current)
