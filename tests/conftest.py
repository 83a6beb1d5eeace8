"""Fixtures for all tests. Asynchronous tests run on both anyio back ends."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.helpers.produced import check, recording


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every test marked anyio on asyncio and on trio."""
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that load the real model in one test process: two of them would fight over the cores."""
    for item in items:
        if item.get_closest_marker("real_model") is not None:
            item.add_marker(pytest.mark.xdist_group("real_model"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test fail that doesn't make happen what its mark `produces` promises."""
    promised = [thing for mark in item.iter_markers("produces") for thing in mark.args]
    if not promised and "process" not in item.path.parts:
        return (yield)
    with recording() as seen:
        result = yield
    check(promised, seen)
    return result
