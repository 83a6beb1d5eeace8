"""Fixtures for all tests. Asynchronous tests run on both anyio back ends."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every test marked anyio on asyncio and on trio."""
    return str(request.param)
