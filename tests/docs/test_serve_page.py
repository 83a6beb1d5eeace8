"""docs/serve.md against the service: its errors, endpoints, headers, limits, metrics and what is told in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infervisor.supervisor.http_api import HttpSettings, create_app
from infervisor.supervisor.http_api.asking import MAX_CHOICES
from infervisor.supervisor.http_api.endpoints.chat_input import ChatRequest
from infervisor.supervisor.http_api.endpoints.completion_input import DEFAULT_MAX_TOKENS, CompletionRequest
from infervisor.supervisor.http_api.endpoints.embedding_input import MAX_TEXTS, EmbeddingsRequest
from infervisor.supervisor.http_api.endpoints.input_model import InputModel, parse
from infervisor.supervisor.http_api.endpoints.responses_input import ResponseRequest
from infervisor.supervisor.http_api.errors import KINDS, HttpRefused
from infervisor.supervisor.http_api.exchange import MAX_REPORT_HEADER
from infervisor.supervisor.http_api.guards.header_limits import MAX_HEAD_BYTES, MAX_HEADERS
from infervisor.supervisor.http_api.openapi import OPERATIONS
from infervisor.supervisor.http_api.request_headers import (
    CLIENT_ID,
    DEADLINE_HEADERS,
    ON_CRASH,
    PRIORITY,
    REPORT,
)
from infervisor.supervisor.http_api.server.connection import ConnectionLimits
from tests.docs.markdown import ROOT, code_names, table
from tests.helpers.asgi_call import ask
from tests.helpers.supervised import scripted
from tests.helpers.waiting import until

PAGE = (ROOT / "docs" / "serve.md").read_text()


def errors_table() -> str:
    """Return the table as it should be."""
    rows: dict[tuple[int, str, int], list[str]] = {}
    for code, kind in KINDS.items():
        rows.setdefault((kind.status, kind.type, kind.retry_after_s or 0), []).append(f"`{code}`")
    lines = ["| status | `type` | `Retry-After` | `code` |", "|---|---|---|---|"]
    for (status, kind_, after_s), codes in sorted(rows.items()):
        after = f"{after_s} s" if after_s else "–"
        lines.append(f"| {status} | `{kind_}` | {after} | {', '.join(codes)} |")
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


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    settings, connections = HttpSettings(), ConnectionLimits()
    for sentence in (
        f"at most {MAX_CHOICES} answers in one request",
        f"a completion has {DEFAULT_MAX_TOKENS} tokens",
        f"{MAX_TEXTS:,} texts to embed",
        f"({settings.max_body_bytes >> 20} mib, {settings.body_timeout_s:g} s)",
        f"({MAX_HEAD_BYTES >> 10} kib, {MAX_HEADERS} headers, {connections.header_timeout_s:g} s)",
        f"there may be {connections.max_connections:,} connections and as many requests",
        f"and the last {settings.keep_reports}",
        f"at most {MAX_REPORT_HEADER >> 10} kb",
    ):
        assert sentence in re.sub(r"\s+", " ", PAGE.lower()), sentence
    assert connections.max_connections == settings.max_requests
    assert (settings.header_after_s, settings.heartbeat_s) == (5, 15), "the page says five and fifteen"


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "one"}]}
MODELS: dict[type[InputModel], dict[str, Any]] = {
    ChatRequest: CHAT,
    CompletionRequest: {"prompt": "one"},
    ResponseRequest: {"input": "one"},
    EmbeddingsRequest: {"input": "one"},
}
"""Each body, and the least that it must have."""
ROWS = {row[0]: code_names(row[1]) for row in table(ROOT / "docs" / "serve.md", "fields")}
ACCEPTED, REFUSED = "accepted, without a meaning here", "refused, unless they ask for nothing"


def test_every_field_is_on_the_page_and_no_other() -> None:
    both, beyond = ROWS["of chats and completions"], ROWS["of chats and completions, beyond OpenAI's"]
    rest = {*ROWS[ACCEPTED], *ROWS[REFUSED]}
    for model, rows in {
        ChatRequest: [both, beyond, ROWS["of chats"]],
        CompletionRequest: [both, beyond, ROWS["of completions"]],
        ResponseRequest: [ROWS["of responses"]],
        EmbeddingsRequest: [ROWS["of embeddings"]],
    }.items():
        named = {name for row in rows for name in row}
        assert named <= set(model.model_fields) <= named | rest, model
    assert rest <= {name for model in MODELS for name in model.model_fields}


def read(model: type[InputModel], body: dict[str, Any]) -> Any:
    return parse(model, json.dumps(body).encode(), HttpSettings())


@pytest.mark.parametrize("name", ROWS[REFUSED])
def test_what_the_page_calls_refused_is_refused(name: str) -> None:
    value = {"background": True, "modalities": ["audio"], "reasoning": {"effort": "high"}}.get(name, "some")
    takers = [model for model in MODELS if name in model.model_fields and name not in MODELS[model]]
    assert takers
    for model in takers:
        with pytest.raises(HttpRefused) as caught:
            read(model, {**MODELS[model], name: value})
        assert str(caught.value.field).startswith(name)
        read(model, {**MODELS[model], name: None})


@pytest.mark.parametrize("name", ROWS[ACCEPTED])
def test_what_the_page_calls_accepted_changes_nothing(name: str) -> None:
    value: Any = {
        "metadata": {"a": "b"},
        "prompt_cache_options": {"a": 1},
        "stream_options": {"include_usage": True},
        "max_tool_calls": 1,
        **dict.fromkeys(("store", "cache_prompt", "parallel_tool_calls"), True),
    }.get(name, "some")
    takers = [model for model in MODELS if name in model.model_fields]
    for model in takers if name != "stream_options" else [ResponseRequest]:
        with_it, without = (read(model, {**MODELS[model], **more}) for more in ({name: value}, {}))
        if model is EmbeddingsRequest:
            assert with_it.texts() == without.texts()
        else:
            changed = with_it.asked(), without.asked()
            assert changed[0].options == changed[1].options
            assert changed[0].include_usage == changed[1].include_usage


async def asked_once() -> list[dict[str, Any]]:
    """Return what the service tells of its requests, its workers and its readiness after one request."""
    async with scripted() as (supervisor, _):
        app = create_app({"m": supervisor})
        await ask(app, "/v1/completions", {"prompt": "one", "max_tokens": 3})
        # Memory and computing time are looked at once a second.
        await until(lambda: supervisor.status().workers[0].sample is not None)
        answers = [
            await ask(app, path, b"", method="GET")
            for path in ("/api/requests", "/api/worker", "/health/ready")
        ]
        return [json.loads(answer.text) for answer in answers]


@pytest.mark.anyio
async def test_what_is_told_in_json_is_on_the_page_and_nothing_else() -> None:
    requests, workers, ready = await asked_once()
    section = PAGE.split("## Looking on")[1].split("## Metrics")[0]
    assert all(f"`{name}`" in section for name in (*requests, *workers, *ready))
    (request,) = requests["requests"]
    rows = table(ROOT / "docs" / "serve.md", "of a request")
    assert {name for row in rows for name in code_names(row[0])} == set(request)
    assert set(code_names(rows[-1][1])) == {*request["choices"][0], "report.tokens"}
    (model,) = workers["models"]
    rows = table(ROOT / "docs" / "serve.md", "of a model")
    assert {name for row in rows for name in code_names(row[0])} == set(model)
    assert set(code_names(rows[-1][1])) == set(model["workers"][0])
    assert request["choices"][0]["report"]["tokens"] == 3


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
