"""What stands between the server and the endpoints, in order.

Owns the order alone; each guard is a pure ASGI application around the next and has a file of its own. They see
each disconnect, since none reads a body or starts a task. `read_body` is what endpoints read with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from infervisor.supervisor.http_api.guards.body_limits import BodyLimits
from infervisor.supervisor.http_api.guards.body_reading import ClientLeft, read_body
from infervisor.supervisor.http_api.guards.envelope import Envelope, new_request_id
from infervisor.supervisor.http_api.guards.error_answers import ErrorAnswers
from infervisor.supervisor.http_api.guards.header_limits import HeaderLimits
from infervisor.supervisor.http_api.guards.hosts import HostCheck
from infervisor.supervisor.http_api.guards.keys import KeyCheck
from infervisor.supervisor.http_api.guards.origins import OriginCheck, cross_origin
from infervisor.supervisor.http_api.guards.places import Places
from infervisor.supervisor.http_api.guards.unread_bodies import UnreadBodies

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.context import Context

__all__ = ["ClientLeft", "guarded", "new_request_id", "read_body"]


def guarded(app: ASGIApp, context: Context) -> ASGIApp:
    """Return the application behind all guards, as `context.settings` has them.

    Raises:
        ConfigurationError: A host, an origin or a key among the settings is malformed.
    """
    settings = context.settings
    app = BodyLimits(app, settings.max_body_bytes)
    app = Places(app, settings.max_requests)
    app = KeyCheck(app, settings.api_keys)
    # Inside of CORS: a page may read why it was refused.
    app = ErrorAnswers(app)
    app = cross_origin(app, settings.cors_origins)
    app = OriginCheck(app, settings.cors_origins)
    app = HostCheck(app, settings.allowed_hosts)
    app = HeaderLimits(app)
    app = ErrorAnswers(app)
    app = UnreadBodies(app)
    return Envelope(app)
