"""Whether a model's file is still the one that was loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infervisor.supervisor.model_identity import change_between, identity_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_an_untouched_file_has_not_changed(model: Path) -> None:
    loaded = identity_of(str(model))
    model.read_bytes()
    assert change_between(loaded, identity_of(str(model))) is None


def test_another_size_and_another_time_of_writing_are_told_apart(model: Path) -> None:
    loaded = identity_of(str(model))
    model.write_bytes(b"other weights")
    assert change_between(loaded, identity_of(str(model))) == (
        "it was overwritten: 7 bytes when loaded, 13 now"
    )
    model.write_bytes(b"WEIGHTS")
    os.utime(model, ns=(1, 1))
    assert change_between(loaded, identity_of(str(model))) == "it was written to after it was loaded"


def test_a_file_that_is_gone_or_replaced_is_harmless(model: Path) -> None:
    loaded = identity_of(str(model))
    other = model.with_name("other")
    other.write_bytes(b"quite other weights")
    other.replace(model)
    assert change_between(loaded, identity_of(str(model))) is None
    model.unlink()
    assert identity_of(str(model)) is None
    assert change_between(loaded, None) is None


def test_without_a_model_there_is_nothing_to_tell() -> None:
    assert identity_of(None) is None
    assert change_between(None, None) is None


def test_a_link_is_followed(model: Path) -> None:
    link = model.with_name("link")
    link.symlink_to(model)
    assert identity_of(str(link)) == identity_of(str(model))
