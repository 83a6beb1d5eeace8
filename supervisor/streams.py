"""Several answers to the same prompt: streams that begin alike, go to the same worker, and share its reading.

Holds streams and decides nothing; each is a request of its own. In the loop's thread, but for `cancel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import anyio

from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import InfervisorError
from infervisor.supervisor.request import Chunk
from infervisor.supervisor.stream import Answer, Stream, answer_of


class Streams:
    """The answers to one prompt. Made by `Supervisor.streams`; a context manager, and a row of streams.

    Each can be read, cancelled and left by itself. Leaving them all together cancels those that haven't ended.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = tuple(streams)

    def __repr__(self) -> str:
        return f"<Streams {', '.join(repr(stream) for stream in self._streams)}>"

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams)

    def __getitem__(self, index: int) -> Stream:
        return self._streams[index]

    async def __aenter__(self) -> Streams:
        """Enter the queue with all of them. Raises what refuses one; then none is left there."""
        try:
            for stream in self._streams:
                await stream.__aenter__()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel those that haven't ended, and wait until all are released, at most the ladder's graces."""
        # All of them before the first wait: their ladders run side by side.
        self.cancel()
        for stream in self._streams:
            await stream.__aexit__(None, None, None)

    def cancel(self, reason: EndReason = EndReason.CANCELLED) -> None:
        """Stop all of them now; returns at once. From any thread: see `Stream.cancel`."""
        for stream in self._streams:
            stream.cancel(reason)

    async def answers(self) -> list[Answer]:
        """Read all of them side by side and return the whole answers, in order. Enters and leaves them.

        Raises the error of the first that doesn't end naturally; the others are cancelled then.
        """
        rests: list[Sequence[Chunk]] = [()] * len(self._streams)
        failed: list[tuple[Stream, InfervisorError]] = []

        async def read(index: int, tasks: anyio.abc.TaskGroup) -> None:
            try:
                rests[index] = await self._streams[index]._rest()
            except InfervisorError as error:
                failed.append((self._streams[index], error))
                tasks.cancel_scope.cancel()

        async with self, anyio.create_task_group() as tasks:
            for index in range(len(self._streams)):
                tasks.start_soon(read, index, tasks)
        if failed:
            stream, error = failed[0]
            error.report = stream.report  # it was made at the end; by now the release is known, too
            raise error
        return [answer_of(rest, stream.report) for rest, stream in zip(rests, self._streams, strict=True)]
