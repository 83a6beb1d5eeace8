"""The contract between the work loop and an engine. A stranger adds an engine by meeting this page.

An engine owns a loaded model and a fixed number of slots, numbered from 0. It knows tokens; it knows
nothing of credit, stop strings, UTF-8, frames or requests: the work loop does those for all engines. Nor does it
choose who is in a step, or how much of a prompt is read in one: the scheduler does.

Threads: every method runs in the work loop's thread, but for two. `interrupt` is called by any thread while a step
runs; between steps the loop calls `clear_interrupt`. `prepare` runs in a thread of its own, several at once, beside
steps; it must not touch what steps change.
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
    largest_slice_tokens: how much of a prompt one step may read of one sequence; fixed_slices: all slices but the
    last of a prompt must have that length, since what is computed depends on it.
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
    largest_slice_tokens: int = 512
    fixed_slices: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence that sits in a slot.

    slot: the one it took. prompt_tokens: all of the prompt; cached_tokens: already in memory. after: (slot,
    tokens), if another sequence reads the same beginning just now: once that slot has read so many tokens, or is
    released, they can be copied, so until then this one is in no step. delivered_data: for each delivered token
    the bytes that `Sampled` had for it.
    """

    slot: int
    prompt_tokens: int
    cached_tokens: int = 0
    after: tuple[int, int] | None = None
    delivered_data: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The step read a slice of the prompt. done_tokens of total_tokens are in memory now.

    copied_tokens: of them, those that this step took over from another sequence instead of computing them.
    """

    done_tokens: int
    total_tokens: int
    copied_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """The step chose one token. data: its bytes (any cut of UTF-8). end: the model's own end token.

    logprobs: None, or plain data: [natural log-probability, [[token, bytes, log-probability], …]], the alternatives
    with the most probable first; before temperature and other samplers.
    """

    token: int
    data: bytes
    end: bool = False
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The step read so many of total_tokens, of all texts together; vectors: of the texts that are whole now.

    Each is an array of little-endian 32-bit floats. is_last: no more will follow.
    """

    done_tokens: int
    total_tokens: int
    vectors: Sequence[bytes]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """This one sequence can't go on, for what `message` says; the others of the step can."""

    message: str


Outcome = Prefilled | Sampled | Embedded | Broken | Sequence[Sampled]
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


class Engine(Protocol):
    """One loaded model and its slots."""

    def load(
        self, model: str | None, options: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> ModelFacts:
        """Load `model`. Calls progress(phase, fraction from 0 to 1) with phase import, load or warm_up.

        Raises `LoadRefused` with what happened, to what, and what to do next.
        """
        ...

    def prepare(self, submit: Submit) -> Any:
        """Return the request as `open` wants it: rendered, tokenised, its grammar tried. Computes nothing.

        For all that needs no slot and may take long: others are served meanwhile, and a cancelled request doesn't
        wait for it. Raises `InvalidRequest` for what can't be served, naming the field.
        """
        ...

    def open(self, slots: Sequence[int], submit: Submit, prepared: Any) -> Opened:
        """Take a prepared request into one of the free `slots`, the one whose memory serves it best.

        Delivered tokens follow the prompt and count as sampled: what is drawn next depends on the seed and on
        how many there are, penalties see them. They may fill the context; then no step comes.
        Raises `InvalidRequest` for what can't be served. After any exception the slots are still free.
        """
        ...

    def step(self, slots: Sequence[int], most: Sequence[int] = ()) -> Sequence[Outcome] | None:
        """Advance each sequence named by one prefill slice or by sampled tokens, in the order given.

        A sequence whose prompt isn't all in memory gets a slice (`Prefilled`), another one its next token
        (`Sampled`), or several: `most` holds for each slot how many tokens may be read or computed, at least 1;
        without it, the engine chooses a slice, and one token. Texts to embed are read like prompts (`Embedded`).
        Returns None when `interrupt` cut the step: no sequence has lost or gained a token,
        finished prefill may be kept, and calling again with the same slots goes on where it was.
        Any exception ends all requests named as engine errors, `Broken` that one alone.
        """
        ...

    def release(self, slot: int) -> None:
        """Free an open slot: after return no step includes its sequence and it can be opened again.

        What the sequence had in memory may stay, for a request that begins alike.
        """
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
        """Put what `save` wrote for the first `tokens` tokens into a slot that no step has included yet.

        Returns False if as much is there already, or if it doesn't come out right; then perhaps nothing is left
        in memory. Afterwards the next step is a
        `Prefilled`, even where nothing is left to read.
        """
        ...


@runtime_checkable
class AnswersQueries(Protocol):
    """An engine that answers what needs no computing. Optional."""

    def answer(self, kind: str, arguments: Mapping[str, Any]) -> Any:
        """Return plain data. Runs in a thread of its own, beside steps.

        kind tokenize: {text, special} → token ids as little-endian 32-bit integers; detokenize: {tokens: the same}
        → the bytes of the text; count: {prompt, messages, tools, special, template_clock_s}, as in `Submit` → how
        many tokens that prompt has. Raises `InvalidRequest`.
        """
        ...


@runtime_checkable
class SharesCores(Protocol):
    """An engine that takes cores by itself, and would take others' if it didn't know of them. Optional."""

    def use_share(self, workers: int) -> None:
        """Before `load`: that many workers like this one share the machine."""
        ...
