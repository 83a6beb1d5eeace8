"""The set-up: what the Makefile installs and when, and what it says if it can't."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

WITHIN_S = 60


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder, without what an outer make has set."""
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for name in ("PROMPT", "MODEL", "VENV", "PYTHON", "WHEEL", "CONSTRAINTS", "PIP_OPTIONS"):
        cleaned.pop(name, None)
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**cleaned, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


def program(path: Path, script: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return an environment that counts as installed and whose commands print what they are given."""
    venv = tmp_path / "venv"
    program(venv / "bin/supervise", 'cat; printf "\\n%s" "$@"')
    for stamp in (".installed-demo", ".installed-dev"):
        (venv / stamp).touch()
    return venv


def test_nothing_is_installed_while_the_stamp_is_newer_than_the_project(installed: Path) -> None:
    dry = run(["make", "--dry-run", f"VENV={installed}", "run", "check"])
    assert dry.returncode == 0, dry.stderr
    assert ".ci/install" not in dry.stdout


def test_a_changed_project_is_installed_again(installed: Path) -> None:
    for stamp in (".installed-demo", ".installed-dev"):
        os.utime(installed / stamp, (0, 0))
    dry = run(["make", "--dry-run", f"VENV={installed}", "run", "test"])
    assert dry.stdout.count(".ci/install") == 2


def test_check_runs_the_tests_and_every_tool(installed: Path) -> None:
    dry = run(["make", "--dry-run", f"VENV={installed}", "check"])
    for tool in ("pytest", "ruff format --check", "ruff check", "mypy", "pyright", "lint-imports"):
        assert tool in dry.stdout


FLAGS = "--temperature\n0\n--max-tokens\n200"


@pytest.mark.parametrize("prompt", ["""it's "that" `id` $(HOME) $5""", "--help", "README.md", "a\nb"])
def test_the_prompt_reaches_the_program_as_it_was_typed(installed: Path, prompt: str) -> None:
    done = run(["make", f"VENV={installed}", "run", f"PROMPT={prompt}"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{prompt}\nrun\n{FLAGS}"


def test_a_named_model_is_passed_on(installed: Path) -> None:
    done = run(["make", f"VENV={installed}", "run", "PROMPT=x", "MODEL=a b.gguf"])
    assert done.stdout == f"x\nrun\n{FLAGS}\n--model\na b.gguf"


def test_an_old_interpreter_is_named_with_what_to_do(tmp_path: Path) -> None:
    old = program(
        tmp_path / "python3",
        'case "$*" in --version) echo "Python 3.9.2";; *version_info*) exit 1;; *) exit 99;; esac',
    )
    done = run([".ci/install", str(old), str(tmp_path / "venv"), "demo"])
    assert done.returncode == 1
    assert "is Python 3.9.2, but 3.11 or newer is needed: name one with make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    done = run(["make", f"PYTHON={tmp_path}/nothing", f"VENV={tmp_path}/venv", "run"])
    assert done.returncode != 0
    assert f"there is no {tmp_path}/nothing" in done.stderr


def test_a_missing_venv_module_is_named(tmp_path: Path) -> None:
    bare = program(tmp_path / "python3", 'case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac')
    done = run([".ci/install", str(bare), str(tmp_path / "venv"), "demo"])
    assert done.returncode == 1
    assert "has no venv module" in done.stderr


def test_a_long_installation_shows_that_it_is_at_work(tmp_path: Path) -> None:
    # A pip that returns only when the heartbeat has been seen, so that nothing depends on timing.
    seen = tmp_path / "seen"
    os.mkfifo(seen)
    venv = tmp_path / "venv"
    program(
        venv / "bin/python",
        f'case "$*" in *"pip install"*) cat "{seen}"; printf "%s\\n" "$*";; *) exit 0;; esac',
    )
    interpreter = program(tmp_path / "python3", "exit 0")
    install = subprocess.Popen(
        [ROOT / ".ci/install", interpreter, venv, "demo,dev"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HEARTBEAT_S": "0.1", "CONSTRAINTS": "c.txt"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    # Without a heartbeat nobody would ever open the other end of the fifo.
    alarm = threading.Timer(WITHIN_S, os.killpg, (install.pid, signal.SIGKILL))
    alarm.start()
    try:
        assert install.stdout is not None
        lines = iter(install.stdout.readline, "")
        assert any("at work for" in line for line in lines)
        with seen.open("w") as release:
            release.write("released\n")
        rest = list(lines)
        # Seen but not collected: until then its number can't belong to a stranger's group.
        ended = os.waitid(os.P_PID, install.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
    finally:
        alarm.cancel()
        alarm.join()
        # What is left of the group, the script's last pause among it, ends here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(install.pid, signal.SIGKILL)
        install.wait()
        install.stdout.close()
    assert any(line.endswith("-c c.txt -e .[demo,dev]\n") for line in rest)
    assert rest[-1].startswith("install: done after")


def test_clean_removes_no_folder_that_is_not_an_environment(tmp_path: Path) -> None:
    dry = run(["make", "--dry-run", f"VENV={tmp_path}", "clean"])
    assert f'if [ -f "{tmp_path}/pyvenv.cfg" ]; then rm -rf "{tmp_path}"; fi' in dry.stdout


def test_ci_runs_make_check_with_the_tested_versions(tmp_path: Path) -> None:
    make = program(tmp_path / "make", 'printf "%s|%s|%s" "$*" "$CONSTRAINTS" "$PWD"')
    done = run([str(ROOT / ".ci/run")], PATH=f"{make.parent}{os.pathsep}{os.environ['PATH']}")
    assert done.stdout == f"check|constraints.txt|{ROOT}"


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    wanted += project["optional-dependencies"]["dev"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {re.split(r"[\[>=<]", entry)[0].lower() for entry in wanted} <= pinned
