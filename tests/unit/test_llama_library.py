"""The native log and the late import of the library."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama import library
from infervisor.worker.engines.llama.library import KEPT_LINES, NativeLog

DEBUG, INFO, WARNING, ERROR, CONTINUED = 1, 2, 3, 4, 5


def test_problems_are_printed_and_preferred(capsys: pytest.CaptureFixture[str]) -> None:
    log = NativeLog()
    log.write(INFO, b"loading\n")
    log.write(ERROR, b"broken\n")
    log.write(INFO, b"more\n")
    assert log.tail() == "broken"
    assert capsys.readouterr().err == "llama.cpp: broken\n"


def test_without_problems_the_last_lines_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    log = NativeLog()
    for number in range(20):
        log.write(INFO, b"line %d\n" % number)
    assert log.tail(2) == "line 18\nline 19"
    assert capsys.readouterr().err == ""


def test_debug_lines_push_nothing_out() -> None:
    log = NativeLog()
    log.write(INFO, b"flash attention enabled\n")
    for _ in range(3 * KEPT_LINES):
        log.write(DEBUG, b"create_tensor: loading ")
        log.write(CONTINUED, b"tensor blk.0\n")
    assert log.tail() == "flash attention enabled"


def test_the_last_line_that_matches_is_found() -> None:
    log = NativeLog()
    for line in (
        b"x: Flash Attention was auto\n",
        b"freq = 1.5\n",
        b"y: flash attention enabled\n",
        b"end\n",
    ):
        log.write(INFO, line)
    found = log.find(r"FLASH attention (\w+)")
    assert found is not None
    assert found[1] == "enabled"
    assert log.find("flash attention disabled") is None


def test_quiet_keeps_without_printing(capsys: pytest.CaptureFixture[str]) -> None:
    log = NativeLog()
    log.quiet = True
    log.write(WARNING, b"aborted\n")
    assert log.tail() == "aborted"
    assert capsys.readouterr().err == ""


def test_lines_are_bounded_and_dots_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    log = NativeLog()
    for number in range(3 * KEPT_LINES):
        log.write(WARNING, b"%d\n" % number)
    log.write(CONTINUED, b"....")
    log.write(CONTINUED, b"\n")
    assert log.tail(10**9).count("\n") == KEPT_LINES - 1
    assert log.tail(1) == str(3 * KEPT_LINES - 1)
    capsys.readouterr()
    log.clear()
    assert log.tail() == ""


def test_control_bytes_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    NativeLog().write(ERROR, b"bad \x1b[2J\x07 \xff name\n")
    assert capsys.readouterr().err == "llama.cpp: bad \\x1b[2J\\x07 \N{REPLACEMENT CHARACTER} name\n"


def test_importing_the_engine_imports_no_library() -> None:
    code = (
        "import sys, infervisor.worker.engines.llama.engine\n"
        "print(sorted(sys.modules.keys() & {'llama_cpp', 'numpy', 'jinja2', 'asyncio', 'anyio'}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "advice"),
    [(ImportError("no module"), "pip install llama-cpp-python"), (OSError("libllama.so"), "doesn't load")],
)
def test_missing_library_names_interpreter_and_next_step(
    monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "llama_cpp":
            raise error
        return original(name, *rest)

    monkeypatch.setattr(library._Library, "module", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LoadRefused, match=advice) as refused:
        library.load_library()
    assert refused.value.code == "engine_import"
    assert sys.executable in str(refused.value)
