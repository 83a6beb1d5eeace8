"""Takes tool calls out of the chunks of an answer, as the reader gets them.

Text that may be the beginning of a call is held back until that is known; what turns out to be none is given as it
was. Runs in the reader's call, in the loop's thread. What is a call is decided in `protocol.tool_calls`.
"""

from __future__ import annotations

from hashlib import blake2b

from infervisor.protocol.tool_calls import FORMATS, Piece, ToolCall, ToolCallParser
from infervisor.supervisor.logprobs import TokenLogprob
from infervisor.supervisor.request import Chunk, Request


class ToolReading:
    """The calls in one answer. calls: those that are complete so far."""

    def __init__(self, parser: ToolCallParser) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        self._parser = parser
        self._index: int | None = None
        self._t_ns = 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @classmethod
    def of(cls, request: Request) -> ToolReading | None:
        """Return what reads this request's answer, or None if there is nothing to take out of it."""
        given, call_format = request.input, request.tool_format
        if given.tools is None or given.output.tool_choice == "none":
            return None
        # Whatever the worker says; one that this end doesn't know is none.
        if call_format is None or call_format not in FORMATS:
            return None
        names = [tool["function"]["name"] for tool in given.tools]
        return cls(ToolCallParser(call_format, names, _prefix(request)))

    def feed(self, chunk: Chunk) -> Chunk | None:
        """Return what of a chunk, and of those before it, is known to be text or calls; None if nothing is."""
        if self._index is None:
            self._index = chunk.index
        self._t_ns = chunk.t_ns
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        return self._chunk(self._parser.feed(chunk.text))

    def finish(self) -> Chunk | None:
        """Return what was held back to the end of the answer, or None. A call that was cut is text."""
        return self._chunk(self._parser.finish())

    def _chunk(self, piece: Piece) -> Chunk | None:
        if not piece.text and not piece.calls:
            return None
        self.calls += piece.calls
        # Where a call ends inside a token, the token goes with what comes first.
        ids, told = tuple(self._ids), tuple(self._logprobs)
        chunk = Chunk(piece.text, self._index or 0, ids, self._t_ns, told, piece.calls)
        self._index = None
        self._ids.clear()
        self._logprobs.clear()
        return chunk


def _prefix(request: Request) -> str:
    """Return what the ids of an answer's calls begin with: other ones in each answer of a chat.

    With the number behind it nine letters and digits, since the templates of one family take no others.
    """
    given = request.input
    told = f"{request.id} {given.seed} {given.template_clock_s}"
    return blake2b(told.encode(), digest_size=4).hexdigest()
