"""The models of a service: their names, their files, and a `Supervisor` for each. Starts nothing."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

from infervisor import ConfigurationError, Deadlines, MemoryLimits, Snapshots, Supervisor, default_model
from infervisor.supervisor.http_api.service.serve_settings import ServeSettings

_NAME = re.compile(r"[^\s/=\x00-\x1f\x7f]+(/[^\s/=\x00-\x1f\x7f]+)*")
_DEADLINES = ("queue", "startup", "first_token", "stall", "total", "consumer")


def split_model(word: str, base: str = "") -> tuple[str | None, str]:
    """Return name and path of `[NAME=]PATH`. What exists as a file is a path, whatever it looks like."""
    name, equals, path = word.partition("=")
    if not equals or not path or not _NAME.fullmatch(name) or name.startswith((".", "~")):
        return None, word
    try:
        is_file = os.path.exists(os.path.join(base, os.path.expanduser(word)))
    except ValueError:
        is_file = False
    return (None, word) if is_file else (name, path)


def model_files(settings: ServeSettings) -> dict[str, str | None]:
    """Return the file of each model by its name, in order; None where the engine needs none.

    Raises `ConfigurationError` for a name that is given twice, and where there is no model at all.
    """
    files: dict[str, str | None] = {}
    words: list[tuple[str | None, str | None]] = [split_model(word) for word in settings.models]
    if not words:
        words = [
            (None, os.fspath(default_model())) if settings.engine == "llama" else (settings.engine, None)
        ]
    for given, path in words:
        name = given or _stem(path or "")
        if name in files:
            raise ConfigurationError(f"two models are called {name!r}: name one of them with NAME=PATH")
        files[name] = path
    return files


def _stem(path: str) -> str:
    stem = os.path.basename(path)
    return stem[: -len(".gguf")] if stem.lower().endswith(".gguf") and len(stem) > len(".gguf") else stem


def make_supervisors(
    settings: ServeSettings, on_event: Callable[[str, Any], None] | None = None
) -> dict[str, Supervisor]:
    """Return a supervisor for each model, none of them started. on_event: called with name and event.

    Raises `ConfigurationError` for what no supervisor takes.
    """

    options = {**settings.options, **_llama_options(settings)}
    return {
        name: Supervisor(
            path,
            engine=settings.engine,
            options=options,
            window=settings.window,
            max_queue=settings.max_queue,
            max_wait_s=settings.max_wait_s,
            deadlines=deadlines(settings),
            python=settings.python,
            on_event=None if on_event is None else functools.partial(on_event, name),
            wait_until_ready=False,
            on_crash=settings.on_crash,
            snapshots=Snapshots() if settings.snapshots else None,
            workers=settings.workers,
            standby=settings.standby,
            memory=_memory(settings),
            slots=settings.slots,
            step_budget_s=None if settings.step_budget_ms is None else settings.step_budget_ms / 1000,
        )
        for name, path in model_files(settings).items()
    }


def deadlines(settings: ServeSettings) -> Deadlines:
    """Return the deadlines of requests that don't say."""
    return Deadlines(**{f"{name}_s": getattr(settings, f"{name}_timeout_s") for name in _DEADLINES})


def _llama_options(settings: ServeSettings) -> dict[str, Any]:
    given = {
        "n_ctx": settings.ctx,
        "threads": settings.threads,
        "threads_batch": settings.threads,
        "n_gpu_layers": settings.gpu_layers,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if options and settings.engine != "llama":
        raise ConfigurationError(
            f"ctx, threads and gpu_layers are the llama engine's; give {settings.engine} its options by options"
        )
    return options


def _memory(settings: ServeSettings) -> MemoryLimits | None:
    if settings.memory_soft_bytes is None and settings.memory_hard_bytes is None:
        return None
    return MemoryLimits(soft_bytes=settings.memory_soft_bytes, hard_bytes=settings.memory_hard_bytes)
