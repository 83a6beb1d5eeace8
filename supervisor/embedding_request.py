"""What a caller holds of a request that embeds texts: a stream without text, and its vectors at the end."""

from __future__ import annotations

from infervisor.protocol.errors import InfervisorError
from infervisor.supervisor.embedding import Embeddings, embeddings_of
from infervisor.supervisor.stream import Stream


class EmbeddingRequest(Stream):
    """One request for vectors. Made by `Supervisor.embedding_request`; it has no chunks to read."""

    async def embeddings(self) -> Embeddings:
        """Return the vectors, once the worker is free again. Raises the error of every end that isn't natural."""
        try:
            async with self:
                await self._rest()
        except InfervisorError as error:
            error.report = self.report  # it was made at the end; by now the release is known, too
            raise
        return embeddings_of(self._request.vectors, self.report)
