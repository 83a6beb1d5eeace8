"""One attempt on this worker: its credit, its text, its counts, and where it ends. No I/O, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infervisor.protocol.credit import Grant
from infervisor.protocol.errors import InvalidRequest, LocalProtocolError
from infervisor.protocol.generation import Limits, Sampling, check_seed, check_text
from infervisor.protocol.messages import Submit
from infervisor.protocol.output import Output, check_priority
from infervisor.worker.engine import Embedded, Opened, Prefilled, Sampled
from infervisor.worker.scheduler import Want
from infervisor.worker.text import TextAssembler


@dataclass(frozen=True, slots=True)
class Taken:
    """What sampled tokens, or vectors, mean: those to send, the first one's index, why it ends, or None."""

    index: int
    tokens: list[list[Any]]
    why: str | None
    vectors: Sequence[bytes] = ()


@dataclass(slots=True, eq=False)
class Attempt:
    """State from arrival to release. The work loop's thread alone touches it.

    prepared: what the engine made of it, once that is there. read_tokens: of prompt and delivered tokens, those
    that are in memory. leader: another attempt that reads the same beginning; until it has read leader_tokens, or
    is released, this one waits for them.
    """

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
    prepared: Any = None
    read_tokens: int = 0
    total_tokens: int = 1
    leader: Attempt | None = None
    leader_tokens: int = 0
    is_open: bool = False

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
        if self.leader is not None:
            if self.leader.is_open and self.leader.read_tokens < self.leader_tokens:
                return False
            self.leader = None
        return not self.prefilled or self.grant.may_compute

    @property
    def want(self) -> Want:
        """What it could use of the next step, if it is runnable."""
        if self.prefilled:
            return Want(self.id, False, self.allowance)
        return Want(self.id, True, max(1, self.total_tokens - self.read_tokens), self.submit.priority)

    def check(self) -> None:
        """Check what the parent should have checked. Raises `InvalidRequest`."""
        submit = self.submit
        if sum(each is not None for each in (submit.prompt, submit.messages, submit.texts)) != 1:
            raise InvalidRequest("exactly one of prompt, messages and texts must be given", "prompt")
        if submit.prompt is not None:
            check_text("prompt", submit.prompt)
        for text in submit.texts or ():
            check_text("texts", text)
        Output.from_wire(submit.output)
        check_priority(submit.priority)
        Sampling.from_wire(submit.sampling)
        check_seed(submit.seed)
        self.limits = Limits.from_wire(submit.limits)
        self.text = TextAssembler(self.limits.stop)

    def opened(self, opened: Opened, context_tokens: int, leader: Attempt | None) -> None:
        """Take what the engine said when it took the request into a slot. leader: who is in `opened.after`."""
        self.is_open = True
        self.slot = opened.slot
        self.context_tokens = context_tokens
        self.prompt_tokens = opened.prompt_tokens
        self.total_tokens = opened.prompt_tokens + len(self.submit.delivered)
        self.in_memory(opened.cached_tokens)
        if opened.after is not None:
            self.leader, self.leader_tokens = leader, opened.after[1]
        # The reader has this text: what counts is the state that it leaves, half characters and held-back stops.
        for data in opened.delivered_data:
            self.text.feed(data)

    def in_memory(self, tokens: int) -> None:
        """Count tokens that are in memory before it begins; they may reach into the answer."""
        self.cached_tokens = self.read_tokens = tokens

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

    def take(self, outcome: Prefilled | Embedded | Sampled | Sequence[Sampled]) -> Taken | None:
        """Count one outcome of a step; return what to send and whether it ends here, None for prefill.

        Where several natural ends fall on one token: stop, stop_sequence, length, context_full. Tokens after the
        one that ends it were computed for nothing.
        """
        if isinstance(outcome, Prefilled):
            self.read_tokens, self.total_tokens = outcome.done_tokens, outcome.total_tokens
            self.cached_tokens += outcome.copied_tokens
            self.prefilled = outcome.done_tokens >= outcome.total_tokens
            return None
        if isinstance(outcome, Embedded):
            self.read_tokens, self.total_tokens = outcome.done_tokens, outcome.total_tokens
            first = self.grant.computed
            for _ in outcome.vectors:
                self.grant.spend()
            return Taken(first, [], "stop" if outcome.is_last else None, outcome.vectors)
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
            "completion_tokens": 0 if self.submit.texts is not None else self.grant.computed,
            "computed_tokens": self.computed_tokens,
        }
