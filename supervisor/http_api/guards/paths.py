"""Which part of the service a request's path belongs to, wherever the service is mounted.

Owns the few sets of paths that guards treat in a way of their own. A path is compared as text and never
reaches the file system. Pure.
"""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Return the path below the place where the service is mounted, as the router compares it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_health(scope: Scope) -> bool:
    """Say whether a probe of a process manager is asked: it has no key and waits for nobody."""
    return route_path(scope).startswith("/health/")


def is_page(scope: Scope) -> bool:
    """Say whether the console's page or one of its files is asked: they hold nothing that is secret."""
    path = route_path(scope)
    return scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith("/console/"))


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header, in order. `name` is in lower case, as ASGI has them."""
    return [value for key, value in scope["headers"] if key == name]
