"""What README and pages for users show runs: Python blocks, commands with their recorded output, make targets."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, blocks

README = ROOT / "README.md"
PAGES = [
    README,
    *(
        ROOT / "docs" / name
        for name in ("api.md", "engines.md", "serve.md", "streams.md", "structured_output.md")
    ),
]
WITHIN_S = 180


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with the scripts of this environment first in PATH and nothing to read."""
    scripts = str(Path(sys.executable).parent)
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


def params(language: str, path: Path = README) -> list[object]:
    """Return the blocks of a language as parameters, marked if they need the real model."""
    found = blocks(path, language)
    assert found, f"{path.name} has no {language} block"
    return [
        pytest.param(
            block,
            id=f"{path.stem}_line_{block.line}",
            marks=[] if "scripted" in block.text else [pytest.mark.real_model],
        )
        for block in found
    ]


def shape(text: str) -> str:
    """Return text with its figures, which vary, replaced."""
    text = re.sub(r"\d+(\.\d+)? (ms|s)\b", "<time>", text)
    return re.sub(r"\d+(\.\d+)? tokens/s", "<rate>", text)


@pytest.mark.parametrize("block", [block for page in PAGES for block in params("python", page)])
def test_python_block_runs_without_a_warning(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.text)
    done = run([sys.executable, "-W", "error", str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout


def test_the_flow_control_example_stops_within_its_window(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(README, "python") if "window=2" in block.text]
    script = tmp_path / "block.py"
    script.write_text(block.text)
    done = run([sys.executable, str(script)], tmp_path)
    reason, computed = done.stdout.split()
    assert reason == "cancelled"
    assert 5 <= int(computed) <= 7


def steps(text: str) -> list[tuple[str, str]]:
    """Return status and name of each line of a probe, and its last line."""
    *lines, last = text.strip().splitlines()
    return [*((line[:7].strip(), line[20:37].strip()) for line in lines), (last, "")]


@pytest.mark.parametrize("block", params("console"))
def test_console_block_prints_what_was_recorded(block: Block, tmp_path: Path) -> None:
    first, _, recorded = block.text.partition("\n")
    command = shlex.split(first.removeprefix("$ "))
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if command[:2] == ["supervise", "probe"]:
        assert steps(done.stdout) == steps(recorded)
        return
    assert command[:2] == ["supervise", "run"]
    answer, _, report = recorded.strip().rpartition("\n")
    assert shape(done.stderr.strip()) == shape(report)
    if "scripted" in command:
        assert done.stdout.strip() == answer
    else:
        # Another CPU may compute other words, but as many.
        assert done.stdout.strip()


def test_make_commands_of_the_readme_are_targets_that_run_what_they_say(tmp_path: Path) -> None:
    commands = [
        line.partition("#")[0].split() for block in blocks(README, "sh") for line in block.text.splitlines()
    ]
    assert commands == [["make", "run"], ["make", "test"], ["make", "serve"]]
    for command, wanted in zip(commands, ("supervise run", "-m pytest", "supervise serve"), strict=True):
        dry = run([command[0], "--dry-run", f"VENV={tmp_path}/venv", *command[1:]], ROOT)
        assert dry.returncode == 0, dry.stderr
        assert wanted in dry.stdout
        assert ".ci/install" in dry.stdout
