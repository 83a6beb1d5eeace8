"""The engines by name. An engine is imported only when a worker was asked for it."""

from __future__ import annotations

import importlib

from infervisor.worker.engine import Engine, LoadRefused

ENGINES = {
    "llama": "infervisor.worker.engines.llama.engine:LlamaEngine",
    "scripted": "infervisor.worker.engines.scripted.engine:ScriptedEngine",
}


def create_engine(name: str) -> Engine:
    """Return a new engine. Raises `LoadRefused` for an unknown name or an interpreter without its library."""
    target = ENGINES.get(name)
    if target is None:
        raise LoadRefused(
            f"there is no engine {name!r}; known engines: {', '.join(sorted(ENGINES))}", "unknown_engine"
        )
    module, _, attribute = target.partition(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)()
    return engine
