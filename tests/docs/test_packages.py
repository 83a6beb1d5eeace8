"""What is installed: wheel and sdist hold the three packages as real files, and nothing else at the top."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from infervisor.supervisor.http_api.console.routes import FILES as CONSOLE_FILES
from tests.docs.markdown import ROOT

WITHIN_S = 300
FOLDERS = ("protocol", "worker", "supervisor")


def build(source: Path, target: Path, kind: str) -> Path:
    """Run the build front end without isolation, so that it needs no network; return what it made."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(target), str(source)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (made,) = target.iterdir()
    return made


def files_of(wheel: Path) -> set[str]:
    """Return the names in a wheel. Fails for anything that isn't a plain file."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            mode = entry.external_attr >> 16
            assert stat.S_IFMT(mode) in (0, stat.S_IFREG), f"{entry.filename} is no plain file"
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project, links and all, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*FOLDERS, "src", "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that the checkout builds."""
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


def test_wheel_holds_every_module_of_the_three_folders_and_nothing_else(wheel: Path) -> None:
    modules = {
        f"infervisor/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    page = {
        f"infervisor/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "supervisor" / "http_api" / "console").iterdir()
        if path.suffix in (".html", ".css", ".js", ".svg")
    }
    files = {name for name in files_of(wheel) if ".dist-info/" not in name}
    assert len(page) == len(CONSOLE_FILES) + 1
    assert files == modules | page | {"infervisor/__init__.py", "infervisor/py.typed"}


def test_wheel_installs_one_top_level_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in files_of(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"infervisor"}


def test_wheel_carries_the_licence_the_command_and_the_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.split(".dist-info/")[-1]: name for name in archive.namelist()}
        assert b"Apache License" in archive.read(texts["licenses/LICENSE"])
        assert b"supervise = infervisor.supervisor.cli.__main__:main" in archive.read(
            texts["entry_points.txt"]
        )
        metadata = archive.read(texts["METADATA"]).decode()
    code = "import infervisor; print(infervisor.__version__)"
    version = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"\nVersion: {version.stdout}" in metadata


def test_wheel_runs_when_it_is_unpacked_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import infervisor; "
        "from infervisor import *; import infervisor.worker.work_loop; print(infervisor.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_sdist_builds_a_wheel_with_the_same_content(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build(source, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        assert not [entry.name for entry in archive.getmembers() if entry.issym() or entry.islnk()]
        assert not [name for name in archive.getnames() if "/tests/" in name]
        # The filter came with a patch release of Python 3.11; later ones warn without it.
        data_filter = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "unpacked", **data_filter)  # type: ignore[arg-type]
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build(unpacked, tmp_path / "wheel", "wheel")
    assert files_of(again) == files_of(wheel)


def test_type_checkers_look_into_every_linked_folder() -> None:
    # pyright passes over a linked folder that it isn't pointed at, and then has nothing to complain about.
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert {f"src/infervisor/{folder}" for folder in FOLDERS} <= set(tools["pyright"]["include"])
    assert "src" in tools["mypy"]["files"]
    for folder in FOLDERS:
        assert (ROOT / "src/infervisor" / folder).resolve() == ROOT / folder
