"""docs/serve.md against the service: its table of errors, endpoints, headers and metrics."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infervisor.supervisor.http_api import create_app
from infervisor.supervisor.http_api.errors import KINDS
from infervisor.supervisor.http_api.openapi import OPERATIONS
from infervisor.supervisor.http_api.request_headers import (
    CLIENT_ID,
    DEADLINE_HEADERS,
    ON_CRASH,
    PRIORITY,
    REPORT,
)
from tests.docs.markdown import ROOT
from tests.helpers.asgi_call import ask
from tests.helpers.supervised import scripted

PAGE = (ROOT / "docs" / "serve.md").read_text()


def errors_table() -> str:
    """Return the table as it should be."""
    lines = ["| status | codes |", "|---|---|"]
    for status in sorted({kind.status for kind in KINDS.values()}):
        codes = [f"`{code}`" for code, kind in KINDS.items() if kind.status == status]
        lines.append(f"| {status} | {', '.join(codes)} |")
    return "\n".join(lines)


def test_the_table_of_errors_is_the_one_of_the_code() -> None:
    told = PAGE.split("<!-- errors:begin -->")[1].split("<!-- errors:end -->")[0].strip()
    assert told == errors_table()


def test_every_endpoint_is_on_the_page() -> None:
    told = set(re.findall(r"`(GET|POST) (/[^`]*)`", PAGE.split("## Endpoints")[1].split("## Bodies")[0]))
    wanted = {(each.method.upper(), each.path) for each in OPERATIONS}
    assert told == wanted | {("GET", "/openapi.json"), ("GET", "/")}


def test_every_header_is_on_the_page() -> None:
    rows = PAGE.split("| header of a request |")[1].split("| header of an answer |")[0].lower()
    # The deadlines share the beginning of the first one's name.
    told = rows.replace("`-", "`x-infervisor-")
    for name in (*DEADLINE_HEADERS, PRIORITY, ON_CRASH, REPORT, CLIENT_ID):
        assert f"`{name}`" in told, name


@pytest.mark.anyio
async def test_every_metric_is_on_the_page_and_no_other() -> None:
    told = set(re.findall(r"`(infervisor_\w+)`", PAGE.split("## Metrics")[1]))
    async with scripted() as (supervisor, _):
        app = create_app({"m": supervisor})
        await supervisor.generate("one", max_tokens=3)
        answer = await ask(app, "/metrics", b"", method="GET")
        there = {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in text_string_to_metric_families(answer.text)
        }
    created = {name for name in there if name.endswith("_created")}
    assert told == there - created
