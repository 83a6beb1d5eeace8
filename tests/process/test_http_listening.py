"""Opening sockets for the HTTP service: what is taken, what is dead, what goes again, and TLS files."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.server.server import open_sockets, tls_context
from tests.helpers.certificates import make_certificate


def test_port_0_takes_a_free_one_and_says_which():
    with open_sockets() as listening:
        assert listening.addresses == (f"127.0.0.1:{listening.port}",)
        with socket.create_connection(("127.0.0.1", listening.port), timeout=5):
            pass


def test_all_addresses_of_a_name_get_the_same_port():
    with open_sockets("localhost") as listening:
        assert {address.rsplit(":", 1)[1] for address in listening.addresses} == {str(listening.port)}
        assert listening.addresses[0].startswith("127.0.0.1:")


def test_a_taken_port_is_said():
    with open_sockets() as listening:
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{listening.port} is in use"):
            open_sockets("127.0.0.1", listening.port or 0)


def test_an_unknown_host_is_said():
    with pytest.raises(ConfigurationError, match="nowhere"):
        open_sockets("nowhere.invalid")


def test_an_address_of_another_machine_is_said():
    with pytest.raises(ConfigurationError, match="no address of this machine"):
        open_sockets("192.0.2.1", 0)


def test_nothing_to_listen_on_is_said():
    with pytest.raises(ConfigurationError, match="nothing to listen on"):
        open_sockets(None)


def test_a_unix_socket_is_private_and_its_file_goes_at_the_end(tmp_path: Path):
    path = tmp_path / "s.sock"
    with open_sockets(None, unix_socket=path) as listening:
        assert listening.addresses == (f"unix:{path}",)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
    assert not path.exists()


def test_a_unix_socket_may_be_shared_and_beside_a_port(tmp_path: Path):
    path = tmp_path / "s.sock"
    with open_sockets(unix_socket=path, unix_mode=0o660) as listening:
        assert len(listening.sockets) == 2
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_the_file_of_a_dead_server_is_replaced(tmp_path: Path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with open_sockets(None, unix_socket=path), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))


def test_the_socket_of_a_living_server_is_not_touched(tmp_path: Path):
    path = tmp_path / "s.sock"
    with open_sockets(None, unix_socket=path):
        with pytest.raises(ConfigurationError, match="in use by another server"):
            open_sockets(None, unix_socket=path)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))


def test_a_file_that_is_no_socket_is_not_touched(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="is no socket"):
        open_sockets(None, unix_socket=path)
    assert path.read_text() == "mine"


def test_a_socket_that_another_server_put_there_meanwhile_stays(tmp_path: Path):
    path = tmp_path / "s.sock"
    first = open_sockets(None, unix_socket=path)
    path.unlink()
    with open_sockets(None, unix_socket=path):
        first.close()
        assert path.exists()


@pytest.mark.parametrize("name", ["missing/s.sock", "x" * 120])
def test_an_impossible_path_is_said_and_leaves_nothing(tmp_path: Path, name: str):
    with pytest.raises(ConfigurationError, match="can't be opened"):
        open_sockets(unix_socket=tmp_path / name)
    assert os.listdir(tmp_path) == []


# --- TLS -------------------------------------------------------------------------------------------


def test_a_certificate_and_its_key_in_one_file_or_in_two(tmp_path: Path):
    cert, key = make_certificate(tmp_path, "one")
    tls_context(cert, key)
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    tls_context(both, None)


def test_what_is_wrong_with_tls_files_is_said(tmp_path: Path):
    cert, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "two")
    _, locked = make_certificate(tmp_path, "locked", "-passout", "pass:secret")
    text = tmp_path / "text.pem"
    text.write_text("hello")
    for wrong_cert, wrong_key, words in [
        (tmp_path / "missing.pem", key, "missing.pem can't be read"),
        (cert, tmp_path, "can't be read"),
        (cert, other, "can't be used"),
        (text, key, "can't be used"),
        (cert, None, "can't be used"),
        (cert, locked, "encrypted"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            tls_context(wrong_cert, wrong_key)
