"""Settings of the wrong kind are refused by name before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from infervisor import ConfigurationError, Supervisor


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("deadlines", {"total_s": 5}),
        ("deadlines", 5),
        ("escalation", 3),
        ("restart", 3),
        ("graces", 3),
        ("liveness", 3),
        ("env", [1]),
        ("python", 5),
        ("python", ""),
        ("on_event", 5),
        ("window", 0),
        ("max_queue", -1),
        ("options", [1]),
        ("engine", 5),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        Supervisor(**{"engine": "scripted", setting: value})


def test_a_model_that_is_no_path_is_named() -> None:
    with pytest.raises(ConfigurationError, match="model"):
        Supervisor(5)  # type: ignore[arg-type]
