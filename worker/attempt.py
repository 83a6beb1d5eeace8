"""One attempt on this worker: its credit, its text, its counts, and where it ends. No I/O, no threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infervisor.protocol.credit import Grant
from infervisor.protocol.errors import InvalidRequest, LocalProtocolError
from infervisor.protocol.generation import Limits, Sampling, check_seed, check_text
from infervisor.protocol.messages import Submit
from infervisor.worker.engine import Opened, Outcome, Prefilled, Sampled
from infervisor.worker.text import TextAssembler


@dataclass(frozen=True, slots=True)
class Taken:
    """What sampled tokens mean. tokens: those to send, index is the first one's; why is None if it goes on."""

    index: int
    tokens: list[list[Any]]
    why: str | None


@dataclass(slots=True, eq=False)
class Attempt:
    """State from arrival to release. The work loop's thread alone touches it."""

    submit: Submit
    grant: Grant
    limits: Limits = field(default_factory=Limits)
    text: TextAssembler = field(default_factory=TextAssembler)
    slot: int = -1
    context_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefilled: bool = False

    @classmethod
    def arrived(cls, submit: Submit) -> Attempt:
        """Return the attempt as it waits for a slot; credit for it counts from now on."""
        delivered = len(submit.delivered)
        return cls(submit, Grant(max(submit.credit, delivered), computed=delivered))

    @property
    def id(self) -> int:
        """The attempt's id."""
        return self.submit.id

    @property
    def runnable(self) -> bool:
        """Whether a step may include it: its prompt isn't read yet, or a token may be computed."""
        return not self.prefilled or self.grant.may_compute

    def check(self) -> None:
        """Check what the parent should have checked. Raises `InvalidRequest`."""
        submit = self.submit
        if (submit.prompt is None) == (submit.messages is None):
            raise InvalidRequest("exactly one of prompt and messages must be given", "prompt")
        if submit.prompt is not None:
            check_text("prompt", submit.prompt)
        Sampling.from_wire(submit.sampling)
        check_seed(submit.seed)
        self.limits = Limits.from_wire(submit.limits)
        self.text = TextAssembler(self.limits.stop)

    def opened(self, slot: int, opened: Opened, context_tokens: int) -> None:
        """Take what the engine said when it took the request into `slot`."""
        self.slot = slot
        self.context_tokens = context_tokens
        self.prompt_tokens = opened.prompt_tokens
        self.cached_tokens = opened.cached_tokens
        self.prefilled = opened.cached_tokens >= opened.prompt_tokens + len(self.submit.delivered)
        # The reader has this text: what counts is the state that it leaves, half characters and held-back stops.
        for data in opened.delivered_data:
            self.text.feed(data)

    def restored(self, tokens: int) -> None:
        """Count tokens whose memory came from a snapshot; they may reach into the answer."""
        self.cached_tokens = max(self.cached_tokens, tokens)

    @property
    def already_ended(self) -> str | None:
        """The natural end that fell on the last delivered token, which a dead worker had no time to tell."""
        return self._natural_end(self.grant.computed) if self.submit.delivered else None

    @property
    def allowance(self) -> int:
        """How many tokens a step may give it, at least 1 if it is runnable."""
        grant, limits = self.grant, self.limits
        room = self.context_tokens - self.prompt_tokens
        if limits.max_tokens is not None:
            room = min(room, limits.max_tokens)
        return max(1, min(grant.limit, room) - grant.computed)

    def take(self, outcome: Outcome) -> Taken | None:
        """Count one outcome of a step; return what to send and whether it ends here, None for prefill.

        Where several natural ends fall on one token: stop, stop_sequence, length, context_full. Tokens after the
        one that ends it were computed for nothing.
        """
        if isinstance(outcome, Prefilled):
            self.prefilled = outcome.done_tokens >= outcome.total_tokens
            return None
        self.prefilled = True
        sampled = (outcome,) if isinstance(outcome, Sampled) else outcome
        if not sampled:
            raise LocalProtocolError("a step gave the sequence neither prompt nor token")
        self.computed_tokens += len(sampled)
        grant, text, ignore_eos = self.grant, self.text, self.limits.ignore_eos
        first = grant.computed
        tokens: list[list[Any]] = []
        why: str | None = None
        for one in sampled:
            if one.end and not ignore_eos:
                why = "stop"
            else:
                index = grant.spend()
                tokens.append([one.token, text.feed(one.data), one.logprobs])
                why = self._natural_end(index + 1)
            if why is not None:
                break
        return Taken(first, tokens, why)

    def _natural_end(self, completion_tokens: int) -> str | None:
        if self.text.stopped:
            return "stop_sequence"
        if self.limits.max_tokens is not None and completion_tokens >= self.limits.max_tokens:
            return "length"
        if self.prompt_tokens + completion_tokens >= self.context_tokens:
            return "context_full"
        return None

    def usage(self) -> dict[str, int]:
        """Return the counts that `ended` carries. completion_tokens: all that the reader has been sent."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.grant.computed,
            "computed_tokens": self.computed_tokens,
        }
