"""The examples run as they are, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

WITHIN_S = 180
ENGINES = ["scripted", pytest.param("llama", marks=pytest.mark.real_model)]


def run(name: str, engine: str, folder: Path) -> str:
    """Run an example in another folder and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), "--engine", engine],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_slow_reader_computes_at_most_its_window_ahead(engine: str, tmp_path: Path) -> None:
    printed = run("slow_reader.py", engine, tmp_path)
    taken = [int(number) for number in re.findall(r"^took (\d+):", printed, flags=re.MULTILINE)]
    computed = re.search(r"^computed: (\d+) ", printed, flags=re.MULTILINE)
    assert computed is not None, printed
    assert taken[-1] == 5
    assert 5 <= int(computed[1]) <= 7
    assert printed.rstrip().endswith("cancelled")


@pytest.mark.parametrize("engine", ENGINES)
def test_asyncio_app_answers_three_questions_and_stops_the_fourth(engine: str, tmp_path: Path) -> None:
    printed = run("asyncio_app.py", engine, tmp_path)
    reports = re.findall(r"^  \[queued .* · (\d+) tokens · (\w+)\]$", printed, flags=re.MULTILINE)
    assert len(reports) == 4, printed
    assert all(reason in ("length", "stop") for _, reason in reports[:3])
    assert reports[3][1] == "cancelled"
    assert "after the cancel (in_band)" in printed
    # Three came at once and one place was free.
    assert "most requests that waited at once: 2; restarts: 0" in printed


@pytest.mark.parametrize("engine", ENGINES)
def test_an_application_survives_the_crash_of_its_worker(engine: str, tmp_path: Path) -> None:
    printed = run("survive_a_crash.py", engine, tmp_path)
    pids = re.findall(r"^\[worker (\d+) is ready after [\d.]+ s\]$", printed, flags=re.MULTILINE)
    assert len(set(pids)) == 2, printed
    assert f"[worker {pids[0]} is gone: the worker died while serving: SIGKILL(-9)" in printed
    assert "[the answer ended: worker_crashed]" in printed
    assert "restarts: {'crashed': 1}]" in printed


def test_every_example_is_named_in_the_readme_of_the_examples() -> None:
    text = (ROOT / "examples/README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert path.name in text
