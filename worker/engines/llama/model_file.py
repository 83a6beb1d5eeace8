"""Look at a model file before native code does, and say in plain words what is wrong with it.

Owns the decision whether a path is worth giving to llama.cpp: it exists, may be read, is a GGUF, is whole,
and so are its further shards. Never imports llama_cpp. Called once by `load()`.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from dataclasses import dataclass

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.gguf_header import GgufHeader, read_header

_OLD_MAGICS = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla"}
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that passed. stamps: (bytes, mtime in ns) of each shard; first_bytes: start of the first."""

    path: str
    header: GgufHeader
    stamps: tuple[tuple[int, int], ...]
    first_bytes: bytes

    @property
    def total_bytes(self) -> int:
        """Bytes on disk, all shards together."""
        return sum(size for size, _ in self.stamps)


def check_model_file(path: str | None) -> ModelFile:
    """Return what is known of the model at `path`, which is used as given: links are not resolved.

    Raises `LoadRefused`. Its codes: model_not_given, model_not_found, model_is_directory, model_unreadable,
    model_not_a_file, model_empty, model_is_lfs_pointer, model_is_web_page, model_old_format, model_not_gguf,
    model_without_weights, model_shard_name, model_shard_missing, model_not_first_shard, and those of
    `read_header`.
    """
    if not path:
        raise LoadRefused("no model was given: pass the path of a GGUF file", "model_not_given")
    header, stamp, first_bytes = _inspect(path)
    stamps = [stamp]
    count = header.number("split.count", 1)
    tensors = header.tensor_count
    if count > 1:
        for shard in _other_shards(path, header, count):
            if not os.path.lexists(shard):
                raise LoadRefused(
                    f"{path} is one of {count} shards, and {shard} is missing: put all into one folder",
                    "model_shard_missing",
                )
            shard_header, stamp, _ = _inspect(shard)
            tensors += shard_header.tensor_count
            stamps.append(stamp)
    _check_plausible(path, header, tensors)
    return ModelFile(path, header, tuple(stamps), first_bytes)


def _inspect(path: str) -> tuple[GgufHeader, tuple[int, int], bytes]:
    try:
        # O_NONBLOCK: a named pipe must be refused below, not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refusal(path, error) from None
    except ValueError as error:
        raise LoadRefused(f"{path!r:.200} is not a usable path: {error}", "model_not_found") from None
    try:
        return _inspect_open(path, descriptor)
    except OSError as error:
        raise _refusal(path, error) from None
    finally:
        os.close(descriptor)


def _inspect_open(path: str, descriptor: int) -> tuple[GgufHeader, tuple[int, int], bytes]:
    info = os.fstat(descriptor)
    if stat.S_ISDIR(info.st_mode):
        raise LoadRefused(
            f"{path} is a directory: give the path of the .gguf file in it", "model_is_directory"
        )
    if not stat.S_ISREG(info.st_mode):
        raise LoadRefused(f"{path} is not a regular file", "model_not_a_file")
    if info.st_size == 0:
        raise LoadRefused(f"{path} is empty (0 bytes): fetch it again", "model_empty")
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        first_bytes = mapped[: 1 << 20]
        _check_magic(path, first_bytes)
        return read_header(mapped, path), (info.st_size, info.st_mtime_ns), first_bytes


def _refusal(path: str, error: OSError) -> LoadRefused:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        return LoadRefused(f"there is no file {path}: check the path", "model_not_found")
    if error.errno in (errno.EACCES, errno.EPERM):
        return LoadRefused(
            f"{path} can't be read: permission denied; check the rights of the file and its folders",
            "model_unreadable",
        )
    return LoadRefused(f"{path} can't be read: {error.strerror}", "model_unreadable", permanent=False)


def _check_magic(path: str, first_bytes: bytes) -> None:
    magic = first_bytes[:4]
    if magic == b"GGUF":
        return
    if b"GGUF".startswith(magic):
        raise LoadRefused(f"{path} is truncated after {len(magic)} bytes: fetch it again", "model_truncated")
    start = first_bytes[:512].lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        raise LoadRefused(
            f"{path} is a Git LFS pointer, not the model: run `git lfs pull` in its repository",
            "model_is_lfs_pointer",
        )
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        raise LoadRefused(
            f"{path} is a saved web page, not a model (it starts with {_shown(first_bytes)}): "
            "use the address of the file itself",
            "model_is_web_page",
        )
    if magic in _OLD_MAGICS:
        raise LoadRefused(
            f"{path} is in the old {_OLD_MAGICS[magic]} format, which llama.cpp no longer reads: "
            "fetch a GGUF version of the model",
            "model_old_format",
        )
    if magic == b"FUGG":
        raise LoadRefused(f"{path} is a byte-swapped GGUF: fetch the little-endian one", "model_big_endian")
    raise LoadRefused(
        f"{path} is not a GGUF file: it starts with {_shown(first_bytes)} instead of 'GGUF'", "model_not_gguf"
    )


def _shown(first_bytes: bytes) -> str:
    # Raw header bytes could drive the reader's terminal: only their escapes are ever shown.
    return repr(bytes(first_bytes[:16]))[1:]


def _other_shards(path: str, header: GgufHeader, count: int) -> list[str]:
    number = header.number("split.no")
    named = _SHARD_NAME.fullmatch(path)
    if number != 0:
        first = f"{named['prefix']}-00001-of-{count:05d}.gguf" if named else f"…-00001-of-{count:05d}.gguf"
        raise LoadRefused(
            f"{path} is shard {number + 1} of {count}: give the first one, {first}", "model_not_first_shard"
        )
    if named is None or int(named["number"]) != 1 or int(named["count"]) != count:
        raise LoadRefused(
            f"{path} is the first of {count} shards, but its name doesn't end in -00001-of-{count:05d}.gguf, "
            "by which the others are found: name files and links that way",
            "model_shard_name",
        )
    return [f"{named['prefix']}-{shard:05d}-of-{count:05d}.gguf" for shard in range(2, count + 1)]


def _check_plausible(path: str, header: GgufHeader, tensors: int) -> None:
    """Refuse what would make native code abort, hang or divide by zero."""
    if not header.architecture:
        raise LoadRefused(f"{path} is corrupt: it names no general.architecture", "model_corrupt")
    if tensors == 0:
        raise LoadRefused(
            f"{path} holds no weights, only a header: fetch the whole model", "model_without_weights"
        )
    layers = header.number("{arch}.block_count")
    if layers > tensors:
        raise LoadRefused(
            f"{path} is corrupt: it declares {layers} layers but holds {tensors} tensors", "model_corrupt"
        )
    for key in ("embedding_length", "context_length"):
        full = f"{header.architecture}.{key}"
        if full in header.keys and header.number(full) <= 0:
            raise LoadRefused(
                f"{path} is corrupt: {full} is {header.values.get(full)!r:.40}", "model_corrupt"
            )
