"""The site of the documents: it builds without a warning, has the whole public API, and needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import infervisor
from tests.docs.markdown import ROOT, documents

API = ROOT / "docs/api.md"
WITHIN_S = 300
# It is built once, whatever the number of test processes.
pytestmark = pytest.mark.xdist_group("site")
LOADING = {"link", "script", "img", "iframe", "source", "video", "audio", "object", "embed", "use", "image"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/build_site.py"), "--to", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"docs: {folder}/index.html; ")
    return folder


class _Page(HTMLParser):
    """What a page loads, and the ids that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if tag in LOADING and name in ("href", "src", "srcset", "data") and value:
                self.loads.append(value)


def test_the_api_page_has_a_reference_of_every_public_name_and_no_other() -> None:
    referred = re.findall(r"^::: infervisor\.(\w+)$", API.read_text(), flags=re.MULTILINE)
    assert sorted(referred) == sorted(infervisor.__all__)


def test_the_site_shows_every_public_name_with_its_docstring(site: Path) -> None:
    path = site / "docs/api/index.html"
    page = _Page(path)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", path.read_text()))
    for name in infervisor.__all__:
        assert f"infervisor.{name}" in page.ids
        value = getattr(infervisor, name)
        if value.__doc__ and isinstance(value, type):
            # Up to the first mark-up, which looks different there.
            (beginning,) = re.findall(r"[^`*_<>&'\"]+", value.__doc__.partition("\n")[0])[:1]
            assert beginning.strip() in text, name


def test_the_site_has_a_page_for_every_document(site: Path) -> None:
    for document in documents():
        name = document.relative_to(ROOT)
        folder = name.parent if name.name == "README.md" else name.with_suffix("")
        assert (site / folder / "index.html").exists(), name


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        for link in _Page(path).loads:
            assert not re.match(r"[\w+.-]+:|//", link), f"{path.relative_to(site)} loads {link}"
    styles = list(site.rglob("*.css"))
    assert styles
    for path in styles:
        outside = re.search(r"@import|url\(\s*[\"']?(?!data:)([\w+.-]+:|//)", path.read_text())
        assert not outside, f"{path.relative_to(site)}: {outside and outside[0]}"


def test_a_list_is_a_list_on_the_site_too(site: Path) -> None:
    # GitHub takes a list right after a line of text; the site's Markdown needs an empty line between them.
    for path in site.rglob("*.html"):
        found = re.search(r"<p>[^<]*\n[-*] .*", path.read_text())
        assert not found, f"{path.relative_to(site)}: {found and found[0]}"


def test_constraints_pin_what_builds_the_site() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    wanted = {re.split(r"[\[>=<]", entry)[0] for entry in project["optional-dependencies"]["docs"]}
    assert wanted <= set(pinned)


def test_make_check_builds_the_site(tmp_path: Path) -> None:
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    dry = subprocess.run(
        ["make", "--dry-run", f"VENV={tmp_path}/venv", "check"],
        cwd=ROOT, env=cleaned, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert dry.returncode == 0, dry.stderr
    assert "docs/build_site.py" in dry.stdout
    assert ",docs\n" in dry.stdout.replace('"', "")
