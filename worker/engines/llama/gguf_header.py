"""Read a GGUF header in pure Python, trusting nothing that it declares.

Owns the walk over keys and tensor infos. Never allocates by a declared length, never loops longer than
the file has bytes for, and never reads tensor data. Called once by `load()`, in the work loop's thread.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infervisor.worker.engine import LoadRefused

MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 1 << 30
MAX_ARRAY_ITEMS = 1 << 30
MAX_ENTRIES = 1 << 20
"""More keys or tensors than any model has by far."""
KEPT_STRING_BYTES = 4096
KEPT_ARRAY_ITEMS = 4096
KEPT_TENSORS = frozenset({"token_embd.weight", "output.weight"})
"""Those whose type and shape matter before loading."""

_STRING = 8
_ARRAY = 9
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS: Mapping[int, struct.Struct] = {
    code: struct.Struct("<" + letter) for code, letter in _LETTERS.items()
}

BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110),
    22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8),
    29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
"""ggml type → (elements per block, bytes per block). Types that aren't here are left to llama.cpp."""

Value = int | float | bool | str | tuple[int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. kind: its ggml type. shape: the row first. bytes: None for a type that isn't in the table."""

    kind: int
    shape: tuple[int, ...]
    bytes: int | None


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a load decision needs.

    values: every scalar, short string and short array of numbers by key. tensors: those of `KEPT_TENSORS`.
    """

    version: int
    values: Mapping[str, Value]
    keys: frozenset[str]
    tensor_count: int
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])

    @property
    def architecture(self) -> str:
        """The model family, such as `llama`; empty for a shard that carries no metadata."""
        value = self.values.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def name(self) -> str:
        """The model's own name, or an empty string."""
        value = self.values.get("general.name", "")
        return value if isinstance(value, str) else ""

    @property
    def has_chat_template(self) -> bool:
        """Whether a default chat template is stored."""
        return "tokenizer.chat_template" in self.keys

    def number(self, key: str, default: int = 0) -> int:
        """Return the whole number stored under `key`, `{arch}` standing for the architecture."""
        value = self.values.get(key.replace("{arch}", self.architecture), default)
        return value if isinstance(value, int) else default

    def per_layer(self, key: str, default: int) -> list[int]:
        """Return one number for each layer: GGUF stores either one for all or an array."""
        layers = self.number("{arch}.block_count")
        value = self.values.get(key.replace("{arch}", self.architecture), default)
        if isinstance(value, tuple):
            return [int(entry) for entry in value[:layers]]
        return [value if isinstance(value, int) else default] * layers


class _Truncated(Exception):
    """The walk ran past the end of the file."""


class _Corrupt(Exception):
    """The header says something impossible."""


def read_header(file: mmap.mmap, path: str) -> GgufHeader:
    """Return the header of the GGUF at `path`, mapped as `file`.

    Checks versions, lengths, and that every tensor of a known type lies inside the file. Raises
    `LoadRefused` with code model_unsupported_version, model_big_endian, model_truncated or model_corrupt.
    """
    try:
        return _walk(file, path)
    except _Truncated as error:
        raise LoadRefused(
            f"{path} is truncated: {error} (the file has {len(file)} bytes); "
            "the download or copy was probably interrupted: fetch it again",
            "model_truncated",
        ) from None
    except _Corrupt as error:
        raise LoadRefused(f"{path} is corrupt: {error}; fetch it again", "model_corrupt") from None


def _walk(file: mmap.mmap, path: str) -> GgufHeader:
    size = len(file)
    if size < 24:
        raise _Truncated("it ends inside the first 24 bytes of the header")
    version, tensor_count, key_count = struct.unpack_from("<IQQ", file, 4)
    _check_version(version, path)
    for what, count in (("keys", key_count), ("tensors", tensor_count)):
        if count > MAX_ENTRIES:
            raise _Corrupt(f"it declares {count} {what}")
    position = 24
    values: dict[str, Value] = {}
    keys: set[str] = set()
    for index in range(key_count):
        key, position = _key(file, position, size, index)
        (kind,), position = _unpack(_SCALARS[4], file, position, size)
        keys.add(key)
        value, position = _value(file, position, size, kind, key)
        if value is not None:
            values[key] = value
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Corrupt(f"general.alignment is {alignment!r}, not a power of two")
    tensors = _check_tensors(file, position, size, tensor_count, alignment)
    return GgufHeader(version, values, frozenset(keys), tensor_count, tensors)


def _check_version(version: int, path: str) -> None:
    if version in (2, 3):
        return
    if version and not version & 0xFFFF:
        raise LoadRefused(
            f"{path} is a big-endian GGUF (version {int.from_bytes(version.to_bytes(4, 'little'), 'big')}); "
            "fetch the little-endian one",
            "model_big_endian",
        )
    if version == 1:
        advice = "fetch or convert a current one"
    elif version == 0:
        advice = "no such version exists: the file is damaged"
    else:
        advice = "it is newer than this program knows: update llama-cpp-python and infervisor"
    raise LoadRefused(
        f"{path} is GGUF version {version}; versions 2 and 3 can be read: {advice}",
        "model_unsupported_version",
    )


def _unpack(layout: struct.Struct, file: mmap.mmap, position: int, size: int) -> tuple[tuple[int, ...], int]:
    end = position + layout.size
    if end > size:
        raise _Truncated("it ends inside the header")
    return layout.unpack_from(file, position), end


def _key(file: mmap.mmap, position: int, size: int, index: int) -> tuple[str, int]:
    (length,), position = _unpack(_SCALARS[10], file, position, size)
    if length == 0:
        raise _Corrupt(f"key {index} is empty")
    if length > MAX_KEY_BYTES:
        raise _Corrupt(f"key {index} declares a length of {length} bytes")
    if position + length > size:
        raise _Truncated("it ends inside a key")
    return file[position : position + length].decode("utf-8", "replace"), position + length


def _value(file: mmap.mmap, position: int, size: int, kind: int, key: str) -> tuple[Value | None, int]:
    layout = _SCALARS.get(kind)
    if layout is not None:
        (value,), position = _unpack(layout, file, position, size)
        return value, position
    if kind == _STRING:
        return _string(file, position, size, key)
    if kind != _ARRAY:
        raise _Corrupt(f"key {key!r:.80} has the unknown type {kind}")
    (item_kind,), position = _unpack(_SCALARS[4], file, position, size)
    (count,), position = _unpack(_SCALARS[10], file, position, size)
    if count > MAX_ARRAY_ITEMS:
        raise _Corrupt(f"key {key!r:.80} declares an array of {count} items")
    if item_kind == _STRING:
        return None, _skip_strings(file, position, size, count, key)
    layout = _SCALARS.get(item_kind)
    if layout is None:
        raise _Corrupt(f"key {key!r:.80} is an array of the unknown type {item_kind}")
    end = position + count * layout.size
    if end > size:
        raise _Truncated(f"it ends inside the array {key!r:.80}")
    if count > KEPT_ARRAY_ITEMS:
        return None, end
    return tuple(item[0] for item in layout.iter_unpack(file[position:end])), end


def _string(file: mmap.mmap, position: int, size: int, key: str) -> tuple[str | None, int]:
    (length,), position = _unpack(_SCALARS[10], file, position, size)
    if length > MAX_STRING_BYTES:
        raise _Corrupt(f"the string {key!r:.80} declares a length of {length} bytes")
    end = position + length
    if end > size:
        raise _Truncated(f"it ends inside the string {key!r:.80}")
    if length > KEPT_STRING_BYTES:
        return None, end
    return file[position:end].decode("utf-8", "replace"), end


def _skip_strings(file: mmap.mmap, position: int, size: int, count: int, key: str) -> int:
    # Written out, since it runs once for every entry of vocabularies with hundreds of thousands.
    if position + 8 * count > size:
        raise _Truncated(f"it ends inside the array {key!r:.80}")
    unpack: Callable[[mmap.mmap, int], tuple[int, ...]] = _SCALARS[10].unpack_from
    last = size - 8
    for _ in range(count):
        if position > last:
            raise _Truncated(f"it ends inside the array {key!r:.80}")
        length = unpack(file, position)[0]
        if length > MAX_STRING_BYTES:
            raise _Corrupt(f"the array {key!r:.80} holds a string that declares {length} bytes")
        position += 8 + length
    if position > size:
        raise _Truncated(f"it ends inside the array {key!r:.80}")
    return position


def _check_tensors(
    file: mmap.mmap, position: int, size: int, count: int, alignment: int
) -> Mapping[str, TensorInfo]:
    kept: dict[str, TensorInfo] = {}
    expected: int | None = 0
    ends: list[tuple[int, str]] = []
    for index in range(count):
        name, position = _key(file, position, size, index)
        (dimensions,), position = _unpack(_SCALARS[4], file, position, size)
        if dimensions > 4:
            raise _Corrupt(f"the tensor {name!r:.80} has {dimensions} dimensions")
        shape, position = _unpack(struct.Struct(f"<{dimensions}q"), file, position, size)
        (kind,), position = _unpack(_SCALARS[4], file, position, size)
        (offset,), position = _unpack(_SCALARS[10], file, position, size)
        if expected is not None and offset != expected:
            raise _Corrupt(f"the tensor {name!r:.80} lies at {offset} instead of {expected}")
        tensor_bytes = _tensor_bytes(name, shape, kind)
        if name in KEPT_TENSORS:
            kept[name] = TensorInfo(kind, shape, tensor_bytes)
        if tensor_bytes is None:
            # A type that isn't in the table: nothing after it can be placed; llama.cpp checks the rest.
            expected = None
            continue
        ends.append((offset + tensor_bytes, name))
        if expected is not None:
            expected = _aligned(offset + tensor_bytes, alignment)
    start = _aligned(position, alignment)
    for end, name in ends:
        if start + end > size:
            raise _Truncated(f"the tensor {name!r:.80} ends at byte {start + end}")
    return kept


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: int) -> int | None:
    if any(length < 0 for length in shape) or math.prod(shape) >= 1 << 62:
        raise _Corrupt(f"the tensor {name!r:.80} has the impossible shape {shape}")
    block = BLOCKS.get(kind)
    if block is None:
        return None
    elements, block_bytes = block
    row = shape[0] if shape else 1
    if row % elements:
        raise _Corrupt(f"the rows of tensor {name!r:.80} have {row} elements, not a multiple of {elements}")
    return math.prod(shape) // elements * block_bytes


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
