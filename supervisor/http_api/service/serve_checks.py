"""What must hold between the settings, and outside of them: files, sockets, keys. Looks, and changes nothing.

Asked by `supervise serve` before it starts anything, and by `supervise config --check`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Iterator

from starlette.types import Receive, Scope, Send

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.guards.hosts import HostCheck
from infervisor.supervisor.http_api.guards.origins import OriginCheck
from infervisor.supervisor.http_api.server.listening import tls_context
from infervisor.supervisor.http_api.service.serve_models import make_supervisors, model_files
from infervisor.supervisor.http_api.service.serve_settings import ServeSettings

MAX_KEY_FILE_BYTES = 1 << 20
MAX_SOCKET_PATH_BYTES = 107
"""Linux has 108 bytes for the path of a Unix socket, with the zero at its end; macOS has four less."""


def check(settings: ServeSettings) -> tuple[str, ...]:
    """Return the keys that clients may use. Raises `ConfigurationError` with a line for each thing wrong."""
    found = list(_problems(settings))
    keys: tuple[str, ...] = ()
    try:
        keys = _keys(settings)
    except ConfigurationError as error:
        found.append(str(error))
    else:
        found += _open_to_all(settings, keys)
    if found:
        raise ConfigurationError("\n".join(found))
    return keys


def is_local(settings: ServeSettings) -> bool:
    """Whether only this machine can reach the service. A name counts as what it stands for now."""
    if settings.unix_socket is not None:
        return True
    try:
        found = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(settings.host) and all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found
    )


def _problems(settings: ServeSettings) -> Iterator[str]:
    yield from _models(settings)
    yield from _address(settings)
    yield from _tls(settings)
    for build in (
        lambda: HostCheck(_nothing, settings.allowed_hosts),
        lambda: OriginCheck(_nothing, settings.cors_origins),
        lambda: make_supervisors(settings),
    ):
        yield from _refusal(build)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Be the application of a guard that is only built to see whether it takes its settings."""


def _refusal(build: Callable[[], object]) -> Iterator[str]:
    try:
        build()
    except ConfigurationError as error:
        yield str(error)


def _models(settings: ServeSettings) -> Iterator[str]:
    try:
        files = model_files(settings)
    except ConfigurationError:
        return  # said when the supervisors are made
    for name, path in files.items():
        if path is not None:
            yield from _unreadable(path, f"models: {name}")
    for alias, name in settings.aliases.items():
        if alias in files:
            yield f"aliases: {alias!r} is the name of a model already: choose another one"
        if name not in files:
            yield f"aliases: {alias!r} stands for {name!r}, but the models are {', '.join(files)}"


def _address(settings: ServeSettings) -> Iterator[str]:
    path = settings.unix_socket
    if path is None:
        if not settings.host:
            yield "host is empty: name an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine"
        return
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        yield f"unix_socket: {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter path"
    elif not os.path.isdir(os.path.dirname(path)):
        yield f"unix_socket: there is no folder {os.path.dirname(path)}: make it first"
    elif os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        yield f"unix_socket: {path} exists and is no socket: name another path, or remove it"


def _tls(settings: ServeSettings) -> Iterator[str]:
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None:
        if key is not None:
            yield "tls_key is given, but tls_cert isn't: TLS needs a certificate"
        return
    if settings.unix_socket is not None:
        yield "tls_cert is given, but unix_socket is, too: leave TLS to whoever speaks through the socket"
    yield from _refusal(lambda: tls_context(certificate, key))


def _unreadable(path: str, what: str) -> Iterator[str]:
    # As bytes: under an ASCII locale a name is no text to the system.
    raw = path.encode("utf-8", "surrogateescape")
    if not os.path.lexists(raw):
        yield f"{what}: there is no file {path}"
    elif not os.path.isfile(raw):
        yield f"{what}: {path} is no file"
    elif not os.access(raw, os.R_OK):
        yield f"{what}: {path} can't be read: permission denied"


# --- keys ------------------------------------------------------------------------------------------


def _keys(settings: ServeSettings) -> tuple[str, ...]:
    path = settings.api_key_file
    if path is None:
        return _checked(settings.api_keys, "SUPERVISE_API_KEYS")
    try:
        with open(path.encode("utf-8", "surrogateescape"), "rb") as file:
            raw = file.read(MAX_KEY_FILE_BYTES + 1)
        text = raw.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"api_key_file: {path} isn't text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"api_key_file: {path} can't be read: {why}") from None
    lines = [line.strip() for line in text.split("\n")]
    keys = [line for line in lines if line and not line.startswith("#")]
    if len(raw) > MAX_KEY_FILE_BYTES or not keys:
        raise ConfigurationError(f"api_key_file: {path} must hold keys, one a line, at most 1 MiB of them")
    return _checked((*settings.api_keys, *keys), f"api_key_file: {path}")


def _checked(keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    for number, key in enumerate(keys, 1):
        # Whatever is wrong with it, a key is not shown.
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigurationError(f"{where}: key {number} has characters that no header can carry")
    return keys


def _open_to_all(settings: ServeSettings, keys: tuple[str, ...]) -> Iterator[str]:
    if not keys and not settings.allow_without_key and not is_local(settings):
        yield (
            f"host: {settings.host} can be reached by other machines, and no key is set: name a file of keys with "
            "api_key_file, or say that nobody needs one with allow_without_key"
        )
