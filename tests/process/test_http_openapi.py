"""The OpenAPI document against the service: schemathesis asks what the document allows, and what it doesn't."""

from __future__ import annotations

import copy
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, settings
from schemathesis.specs.openapi import checks
from starlette.routing import Route

from infervisor import Supervisor
from infervisor.supervisor.http_api import create_app
from infervisor.supervisor.http_api.openapi import OPERATIONS, document
from tests.helpers.leaks import no_leftovers
from tests.helpers.serving import Serving, serving


def nothing_fails(ctx: Any, response: Any, case: Any) -> None:
    """Check: what isn't done is the client's own wish. Its headers may leave no time for anything."""
    if response.status_code >= 500:
        assert response.json()["error"]["code"].endswith("_timeout")


def wrong_data_is_refused(ctx: Any, response: Any, case: Any) -> bool | None:
    """Check: as it is in schemathesis, but that anybody may send headers that nobody here knows."""
    if any(name.lower() == "x-schemathesis-unknown-property" for name in case.headers or ()):
        return None
    return checks.negative_data_rejection(ctx, response, case)


# By name: the registry of all checks is filled late, and what isn't there yet is never missed.
WANTED: list[Any] = [
    nothing_fails,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    wrong_data_is_refused,
    checks.unsupported_method,
    checks.allow_header_conformance,
    checks.missing_required_header,
]


@pytest.fixture(autouse=True)
def leaves_nothing() -> None:
    """Each test may have a worker restarted, which then is another child: the service is looked at as a whole."""


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    arguments = ("--log-level", "error")
    with no_leftovers(), serving(*arguments, text="one two three", slots=4, context_tokens=2000) as started:
        started.ready()
        yield started


def bodies_that_end() -> dict[str, Any]:
    """Return the document without the way to ask for an answer that never ends."""
    made = copy.deepcopy(document())
    for name in ("ChatRequest", "CompletionRequest"):
        del made["components"]["schemas"][name]["properties"]["ignore_eos"]
    return {**made, "servers": [{"url": "/"}]}


schema = schemathesis.openapi.from_dict(bodies_that_end())


@schema.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_what_the_document_says(case: Any, service: Serving) -> None:
    base_url = f"http://127.0.0.1:{service.port}"
    case.call_and_validate(base_url=base_url, checks=WANTED, timeout=30)


def bodies_that_can_not_fail() -> dict[str, Any]:
    """Return the document without headers, and without what is checked for its sense: grammars, schemas, tools."""
    made = bodies_that_end()
    for path, methods in made["paths"].items():
        for told in methods.values():
            told["parameters"] = [each for each in told.get("parameters", ()) if each["in"] == "path"]
        # The scripted engine makes no vectors.
        if path not in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            made["paths"][path] = {}
    schemas = made["components"]["schemas"]
    schemas["Message"]["properties"] = {
        "role": {"type": "string", "minLength": 1},
        "content": {"type": "string"},
    }
    schemas["Message"].update(required=["role", "content"], additionalProperties=False)
    ids_to_numbers = {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -9, "maximum": 9},
    }
    # More at once than may wait for a place.
    schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][1]["maxItems"] = 4
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest"):
        fields = schemas[name]["properties"]
        for left_out in (
            "grammar", "json_schema", "response_format", "text", "tools", "tool_choice",
            # One allows or limits the other.
            "logprobs", "top_logprobs", "max_completion_tokens", "best_of", "include",
        ):  # fmt: skip
            fields.pop(left_out, None)
        if "logit_bias" in fields:
            fields["logit_bias"] = {"propertyNames": {"pattern": "^[0-9]{1,4}$"}, **ids_to_numbers}
        fields["model"] = {"enum": ["scripted", None]}
        if "n" in fields:
            fields["n"] = {"enum": [1, 2, None]}
    return made


possible = schemathesis.openapi.from_dict(bodies_that_can_not_fail())


@possible.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_document_allows_is_answered(case: Any, service: Serving) -> None:
    assume(case.meta.generation.mode.is_positive)
    # A whole number to JSON Schema, and none here.
    assume(not re.search(r"\d\.0\b", json.dumps(case.body)))
    answer = case.call(base_url=f"http://127.0.0.1:{service.port}", timeout=30)
    assert answer.status_code == 200, answer.text


def test_the_worker_has_not_noticed(service: Serving) -> None:
    _, told = service.ask("GET", "/api/worker")
    (model,) = told["models"]
    # Somebody may ask for restarts; nothing else can make one.
    assert set(model["restarts"]) <= {"stopped", "recycled"}
    assert service.until("/health/ready", 200)["status"] == "ready"


def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    app = create_app(Supervisor(engine="scripted"))
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    undocumented = {
        (method, path)
        for method, path in routes
        if path == "/"
        or path.startswith("/console/")
        # Nothing is stored, which is what these say.
        or path.startswith("/v1/responses/")
    }
    assert routes - undocumented == {(each.method, each.path) for each in OPERATIONS}


def test_the_document_refers_to_nothing_outside(service: Serving) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/openapi.json", timeout=30) as answer:
        served = json.load(answer)
    assert served == {**document(), "servers": [{"url": "/"}]}
    text = json.dumps(served)
    assert "http:" not in text
    assert "https:" not in text
    names = set(served["components"]["schemas"])
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names
