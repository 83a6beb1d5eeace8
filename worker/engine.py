"""The contract between the work loop and an engine. A stranger adds an engine by meeting this page.

An engine owns a loaded model and a fixed number of slots, numbered from 0. It knows tokens; it knows
nothing of credit, stop strings, UTF-8, frames or requests: the work loop does those for all engines.

Threads: every method runs in the work loop's thread, but `interrupt`, which any thread may call while a
step runs. Between steps the loop calls `clear_interrupt`. A step must return soon: a prefill advances by
one slice of about 250 ms or less.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from infervisor.protocol.messages import Submit

T = TypeVar("T")


class AbortGranularity(enum.StrEnum):
    """What a cancel has to wait for at most."""

    NODE = "node"
    """One node of the compute graph."""
    MICRO_BATCH = "micro_batch"
    """One micro-batch: devices that can't be interrupted inside a graph."""
    STEP = "none"
    """A whole step."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is true once the model is loaded; travels in `ready`.

    fingerprint: two workers with the same one compute the same from the same tokens.
    context_tokens: the *effective* context of one sequence: prompt and answer together.
    extra: anything else worth showing (plain values): model name, bytes, devices, threads.
    """

    engine: str
    library: str
    fingerprint: str
    context_tokens: int
    vocabulary_tokens: int
    has_chat_template: bool
    slots: int
    abort: AbortGranularity
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence that sits in a slot.

    prompt_tokens: all of the prompt; cached_tokens: already computed. delivered_data: for each delivered token the
    bytes that `Sampled` had for it.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    delivered_data: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The step read a slice of the prompt. done_tokens of total_tokens are in memory now."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The step chose one token. data: its bytes (any cut of UTF-8). end: the model's own end token."""

    token: int
    data: bytes
    end: bool = False
    logprobs: Any = None


Outcome = Prefilled | Sampled | Sequence[Sampled]
"""What a step did for one sequence. A sequence of several tokens: an engine that can be sure of more than one in a
step, as after an accepted draft; at least one, in order, nothing after an end token."""


class LoadRefused(Exception):
    """`load` can't succeed.

    code: stable name. detail: what the library logged about it. permanent: trying again without a change is
    pointless.
    """

    def __init__(
        self, message: str, code: str = "model_load", *, detail: str = "", permanent: bool = True
    ) -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail
        self.permanent = permanent


class Stoppable(Protocol):
    """Runs Python code that a cancel may end at any bytecode, by an exception that isn't an `Exception`."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Run `function` and return its result. What a cancel raises must pass through the engine."""
        ...


class Engine(Protocol):
    """One loaded model and its slots."""

    def load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        """Load `model`. Calls progress(phase, fraction from 0 to 1) with phase import, load or warm_up.

        Raises `LoadRefused` with what happened, to what, and what to do next.
        """
        ...

    def open(self, slot: int, submit: Submit, stoppable: Stoppable) -> Opened:
        """Take the request into `slot`: render its template, tokenise, set up its sampler. Computes nothing.

        Python code that a model file or a caller controls (a template) must run inside
        `stoppable(function)`, which a cancel ends by an asynchronous exception; leave no state behind it.
        Delivered tokens follow the prompt and count as sampled: what is drawn next depends on the seed and on
        how many there are, penalties see them. They may fill the context; then no step comes.
        Raises `InvalidRequest` for what can't be served. After any exception the slot is still free.
        """
        ...

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        """Advance each sequence named by one prefill slice or by sampled tokens, in the order given.

        A sequence whose prompt isn't all in memory gets a slice (`Prefilled`), another one its next token
        (`Sampled`), or several: `most` holds for each slot how many may be computed, at least 1; without it,
        1. Returns None when `interrupt` cut the step: no sequence has lost or gained a token,
        finished prefill may be kept, and calling again with the same slots goes on where it was.
        Any exception ends the requests named as engine errors.
        """
        ...

    def release(self, slot: int) -> None:
        """Free an open slot: after return no step includes its sequence and it can be opened again."""
        ...

    def interrupt(self) -> None:
        """Make the running step return None soon. Any thread; must not block or take the step's locks."""
        ...

    def clear_interrupt(self) -> None:
        """Forget an interrupt, before the next step."""
        ...

    def close(self) -> None:
        """Free sampler, context, model. Idempotent."""
        ...


@runtime_checkable
class KeepsSnapshots(Protocol):
    """An engine that can write down what a sequence has in memory, for another process that loaded the same.

    Optional: without it everything is read again. Called between steps, in the work loop's thread, and short:
    nobody is served meanwhile. Only what an engine with the same fingerprint wrote is given to `restore`.
    """

    def tokens(self, slot: int) -> Sequence[int]:
        """Return the sequence's tokens: prompt, delivered, sampled. Not to be kept or changed."""
        ...

    def tokens_in_memory(self, slot: int) -> int:
        """Return how many of `tokens`, from the first on, are wholly in memory."""
        ...

    def snapshot_bytes(self, slot: int) -> int:
        """Return how many bytes `save` would write now."""
        ...

    def save(self, slot: int, memory: memoryview) -> int:
        """Write what is in memory into `memory`; return how many bytes that took, 0 if it can't be done."""
        ...

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        """Put what `save` wrote for the first `tokens` tokens into a slot in which nothing has been read yet.

        Returns False, with nothing in memory, if that doesn't come out right. Afterwards the next step is a
        `Prefilled`, even where nothing is left to read.
        """
        ...
