"""What a worker inherits."""

from __future__ import annotations

from typing import Any

import pytest

from infervisor.protocol.errors import ConfigurationError
from infervisor.supervisor.environment import worker_environment

HOST = {
    "PATH": "/bin", "HOME": "/root", "LC_ALL": "C.UTF-8", "LANG": "C", "OMP_WAIT_POLICY": "passive",
    "CUDA_VISIBLE_DEVICES": "0", "TMPDIR": "/tmp/é", "PYTHONPATH": "/evil", "PYTHONSTARTUP": "/evil.py",
    "LD_PRELOAD": "/evil.so", "LD_LIBRARY_PATH": "/evil", "OPENAI_API_KEY": "secret", "PYTHONHOME": "/evil",
}  # fmt: skip


def test_only_the_short_list_is_inherited() -> None:
    assert sorted(worker_environment(HOST, {})) == [
        "CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LC_ALL", "OMP_WAIT_POLICY", "PATH", "TMPDIR",
    ]  # fmt: skip


def test_the_user_adds_overrides_and_removes() -> None:
    env = {"PYTHONPATH": "/mine", "LANG": "de", "HOME": None, "NEVER_SET": None, "EMPTY": ""}
    passed = worker_environment(HOST, env)
    assert passed["PYTHONPATH"] == "/mine"
    assert passed["LANG"] == "de"
    assert passed["EMPTY"] == ""
    assert "HOME" not in passed
    assert "NEVER_SET" not in passed


@pytest.mark.parametrize("name", ["", "A=B", "A\0B", 5, None])
def test_impossible_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="can't be the name of a variable"):
        worker_environment({}, {name: "x"})


@pytest.mark.parametrize("value", ["secret\0", 5, b"secret", ["secret"]])
def test_impossible_values_are_refused_without_being_shown(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"env\['KEY'\] must be a string") as caught:
        worker_environment({}, {"KEY": value})
    assert "secret" not in str(caught.value)
