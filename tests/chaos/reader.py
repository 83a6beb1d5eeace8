"""Reads one stream of a cell to whatever end it has, and says whether that was right. Runs in the test's task."""

from __future__ import annotations

from infervisor import EndReason, InfervisorError, Stream
from tests.helpers.inside import words

TOKENS = 40
"""Of a whole answer."""


class Reader:
    """Reads one stream, and keeps what came and how it ended."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.texts: list[str] = []
        self.indexes: list[int] = []
        self.error: InfervisorError | None = None
        self.is_done = False

    async def read(self, chunks: int) -> None:
        """Read so many chunks, or to the end."""
        while chunks and not self.is_done:
            chunks -= 1
            try:
                chunk = await anext(self.stream)
            except StopAsyncIteration:
                self.is_done = True
            except InfervisorError as error:
                self.error = error
                self.is_done = True
            else:
                self.texts.append(chunk.text)
                self.indexes.append(chunk.index)

    async def finish(self) -> None:
        """Read to the end and wait for the release."""
        await self.read(1 << 30)
        await self.stream.released()

    @property
    def id(self) -> int:
        """The request."""
        return self.stream.report.request_id

    @property
    def reason(self) -> EndReason | None:
        """Why it ended."""
        return self.stream.end_reason

    def is_whole(self, tokens: int = TOKENS) -> None:
        """Fail unless the answer is exact and complete, and nothing of it came twice or never."""
        assert self.error is None, f"{self.error!r}: {self.stream.report}"
        assert "".join(self.texts) == words(tokens)
        assert self.indexes == list(range(tokens))
        report = self.stream.report
        assert report.end_reason is EndReason.LENGTH
        assert report.is_released
        assert report.usage.completion_tokens == tokens

    def ended_as(self, reason: EndReason) -> None:
        """Fail unless it ended with this reason, with a beginning of the answer."""
        assert self.error is not None, self.stream.report
        assert self.reason is reason, self.stream.report
        assert self.error.code == reason
        assert self.stream.report.is_released
        assert self.indexes == list(range(len(self.texts)))
        assert "".join(self.texts) == words(len(self.texts))
