"""The OpenAPI document against the service: schemathesis asks what the document allows, and what it doesn't."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS
from starlette.routing import Route

from infervisor import Supervisor
from infervisor.supervisor.http_api import create_app
from infervisor.supervisor.http_api.openapi import OPERATIONS, document
from tests.helpers.leaks import no_leftovers
from tests.helpers.serving import Serving, serving

# A body that fits its schema can still be impossible: a grammar that is none, a tool without a schema.
LEFT_OUT = {"positive_data_acceptance", "max_response_time"}
WANTED = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]


@pytest.fixture(autouse=True)
def leaves_nothing() -> None:
    """Each test may have a worker restarted, which then is another child: the service is looked at as a whole."""


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    arguments = ("--log-level", "error")
    with no_leftovers(), serving(*arguments, text="one two three", slots=4) as started:
        started.ready()
        yield started


schema = schemathesis.openapi.from_dict({**document(), "servers": [{"url": "/"}]})


@schema.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_what_the_document_says(case: Any, service: Serving) -> None:
    base_url = f"http://127.0.0.1:{service.port}"
    case.call_and_validate(base_url=base_url, checks=WANTED, timeout=30)


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
        if path in ("/", "/openapi.json")
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
