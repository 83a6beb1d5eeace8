"""Run as a program: load a GGUF with llama.cpp and print the bytes of the buffers that it says it made.

A process of its own, because the library has one log for the whole process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIZE = re.compile(r"(\S+)\s+(KV|model|compute|output) buffer size\s*=\s*([\d.]+) MiB")


def native_buffers(model: Path, context_tokens: int, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of llama.cpp's buffers by kind: KV, model, compute, output; repacked weights apart."""
    given = json.dumps([str(model), context_tokens, options])
    done = subprocess.run(
        [sys.executable, __file__, given],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    sizes: dict[str, int] = json.loads(done.stdout)
    return sizes


def main(model: str, context_tokens: int, options: dict[str, Any]) -> None:
    """Print the figures as JSON."""
    from infervisor.worker.engines.llama.library import load_library
    from infervisor.worker.engines.llama.loading import load_context, load_model
    from infervisor.worker.engines.llama.model_file import check_model_file
    from infervisor.worker.engines.llama.options import LlamaOptions

    settings = LlamaOptions.from_mapping(options)
    library, log = load_library()
    lines: list[str] = []
    callback = library.llama_log_callback(
        lambda _level, text, _data: lines.append(text.decode(errors="replace"))
    )
    library.llama_log_set(callback, None)
    native = load_model(library, log, check_model_file(model), settings, lambda *_: None)
    load_context(library, log, native, settings, context_tokens)
    sizes: dict[str, int] = {}
    for buffer, kind, mebibytes in _SIZE.findall("".join(lines)):
        name = "repacked" if "REPACK" in buffer else kind
        sizes[name] = sizes.get(name, 0) + int(float(mebibytes) * (1 << 20))
    print(json.dumps(sizes), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
