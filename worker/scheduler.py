"""Who is in the next step, and how much each of them may read or compute. Pure: no model, no clock, no thread.

Every sequence that samples is in every step. What is left of the step's time goes to prompts that wait to be read:
a slice as long as the budget allows, given to those that have had least so far. So a long prompt neither stalls its
neighbours nor starves, and a short one doesn't wait behind it. Costs are learned from the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_STEP_S = 0.2
"""What a step aims at in which nobody waits for its next token; the engine contract allows 0.25 s."""
LONE_STEPS = 4.5
"""How many times a lone decoding step the slice beside running sequences takes, where no budget is given: a running
stream's gap grows to 5.5 times, and the prompt takes about 1.3 times as long as alone."""
LEAST_SLICE_TOKENS = 8
"""Below it a token costs more than twice as much, and the same token isn't always computed to the same numbers."""
FIRST_SLICE_TOKENS = 32
LEVEL = 1.25
"""By how much a level of priority raises a sequence's share of the reading."""


@dataclass(frozen=True, slots=True)
class Want:
    """What one runnable sequence could use.

    id: of its attempt. reading: its prompt isn't all in memory. tokens: how many are left to read, or may be
    computed; at least 1. priority: as in `Submit`.
    """

    id: int
    reading: bool
    tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence gets in a step: at most so many tokens."""

    id: int
    tokens: int


class Costs:
    """What steps cost on this machine, in seconds, learned from those done: running averages."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}
        self.read_token_s = 0.0

    def decode_s(self, sequences: int) -> float:
        """Return the time of a step in which so many sequences sample; 0 if nothing is known."""
        known = self._decode_s
        if not sequences or not known:
            return 0.0
        nearest = min(known, key=lambda count: (abs(count - sequences), count))
        return known[nearest]

    @property
    def lone_decode_s(self) -> float:
        """The shortest of all decoding steps: that of one sequence alone, or the nearest to it that is known."""
        return min(self._decode_s.values(), default=0.0)

    def learn(self, sampling: int, read_tokens: int, seconds: float) -> None:
        """Take what a step cost in which `sampling` sequences sampled and so many prompt tokens were read."""
        if not read_tokens:
            self._decode_s[sampling] = _average(self._decode_s.get(sampling), seconds)
        elif read_tokens >= LEAST_SLICE_TOKENS and (not sampling or self._decode_s):
            # A short rest of a prompt costs more per token than a slice does.
            reading_s = max(seconds - self.decode_s(sampling), seconds / 10)
            self.read_token_s = _average(self.read_token_s, reading_s / read_tokens)


def _average(before: float | None, now: float) -> float:
    return 0.75 * before + 0.25 * now if before else now


class Scheduler:
    """The scheduling of one engine.

    budget_s: how long a step may take in which somebody waits for its next token; None is `LONE_STEPS`.
    largest_slice_tokens, fixed_slices: as in `ModelFacts`.
    """

    def __init__(
        self, largest_slice_tokens: int, *, fixed_slices: bool = False, budget_s: float | None = None
    ) -> None:
        self.costs = Costs()
        self._largest = largest_slice_tokens
        self._fixed = fixed_slices
        self._budget_s = budget_s
        self._last_tokens = min(largest_slice_tokens, FIRST_SLICE_TOKENS)
        self._had: dict[int, float] = {}
        """Tokens read so far by each sequence that reads, divided by its weight."""

    def plan(self, wants: Sequence[Want]) -> list[Share]:
        """Return who is in the next step. Empty only if nobody wants anything."""
        shares = [Share(want.id, want.tokens) for want in wants if not want.reading]
        readers = [want for want in wants if want.reading]
        if readers:
            shares += self._readers(readers, self.slice_tokens(len(shares)))
        return shares

    def slice_tokens(self, sampling: int) -> int:
        """Return how many prompt tokens the next step may read beside so many sequences that sample."""
        if self._fixed:
            return self._largest
        wanted = self._affordable(sampling)
        # At most doubled: one lucky measurement must not make a slice of seconds.
        wanted = min(wanted, 2 * self._last_tokens, self._largest)
        return max(wanted, min(LEAST_SLICE_TOKENS, self._largest))

    def _affordable(self, sampling: int) -> int:
        token_s = self.costs.read_token_s
        if not token_s:
            return FIRST_SLICE_TOKENS if not sampling else LEAST_SLICE_TOKENS
        if not sampling:
            seconds = LONGEST_STEP_S
        elif self._budget_s is None:
            seconds = min(LONE_STEPS * self.costs.lone_decode_s, LONGEST_STEP_S)
        else:
            seconds = self._budget_s - self.costs.decode_s(sampling)
        return int(max(0.0, seconds) / token_s)

    def _readers(self, readers: Sequence[Want], tokens: int) -> list[Share]:
        """Divide a slice: those that have had least come first, and a short prompt leaves room for the next."""
        # Race "everybody has read much already": a newcomer starts level with them, not with all of it to catch up.
        level = min((self._had[want.id] for want in readers if want.id in self._had), default=0.0)
        had = {want.id: self._had.setdefault(want.id, level) for want in readers}
        shares: list[Share] = []
        for want in sorted(readers, key=lambda want: had[want.id]):
            count = min(want.tokens, self._largest if self._fixed else tokens)
            is_scrap = count < want.tokens and count < LEAST_SLICE_TOKENS
            if shares and (count > tokens or count <= 0 or is_scrap):
                break
            shares.append(Share(want.id, count))
            self._had[want.id] += count / LEVEL**want.priority
            tokens -= count
        return shares

    def measured(self, sampling: int, read_tokens: int, seconds: float) -> None:
        """Learn from a step that is done, in which `sampling` sequences sampled and so many tokens were read."""
        self.costs.learn(sampling, read_tokens, seconds)
        if read_tokens:
            self._last_tokens = max(read_tokens, min(LEAST_SLICE_TOKENS, self._largest))

    def forget(self, attempt_id: int) -> None:
        """Drop what is known of a sequence that reads no more."""
        self._had.pop(attempt_id, None)
