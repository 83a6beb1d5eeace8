"""The real model: one back end, and nothing left behind by any test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.leaks import no_leftovers


@pytest.fixture
def anyio_backend() -> str:
    """One back end is enough here: what differs between them is tested with the scripted engine."""
    return "asyncio"


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield
