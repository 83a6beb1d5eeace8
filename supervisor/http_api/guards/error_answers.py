"""An error that leaves the application becomes an answer, as long as none has begun.

Owns nothing but that rule. Which status and which words an error gets is in `errors.py`. Runs in the task of
the request.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infervisor import InfervisorError
from infervisor.supervisor.http_api.errors import error_answer
from infervisor.supervisor.http_api.guards.body_reading import ClientLeft

_log = logging.getLogger("infervisor.http")


class ErrorAnswers:
    """Answer in the place of an application that raised.

    After the answer's start the error goes on to the server, which closes the connection: a client can't
    take what it has for the whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, and answer what it raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientLeft:
            return  # nobody is there to be answered
        except Exception as error:
            request_id = scope["state"].get("request_id")
            if has_begun:
                _log.warning(
                    "%s: %s after the answer had begun; it is cut off", request_id, type(error).__name__
                )
                raise
            if not isinstance(error, InfervisorError):
                _log.error("%s: unexpected error; answered with 500", request_id, exc_info=error)
            await error_answer(error, request_id=request_id)(scope, receive, sending)
