"""From `load` to `ready` or `failed`. Runs in the main thread, once."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

import msgpack

import infervisor
from infervisor.protocol.errors import LocalProtocolError
from infervisor.protocol.messages import Failed, Load, Progress, Ready
from infervisor.worker.engine import Engine, LoadRefused, ModelFacts, SharesCores
from infervisor.worker.engines import create_engine
from infervisor.worker.fault_hooks import FaultHooks, TakesFaultHooks
from infervisor.worker.outbox import Outbox, sendable

PROGRESS_INTERVAL_NS = 50_000_000
DETAIL_CHARACTERS = 32_768
MESSAGE_CHARACTERS = 8_192


class ProgressReporter:
    """Sends progress at most 20 times a second, but every change of phase and every end of one."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._phase = ""
        self._next_ns = 0

    def __call__(self, phase: str, fraction: float) -> None:
        """Tell how far loading is. fraction: of this phase, from 0 to 1."""
        now_ns = time.monotonic_ns()
        if phase == self._phase and fraction < 1 and now_ns < self._next_ns:
            return
        self._phase = phase
        self._next_ns = now_ns + PROGRESS_INTERVAL_NS
        self._outbox.send(Progress(now_ns, phase, min(1.0, max(0.0, fraction))))


def versions() -> dict[str, str]:
    """Return the versions that `hello` carries. The model library's comes with `ready`, once it is imported."""
    return {
        "python": platform.python_version(),
        "infervisor": infervisor.__version__,
        "msgpack": ".".join(map(str, msgpack.version)),
    }


def load(message: Load, outbox: Outbox, hooks: FaultHooks) -> tuple[Engine, ModelFacts] | None:
    """Create the engine, load the model and send `ready`; or send `failed` and return None."""
    try:
        engine = create_engine(message.engine)
        if isinstance(engine, TakesFaultHooks):
            engine.use_fault_hooks(hooks)
        if isinstance(engine, SharesCores):
            engine.use_share(max(1, message.workers))
        facts = engine.load(message.model, message.options, ProgressReporter(outbox))
        outbox.send(Ready(time.monotonic_ns(), facts.fingerprint, _plain(facts)))
    except LoadRefused as error:
        _fail(outbox, error.code, str(error), error.detail, error.permanent)
    except ImportError as error:
        _fail(outbox, "engine_import", _import_advice(message.engine, error), _trace(error), True)
    except LocalProtocolError as error:
        text = f"the facts of engine {message.engine} can't be sent: {error}"
        _fail(outbox, "engine_error", text, _trace(error), True)
    except Exception as error:
        text = f"engine {message.engine} failed to load {message.model}: {type(error).__name__}: {error}"
        _fail(outbox, "engine_error", text, _trace(error), False)
    else:
        return engine, facts
    return None


def _plain(facts: ModelFacts) -> dict[str, Any]:
    plain = asdict(facts)
    plain["abort"] = facts.abort.value
    plain["extra"] = dict(facts.extra)
    return plain


def _import_advice(engine: str, error: ImportError) -> str:
    library = "llama-cpp-python" if engine == "llama" else (error.name or "the missing package")
    return (
        f"engine {engine} can't be imported by {sys.executable}: {error}. "
        f"Install it there: {sys.executable} -m pip install {library}"
    )


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _fail(outbox: Outbox, code: str, message: str, detail: str, permanent: bool) -> None:
    print(f"worker: {message}", file=sys.stderr, flush=True)
    outbox.send(
        Failed(
            time.monotonic_ns(),
            code,
            sendable(message)[:MESSAGE_CHARACTERS],
            sendable(detail)[-DETAIL_CHARACTERS:],
            permanent,
        )
    )
