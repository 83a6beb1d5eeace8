"""Whether a model's file is still the one that was loaded.

A file that is overwritten in place changes the weights under a running model, silently: the answers become
wrong, not the process. An unlinked file is harmless. Looked at before each start, with each request and while
idle.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one file from another without reading it."""

    inode: int
    size_bytes: int
    mtime_ns: int


def identity_of(path: str | None) -> FileIdentity | None:
    """Return the identity of a file, or None if there is no model or it can't be seen."""
    if path is None:
        return None
    try:
        # As bytes: under an ASCII locale Python can't encode the name itself.
        found = os.stat(path.encode())
    except OSError:
        return None
    return FileIdentity(found.st_ino, found.st_size, found.st_mtime_ns)


def change_between(loaded: FileIdentity | None, now: FileIdentity | None) -> str | None:
    """Return what changed, in words, or None. A file that is gone or was replaced by another is harmless."""
    if loaded is None or now is None or loaded == now or loaded.inode != now.inode:
        return None
    if loaded.size_bytes != now.size_bytes:
        return f"it was overwritten: {loaded.size_bytes} bytes when loaded, {now.size_bytes} now"
    return "it was written to after it was loaded"
