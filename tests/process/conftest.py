"""Every process test proves that it left nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.leaks import no_leftovers


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield
