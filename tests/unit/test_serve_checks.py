"""What must hold between the settings of the service, and outside of them; its models; and kinds of settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.service import serve_checks, serve_models
from infervisor.supervisor.http_api.service.serve_settings import ServeSettings
from infervisor.supervisor.http_api.service.setting_kinds import Kind, Setting, from_text, parse_size, plain

# --- what must hold ----------------------------------------------------------------------------------


def problem(**given: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        serve_checks.check(ServeSettings(**{"engine": "scripted", **given}))
    return str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no.such.name.invalid"])
def test_other_machines_need_a_key_or_leave(host: str, tmp_path: Path) -> None:
    assert "no key is set" in problem(host=host)
    keys = tmp_path / "keys"
    keys.write_text("# mine\nsesame\r\n\n  open  \n")
    assert serve_checks.check(ServeSettings(engine="scripted", host=host, api_key_file=str(keys))) == (
        "sesame",
        "open",
    )
    assert serve_checks.check(ServeSettings(engine="scripted", host=host, api_keys=("k",))) == ("k",)
    assert serve_checks.check(ServeSettings(engine="scripted", host=host, allow_without_key=True)) == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert serve_checks.check(ServeSettings(engine="scripted", host=host)) == ()


def test_a_unix_socket_needs_none(tmp_path: Path) -> None:
    assert (
        serve_checks.check(ServeSettings(engine="scripted", host="0.0.0.0", unix_socket=str(tmp_path / "s")))
        == ()
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": ""}, "host is empty: name an address"),
        ({"unix_socket": "/missing/s"}, "unix_socket: there is no folder /missing: make it first"),
        ({"unix_socket": "/tmp/" + "x" * 200}, "is longer than 107 bytes: choose a shorter path"),
        ({"unix_socket": __file__}, "exists and is no socket: name another path"),
        ({"tls_key": "k"}, "tls_key is given, but tls_cert isn't: TLS needs a certificate"),
        (
            {"tls_cert": "/missing", "tls_key": "/missing"},
            "/missing can't be read: No such file or directory",
        ),
        ({"tls_cert": __file__, "tls_key": __file__}, "can't be used"),
        ({"unix_socket": "/tmp/s", "tls_cert": "c", "tls_key": "k"}, "but unix_socket is, too"),
        ({"api_key_file": "/missing"}, "api_key_file: /missing can't be read: No such file or directory"),
        ({"api_key_file": "/dev/null"}, "api_key_file: /dev/null must hold keys, one a line"),
        ({"api_keys": ("se same",)}, "SUPERVISE_API_KEYS: key 1 has characters that no header can carry"),
        ({"allowed_hosts": ("a b",)}, "allowed_hosts: 'a b' is no host"),
        ({"cors_origins": ("app.example",)}, "cors_origins: 'app.example' is no origin"),
        ({"models": ("/missing",)}, "models: missing: there is no file /missing"),
        ({"models": ("/",)}, "models: : / is no file"),
        (
            {"models": ("/a/m.gguf", "/b/m.gguf")},
            "two models are called 'm': name one of them with NAME=PATH",
        ),
        ({"aliases": {"scripted": "scripted"}}, "'scripted' is the name of a model already"),
        ({"ctx": 5}, "ctx, threads and gpu_layers are the llama engine's"),
        ({"memory_soft_bytes": 1}, "memory.soft_bytes=1 is less than any worker takes"),
    ],
)
def test_what_cannot_be_served_is_refused(given: dict[str, Any], said: str) -> None:
    found = problem(**given)
    assert said in found
    assert "same" not in found


# --- models ------------------------------------------------------------------------------------------


def test_a_model_has_the_name_that_it_is_given_or_that_of_its_file(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.gguf"
    odd.touch()
    settings = ServeSettings(
        models=("/x/Small.Q4.GGUF", "big=/y/m.gguf", "org/tiny=/z", str(odd), "/x/.gguf")
    )
    assert serve_models.model_files(settings) == {
        "Small.Q4": "/x/Small.Q4.GGUF",
        "big": "/y/m.gguf",
        "org/tiny": "/z",
        "a=b": str(odd),
        ".gguf": "/x/.gguf",
    }
    assert serve_models.model_files(ServeSettings(engine="scripted")) == {"scripted": None}


# --- kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("1k", 1024), ("2GiB", 2 << 30), (" 3 MB ", 3 << 20), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["G", "-1", "1.5G", "1X", "٣", "9" * 30])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_size(text)


def test_words_of_a_variable() -> None:
    words = Setting(Kind.WORDS, "", "")
    assert from_text(words, " a, b ,,c") == ["a", "b", "c"]
    assert from_text(words, '["a,b"]') == ["a,b"]
    switch = Setting(Kind.SWITCH, "", "")
    assert [from_text(switch, text) for text in ("1", "TRUE", "on", "0", "No")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    limit = Setting(Kind.SECONDS, "", "", takes_none=True)
    assert [from_text(limit, text) for text in ("none", "0", "1e1")] == [None, None, 10]
    assert [plain(limit, value) for value in (0, "none", 5, False)] == [None, None, 5, False]
