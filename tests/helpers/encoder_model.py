"""A tiny BERT: random weights, real llama.cpp. It reads texts whole, generates nothing and gives vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZE, HEADS, LAYERS, CONTEXT_TOKENS = 32, 2, 2, 512


def build_encoder(path: Path, pooling: int = 1) -> Path:
    """Write it to `path`, which is returned. pooling: llama.cpp's number, 1 is the mean and 2 the first token."""
    # Pieces that begin a word carry this mark in GGUF; those that go on with one carry none.
    tokens = [*WORDS, *("\N{LOWER ONE EIGHTH BLOCK}" + letter for letter in LETTERS), *LETTERS]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * SIZE)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_token_type_count(2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("bert")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_types([3] * len(WORDS) + [1] * (len(tokens) - len(WORDS)))
    for name, token in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(token)
    for name, values in _tensors(len(tokens)).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(vocabulary: int) -> dict[str, Any]:
    chance = np.random.default_rng(5)

    def random(*shape: int) -> Any:
        return chance.normal(0, 0.5, shape).astype(np.float32)

    ones = np.ones(SIZE, np.float32)
    tensors = {
        "token_embd.weight": random(vocabulary, SIZE),
        "token_types.weight": random(2, SIZE),
        "position_embd.weight": random(CONTEXT_TOKENS, SIZE),
        "token_embd_norm.weight": ones,
        "token_embd_norm.bias": random(SIZE),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for part, shape in (
            ("attn_q", (SIZE, SIZE)), ("attn_k", (SIZE, SIZE)), ("attn_v", (SIZE, SIZE)),
            ("attn_output", (SIZE, SIZE)), ("ffn_up", (2 * SIZE, SIZE)), ("ffn_down", (SIZE, 2 * SIZE)),
        ):  # fmt: skip
            tensors[f"{block}.{part}.weight"] = random(*shape)
            tensors[f"{block}.{part}.bias"] = random(shape[0])
        for part in ("attn_output_norm", "layer_output_norm"):
            tensors[f"{block}.{part}.weight"] = ones
            tensors[f"{block}.{part}.bias"] = random(SIZE)
    return tensors
