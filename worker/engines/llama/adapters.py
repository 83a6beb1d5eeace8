"""LoRA adapters: looked at before anything is loaded, then given to llama.cpp with the model they change.

Owns the native adapters between the model's load and its end. They are loaded before the context, which is made
large enough for them, and freed after it but before the model, which frees what is left of them by itself.
Runs in the work loop's thread, during `load` and `close`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.gguf_header import GgufHeader
from infervisor.worker.engines.llama.library import NativeLog
from infervisor.worker.engines.llama.model_file import ModelFile, check_model_file
from infervisor.worker.engines.llama.options import Lora


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that passed, and how strongly it counts. mark: differs if anything of it does."""

    path: str
    scale: float
    name: str
    file_bytes: int
    mark: str


def check_adapters(adapters: Sequence[Lora], model: ModelFile) -> tuple[AdapterFile, ...]:
    """Return the adapters as files that llama.cpp may be given with `model`.

    Raises `LoadRefused` with code adapter_mismatch, adapter_unsupported, or adapter_ and what `check_model_file`
    says of a model: adapter_not_found, adapter_not_gguf, adapter_truncated, adapter_corrupt …
    """
    return tuple(_checked(adapter, model) for adapter in adapters)


def _checked(adapter: Lora, model: ModelFile) -> AdapterFile:
    try:
        file = check_model_file(adapter.path)
    except LoadRefused as error:
        code = "adapter_" + error.code.removeprefix("model_")
        raise LoadRefused(f"lora: {error}", code, detail=error.detail, permanent=error.permanent) from None
    _check_kind(adapter.path, file.header)
    made_for = file.header.architecture
    if made_for != model.header.architecture:
        raise LoadRefused(
            f"lora: {adapter.path} is an adapter for {made_for!r:.60} models, and {model.path} is "
            f"{model.header.architecture!r:.60}: use one that was made from this model",
            "adapter_mismatch",
        )
    mark = hashlib.sha256(repr((file.stamps, adapter.scale)).encode() + file.first_bytes).hexdigest()
    return AdapterFile(adapter.path, adapter.scale, file.header.name, file.total_bytes, mark)


def _check_kind(path: str, header: GgufHeader) -> None:
    kind = header.values.get("general.type")
    if kind != "adapter":
        found = "a model" if kind in (None, "model") else f"{kind!r:.60}"
        raise LoadRefused(
            f"lora: {path} is {found}, not an adapter: give the .gguf that convert_lora_to_gguf.py writes",
            "adapter_not_an_adapter",
        )
    # Native code ends the process over a number of another type.
    if not isinstance(header.values.get("adapter.lora.alpha", 0.0), float):
        raise LoadRefused(
            f"lora: {path} is damaged: its adapter.lora.alpha is no float; convert it again",
            "adapter_corrupt",
        )
    # These are off until certain tokens come, which llama.cpp leaves to the caller: always on is another model.
    activated = "adapter.alora.invocation_tokens" in header.keys
    if header.values.get("adapter.type") != "lora" or activated:
        found = "an activated LoRA" if activated else f"of type {header.values.get('adapter.type')!r:.60}"
        raise LoadRefused(
            f"lora: {path} is {found}, which isn't supported: use a plain LoRA", "adapter_unsupported"
        )


class Adapters:
    """The adapters of a loaded model. None at all is as good as some."""

    def __init__(self, llama: Any, files: Sequence[AdapterFile]) -> None:
        self._llama = llama
        self._files = tuple(files)
        self._natives: list[Any] = []

    @classmethod
    def load(cls, llama: Any, log: NativeLog, model: Any, files: Sequence[AdapterFile]) -> Adapters:
        """Load each of `files` for the native `model`, before its context is made.

        Raises `LoadRefused` (code adapter_mismatch or out_of_memory) and leaves no adapter behind.
        """
        adapters = cls(llama, files)
        try:
            for file in adapters._files:
                log.clear()
                native = llama.llama_adapter_lora_init(model, os.fsencode(file.path))
                if not native:
                    raise _refusal(log, file)
                adapters._natives.append(native)
        except BaseException:
            adapters.close()
            raise
        return adapters

    def attach(self, context: Any) -> None:
        """Let `context` compute with all of them. Raises `LoadRefused`."""
        count = len(self._natives)
        if not count:
            return
        natives = (self._llama.llama_adapter_lora_p_ctypes * count)(*self._natives)
        scales = (ctypes.c_float * count)(*(file.scale for file in self._files))
        if self._llama.llama_set_adapters_lora(context, natives, count, scales) != 0:
            paths = ", ".join(file.path for file in self._files)
            raise LoadRefused(f"lora: llama.cpp can't use {paths:.500} with this model", "adapter_mismatch")

    @property
    def marks(self) -> tuple[str, ...]:
        """What of them changes what is computed, for the fingerprint."""
        return tuple(file.mark for file in self._files)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Plain values for `ready`: path, name and scale of each."""
        return [{"path": file.path, "name": file.name, "scale": file.scale} for file in self._files]

    def close(self) -> None:
        """Free them: after the context, before the model. Idempotent."""
        while self._natives:
            self._llama.llama_adapter_lora_free(self._natives.pop())


def _refusal(log: NativeLog, file: AdapterFile) -> LoadRefused:
    tail = log.tail()
    said = tail.partition("\n")[0].rpartition("failed to apply lora adapter: ")[2] or "nothing more"
    if "allocate" in tail:
        return LoadRefused(
            f"lora: {file.path} needs more memory than there is: lower n_ctx or slots (llama.cpp says: {said})",
            "out_of_memory", detail=tail,
        )  # fmt: skip
    return LoadRefused(
        f"lora: {file.path} doesn't fit this model: use one that was made from it (llama.cpp says: {said})",
        "adapter_mismatch",
        detail=tail,
    )
