"""A model loaded by llama.cpp without an engine around it, for tests of one part of the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infervisor.worker.engines.llama.library import AbortFlag, NativeLog, load_library
from infervisor.worker.engines.llama.tokenizer import Vocabulary


@dataclass(frozen=True)
class NativeModel:
    """What parts of the engine are made with."""

    llama: Any
    log: NativeLog
    abort: AbortFlag
    native: Any
    vocabulary: Vocabulary


@contextmanager
def native_model(path: Path, *, vocabulary_only: bool = False) -> Iterator[NativeModel]:
    """Yield the model at `path`; it is freed afterwards."""
    llama, log = load_library()
    parameters = llama.llama_model_default_params()
    parameters.vocab_only = vocabulary_only
    native = llama.llama_model_load_from_file(os.fsencode(path), parameters)
    assert native, log.tail()
    try:
        yield NativeModel(llama, log, AbortFlag(llama), native, Vocabulary(llama, native))
    finally:
        llama.llama_model_free(native)
