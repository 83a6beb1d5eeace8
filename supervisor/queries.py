"""Questions that compute nothing: a text's tokens, and back. They take no slot and wait behind no stream.

`Queries` belongs to a supervisor: it finds a worker for each question, and another one if that dies. `OpenQueries`
belongs to a worker: what it hasn't answered yet. Runs in the loop's thread; never touches requests or slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio

from infervisor.protocol.arrays import NUMBER_BYTES, pack_ids, unpack_ids
from infervisor.protocol.codec import MAX_TO_WORKER_BYTES
from infervisor.protocol.errors import (
    ConfigurationError,
    DeadlineExceeded,
    EngineError,
    InfervisorError,
    InvalidRequest,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
)
from infervisor.protocol.messages import Answered, Query
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.link import Link
from infervisor.supervisor.notice import Notice
from infervisor.supervisor.request_input import MAX_PROMPT_BYTES, RequestInput, check_size
from infervisor.supervisor.settings import check_seconds

if TYPE_CHECKING:
    from infervisor.supervisor.pool import Pool
    from infervisor.supervisor.worker import Worker

MAX_CALLERS = 256
"""Queries of one supervisor that wait at once; more are refused as `overloaded`."""
MAX_UNANSWERED = 256
MAX_UNANSWERED_BYTES = 4 * MAX_TO_WORKER_BYTES
"""What one worker may have been asked and not answered, those included that nobody waits for any more."""
RETRIES = 2
"""Workers that are asked after the first one died."""
DEFAULT_TIMEOUT_S = 30.0
_MAX_ID = (1 << 31) - 1

T = TypeVar("T")
Facts = Mapping[str, Any]
_query_ids = itertools.count(1)
"""Ids of this process: never reused, so that a late answer can't be taken for another one's."""


@dataclass(slots=True, eq=False)
class OpenQuery:
    """One question to one worker. settled: it has a value or an error, or was lost with its worker.

    read: checks what the worker says; raises `RemoteProtocolError`. lost: makes the error of the worker's death.
    """

    id: int
    read: Callable[[Any], Any]
    size_bytes: int = 0
    settled: anyio.Event = field(default_factory=anyio.Event)
    value: Any = None
    error: InfervisorError | None = None
    lost: Callable[[], InfervisorError] | None = None


class OpenQueries:
    """What one worker was asked and hasn't answered."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: dict[int, OpenQuery] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, kind: str, arguments: Mapping[str, Any], read: Callable[[Any], Any]) -> OpenQuery:
        """Send a question. Raises `Overloaded`, or `LocalProtocolError` if it fits no frame."""
        if len(self._open) >= MAX_UNANSWERED or self._bytes > MAX_UNANSWERED_BYTES:
            raise Overloaded(
                f"the worker has {len(self._open)} queries of {self._bytes} bytes to answer; try again later"
            )
        query = OpenQuery(next(_query_ids), read)
        query.size_bytes = self._link.send(Query(query.id, kind, arguments))
        self._bytes += query.size_bytes
        self._open[query.id] = query
        return query

    def on_answered(self, message: Answered) -> None:
        """Apply the worker's answer. Raises `RemoteProtocolError` for one that nobody asked for, or can't be."""
        query = self._open.get(message.id)
        if query is None:
            raise RemoteProtocolError(f"answered: query {message.id} isn't open")
        if message.error is None:
            query.value = query.read(message.value)
        elif message.value is not None:
            raise RemoteProtocolError(f"answered: query {message.id} has both a value and an error")
        else:
            query.error = _error_of(message.error)
        # Only now: what can't be read goes down with the worker, and is asked of the next one.
        self._forget(query)
        query.settled.set()

    def give_up(self, query: OpenQuery) -> None:
        """Nobody waits for it any more. Its answer may still come; until then it counts as unanswered."""
        if query.id in self._open and self._link.withdraw(query.id, Query.name):
            self._forget(query)

    def lose(self, make_error: Callable[[], InfervisorError]) -> None:
        """The worker is gone, and answers nothing more."""
        for query in list(self._open.values()):
            self._forget(query)
            query.lost = make_error
            query.settled.set()

    def _forget(self, query: OpenQuery) -> None:
        del self._open[query.id]
        self._bytes -= query.size_bytes


@dataclass(frozen=True, slots=True)
class _Question(Generic[T]):
    """What is asked, whichever worker answers. Both functions get that one's facts.

    arguments: raises `InvalidRequest` for what this worker's model can't be asked.
    """

    kind: str
    arguments: Callable[[Facts], Mapping[str, Any]]
    read: Callable[..., T]


class Queries:
    """The questions of one supervisor.

    wait_ready: returns when a worker is ready, and raises what keeps one from becoming it. changed: rings whenever
    who serves may have changed.
    """

    def __init__(self, pool: Pool, wait_ready: Callable[[], Awaitable[object]], changed: Notice) -> None:
        self._pool = pool
        self._wait_ready = wait_ready
        self._changed = changed
        self._callers = 0

    async def tokenize(
        self, text: object, special: object = True, timeout_s: object = DEFAULT_TIMEOUT_S
    ) -> list[int]:
        """Return the tokens of `text` and nothing but it: no token that begins or ends a sequence is added.

        special: spellings of control tokens become those. Raises `InvalidRequest`, `Overloaded`,
        `DeadlineExceeded`, and what keeps a worker from being had. Safe to cancel.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a string, not {type(text).__name__}", "text")
        check_size("text", text)
        arguments = {"text": text, "special": _flag("special", special)}
        return await self._ask(_Question("tokenize", lambda facts: arguments, _read_ids), timeout_s)

    async def detokenize(self, tokens: object, timeout_s: object = DEFAULT_TIMEOUT_S) -> str:
        """Return the text of `tokens`, control tokens spelled out.

        Bytes that are no UTF-8, as in half a character, become U+FFFD. Raises what `tokenize` raises; also
        `InvalidRequest` for a token that the model doesn't have.
        """
        ids = _ids(tokens)
        packed = pack_ids(ids)
        highest = max(ids, default=0)

        def arguments(facts: Facts) -> Mapping[str, Any]:
            size = _vocabulary_tokens(facts)
            if highest >= size:
                index = ids.index(highest)
                raise InvalidRequest(
                    f"tokens[{index}] is {highest}, and the model has the tokens 0 to {size - 1}",
                    f"tokens[{index}]",
                )
            return {"tokens": packed}

        return await self._ask(_Question("detokenize", arguments, _read_text), timeout_s)

    async def count(self, given: RequestInput, timeout_s: object = DEFAULT_TIMEOUT_S) -> int:
        """Return how many tokens a request's prompt has, with those that the model or its template adds.

        Raises what `tokenize` raises.
        """
        arguments = {
            "prompt": given.prompt,
            "messages": given.messages,
            "tools": given.tools,
            "special": given.special,
            "template_clock_s": given.template_clock_s,
        }
        return await self._ask(_Question("count", lambda facts: arguments, _read_count), timeout_s)

    async def _ask(self, question: _Question[T], timeout_s: object) -> T:
        try:
            seconds = check_seconds("timeout_s", timeout_s)
        except ConfigurationError as error:
            raise InvalidRequest(str(error), "timeout_s") from None
        if self._callers >= MAX_CALLERS:
            raise Overloaded(f"{self._callers} queries wait for an answer already; try again later")
        self._callers += 1
        try:
            with anyio.move_on_after(seconds):
                return await self._until_answered(question)
        finally:
            self._callers -= 1
        raise DeadlineExceeded(
            f"the query {question.kind} wasn't answered within {seconds:g} s: raise timeout_s, or ask for less"
        )

    async def _until_answered(self, question: _Question[T]) -> T:
        losses = 0
        while True:
            worker = await self._worker()
            facts = worker.facts
            arguments = question.arguments(facts)
            try:
                query = worker.queries.ask(question.kind, arguments, partial(question.read, facts=facts))
            except LocalProtocolError as error:
                raise InvalidRequest(f"the query {question.kind} can't be sent: {error}") from error
            try:
                await query.settled.wait()
            finally:
                worker.queries.give_up(query)
            if query.error is not None:
                raise query.error
            if query.lost is None:
                # Only `read` of this very question has set it.
                return cast(T, query.value)
            losses += 1
            if losses > RETRIES:
                raise query.lost()

    async def _worker(self) -> Worker:
        self._pool.want()
        while True:
            await self._wait_ready()
            for worker in self._pool.serving:
                # Race "it is dead and not collected": nothing is asked of the dead.
                if worker.is_ready and not worker.process.has_exited():
                    return worker
            await self._changed.wait()


# --- what callers pass ---------------------------------------------------------------------------


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {quoted(value, 80)}", name)
    return value


def _ids(tokens: object) -> list[int]:
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Sequence):
        raise InvalidRequest(f"tokens must be a list of token ids, not {type(tokens).__name__}", "tokens")
    most = MAX_PROMPT_BYTES // NUMBER_BYTES
    if len(tokens) > most:
        raise InvalidRequest(f"{len(tokens)} tokens; at most {most} are taken", "tokens")
    ids: list[int] = list(tokens)
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MAX_ID:
            raise InvalidRequest(
                f"tokens[{index}] must be a token id from 0 on, not {quoted(token, 80)}", f"tokens[{index}]"
            )
    return ids


# --- what workers say ----------------------------------------------------------------------------


def _vocabulary_tokens(facts: Facts) -> int:
    size = facts.get("vocabulary_tokens")
    return size if type(size) is int and size > 0 else _MAX_ID + 1


def _read_ids(value: Any, facts: Facts) -> list[int]:
    if not isinstance(value, bytes) or len(value) % NUMBER_BYTES:
        raise RemoteProtocolError(f"answered: token ids must be bytes, four each, not {quoted(value, 80)}")
    ids = unpack_ids(value).tolist()
    size = _vocabulary_tokens(facts)
    if ids and not (0 <= min(ids) and max(ids) < size):
        raise RemoteProtocolError(
            f"answered: the model has no token {min(ids) if min(ids) < 0 else max(ids)}"
        )
    return ids


def _read_text(value: Any, facts: Facts) -> str:
    if not isinstance(value, bytes):
        raise RemoteProtocolError(f"answered: a text must be bytes, not {quoted(value, 80)}")
    return value.decode("utf-8", "replace")


def _read_count(value: Any, facts: Facts) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_ID:
        raise RemoteProtocolError(f"answered: a count must be a whole number, not {quoted(value, 80)}")
    return value


def _error_of(given: Mapping[str, Any]) -> InfervisorError:
    message = str(given.get("message", "the worker gave no reason"))
    if given.get("code") == InvalidRequest.code:
        field_name = given.get("field")
        return InvalidRequest(message, field_name if isinstance(field_name, str) else None)
    return EngineError(message, str(given.get("detail", "")))
