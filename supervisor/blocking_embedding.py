"""The request of an embedding, for threads: see `embedding_request`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infervisor.supervisor.blocking_stream import BlockingStream
from infervisor.supervisor.embedding import Embeddings
from infervisor.supervisor.embedding_request import EmbeddingRequest
from infervisor.supervisor.loop_thread import LoopThread

if TYPE_CHECKING:
    from infervisor.supervisor.blocking import BlockingSupervisor


class BlockingEmbeddingRequest(BlockingStream):
    """One request for vectors. Made by `BlockingSupervisor.embedding_request`; it has no chunks to read."""

    def __init__(self, supervisor: BlockingSupervisor, loop: LoopThread, request: EmbeddingRequest) -> None:
        super().__init__(supervisor, loop, request)
        self._embedding = request

    def embeddings(self) -> Embeddings:
        """Return the vectors: see `EmbeddingRequest.embeddings`. `cancel` ends it, from any thread."""
        return self._run(self._embedding.embeddings)
