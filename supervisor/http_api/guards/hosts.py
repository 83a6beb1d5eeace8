"""Whom a request addresses: the check against DNS rebinding.

A page of a stranger can let its own name point to 127.0.0.1, and is then, for the browser, of the same origin
as this service. The name is in the request, so only names that are known are served. Through a Unix socket
comes no browser, and every name is fine. Runs in the task of the request.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.paths import header_values

_AUTHORITY = re.compile(
    r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?)\.?(?::(?P<port>[0-9]{1,5}))?"
)
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#]*)(?P<path>/.*)?", re.IGNORECASE)


class Authority(NamedTuple):
    """A host and, if it is said, its port."""

    name: str
    port: int | None


def parse_authority(text: str) -> Authority | None:
    """Return the parts of `host[:port]` in a form that can be compared; None if it is malformed.

    User information, zones and empty ports are malformed: no client of the field sends them here.
    """
    match = _AUTHORITY.fullmatch(text.lower())
    if match is None:
        return None
    name, port = match["name"], match["port"]
    if name.startswith("["):
        try:
            name = f"[{ipaddress.IPv6Address(name[1:-1])}]"
        except ValueError:
            return None
    if port is not None and int(port) > 65535:
        return None
    return Authority(name, None if port is None else int(port))


def is_loopback(name: str) -> bool:
    """Say whether a name can only mean this machine."""
    if name in ("localhost", "[::1]"):
        return True
    try:
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


class HostCheck:
    """Serve requests that address this machine's loopback or a host that is listed; refuse others with 403."""

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str]) -> None:
        """Take hosts as `name` or `name:port`; "*" allows every well-formed one."""
        self._app = app
        self._allows_all = "*" in allowed_hosts
        self._allowed = frozenset(_listed(host) for host in allowed_hosts if host != "*")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, or raise `HttpRefused`."""
        if scope["type"] == "http":
            hosts = header_values(scope, b"host")
            absolute = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
            if absolute is not None:
                scope = _with_path(scope, absolute["path"] or b"/")
                hosts = [*hosts, absolute["authority"]] if absolute["authority"] not in hosts else hosts
            self._check(scope, hosts)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, hosts: list[bytes]) -> None:
        server = scope.get("server")
        if server is not None and server[1] is None:
            return  # a Unix socket
        if len(hosts) != 1:
            raise HttpRefused(
                "forbidden_host", "The request names no host, or several. Send one Host header."
            )
        host = parse_authority(hosts[0].decode("latin-1"))
        if host is None:
            raise HttpRefused("forbidden_host", "The Host header is malformed. Send host or host:port.")
        if not (self._allows_all or is_loopback(host.name) or self._is_listed(host)):
            raise HttpRefused(
                "forbidden_host",
                f"The host {host.name!r} is not served. If it is this service's name, add it to allowed_hosts.",
            )

    def _is_listed(self, host: Authority) -> bool:
        return host in self._allowed or Authority(host.name, None) in self._allowed


def _listed(text: str) -> Authority:
    host = parse_authority(text)
    if host is None:
        raise ConfigurationError(
            f"allowed_hosts: {text!r} is no host. Give name, name:port, an address, or * for every host."
        )
    return host


def _with_path(scope: Scope, raw_path: bytes) -> Scope:
    """Return the scope of a request whose target was a whole URL, as proxies send it."""
    path: str = scope["path"]
    start = path.find("/", path.index("://") + 3)
    return {**scope, "path": path[start:] if start >= 0 else "/", "raw_path": raw_path}
