"""Give a checked file to llama.cpp: model, context, and what is then true of them.

Owns the native parameters and turns llama.cpp's log into a reason: the library itself only says "no".
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

from infervisor.worker.engine import AbortGranularity, LoadRefused, ModelFacts
from infervisor.worker.engines.llama.adapters import Adapters
from infervisor.worker.engines.llama.capacity import default_threads, usable_cores
from infervisor.worker.engines.llama.library import NativeLog
from infervisor.worker.engines.llama.model_file import ModelFile
from infervisor.worker.engines.llama.options import KV_TYPES, SPLIT_MODES, LlamaOptions
from infervisor.worker.engines.llama.tokenizer import Vocabulary

_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"unknown model architecture",
        "model_unsupported_architecture",
        "is of an architecture that this llama.cpp doesn't know: update llama-cpp-python",
    ),
    (
        r"invalid ggml type|unknown type",
        "model_unsupported_type",
        "holds a tensor type that this llama.cpp doesn't know: update llama-cpp-python",
    ),
    (
        r"unknown pre-tokenizer|unknown tokenizer|cannot find tokenizer",
        "model_unsupported_tokenizer",
        "has a tokeniser that this llama.cpp doesn't know: update llama-cpp-python",
    ),
    (
        r"failed to allocate|unable to allocate|out of memory|bad_alloc|cannot allocate",
        "out_of_memory",
        "needs more memory than there is: lower n_ctx or slots, or use a smaller quantisation",
    ),
    (
        r"does not divide|requires flash",
        "bad_option",
        "doesn't go with this model and these options: use kv_type_k='f16' and kv_type_v='f16'",
    ),
    (
        r"missing tensor|tensor '.*' not found|wrong shape|wrong number of tensors|"
        r"not within the file bounds|key not found|invalid|corrupt|has offset|unexpected|expected",
        "model_corrupt",
        "is damaged or was converted wrongly: fetch it again",
    ),
)


def _refusal(log: NativeLog, subject: str, fallback: str) -> LoadRefused:
    tail = log.tail()
    # The first line is nearest to the cause; what follows it is how the failure was passed on.
    said = tail.partition("\n")[0] or "nothing more"
    for pattern, code, text in _REASONS:
        if re.search(pattern, tail, re.IGNORECASE):
            return LoadRefused(f"{subject} {text} (llama.cpp says: {said})", code, detail=tail)
    return LoadRefused(f"{subject} {fallback} (llama.cpp says: {said})", "model_load", detail=tail)


def load_model(
    llama: Any, log: NativeLog, file: ModelFile, options: LlamaOptions, progress: Callable[[str, float], None]
) -> Any:
    """Return the native model. Calls progress("load", fraction). Raises `LoadRefused`."""
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = options.n_gpu_layers if options.n_gpu_layers >= 0 else (1 << 31) - 1
    parameters.split_mode = SPLIT_MODES[options.split_mode]
    parameters.main_gpu = options.main_gpu
    parameters.load_mode = int(options.use_mmap) | int(options.use_mlock) << 1
    # Repacked weights are computed by other kernels than plain ones, depending on the batch.
    parameters.use_extra_bufts = not options.reproducible
    shares: Any = None
    if options.tensor_split:
        count = max(int(llama.llama_max_devices()), len(options.tensor_split))
        shares = (ctypes.c_float * count)(*options.tensor_split)
        parameters.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))

    failures: list[BaseException] = []

    def advanced(fraction: float, _data: Any) -> bool:
        # An exception can't cross native code: it waits until the load is over.
        try:
            progress("load", min(max(float(fraction), 0.0), 1.0))
        except BaseException as error:
            failures.append(error)
        return not failures

    callback = llama.llama_progress_callback(advanced)
    parameters.progress_callback = callback
    log.clear()
    model = llama.llama_model_load_from_file(os.fsencode(file.path), parameters)
    if failures:
        if model:
            llama.llama_model_free(model)
        raise failures[0]
    if not model:
        raise _refusal(log, file.path, "couldn't be loaded")
    if llama.llama_model_has_encoder(model) or not llama.llama_model_has_decoder(model):
        llama.llama_model_free(model)
        raise LoadRefused(
            f"{file.path} is an encoder model, which doesn't generate text: use a decoder-only model",
            "model_not_generative",
        )
    return model


def load_context(llama: Any, log: NativeLog, model: Any, options: LlamaOptions, context_tokens: int) -> Any:
    """Return a native context in which each slot has at least `context_tokens`. Raises `LoadRefused`."""
    threads = options.threads or default_threads()
    slots = options.slot_count
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = min(context_tokens * slots, (1 << 32) - 1)
    # One decode call carries a token of every slot.
    parameters.n_batch = max(options.batch_tokens, slots)
    parameters.n_ubatch = options.ubatch
    parameters.n_seq_max = slots
    parameters.n_threads = threads
    parameters.n_threads_batch = options.threads_batch or threads
    parameters.flash_attn_type = options.flash_attention_type
    parameters.rope_freq_base = options.rope_freq_base
    parameters.rope_freq_scale = options.rope_freq_scale
    parameters.type_k = KV_TYPES[options.kv_type_k][0]
    parameters.type_v = KV_TYPES[options.kv_type_v][0]
    # Devices can't be interrupted inside a graph: without offloaded layers they get no work at all.
    parameters.offload_kqv = parameters.op_offload = options.n_gpu_layers != 0
    parameters.swa_full = options.swa_full
    # Each slot has cells of its own: what one sequence computes can't depend on where others lie.
    parameters.kv_unified = False
    # Vectors are made in a context of their own.
    parameters.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
    parameters.no_perf = True
    log.clear()
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise _refusal(log, f"a context of {context_tokens} tokens in {slots} slot(s)", "couldn't be made")
    return context


def model_facts(
    llama: Any, log: NativeLog, model: Any, context: Any, file: ModelFile, options: LlamaOptions,
    adapters: Adapters, vocabulary: Vocabulary,
) -> ModelFacts:  # fmt: skip
    """Return what is true of the loaded model, but for its chat template, which somebody else tries.

    log: what was said since `load_context` began.
    """
    context_tokens = int(llama.llama_n_ctx_seq(context))
    library = f"llama-cpp-python {llama.__version__}"
    return ModelFacts(
        engine="llama",
        library=library,
        fingerprint=_fingerprint(file, options, adapters, context_tokens, library),
        context_tokens=context_tokens,
        vocabulary_tokens=vocabulary.size,
        has_chat_template=False,
        slots=options.slot_count,
        abort=AbortGranularity.MICRO_BATCH if _offloads(llama, options) else AbortGranularity.NODE,
        extra={
            "model_name": file.header.name,
            "model_path": file.path,
            "architecture": file.header.architecture,
            "file_bytes": file.total_bytes,
            "parameters": int(llama.llama_model_n_params(model)),
            "trained_context_tokens": int(llama.llama_model_n_ctx_train(model)),
            "reproducible": options.reproducible,
            "lora": adapters.facts,
            "system": (llama.llama_print_system_info() or b"").decode("utf-8", "replace").strip(),
            **_memory_facts(llama, log, model, context, options),
            "cores": usable_cores(),
            "threads": int(llama.llama_n_threads(context)),
            "threads_batch": int(llama.llama_n_threads_batch(context)),
            "batch_tokens": int(llama.llama_n_batch(context)),
            "ubatch": int(llama.llama_n_ubatch(context)),
        },
    )


def _offloads(llama: Any, options: LlamaOptions) -> bool:
    return options.n_gpu_layers != 0 and bool(llama.llama_supports_gpu_offload())


def _memory_facts(
    llama: Any, log: NativeLog, model: Any, context: Any, options: LlamaOptions
) -> dict[str, object]:
    """Return where model and context lie and how: what is in use, as far as the library tells."""
    layers = int(llama.llama_model_n_layer(model)) + 1
    asked = options.n_gpu_layers
    offloaded = _offloads(llama, options)
    flash = log.find(r"flash attention (?:was auto, set to )?(enabled|disabled)")
    base = log.find(r"\bfreq_base += ([\d.e+-]+)")
    scale = log.find(r"\bfreq_scale += ([\d.e+-]+)")
    return {
        "n_ctx": int(llama.llama_n_ctx(context)),
        "slots": options.slot_count,
        "prefix_reuse": options.prefix_reuse,
        "kv_type_k": options.kv_type_k,
        "kv_type_v": options.kv_type_v,
        # "auto" is what the library says; asked for, it is on or the context wouldn't be there.
        "flash_attention": flash[1].lower() == "enabled" if flash else _asked_flash(options),
        "swa_full": options.swa_full,
        "rope_freq_base": float(base[1]) if base else options.rope_freq_base,
        "rope_freq_scale": float(scale[1]) if scale else options.rope_freq_scale,
        "use_mmap": options.use_mmap and bool(llama.llama_supports_mmap()),
        "use_mlock": options.use_mlock and bool(llama.llama_supports_mlock()),
        "gpu_offload": offloaded,
        "gpu_layers": (layers if asked < 0 else min(asked, layers)) if offloaded else 0,
        "main_gpu": options.main_gpu,
        "tensor_split": list(options.tensor_split),
        "split_mode": options.split_mode,
    }


def _asked_flash(options: LlamaOptions) -> bool | None:
    return None if options.flash_attention_type < 0 else options.flash_attention_type == 1


def _fingerprint(
    file: ModelFile, options: LlamaOptions, adapters: Adapters, context_tokens: int, library: str
) -> str:
    digest = hashlib.sha256(file.first_bytes)
    # All that may change what is computed. Not slots, which have memory of their own. Not threads: they divide the
    # work, and only flash attention over a long cache, which is never reproducible, rounds differently for it.
    changing = (
        library, file.stamps, context_tokens, options.batch_tokens, options.ubatch, options.n_gpu_layers,
        options.main_gpu, options.tensor_split, options.split_mode, options.flash_attention_type,
        options.kv_type_k, options.kv_type_v, options.rope_freq_base, options.rope_freq_scale,
        options.swa_full, options.reproducible, options.chat_template, adapters.marks,
    )  # fmt: skip
    digest.update(repr(changing).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]
