"""`create_app`: the service as an ASGI application, for a server of its own or within another application.

Owns the order of its parts and nothing that runs. It never enters or closes a supervisor: whoever made that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from infervisor import Supervisor
from infervisor.supervisor.http_api import openapi
from infervisor.supervisor.http_api.console import routes as console
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints import chat, completions, embeddings, openai_models, responses
from infervisor.supervisor.http_api.errors import HttpRefused, error_answer
from infervisor.supervisor.http_api.guards.order import guarded
from infervisor.supervisor.http_api.ledger import Entry, Ledger
from infervisor.supervisor.http_api.models import Models, name_of
from infervisor.supervisor.http_api.settings import HttpSettings
from infervisor.supervisor.http_api.watching import health, metrics, requests_api, worker_api

PARTS = (
    chat, completions, responses, embeddings, openai_models, health, metrics, requests_api, worker_api, openapi,
)  # fmt: skip


def create_app(
    supervisor: Supervisor | Mapping[str, Supervisor],
    *,
    settings: HttpSettings | None = None,
    aliases: Mapping[str, str] | None = None,
    on_finished: Callable[[Entry], None] | None = None,
) -> Starlette:
    """Return the application for one supervisor, or for several by the names of their models.

    aliases: further names, each of a model. on_finished: called with every request that asked a model, when it is
    over. The application can be mounted; the supervisors must be running, in the same event loop, while it serves.
    `app.state.context` holds its models, requests and settings. Raises `ConfigurationError`.
    """
    supervisors = {name_of(supervisor): supervisor} if isinstance(supervisor, Supervisor) else supervisor
    chosen = settings or HttpSettings()
    models = Models(supervisors, aliases)
    context = Context(models, Ledger(chosen.keep_reports, on_finished), chosen)
    routes: list[BaseRoute] = [route for part in PARTS for route in part.routes(context)]
    if chosen.console:
        routes += console.routes(context)

    def behind_guards(app: ASGIApp) -> ASGIApp:
        return guarded(app, context)

    app = Starlette(
        routes=routes,
        middleware=[Middleware(behind_guards)],
        exception_handlers={HTTPException: _refuse},
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that isn't there."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:80]
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        refused = HttpRefused(
            "method_not_allowed",
            f"{request.method} isn't for {path!r}: use {allowed.get('Allow')}.",
            None,
            allowed,
        )
    else:
        refused = HttpRefused(
            "not_found", f"There is nothing at {path!r}: /openapi.json lists what there is."
        )
    return error_answer(refused)
