"""Every message of the pipe: frozen values, the same for the sender and the receiver.

On the wire a message is one msgpack array `[name, field, …]` with the fields in the order of the class.
Messages from the worker begin with `t_ns`, the worker's `time.monotonic_ns()`. Ids are attempts: unsigned
64-bit numbers that are never used twice.

Owns names, field order and field checks. `protocol.codec` does the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.field_checks import (
    is_answer,
    is_area_or_none,
    is_counts,
    is_flag,
    is_fraction,
    is_ids,
    is_int,
    is_map,
    is_map_or_none,
    is_messages_or_none,
    is_number_or_none,
    is_share_or_none,
    is_text,
    is_text_or_none,
    is_texts_or_none,
    is_tokens,
    is_u64,
    is_u64_or_none,
    is_vectors,
)
from infervisor.protocol.quoting import quoted

PROTOCOL_VERSION = 3

ENDED_WHY = frozenset(
    {"stop", "stop_sequence", "length", "context_full", "cancelled", "invalid_request", "engine_error"}
)
"""What a worker can say of an end. The parent alone names the reason that the caller sees."""

Check = Callable[[object], bool]
M = TypeVar("M", bound="Message")


def _wire(check: Check) -> dict[str, Check]:
    return {"check": check}


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. `name` is what stands first on the wire."""

    name: ClassVar[str]

    def to_wire(self) -> list[Any]:
        """Return `[name, field, …]`."""
        return [self.name, *_VALUES[type(self)](self)]

    @classmethod
    def from_wire(cls: type[M], values: Sequence[Any]) -> M:
        """Build from the fields after the name. Raises `RemoteProtocolError` naming the field at fault."""
        checks = _CHECKS[cls]
        if len(values) != len(checks):
            raise RemoteProtocolError(f"{cls.name}: {len(values)} fields instead of {len(checks)}")
        for value, (attribute, check) in zip(values, checks):  # noqa: B905 - counted above
            if not check(value):
                raise RemoteProtocolError(f"{cls.name}.{attribute}: unexpected {quoted(value)}")
        return cls(*values)


# --- to the worker -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load(Message):
    """Create the engine and load the model. Sent once, after hello.

    snapshot_share: the share of the computing time that KV snapshots may take, from 0 to 1; None takes none.
    step_budget_s: how long a step may take in which running sequences wait for others' prompts, in seconds; None
    lets the worker choose. workers: how many workers of this kind share the machine's cores.
    """

    name: ClassVar[str] = "load"
    engine: str = field(metadata=_wire(is_text))
    model: str | None = field(metadata=_wire(is_text_or_none))
    options: Mapping[str, Any] = field(metadata=_wire(is_map))
    snapshot_share: float | None = field(default=None, metadata=_wire(is_share_or_none))
    step_budget_s: float | None = field(default=None, metadata=_wire(is_number_or_none))
    workers: int = field(default=1, metadata=_wire(is_u64))


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Start one attempt. Exactly one of prompt, messages and texts is set.

    sampling, limits: `Sampling.to_wire()`, `Limits.to_wire()`. template_clock_s: seconds since the epoch that
    a chat template may show, or None. special: whether a raw prompt's control-token texts become tokens.
    credit: the first credit limit in tokens. delivered: token ids that the reader has already (on resuming).
    snapshot: where in the shared memory this request's KV snapshots lie, as [offset, bytes], or None.
    texts: what is to be embedded: then the answer is `vectors`, one for each. output: `Output.to_wire()`.
    tools: what the model may call, as OpenAI's `tools`. priority: −100 to 100, more goes first.
    """

    name: ClassVar[str] = "submit"
    id: int = field(metadata=_wire(is_u64))
    prompt: str | None = field(metadata=_wire(is_text_or_none))
    messages: Sequence[Mapping[str, Any]] | None = field(metadata=_wire(is_messages_or_none))
    sampling: Mapping[str, Any] = field(metadata=_wire(is_map))
    seed: int = field(metadata=_wire(is_u64))
    template_clock_s: float | None = field(metadata=_wire(is_number_or_none))
    special: bool = field(metadata=_wire(is_flag))
    limits: Mapping[str, Any] = field(metadata=_wire(is_map))
    credit: int = field(metadata=_wire(is_u64))
    delivered: Sequence[int] = field(metadata=_wire(is_ids))
    snapshot: Sequence[int] | None = field(default=None, metadata=_wire(is_area_or_none))
    texts: Sequence[str] | None = field(default=None, metadata=_wire(is_texts_or_none))
    output: Mapping[str, Any] = field(default_factory=dict[str, Any], metadata=_wire(is_map))
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, metadata=_wire(is_messages_or_none))
    priority: int = field(default=0, metadata=_wire(is_int))


@dataclass(frozen=True, slots=True)
class Credit(Message):
    """Raise the absolute credit limit: a token with index ≥ limit is not computed."""

    name: ClassVar[str] = "credit"
    id: int = field(metadata=_wire(is_u64))
    limit: int = field(metadata=_wire(is_u64))


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Stop an attempt, now."""

    name: ClassVar[str] = "cancel"
    id: int = field(metadata=_wire(is_u64))


@dataclass(frozen=True, slots=True)
class Query(Message):
    """Ask something that computes nothing. kind: tokenize, detokenize or count; arguments depend on it.

    Answered by one `answered`, out of the order of everything else.
    """

    name: ClassVar[str] = "query"
    id: int = field(metadata=_wire(is_u64))
    kind: str = field(metadata=_wire(is_text))
    arguments: Mapping[str, Any] = field(metadata=_wire(is_map))


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """Take no more submits; finish what is there."""

    name: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Release everything and exit."""

    name: ClassVar[str] = "shutdown"


# --- from the worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first frame. versions: name → version of python, infervisor and msgpack."""

    name: ClassVar[str] = "hello"
    t_ns: int = field(metadata=_wire(is_u64))
    protocol: int = field(metadata=_wire(is_u64))
    pid: int = field(metadata=_wire(is_u64))
    versions: Mapping[str, Any] = field(metadata=_wire(is_map))


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Loading goes on. phase: import, load or warm_up; fraction of that phase from 0 to 1."""

    name: ClassVar[str] = "progress"
    t_ns: int = field(metadata=_wire(is_u64))
    phase: str = field(metadata=_wire(is_text))
    fraction: float = field(metadata=_wire(is_fraction))


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The model is loaded. facts: `worker.engine.ModelFacts` as a plain mapping."""

    name: ClassVar[str] = "ready"
    t_ns: int = field(metadata=_wire(is_u64))
    fingerprint: str = field(metadata=_wire(is_text))
    facts: Mapping[str, Any] = field(metadata=_wire(is_map))


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Loading failed; the worker exits. permanent: trying again without a change is pointless."""

    name: ClassVar[str] = "failed"
    t_ns: int = field(metadata=_wire(is_u64))
    code: str = field(metadata=_wire(is_text))
    message: str = field(metadata=_wire(is_text))
    detail: str = field(metadata=_wire(is_text))
    permanent: bool = field(metadata=_wire(is_flag))


@dataclass(frozen=True, slots=True)
class Started(Message):
    """An attempt sits in a slot; its prompt is known to fit.

    cached_tokens: tokens whose KV is there already; on resuming, those of the answer that were delivered count,
    too.
    """

    name: ClassVar[str] = "started"
    t_ns: int = field(metadata=_wire(is_u64))
    id: int = field(metadata=_wire(is_u64))
    slot: int = field(metadata=_wire(is_u64))
    cached_tokens: int = field(metadata=_wire(is_u64))
    prompt_tokens: int = field(metadata=_wire(is_u64))


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """Computed tokens. index: of the first; tokens: [id, text (possibly empty), logprobs or None] each."""

    name: ClassVar[str] = "tokens"
    t_ns: int = field(metadata=_wire(is_u64))
    id: int = field(metadata=_wire(is_u64))
    index: int = field(metadata=_wire(is_u64))
    tokens: Sequence[Sequence[Any]] = field(metadata=_wire(is_tokens))


@dataclass(frozen=True, slots=True)
class Vectors(Message):
    """Embeddings. index: of the first text; vectors: little-endian 32-bit floats of one text each."""

    name: ClassVar[str] = "vectors"
    t_ns: int = field(metadata=_wire(is_u64))
    id: int = field(metadata=_wire(is_u64))
    index: int = field(metadata=_wire(is_u64))
    vectors: Sequence[bytes] = field(metadata=_wire(is_vectors))


@dataclass(frozen=True, slots=True)
class Answered(Message):
    """The answer to a query: bytes or a count, or None and an error: a mapping with code, message and field."""

    name: ClassVar[str] = "answered"
    t_ns: int = field(metadata=_wire(is_u64))
    id: int = field(metadata=_wire(is_u64))
    value: bytes | int | None = field(metadata=_wire(is_answer))
    error: Mapping[str, Any] | None = field(metadata=_wire(is_map_or_none))


@dataclass(frozen=True, slots=True)
class Ended(Message):
    """No token follows. why: one of `ENDED_WHY`. text: what was held back and is now released.

    usage: prompt_tokens, cached_tokens, completion_tokens (sent), computed_tokens (the engine's own count).
    error: None, or a mapping with code, message, detail and field.
    """

    name: ClassVar[str] = "ended"
    t_ns: int = field(metadata=_wire(is_u64))
    id: int = field(metadata=_wire(is_u64))
    why: str = field(metadata=_wire(lambda value: isinstance(value, str) and value in ENDED_WHY))
    text: str = field(metadata=_wire(is_text))
    usage: Mapping[str, int] = field(metadata=_wire(is_counts))
    error: Mapping[str, Any] | None = field(metadata=_wire(is_map_or_none))


@dataclass(frozen=True, slots=True)
class Released(Message):
    """No step includes the attempt any more and its slot is free. noticed_ns: when a cancel was seen."""

    name: ClassVar[str] = "released"
    t_ns: int = field(metadata=_wire(is_u64))
    id: int = field(metadata=_wire(is_u64))
    noticed_ns: int | None = field(metadata=_wire(is_u64_or_none))
    freed_ns: int = field(metadata=_wire(is_u64))


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """The work loop moves. steps: so far; longest_ns: phase → longest step; active and waiting attempts."""

    name: ClassVar[str] = "beat"
    t_ns: int = field(metadata=_wire(is_u64))
    steps: int = field(metadata=_wire(is_u64))
    longest_ns: Mapping[str, int] = field(metadata=_wire(is_counts))
    active: int = field(metadata=_wire(is_u64))
    waiting: int = field(metadata=_wire(is_u64))


@dataclass(frozen=True, slots=True)
class Log(Message):
    """A line worth telling. dropped: how many were not sent since the last one."""

    name: ClassVar[str] = "log"
    t_ns: int = field(metadata=_wire(is_u64))
    level: str = field(metadata=_wire(is_text))
    text: str = field(metadata=_wire(is_text))
    dropped: int = field(metadata=_wire(is_u64))


ToWorker = Load | Submit | Credit | Cancel | Query | Drain | Shutdown
FromWorker = (
    Hello | Progress | Ready | Failed | Started | Tokens | Vectors | Answered | Ended | Released | Beat | Log
)

_TO_WORKER: tuple[type[Message], ...] = (Load, Submit, Credit, Cancel, Query, Drain, Shutdown)
_FROM_WORKER: tuple[type[Message], ...] = (
    Hello, Progress, Ready, Failed, Started, Tokens, Vectors, Answered, Ended, Released, Beat, Log,
)  # fmt: skip
TO_WORKER: Mapping[str, type[Message]] = {cls.name: cls for cls in _TO_WORKER}
FROM_WORKER: Mapping[str, type[Message]] = {cls.name: cls for cls in _FROM_WORKER}


def _values_of(cls: type[Message]) -> Callable[[Message], tuple[Any, ...]]:
    names = [f.name for f in fields(cls)]
    if len(names) > 1:
        return attrgetter(*names)
    # attrgetter of one name returns no tuple, and of none doesn't exist.
    return lambda message: tuple(getattr(message, name) for name in names)


_VALUES: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    cls: _values_of(cls) for cls in (*_TO_WORKER, *_FROM_WORKER)
}
_CHECKS: dict[type[Any], tuple[tuple[str, Check], ...]] = {
    cls: tuple((f.name, f.metadata["check"]) for f in fields(cls)) for cls in (*_TO_WORKER, *_FROM_WORKER)
}
