"""LoRA adapters for the table models: each adds to the logits of one token after another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.helpers.models import VOCABULARY


def build_adapter(
    path: Path,
    follows: Mapping[int, int],
    *,
    strength: float = 20.0,
    architecture: str = "llama",
    tensor: str = "output.weight",
    size: int | None = None,
    kind: str = "lora",
    alpha: float = 1.0,
    activated: bool = False,
) -> Path:
    """Write an adapter after which each token of `follows` is followed by the one it names. Returns `path`.

    strength: against 10, which the table models' own entries have. The rest is for adapters that don't fit.
    """
    width = size or len(VOCABULARY)
    rank = max(1, len(follows))
    down = np.zeros((rank, width), np.float32)
    up = np.zeros((width, rank), np.float32)
    for row, (token, following) in enumerate(follows.items()):
        down[row, token] = 1.0
        # llama.cpp multiplies by scale × alpha ÷ rank.
        up[following, row] = strength * rank
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_name(path.stem)
    writer.add_string("adapter.type", kind)
    if isinstance(alpha, int):
        writer.add_uint32("adapter.lora.alpha", alpha)
    else:
        writer.add_float32("adapter.lora.alpha", alpha)
    if activated:
        writer.add_key_value(
            "adapter.alora.invocation_tokens", [1, 2], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
        )
    writer.add_tensor(f"{tensor}.lora_a", down)
    writer.add_tensor(f"{tensor}.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
