"""The options of the llama engine: names, ranges and defaults. llama.cpp's names where it has one.

Pure values: nothing is loaded or measured here. Bad options are refused before native code sees them,
because some of them abort the process (a thread count of 100,000, for one).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from infervisor.worker.engine import LoadRefused

KV_TYPES: Mapping[str, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
    "iq4_nl": (20, 18 / 32),
}
"""Name → (ggml type, bytes per element) of the types that a KV cache can have."""
SPLIT_MODES: Mapping[str, int] = {"none": 0, "layer": 1, "row": 2}
DEFAULT_CONTEXT_TOKENS = 4096
MAX_THREADS = 512
"""GGML_MAX_N_THREADS: beyond it the native library crashes."""
MAX_SLOTS = 64
DEFAULT_SLOTS = 4
MAX_ADAPTERS = 16
MAX_SCALE = 1000
REPRODUCIBLE_SLICE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter to load. path: of its GGUF, with `~` expanded. scale: how strongly it counts; 0 is not at all."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How to load a model.

    n_ctx: context of one sequence in tokens; None is the model's own but at most 4096, 0 the model's own.
    fit_context: when memory is short, load with the largest context that fits instead of refusing.
    check_memory: look before loading whether it fits. threads, threads_batch: for decoding and for prefill;
    None is this worker's share of the physical cores, and fewer while other processes take them; threads_batch
    follows threads. batch_tokens: most tokens of one prefill call; ubatch: most tokens of one micro-batch.
    n_gpu_layers: −1 is all. main_gpu, tensor_split, split_mode: as in llama.cpp. use_mmap, use_mlock.
    flash_attention: "auto", true or false. kv_type_k, kv_type_v: element types of the KV cache.
    rope_freq_base, rope_freq_scale: 0 is the model's own. swa_full: keep the whole cache for
    sliding-window layers, without which an interrupted step can cost a prefill. slots: sequences at once;
    None is 4, or fewer where memory is short. prefix_reuse: what a request has in memory stays there, for one
    that begins alike. lora: adapters, each a path or {"path", "scale"}; one or a list.
    reproducible: the same text whatever else runs, at some cost in speed. chat_template: used instead of
    the model's.
    """

    n_ctx: int | None = None
    fit_context: bool = False
    check_memory: bool = True
    threads: int | None = None
    threads_batch: int | None = None
    batch_tokens: int = 512
    ubatch: int = 512
    n_gpu_layers: int = 0
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    split_mode: str = "layer"
    use_mmap: bool = True
    use_mlock: bool = False
    flash_attention: bool | str = "auto"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    swa_full: bool = True
    slots: int | None = None
    prefix_reuse: bool = True
    lora: tuple[Lora, ...] = ()
    reproducible: bool = False
    chat_template: str | None = None

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> LlamaOptions:
        """Check and build. Raises `LoadRefused` (code unknown_option or bad_option) naming the option."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise LoadRefused(
                    f"the llama engine has no option {name!r:.80}; its options are {', '.join(known)}",
                    "unknown_option",
                )
        checked = {name: _CHECKS[name](name, value) for name, value in options.items()}
        built = cls(**checked)
        if built.kv_type_v not in ("f32", "f16", "bf16") and built.flash_attention_type == 0:
            switch = "reproducible=true" if built.reproducible else "flash_attention=false"
            raise LoadRefused(
                f"kv_type_v={built.kv_type_v!r} needs flash attention, which {switch} switches off: "
                "use kv_type_v='f16'",
                "bad_option",
            )
        if built.reproducible and min(built.ubatch, built.batch_tokens) < REPRODUCIBLE_SLICE_TOKENS:
            raise LoadRefused(
                f"reproducible needs batch_tokens and ubatch of at least {REPRODUCIBLE_SLICE_TOKENS}",
                "bad_option",
            )
        return built

    @property
    def slot_count(self) -> int:
        """Slots as asked for, or the default."""
        return DEFAULT_SLOTS if self.slots is None else self.slots

    @property
    def flash_attention_type(self) -> int:
        """llama.cpp's number: −1 auto, 0 off, 1 on."""
        if self.reproducible:
            return 0
        return -1 if self.flash_attention == "auto" else int(bool(self.flash_attention))

    def wanted_context(self, trained_tokens: int) -> int:
        """Return the tokens of context to ask for, given the model's own length (0 if it names none)."""
        if self.n_ctx is None:
            return min(trained_tokens or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS)
        return self.n_ctx or trained_tokens or DEFAULT_CONTEXT_TOKENS


Check = Callable[[str, object], Any]


def _bad(name: str, value: object, wanted: str) -> LoadRefused:
    shown = repr(value) if not isinstance(value, int) or value.bit_length() <= 128 else "a huge number"
    return LoadRefused(f"{name} must be {wanted}, not {shown:.80}", "bad_option")


def _whole(low: int, high: int, *, optional: bool = False) -> Check:
    wanted = f"a whole number from {low} to {high}"

    def check(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _bad(name, value, wanted)
        return value

    return check


def _context(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not (value == 0 or 32 <= value < 1 << 31):
        raise _bad(name, value, f"a whole number from 32 to {(1 << 31) - 1}, or 0 for the model's own")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "true or false")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise _bad(name, value, "a number of at least 0")
    return float(value)


def _one_of(names: Mapping[str, object]) -> Check:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise _bad(name, value, f"one of {', '.join(names)}")
        return value

    return check


def _flash(name: str, value: object) -> bool | str:
    if isinstance(value, bool):
        return value
    if value != "auto":
        raise _bad(name, value, "true, false or 'auto'")
    return "auto"


def _shares(name: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > 16:
        raise _bad(name, value, "a list of at most 16 numbers")
    return tuple(_number(name, share) for share in value)


def _text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _bad(name, value, "a string")
    return value


def _adapters(name: str, value: object) -> tuple[Lora, ...]:
    if value is None:
        return ()
    given: list[object] = (
        list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else [value]
    )
    if len(given) > MAX_ADAPTERS:
        raise LoadRefused(f"{name} must be at most {MAX_ADAPTERS} adapters, not {len(given)}", "bad_option")
    adapters = tuple(_adapter(name, one) for one in given)
    paths = [adapter.path for adapter in adapters]
    for path in paths:
        if paths.count(path) > 1:
            raise LoadRefused(
                f"{name} must be different adapters, and {path:.200} is given twice", "bad_option"
            )
    return adapters


def _adapter(name: str, value: object) -> Lora:
    if isinstance(value, Lora):
        return value
    entry: Mapping[object, object] = {"path": value}
    if isinstance(value, Mapping):
        entry = cast("Mapping[object, object]", value)
    path, scale = entry.get("path"), entry.get("scale", 1.0)
    if not isinstance(path, str) or not path or not entry.keys() <= {"path", "scale"}:
        raise _bad(name, value, 'a path, {"path": …, "scale": …} or a list of these')
    # Beyond it the product is no finite number, and neither is any logit.
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= MAX_SCALE:
        raise _bad(name, value, f"adapters with a scale from -{MAX_SCALE} to {MAX_SCALE}")
    return Lora(os.path.expanduser(path), float(scale))


_CHECKS: Mapping[str, Check] = {
    "n_ctx": _context,
    "fit_context": _flag,
    "check_memory": _flag,
    "threads": _whole(1, MAX_THREADS, optional=True),
    "threads_batch": _whole(1, MAX_THREADS, optional=True),
    "batch_tokens": _whole(8, 1 << 20),
    "ubatch": _whole(8, 1 << 20),
    "n_gpu_layers": _whole(-1, 1 << 16),
    "main_gpu": _whole(0, 255),
    "tensor_split": _shares,
    "split_mode": _one_of(SPLIT_MODES),
    "use_mmap": _flag,
    "use_mlock": _flag,
    "flash_attention": _flash,
    "kv_type_k": _one_of(KV_TYPES),
    "kv_type_v": _one_of(KV_TYPES),
    "rope_freq_base": _number,
    "rope_freq_scale": _number,
    "swa_full": _flag,
    "slots": _whole(1, MAX_SLOTS, optional=True),
    "prefix_reuse": _flag,
    "lora": _adapters,
    "reproducible": _flag,
    "chat_template": _text,
}
