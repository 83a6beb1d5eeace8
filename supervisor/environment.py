"""What a worker inherits: a short list of variables, and what the user adds.

Secrets and loader variables of the host (API keys, PYTHONPATH, LD_PRELOAD) stay out unless they are named in
`env`, which also overrides and, with None, removes.
"""

from __future__ import annotations

from collections.abc import Mapping

from infervisor.protocol.errors import ConfigurationError

PASSED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
        "VIRTUAL_ENV", "SYSTEMROOT", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "COVERAGE_PROCESS_START",
    }
)  # fmt: skip
PASSED_PREFIXES = (
    "LC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "GGML_",
    "LLAMA_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "VK_",
    "MTL_",
)


def worker_environment(host: Mapping[str, str], env: Mapping[str, str | None]) -> dict[str, str]:
    """Return the worker's environment. Raises `ConfigurationError` for what can't be a variable."""
    passed = {
        name: value for name, value in host.items() if name in PASSED or name.startswith(PASSED_PREFIXES)
    }
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env must map names of variables to strings, not be a {type(env).__name__}")
    for name, given in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigurationError(f"env holds {name!r:.80}, which can't be the name of a variable")
        if given is None:
            passed.pop(name, None)
        elif not isinstance(given, str) or "\0" in given:
            # The value isn't shown: it may be a secret.
            raise ConfigurationError(f"env[{name!r:.80}] must be a string without NUL, or None to remove it")
        else:
            passed[name] = given
    return passed
