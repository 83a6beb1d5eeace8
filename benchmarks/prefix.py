"""What a prompt costs that begins like one read before: the next turn of a chat, and several answers to one.

SmolLM2, 2 threads, four slots. Every round has a text of its own from the first word on, so that nothing of an
earlier round helps. The time to the first token is the parent's, from the request.
"""

from __future__ import annotations

import random

import anyio

from benchmarks.figures import Figure, ratio
from benchmarks.streams import check_length, fresh_text
from infervisor import Supervisor, default_model

OPTIONS = {"n_ctx": 4096, "threads": 2}
HISTORY_TOKENS = 1500
TEMPLATE_TOKENS = 31
"""What SmolLM2's template puts around a single message."""
ANSWER_TOKENS = 24
PROMPT_TOKENS = 1000
CHOICES = 4


def _ttft_s(ttft_s: float | None) -> float:
    assert ttft_s is not None
    return ttft_s


async def two_turns(supervisor: Supervisor) -> tuple[float, float, int]:
    """Return seconds to the first token in the second turn and in the first, and the second's cached tokens."""
    chat = [{"role": "user", "content": fresh_text(HISTORY_TOKENS - TEMPLATE_TOKENS)}]
    first = await supervisor.generate(messages=chat, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    check_length(first.report.usage.prompt_tokens, HISTORY_TOKENS)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And what came then?"}]
    second = await supervisor.generate(
        messages=chat, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True
    )
    assert not first.report.usage.cached_tokens, first.report
    return (
        _ttft_s(second.report.timeline.ttft_s),
        _ttft_s(first.report.timeline.ttft_s),
        second.report.usage.cached_tokens,
    )


async def several_answers(supervisor: Supervisor) -> float:
    """Return the prompt tokens that were computed for several answers, as a share of the prompt."""
    answers = await supervisor.answers(
        fresh_text(PROMPT_TOKENS), n=CHOICES, max_tokens=8, temperature=0.8, ignore_eos=True
    )
    used = [answer.report.usage for answer in answers]
    check_length(used[0].prompt_tokens, PROMPT_TOKENS)
    return sum(one.prompt_tokens - one.cached_tokens for one in used) / used[0].prompt_tokens


def measure(quick: bool) -> list[Figure]:
    """Measure the two turns, then the answers."""
    random.seed(1)
    rounds = 2 if quick else 4

    async def both() -> list[Figure]:
        async with Supervisor(default_model(), slots=CHOICES, options=OPTIONS) as supervisor:
            turns = [await two_turns(supervisor) for _ in range(rounds)]
            shares = [await several_answers(supervisor) for _ in range(rounds)]
        return [
            ratio(
                "second_turn",
                f"second turn of a chat with {HISTORY_TOKENS:,} tokens of history ÷ the first, time to first token",
                [(second, first) for second, first, _ in turns], ("≤", 0.10),
                cached_tokens=[cached for _, _, cached in turns],
            ),
            Figure(
                "choices_computed",
                f"{CHOICES} answers to a {PROMPT_TOKENS:,}-token prompt: tokens of it computed ÷ its length, most",
                round(max(shares), 3), "ratio", rounds, ("≤", 1.1),
                details={"shares": [round(share, 3) for share in shares]},
            ),
        ]  # fmt: skip

    return anyio.run(both)
