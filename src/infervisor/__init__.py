"""infervisor: a local language model in a crash-isolated worker.

The whole public API is on this screen. Names are loaded when they are first used (PEP 562), because the
worker runs this module too and must not load what only the parent needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infervisor.protocol.endings import EndClass, EndReason
    from infervisor.protocol.errors import (
        AdmissionError,
        ConfigurationError,
        DeadlineExceeded,
        EngineError,
        InfervisorError,
        InvalidRequest,
        ModelLoadError,
        Overloaded,
        Poisoned,
        ProtocolError,
        RequestCancelled,
        RequestError,
        ShuttingDown,
        Unavailable,
        UsageError,
        WorkerDied,
        WorkerError,
        WorkerSpawnError,
        WorkerUnresponsive,
    )
    from infervisor.protocol.ladder import Stage
    from infervisor.protocol.timeline import Timeline
    from infervisor.protocol.tool_calls import ToolCall
    from infervisor.supervisor.blocking import BlockingSupervisor
    from infervisor.supervisor.blocking_embedding import BlockingEmbeddingRequest
    from infervisor.supervisor.blocking_stream import BlockingStream, BlockingStreams
    from infervisor.supervisor.default_model import default_model
    from infervisor.supervisor.embedding import Embeddings
    from infervisor.supervisor.embedding_request import EmbeddingRequest
    from infervisor.supervisor.events import Event
    from infervisor.supervisor.logprobs import TokenLogprob, TopLogprob
    from infervisor.supervisor.report import Report, Usage
    from infervisor.supervisor.request import Chunk
    from infervisor.supervisor.resume import OnCrash, Resume
    from infervisor.supervisor.settings import (
        Deadlines,
        Escalation,
        Liveness,
        MemoryLimits,
        RestartPolicy,
        Snapshots,
        StopGraces,
    )
    from infervisor.supervisor.status import Status, WorkerStatus
    from infervisor.supervisor.stream import Answer, Stream
    from infervisor.supervisor.streams import Streams
    from infervisor.supervisor.supervisor import Supervisor

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("EndClass", "EndReason"), "protocol.endings"),
    **dict.fromkeys(
        (
            "AdmissionError", "ConfigurationError", "DeadlineExceeded", "EngineError", "InfervisorError",
            "InvalidRequest", "ModelLoadError", "Overloaded", "Poisoned", "ProtocolError", "RequestCancelled",
            "RequestError", "ShuttingDown", "Unavailable", "UsageError", "WorkerDied", "WorkerError",
            "WorkerSpawnError", "WorkerUnresponsive",
        ),
        "protocol.errors",
    ),
    "Stage": "protocol.ladder",
    "Timeline": "protocol.timeline",
    "ToolCall": "protocol.tool_calls",
    **dict.fromkeys(("BlockingStream", "BlockingStreams"), "supervisor.blocking_stream"),
    "BlockingEmbeddingRequest": "supervisor.blocking_embedding",
    "BlockingSupervisor": "supervisor.blocking",
    "default_model": "supervisor.default_model",
    "Embeddings": "supervisor.embedding",
    "EmbeddingRequest": "supervisor.embedding_request",
    "Event": "supervisor.events",
    **dict.fromkeys(("TokenLogprob", "TopLogprob"), "supervisor.logprobs"),
    **dict.fromkeys(("Report", "Usage"), "supervisor.report"),
    **dict.fromkeys(("OnCrash", "Resume"), "supervisor.resume"),
    **dict.fromkeys(
        ("Deadlines", "Escalation", "Liveness", "MemoryLimits", "RestartPolicy", "Snapshots", "StopGraces"),
        "supervisor.settings",
    ),
    **dict.fromkeys(("Status", "WorkerStatus"), "supervisor.status"),
    **dict.fromkeys(("Answer", "Stream"), "supervisor.stream"),
    "Streams": "supervisor.streams",
    "Chunk": "supervisor.request",
    "Supervisor": "supervisor.supervisor",
}  # fmt: skip

__all__ = [  # noqa: RUF022
    "Supervisor", "Stream", "Streams", "BlockingSupervisor", "BlockingStream", "BlockingStreams",
    "BlockingEmbeddingRequest", "Chunk",
    "Answer", "TokenLogprob", "TopLogprob", "ToolCall", "Embeddings", "EmbeddingRequest", "Report", "Usage",
    "Resume", "Timeline", "EndReason", "EndClass", "Stage", "Deadlines", "Escalation", "Liveness",
    "RestartPolicy", "StopGraces", "OnCrash", "Snapshots", "MemoryLimits", "Status", "WorkerStatus", "Event",
    "default_model", "InfervisorError", "ConfigurationError", "UsageError",
    "ProtocolError", "AdmissionError", "Overloaded", "ShuttingDown", "Unavailable", "InvalidRequest",
    "RequestError", "RequestCancelled", "DeadlineExceeded", "EngineError", "Poisoned", "WorkerError",
    "WorkerSpawnError", "ModelLoadError", "WorkerUnresponsive", "WorkerDied",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
