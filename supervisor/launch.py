"""What a worker is started with, from what the user passed: checked, and resolved once. No process here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.codec import encode
from infervisor.protocol.errors import ConfigurationError, InvalidRequest, LocalProtocolError
from infervisor.protocol.messages import Load
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.release import DEFAULT_LIMIT_NS
from infervisor.supervisor.settings import Liveness, MemoryLimits, StopGraces, check_count, check_seconds

MAX_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every worker of a supervisor is started with, and held to.

    snapshots: descriptor of the shared memory, or None. alert_after_ns: how long it may take to give all back.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    load: Load
    startup_s: float | None
    graces: StopGraces
    liveness: Liveness
    snapshots: int | None = None
    memory: MemoryLimits | None = None
    alert_after_ns: int = DEFAULT_LIMIT_NS


def model_path(model: str | os.PathLike[str] | None, engine: str) -> str | None:
    """Return the absolute path as text, links kept. Raises `ConfigurationError`; None only without a model."""
    if model is None:
        if engine == "llama":
            raise ConfigurationError(
                "name a model: the path of a .gguf file, or default_model() for the embedded default"
            )
        return None
    path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model
    if not isinstance(path, str):
        raise ConfigurationError(f"the model must be a path as text, not {path!r:.80}")
    if not path or "\0" in path:
        raise ConfigurationError(f"the model path {path!r:.80} is empty or holds a NUL character")
    # As bytes: under an ASCII locale the name of the current folder can't be had as text.
    raw = os.path.abspath(os.path.expanduser(path.encode("utf-8", "surrogateescape")))
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the model path {raw!r:.200} isn't valid UTF-8: rename the file or folder, or link to it"
        ) from None


def interpreter(python: str | os.PathLike[str] | None) -> str:
    """Return the interpreter for the worker: a path made absolute, or a name for the search path."""
    if python is not None:
        if not isinstance(python, (str, os.PathLike)) or not os.fspath(python):
            raise ConfigurationError(f"python must be the path of an interpreter, not {python!r:.80}")
        return os.fspath(python) if os.sep not in os.fspath(python) else os.path.abspath(os.fspath(python))
    if not sys.executable:
        raise ConfigurationError("this host has no interpreter of its own: name one with python=")
    return sys.executable


def load_message(
    engine: object,
    model: str | None,
    options: Mapping[str, Any],
    snapshot_share: float | None = None,
    *,
    slots: int | None = None,
    step_budget_s: float | None = None,
    workers: int = 1,
) -> Load:
    """Return the message that tells a worker what to load. Raises `ConfigurationError` if it can't be sent.

    slots: short for the option of that name. step_budget_s, workers: see `Load`.
    """
    if not isinstance(engine, str) or not engine:
        raise ConfigurationError(f"engine must be a name such as 'llama', not {engine!r:.80}")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigurationError(f"options must map names to values, not {options!r:.80}")
    options = dict(options)
    if slots is not None:
        check_count("slots", slots, 1, MAX_SLOTS)
        if options.setdefault("slots", slots) != slots:
            raise ConfigurationError(
                f"slots={slots}, but options['slots'] is {quoted(options['slots'], 60)}: give one of the two"
            )
    budget_s = None if step_budget_s is None else check_seconds("step_budget_s", step_budget_s)
    load = Load(engine, model, options, snapshot_share, budget_s, workers)
    try:
        encode(load)
    except (LocalProtocolError, InvalidRequest) as error:
        raise ConfigurationError(f"options can't be sent to the worker: {error}") from error
    return load
