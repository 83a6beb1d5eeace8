"""A real browser without a screen, and pages of it that must not complain or ask anybody else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WITHIN_MS = 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all of them in one process: one browser, and one of them at a time."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser, while it is used: its event loop would disturb other tests.

    Skips without one, unless REQUIRE_BROWSER is set: then it fails.
    """
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        lack = f"there is no browser: none of {', '.join(NAMES)} is in PATH"
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip)(lack)
    expect.set_options(timeout=WITHIN_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path,
            args=[
                "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                "--disable-component-update", "--disable-sync", "--disable-quic",
            ],
        )  # fmt: skip
        yield started
        started.close()


class Pages:
    """Makes pages of one service, and notes what they should not do."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.complaints: list[str] = []
        self.allowed: tuple[str, ...] = ()
        """What a test provokes on purpose: parts of complaints."""

    @contextmanager
    def open(self, url: str, **context: Any) -> Iterator[Page]:
        """Open the page in a browser profile of its own."""
        profile = self._browser.new_context(viewport={"width": 1280, "height": 860}, **context)
        profile.set_default_timeout(WITHIN_MS)
        try:
            page = profile.new_page()
            self.watch(page, url)
            page.goto(url)
            yield page
        finally:
            profile.close()

    def watch(self, page: Page, url: str) -> None:
        """Note errors, and requests to others."""
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on(
            "console",
            lambda line: (
                self.complaints.append(f"{line.type}: {line.text}")
                if line.type in ("error", "warning")
                else None
            ),
        )
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(url) else self.complaints.append(f"asked {asked.url}"),
        )


@pytest.fixture
def pages(browser: Browser) -> Iterator[Pages]:
    """Pages that end the test with a failure if they complained."""
    made = Pages(browser)
    yield made
    left = [told for told in made.complaints if not any(part in told for part in made.allowed)]
    assert left == []
