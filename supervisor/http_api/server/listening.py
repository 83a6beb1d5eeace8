"""The sockets that the service listens on, opened before anything else is started.

Owns the sockets and, for a Unix socket, its file, which goes when they are closed. A taken port or path is an
error with its name; the file of a server that died is replaced. Runs wherever it is called, before the loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from infervisor import ConfigurationError

BACKLOG = 512
LOCK_WAIT_S = 5.0


class Listening:
    """Open sockets. Use it as a context manager, or call `close()`."""

    def __init__(
        self, sockets: list[socket.socket], addresses: list[str], unix_path: Path | None = None
    ) -> None:
        self.sockets = sockets
        self.addresses = tuple(addresses)
        """Where the service can be reached: `host:port`, or `unix:PATH`."""
        self._unix_path = unix_path
        self._identity = None if unix_path is None else _identity(unix_path)

    @property
    def port(self) -> int | None:
        """The TCP port that was bound; None without one."""
        for sock in self.sockets:
            if sock.family != socket.AF_UNIX and sock.fileno() >= 0:
                return int(sock.getsockname()[1])
        return None

    def close(self) -> None:
        """Close the sockets; remove the Unix socket's file if it is still the one that was made here."""
        if self._unix_path is not None and _identity(self._unix_path) == self._identity is not None:
            with contextlib.suppress(OSError):
                self._unix_path.unlink()
        self._unix_path = None
        for sock in self.sockets:
            sock.close()

    def __enter__(self) -> Listening:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def open_sockets(
    host: str | None = "127.0.0.1",
    port: int = 0,
    unix_socket: str | os.PathLike[str] | None = None,
    *,
    unix_mode: int = 0o600,
) -> Listening:
    """Bind and listen: on all addresses of `host` at `port` (0: any free one), on a Unix socket, or on both.

    Raises:
        ConfigurationError: It can't be had. Nothing stays open.
    """
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        if host is not None:
            for sock in _bind_tcp(host, port, opened):
                sockets.append(sock)
        addresses = [_address(sock) for sock in sockets]
        path = None if unix_socket is None else Path(unix_socket).absolute()
        if path is not None:
            sockets.append(_bind_unix(path, unix_mode, opened))
            addresses.append(f"unix:{path}")
        if not sockets:
            raise ConfigurationError(
                "There is nothing to listen on. Give a host and a port, or a Unix socket."
            )
        opened.pop_all()
        return Listening(sockets, addresses, path)


def tls_context(cert_file: str | os.PathLike[str], key_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Return a context for these PEM files. Without a key file the key is in the certificate's file.

    Raises:
        ConfigurationError: A file can't be read, isn't PEM, is encrypted, or the two don't belong together.
    """
    for file in (cert_file, key_file):
        if file is not None:
            try:
                Path(file).open("rb").close()
            except OSError as error:
                raise ConfigurationError(
                    f"TLS: {os.fspath(file)} can't be read: {error.strerror}."
                ) from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"TLS: {os.fspath(cert_file)} and {os.fspath(key_file or cert_file)} can't be used: {error}. Give "
            "a PEM certificate chain and its unencrypted PEM key."
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")  # or OpenSSL would ask on the terminal


def _bind_tcp(host: str, port: int, opened: contextlib.ExitStack) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(
            f"The host {host!r} isn't known here. Give an address or a name of it."
        ) from error
    bound = False
    for family, kind, protocol, _, address in sorted(set(found), key=lambda one: one[0] != socket.AF_INET):
        sock = opened.enter_context(socket.socket(family, kind, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((address[0], port, *address[2:]))
            sock.listen(BACKLOG)
        except OSError as error:
            if bound and error.errno == errno.EADDRNOTAVAIL:  # localhost is ::1, too, where IPv6 is off
                continue
            raise ConfigurationError(_why_not(error, host, port)) from error
        sock.setblocking(False)
        port = port or sock.getsockname()[1]  # the other addresses of the name get the same
        bound = True
        yield sock


def _why_not(error: OSError, host: str, port: int) -> str:
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another process. Choose another port, or stop that process."
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{where} may not be opened by this user: ports below 1024 need a privilege. Choose a higher one."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine. Choose one that it has, as 127.0.0.1."
    return f"{where} can't be opened: {error.strerror}."


def _bind_unix(path: Path, mode: int, opened: contextlib.ExitStack) -> socket.socket:
    try:
        with _alone_in(path.parent):
            _clear(path)
            sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.bind(os.fspath(path))
            opened.callback(path.unlink, missing_ok=True)
            # Before it listens nobody can connect, so that there is no moment with other permissions.
            path.chmod(mode)
            sock.listen(BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)  # a path that is too long has only a text
        raise ConfigurationError(f"The Unix socket {path} can't be opened: {reason}.") from error
    sock.setblocking(False)
    return sock


def _clear(path: Path) -> None:
    """Remove the file that a dead server left; refuse anything else that is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigurationError(f"{path} exists and is no socket. Choose another path, or remove it.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody lives there
    raise ConfigurationError(f"{path} is in use by another server. Choose another path, or stop that server.")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep another server, that starts now, from taking the new socket for a dead one's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"another process keeps {folder} locked") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
