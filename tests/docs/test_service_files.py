"""The files of examples/service agree with the program, with each other, and with who reads them."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from infervisor.supervisor.cli.app import app
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.http_api.service.config_file import load
from infervisor.supervisor.http_api.service.serve_settings import ServeSettings, settings_table, variable_of
from infervisor.supervisor.http_api.service.service import STOP_S
from tests.docs.markdown import ROOT, table

FOLDER = ROOT / "examples/service"
FILES = sorted(FOLDER.iterdir())
LONGEST_STOP_S = ServeSettings().drain_grace_s + STOP_S


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(FOLDER / "infervisor.service")
    return parser


def compose() -> Any:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["infervisor"]


def flags() -> set[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {flag for name in ("serve", "config") for made in commands[name].params for flag in made.opts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_flags_and_variables_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    known = {variable_of(name) for name, _, _ in settings_table()} | {"SUPERVISE_CONFIG"}
    assert set(re.findall(r"\bSUPERVISE_[A-Z_]+\b", text)) <= known
    spelt: set[str] = set()
    for command in re.findall(r"supervise (?:serve|config)\b([^`\n]*)", text):
        spelt |= {word for word in shlex.split(command, comments=True) if word.startswith("-")}
    assert spelt <= flags()


def test_the_words_of_the_container_are_flags() -> None:
    words = compose()["command"]
    assert {word for word in words if word.startswith("-")} <= flags()


def test_the_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERVISE_CONFIG", raising=False)
    settings = load({}, str(FOLDER / "config.toml")).settings
    assert settings.models[0] == "/var/lib/models/small.gguf"
    assert settings.drain_grace_s == ServeSettings().drain_grace_s


def test_nobody_is_killed_while_it_drains() -> None:
    assert int(unit()["Service"]["TimeoutStopSec"]) > LONGEST_STOP_S
    grace = compose()["stop_grace_period"]
    assert grace.endswith("s")
    assert int(grace[:-1]) > LONGEST_STOP_S


def test_the_unit_starts_again_what_another_start_can_mend() -> None:
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(ExitCode.USAGE.value)
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
    described = {int(row[0]): row[1:] for row in table(FOLDER / "README.md", "exit code")}
    assert set(described) <= set(ExitCode)
    assert {code for code, (_, again) in described.items() if again.startswith("no")} == {0, 2}


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    text = (FOLDER / "infervisor.service").read_text()
    # The program of the unit isn't installed here.
    (tmp_path / "infervisor.service").write_text(text.replace("/opt/infervisor/bin/supervise", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "infervisor.service")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_has_what_its_image_needs() -> None:
    made = compose()
    image = (FOLDER / "Dockerfile").read_text()
    assert (FOLDER / made["build"]["context"]).resolve() == ROOT
    assert (ROOT / made["build"]["dockerfile"]) == FOLDER / "Dockerfile"
    assert made["read_only"] is True
    # The same look at the health, in the two files.
    probe = re.search(r'CMD \["python", "-c", "([^"]+)"\]', image)
    assert probe is not None
    assert made["healthcheck"]["test"][3] == probe[1]
    compile(probe[1], "probe", "exec")
    (secret,) = made["secrets"]
    assert f"SUPERVISE_API_KEY_FILE=/run/secrets/{secret}" in image
    assert "STOPSIGNAL SIGTERM" in image
    assert re.search(r"^USER \d+$", image, flags=re.MULTILINE)


def test_the_page_names_every_file() -> None:
    named = {
        name for row in table(FOLDER / "README.md", "file") for name in re.findall(r"\]\(([\w.]+)\)", row[0])
    }
    assert named == {path.name for path in FILES} - {"README.md"}
