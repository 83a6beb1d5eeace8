"""How much memory a model will take, from its header and the options, and whether that fits.

Pure: reads nothing but what it is given. The formulas follow what llama.cpp allocates on a CPU, and tests compare
them with its own figures. Measured on SmolLM2, Gemma 3 and five made-up dense and mixture models, each in twelve
settings: KV cache exact, compute buffers between 1 % too low and 20 % too high.

Weights count once. Where llama.cpp lays them out anew in private memory, the file's pages are read and then left to
the kernel. Most of the compute buffer is reserved for a batch of which every token's logits are wanted, and the
kernel gives memory for it only when that happens, so that a small model with a large vocabulary takes less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.gguf_header import GgufHeader
from infervisor.worker.engines.llama.options import KV_TYPES, LlamaOptions

CONTEXT_STEP_TOKENS = 256
"""llama.cpp rounds the context of a sequence up to a multiple of this."""
LEAST_FITTED_TOKENS = 512
FLOAT_BYTES = 4
_REPACKED = (2, 12, 20)
"""Q4_0, Q4_K and IQ4_NL: laid out anew for the CPU's vector units, in private memory."""
_DENSE_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2}
"""Every how many layers one sees everything, in families whose header says only how wide the others' window is."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by part. weights: on disk or in memory, shared or not. kv: of all slots. compute: buffers."""

    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.kv + self.compute

    def to_facts(self) -> dict[str, int]:
        """Return plain values for `ready`."""
        return {"weights": self.weights, "kv": self.kv, "compute": self.compute}


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that may still be taken, of how many, and whose limit that is."""

    total: int
    of_all: int
    whose: str = "this machine"


@dataclass(frozen=True, slots=True)
class FittedContext:
    """The context of one slot, and the slots, to ask for.

    reduced_from, slots_reduced_from: what was wanted, if it had to be made smaller.
    """

    tokens: int
    slots: int
    estimate: MemoryEstimate
    reduced_from: int | None = None
    slots_reduced_from: int | None = None

    def to_facts(self) -> dict[str, object]:
        """Return plain values for `ready`."""
        facts: dict[str, object] = {"memory_estimate_bytes": self.estimate.to_facts()}
        if self.reduced_from is not None:
            facts["context_reduced_from"] = self.reduced_from
        if self.slots_reduced_from is not None:
            facts["slots_reduced_from"] = self.slots_reduced_from
        return facts


def estimate(
    header: GgufHeader, file_bytes: int, options: LlamaOptions, context_tokens: int
) -> MemoryEstimate:
    """Return what a model of `file_bytes` takes with `context_tokens` tokens in each slot."""
    return MemoryEstimate(
        weights=file_bytes + _second_copy_bytes(header, options),
        kv=kv_cache_bytes(header, options, context_tokens),
        compute=compute_bytes(header, options, context_tokens),
    )


def _second_copy_bytes(header: GgufHeader, options: LlamaOptions) -> int:
    # Repacked weights stand in for the file's pages, which are read once. Only an embedding that is the output
    # matrix, too, is needed in both layouts. What a further shard holds isn't known here.
    embedding = header.tensors.get("token_embd.weight")
    tied = "output.weight" not in header.tensors and header.number("split.count", 1) == 1
    if embedding is None or not tied or options.reproducible or embedding.kind not in _REPACKED:
        return 0
    return embedding.bytes or 0


def cells(context_tokens: int) -> int:
    """Return the cells of the KV cache that llama.cpp makes for one sequence."""
    return -(-context_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS


def kv_cache_bytes(header: GgufHeader, options: LlamaOptions, context_tokens: int) -> int:
    """Return how many bytes the KV cache of all slots takes for `context_tokens` tokens each."""
    key_length, value_length = _head_tokens(header)
    cell_bytes = key_length * KV_TYPES[options.kv_type_k][1] + value_length * KV_TYPES[options.kv_type_v][1]
    dense = cells(context_tokens)
    heads = header.per_layer("{arch}.attention.head_count_kv", header.number("{arch}.attention.head_count"))
    # The last layers of some families use the cache of earlier ones.
    heads = heads[: len(heads) - header.number("{arch}.attention.shared_kv_layers")]
    window = header.number("{arch}.attention.sliding_window")
    narrow = dense
    if window > 0 and not options.swa_full:
        narrow = min(dense, cells(window + _batch(options, dense)))
    sliding = _sliding_layers(header, len(heads)) if narrow < dense else [False] * len(heads)
    cell_count = sum(n * (narrow if slides else dense) for n, slides in zip(heads, sliding, strict=True))
    return int(cell_count * cell_bytes * options.slot_count)


def _sliding_layers(header: GgufHeader, layers: int) -> list[bool]:
    stored = header.values.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(stored, tuple):
        # One flag a layer; what is missing counts as dense, which takes more.
        return [bool(flag) for flag in stored[:layers]] + [False] * (layers - len(stored))
    every = stored if isinstance(stored, int) and stored > 0 else _DENSE_EVERY.get(header.architecture)
    return [False] * layers if every is None else [layer % every < every - 1 for layer in range(layers)]


def _head_tokens(header: GgufHeader) -> tuple[int, int]:
    """Return the width of one head's keys and values."""
    heads = max(header.per_layer("{arch}.attention.head_count", 0), default=0)
    width = header.number("{arch}.embedding_length") // heads if heads > 0 else 0
    key_length = header.number("{arch}.attention.key_length", width)
    return key_length, header.number("{arch}.attention.value_length", width)


def _batch(options: LlamaOptions, dense: int) -> int:
    """Return the tokens of the largest micro-batch, which carries equally many of every slot."""
    tokens = min(options.ubatch, max(options.batch_tokens, options.slot_count), dense * options.slot_count)
    return -(-tokens // options.slot_count) * options.slot_count


def compute_bytes(header: GgufHeader, options: LlamaOptions, context_tokens: int) -> int:
    """Return how many bytes the buffers of one decode call take: the widest of three moments, and the output."""
    width = header.number("{arch}.embedding_length")
    heads = max(header.per_layer("{arch}.attention.head_count", 0), default=0)
    kv_heads = max(header.per_layer("{arch}.attention.head_count_kv", heads), default=heads)
    key_length, value_length = _head_tokens(header)
    queries, keys_and_values = heads * key_length, kv_heads * (key_length + value_length)
    dense = cells(context_tokens)
    masks = 2 if header.number("{arch}.attention.sliding_window") > 0 else 1
    if options.flash_attention_type == 0:
        # Every head's scores of every token against every cell, and a mask of floats.
        mask = masks * dense
        attention = heads * dense + 4 * width + 2 * queries + keys_and_values
    else:
        mask = masks * dense // 2
        attention = 3 * queries + keys_and_values + 2 * width
    experts = header.number("{arch}.expert_used_count")
    wide = max(header.per_layer("{arch}.feed_forward_length", 0), default=0)
    wide = max(wide, experts * header.number("{arch}.expert_feed_forward_length", wide))
    forward = max(3 * wide, 2 * experts * width) + 4 * width
    embedding = header.tensors.get("token_embd.weight")
    logits = embedding.shape[-1] if embedding is not None and embedding.shape else 0
    floats = max(mask + attention, mask + forward, logits + 2 * width)
    return FLOAT_BYTES * (_batch(options, dense) * floats + options.slot_count * logits)


def fit_context(
    header: GgufHeader, file_bytes: int, options: LlamaOptions, wanted_tokens: int, free: FreeMemory | None
) -> FittedContext:
    """Return the context and the slots to load with, given what is free (None: not looked at).

    file_bytes: of the model and its adapters. Slots that weren't asked for give way first, down to one, then the
    context if `options.fit_context` allows it. Raises `LoadRefused` with code out_of_memory if it doesn't fit all
    the same; that is permanent if it wouldn't fit into all memory either. Layers on a device have memory of their
    own, so nothing is refused then.
    """
    wanted = estimate(header, file_bytes, options, wanted_tokens)
    if free is None or options.n_gpu_layers != 0 or wanted.total <= free.total:
        return FittedContext(wanted_tokens, options.slot_count, wanted)
    asked = options.slot_count
    for slots in range(asked - 1, 0, -1) if options.slots is None else ():
        options = replace(options, slots=slots)
        wanted = estimate(header, file_bytes, options, wanted_tokens)
        if wanted.total <= free.total:
            return FittedContext(wanted_tokens, slots, wanted, slots_reduced_from=asked)
    slots = options.slot_count
    fitting = _largest_context(header, file_bytes, options, wanted_tokens, free)
    if fitting is not None and options.fit_context:
        smaller = estimate(header, file_bytes, options, fitting)
        fewer = asked if slots < asked else None
        return FittedContext(fitting, slots, smaller, wanted_tokens, fewer)
    raise LoadRefused(
        f"this model with a context of {wanted_tokens} tokens in {slots} slot(s) needs about "
        f"{_gb(wanted.total)} of memory (weights {_gb(wanted.weights)}, KV cache {_gb(wanted.kv)}, compute "
        f"buffers {_gb(wanted.compute)}), and {free.whose} has {_gb(free.total)} free of {_gb(free.of_all)}: "
        + _advice(options, wanted, fitting, free),
        "out_of_memory",
        permanent=wanted.total > free.of_all,
    )


def _largest_context(
    header: GgufHeader, file_bytes: int, options: LlamaOptions, below_tokens: int, free: FreeMemory
) -> int | None:
    """Return the largest multiple of 256 from 512 up to below `below_tokens` that fits, or None."""
    low, high = LEAST_FITTED_TOKENS // CONTEXT_STEP_TOKENS, (below_tokens - 1) // CONTEXT_STEP_TOKENS
    fitting = None
    while low <= high:
        middle = (low + high) // 2
        tokens = middle * CONTEXT_STEP_TOKENS
        if estimate(header, file_bytes, options, tokens).total <= free.total:
            fitting, low = tokens, middle + 1
        else:
            high = middle - 1
    return fitting


def _advice(options: LlamaOptions, wanted: MemoryEstimate, fitting: int | None, free: FreeMemory) -> str:
    ways: list[str] = []
    if fitting is not None:
        ways.append(f"n_ctx={fitting} would fit (fit_context=true chooses it)")
    if wanted.weights > free.total:
        ways.append("use a smaller model or quantisation")
    if options.slot_count > 1:
        ways.append("lower slots")
    if wanted.kv > wanted.compute and options.kv_type_k == "f16" and not options.reproducible:
        ways.append("use kv_type_k='q8_0' and kv_type_v='q8_0'")
    if wanted.compute > wanted.kv and options.ubatch > 32:
        ways.append("lower ubatch")
    if fitting is None:
        ways.append("free some memory")
    return "; ".join([*ways, "or load all the same with check_memory=false"])


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:.0f} GB"
