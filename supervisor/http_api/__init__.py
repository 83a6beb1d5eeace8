"""An OpenAI-compatible service over supervisors: HTTP is known here, and nowhere else.

Uses the public API alone. Start reading at `app.py`; what happens to one request is in `exchange.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.app import create_app
    from infervisor.supervisor.http_api.settings import HttpSettings

__all__ = ["HttpSettings", "create_app"]


def __getattr__(name: str) -> Any:
    # Late: the command line reads the table of settings without the packages of the extra.
    if name == "create_app":
        from infervisor.supervisor.http_api.app import create_app

        return create_app
    if name == "HttpSettings":
        from infervisor.supervisor.http_api.settings import HttpSettings

        return HttpSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
