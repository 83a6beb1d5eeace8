"""What this machine can carry: processor cores for the default thread count, memory for the KV cache.

Reads the operating system's counts, decides nothing about the model but whether its context can fit.
"""

from __future__ import annotations

import os
from pathlib import Path

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.gguf_header import GgufHeader
from infervisor.worker.engines.llama.options import KV_TYPES, MAX_THREADS, LlamaOptions


def default_threads() -> int:
    """Return the physical cores that this process may use, at least 1.

    Two threads on one core's hyper-threads slow decoding down, so siblings count once; an affinity mask and
    a container's processor quota are respected.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 2) // 2)
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota_cores(), MAX_THREADS))


def _core_of(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu {cpu}"


def _quota_cores() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        # No such file, or the quota is "max".
        return MAX_THREADS


def memory_bytes() -> int:
    """Return the bytes of physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_cache_bytes(header: GgufHeader, options: LlamaOptions, context_tokens: int) -> int:
    """Return about how many bytes the KV cache of all slots takes for `context_tokens` tokens each."""
    heads = header.number("{arch}.attention.head_count")
    head_tokens = header.number("{arch}.embedding_length") // heads if heads else 0
    key_length = header.number("{arch}.attention.key_length", head_tokens)
    value_length = header.number("{arch}.attention.value_length", head_tokens)
    kv_heads = sum(header.per_layer("{arch}.attention.head_count_kv", heads))
    per_token = kv_heads * (
        key_length * KV_TYPES[options.kv_type_k][1] + value_length * KV_TYPES[options.kv_type_v][1]
    )
    return int(per_token * context_tokens * options.slots)


def check_memory(header: GgufHeader, options: LlamaOptions, context_tokens: int) -> None:
    """Refuse a context that can't fit, in place of minutes of allocation and a death at random.

    Raises `LoadRefused` with code out_of_memory naming both numbers. Layers on a device have memory of
    their own, so nothing is refused then.
    """
    if options.n_gpu_layers != 0:
        return
    needed, available = kv_cache_bytes(header, options, context_tokens), memory_bytes()
    if needed > available:
        raise LoadRefused(
            f"a context of {context_tokens} tokens in {options.slots} slot(s) needs about "
            f"{needed / 1e9:.1f} GB for its KV cache, and this machine has {available / 1e9:.1f} GB of "
            "memory: lower n_ctx or slots, or use kv_type_k='q8_0'",
            "out_of_memory",
        )
