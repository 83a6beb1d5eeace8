"""The examples run as they are, as a reader would run them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest
from jupyter_client.manager import KernelManager

from tests.docs.markdown import ROOT
from tests.helpers.display import click, press, screen, type_text
from tests.helpers.host_process import host
from tests.helpers.waiting import is_gone, wait_gone

WITHIN_S = 180
ENGINES = ["scripted", pytest.param("llama", marks=pytest.mark.real_model)]


def run(name: str, engine: str, folder: Path, *arguments: str) -> str:
    """Run an example in another folder and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), "--engine", engine, *arguments],
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
    reports = re.findall(
        r"^  \[queued .* · (\d+) tokens · (?:\d+ of the prompt cached · )?(\w+)\]$",
        printed,
        flags=re.MULTILINE,
    )
    assert len(reports) == 4, printed
    assert all(reason in ("length", "stop") for _, reason in reports[:3])
    assert reports[3][1] == "cancelled"
    assert "after the cancel (in_band)" in printed
    # Three came at once, and there were four places, or one.
    waited = 0 if engine == "llama" else 2
    assert f"most requests that waited at once: {waited}; restarts: 0" in printed


@pytest.mark.parametrize("engine", ENGINES)
def test_four_streams_come_side_by_side_and_stopping_one_leaves_the_others_whole(
    engine: str, tmp_path: Path
) -> None:
    printed = run("side_by_side.py", engine, tmp_path)
    reports = re.findall(
        r"^\[(\d): queued .* · \d+ tokens · (?:(\d+) of the prompt cached · )?(\w+)\]$",
        printed,
        flags=re.MULTILINE,
    )
    assert [number for number, *_ in reports] == ["0", "1", "2", "3"], printed
    assert [reason for *_, reason in reports].count("cancelled") == 1
    assert (reports[2][2], "after the cancel (in_band)" in printed) == ("cancelled", True)
    assert "[slots: 4; most requests that waited at once: 0]" in printed
    lines = re.findall(r"^(\d)  (.*)$", printed, flags=re.MULTILINE)
    # Side by side: before any of the three that go on has said its last line, each has said its first.
    numbers = [int(number) for number, _ in lines if number != "2"]
    assert {0, 1, 3} == set(numbers[: min(len(numbers) - numbers[::-1].index(n) for n in (0, 1, 3))])
    if engine == "scripted":
        for number in (0, 1, 3):
            said = "".join(f"{text} " for n, text in lines if n == str(number))
            assert said.split() == [f"w{index}" for index in range(48)]
    else:
        # They begin with the same system message, which one of them read.
        assert sum(int(cached or 0) > 60 for _, cached, _ in reports) >= 3, printed


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_survives_the_crash_of_its_worker(engine: str, tmp_path: Path) -> None:
    printed = run("survive_a_crash.py", engine, tmp_path)
    ready = re.findall(r"^\[worker (\d+) is ready after [\d.]+ s\]$", printed, flags=re.MULTILINE)
    lost = re.findall(r"^\[worker (\d+) crashed: \d+ tokens have arrived\]$", printed, flags=re.MULTILINE)
    went_on = re.findall(r"^\[worker (\d+) goes on after [\d.]+ s\]$", printed, flags=re.MULTILINE)
    assert len(set(ready)) == 2, printed
    assert (lost, went_on) == (ready[:1], ready[1:])
    assert re.search(
        rf"^\[outlived worker {lost[0]}: \d+ tokens from a snapshot\]$", printed, flags=re.MULTILINE
    )
    assert re.search(
        r" · 60 tokens · resumed 1 × \(paused [\d.]+ m?s\) · length\]$", printed, flags=re.MULTILINE
    )
    assert "restarts: {'crashed': 1}]" in printed
    if engine == "scripted":
        said = re.sub(r"\n?^\[.*?\]\n", "", printed, flags=re.MULTILINE)
        assert said.split() == [f"w{number}" for number in range(60)]


def test_an_answer_ends_with_the_crash_of_its_worker_if_that_is_wanted(tmp_path: Path) -> None:
    printed = run("survive_a_crash.py", "scripted", tmp_path, "--on-crash", "fail")
    assert "[the answer ended: worker_crashed]" in printed
    assert "resumed" not in printed
    assert "w59" not in printed


@pytest.mark.parametrize("engine", ENGINES)
def test_trio_app_answers_side_by_side_and_cancels_what_takes_too_long(engine: str, tmp_path: Path) -> None:
    printed = run("trio_app.py", engine, tmp_path)
    reports = re.findall(
        r"^  \[queued .* · (\d+) tokens · (?:\d+ of the prompt cached · )?(\w+)\]$",
        printed,
        flags=re.MULTILINE,
    )
    assert len(reports) == 3, printed
    assert all(reason in ("length", "stop") for _, reason in reports[:2])
    assert reports[2][1] == "cancelled"
    assert re.search(r"^  \d+ pieces within 0.5 s$", printed, flags=re.MULTILINE)
    assert "after the cancel (in_band)" in printed


# --- another interpreter -------------------------------------------------------------------------------


def other_environment(folder: Path, *, has_everything: bool) -> Path:
    """Return the interpreter of a new environment that has infervisor and msgpack, or all that this one has.

    If there is another Python on this machine that will do, it is that one's.
    """
    candidates = [] if has_everything else ["/usr/bin/python3", "/usr/local/bin/python3"]
    base = next((path for path in candidates if _will_do(path)), sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True, timeout=WITHIN_S)
    (site,) = folder.glob("lib/python3*/site-packages")
    if has_everything:
        here = Path(msgpack.__file__).parents[1]
        (site / "rest.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
    else:
        # What `pip install --no-deps` would put there, as real files.
        for package in (Path(msgpack.__file__).parent, ROOT / "src/infervisor"):
            shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "bin/python"


def _will_do(path: str) -> bool:
    """Whether this is a Python of 3.11 or newer that can make an environment."""
    probe = "import sys, venv; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([path, "-c", probe], capture_output=True, timeout=WITHIN_S).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("engine", ENGINES)
def test_the_worker_runs_in_an_environment_of_its_own(engine: str, tmp_path: Path) -> None:
    python = other_environment(tmp_path / "other", has_everything=engine == "llama")
    printed = run("other_interpreter.py", engine, tmp_path, "--python", str(python))
    assert f"this process: {sys.executable}, " in printed
    version = subprocess.run([python, "--version"], capture_output=True, text=True).stdout.split()[1]
    assert re.search(
        rf"^the worker: {re.escape(str(python))}, .*'python': '{version}'", printed, re.MULTILINE
    )
    assert "the model library is loaded here: False" in printed
    if engine == "scripted":
        assert "w0 w1 w2 " in printed
        # It can't have borrowed anything: what the parent runs on isn't there.
        lacks = subprocess.run([python, "-P", "-c", "import anyio"], capture_output=True, cwd=tmp_path)
        assert lacks.returncode == 1


def test_an_environment_that_cannot_serve_is_named(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare/bin/python")
    command = [sys.executable, str(ROOT / "examples/other_interpreter.py"), "--engine", "scripted"]
    done = subprocess.run([*command, "--python", python], capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1
    assert "can't serve: " in done.stderr
    assert "install infervisor there" in done.stderr


# --- a window ------------------------------------------------------------------------------------------

WATCHED = """
import functools, importlib.util, sys, time
spec = importlib.util.spec_from_file_location("tk_window", sys.argv.pop(1))
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

class Watched(example.Window):
    \"\"\"Tells where its widgets are, what its status says, and how long it stood still at most until then.\"\"\"

    def __init__(self, supervisor):
        super().__init__(supervisor)
        self.update()
        for widget in (self.entry, self.send_button, self.stop_button):
            print(widget.winfo_rootx() + 10, widget.winfo_rooty() + 10, flush=True)
        # What the window manager's button does, where there is none.
        self.bind("<Escape>", lambda _: self.destroy())
        self.shown = 0
        self.stoppable = False
        self.worst, self.last = 0.0, time.monotonic()
        # The worker may have been quicker than the window.
        self.tell(self.status.get())
        self.status.trace_add("write", lambda *_: self.tell(self.status.get()))
        self.tick()

    def tick(self):
        now = time.monotonic()
        self.worst, self.last = max(self.worst, now - self.last), now
        shown = len(self.answer.get("1.0", "end-1c"))
        if shown and not self.shown:
            self.tell("text")
        self.shown = shown
        stoppable = str(self.stop_button["state"]) == "normal"
        if stoppable and not self.stoppable:
            self.tell("stoppable")
        self.stoppable = stoppable
        self.after(5, self.tick)

    def tell(self, what):
        pid = self.supervisor.status().worker_pid
        print(f"{what}|{pid}|{self.worst:.3f}|{self.prompt.get()}", flush=True)
        self.worst = 0.0

def tell(event):
    if type(event).__name__ == "WorkerExited":
        print("gone", event.pid, flush=True)

example.Window = Watched
example.BlockingSupervisor = functools.partial(example.BlockingSupervisor, on_event=tell)
example.main()
"""
NEVER_FROZEN_S = 1.0
"""No answer, no stop and no dead worker takes the window longer; each takes several seconds here."""


def test_the_window_says_why_the_model_doesnt_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with screen() as display:
        monkeypatch.setenv("DISPLAY", display)
        example = str(ROOT / "examples/tk_window.py")
        with host(WATCHED, example, "--model", "/nowhere.gguf", flags=("-W", "error")) as window:
            said = ""
            while "there is no file /nowhere.gguf" not in said:
                said = window.line()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_window_never_freezes_and_stop_stops(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with screen() as display:
        monkeypatch.setenv("DISPLAY", display)
        example = str(ROOT / "examples/tk_window.py")
        with host(WATCHED, example, "--engine", engine, flags=("-W", "error")) as window:
            entry, send, stop = (window.line() for _ in range(3))
            gaps: list[float] = []

            def until(status: str) -> tuple[str, int]:
                while True:
                    line = window.line()
                    if line.startswith("gone"):
                        continue
                    said, pid, worst, _prompt = line.split("|", 3)
                    gaps.append(float(worst))
                    if said.startswith(status):
                        return said, int(pid) if pid.isdigit() else 0

            until("ready")
            # In the middle of an answer.
            click(display, entry)
            type_text(display, " Tell me a long story.")
            click(display, send)
            until("text")
            click(display, stop)
            said, _ = until("stopped")
            assert re.fullmatch(r"stopped · released after \d+ ms \(in_band\)", said)
            # While the prompt is read: it is long now.
            click(display, entry)
            type_text(display, " and so on" * 200)
            click(display, send)
            until("reading")
            until("stoppable")
            click(display, stop)
            said, pid = until("stopped")
            assert re.fullmatch(r"stopped · released after \d+ ms \(in_band\)", said)
            # While the worker stands still: only a kill helps, after the graces.
            click(display, send)
            until("reading")
            until("stoppable")
            os.kill(pid, signal.SIGSTOP)
            click(display, stop)
            said, _ = until("stopped")
            assert re.fullmatch(r"stopped · released after [\d.]+ s \(kill\)", said)
            assert max(gaps) < NEVER_FROZEN_S, gaps
            # Closed in the middle of an answer of the next worker, it ends and leaves nothing.
            click(display, send)
            until("reading")
            click(display, entry)
            press(display, "Escape")
            code, said, errors = window.finish()
            assert (code, errors) == (0, "")
            gone = int(said.split("gone ")[1])
            assert gone != pid
            assert is_gone(gone)


# --- a notebook ----------------------------------------------------------------------------------------


class Kernel:
    """A real kernel, used as a notebook uses it."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        # Sockets in the file system: nothing is open to the network, and nothing is warned of.
        self.manager.transport = "ipc"
        self.manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WITHIN_S)

    def run(self, code: str, on_print: Callable[[], None] = lambda: None) -> tuple[str, str]:
        """Run a cell; return what it printed and the name of its error, or ""."""
        printed: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
                on_print()

        reply = self.client.execute_interactive(code, timeout=WITHIN_S, output_hook=hook)
        return "".join(printed), reply["content"].get("ename", "")


@contextlib.contextmanager
def kernel(folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Yield a kernel whose files are in a folder of this test."""
    # Short, because a socket's path may not be longer than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nb") as short:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            monkeypatch.setenv(name, short)
        monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        monkeypatch.setenv("ENGINE", engine)
        monkeypatch.chdir(folder)
        running = Kernel()
        try:
            yield running
        finally:
            running.client.stop_channels()
            if running.manager.is_alive():
                running.manager.shutdown_kernel(now=True)


def cells() -> list[str]:
    """Return the code of the notebook's cells."""
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


WORKER = "print(supervisor.status().worker_pid)"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernel(tmp_path, engine, monkeypatch) as notebook:
        done = [notebook.run(code) for code in cells()]
    assert [error for _, error in done] == [""] * len(done), done
    printed = [text for text, _ in done]
    assert printed[0].startswith(engine)
    assert printed[1].strip()
    assert re.search(r" · (length|stop)$", printed[2].strip())
    assert printed[-1] == "stopped\n"


def test_an_interrupted_cell_ends_its_request_and_a_restarted_kernel_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = (
        "async with supervisor.stream('hello') as stream:\n"
        "    async for chunk in stream:\n"
        "        print(chunk, flush=True)\n"
        "        await asyncio.sleep(0.05)\n"
    )
    with kernel(tmp_path, "scripted", monkeypatch) as notebook:
        assert notebook.run(cells()[0])[1] == ""
        prints = itertools.count(1)
        _, error = notebook.run(
            endless, lambda: notebook.manager.interrupt_kernel() if next(prints) == 3 else None
        )
        assert error in ("CancelledError", "KeyboardInterrupt")
        assert "cancelled" in notebook.run("print(stream.report.to_line())")[0]
        assert notebook.run("print(await supervisor.generate('x', max_tokens=3))")[0] == "w0 w1 w2 \n"
        # In a cell that waits without awaiting, blocking calls would stop the kernel's own loop.
        blocking = "import infervisor; infervisor.BlockingSupervisor(engine='scripted').__enter__()"
        assert notebook.run(blocking)[1] == "UsageError"
        pid = int(notebook.run(WORKER)[0])
        notebook.client.execute(endless)
        notebook.manager.restart_kernel(now=True)
        wait_gone(pid, within_s=WITHIN_S)


# --- a web application ---------------------------------------------------------------------------------

SERVE = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_the_web_application_serves_threads_and_notices_who_leaves(engine: str) -> None:
    example = str(ROOT / "examples/flask_app.py")
    with host(SERVE, example, "--engine", engine, "--port", "0", flags=("-W", "error")) as server:
        address = urlsplit(server.line())
        assert address.hostname == "127.0.0.1"

        def ask(path: str) -> HTTPResponse:
            connection = HTTPConnection("127.0.0.1", address.port, timeout=WITHIN_S)
            connection.request("GET", path)
            return connection.getresponse()

        with ThreadPoolExecutor(3) as pool:
            whole = [
                pool.submit(lambda: ask("/answer?q=hello&max_tokens=5").read().decode()) for _ in range(3)
            ]
            for answer in whole:
                events = answer.result(WITHIN_S).strip().split("\n\n")
                assert events[-1].startswith("event: end")
                assert any(event.startswith('data: {"text": ') for event in events)
        assert all(re.search(r" · (length|stop)$", server.line()) for _ in whole)
        refused = ask("/answer?q=hello&max_tokens=0")
        assert (refused.status, json.loads(refused.read())["code"]) == (400, "invalid_request")
        # Who leaves in the middle of an answer, or while the prompt is read and there is nothing to send.
        for question, first in (("Tell+me+a+long+story", b"data: "), ("and+so+on+" * 300, b": waiting")):
            answer = ask(f"/answer?max_tokens=100000&q={question}")
            while not answer.readline().startswith(first):
                pass
            answer.close()
            assert server.line().endswith("client_disconnected")
        # Who left has left nothing: the next one is served at once.
        assert b"event: end" in ask("/answer?q=hello&max_tokens=3").read()
        server.line()
        assert json.loads(ask("/status").read()) == {"worker": "ready", "in_flight": 0, "waiting": 0}
        server.signal(signal.SIGINT)
        code, _, _ = server.finish()
        assert code == 0


def test_every_example_is_named_in_the_readme_of_the_examples() -> None:
    text = (ROOT / "examples/README.md").read_text()
    for path in (ROOT / "examples").iterdir():
        if path.name not in ("README.md", "__pycache__"):
            target = f"{path.name}/README.md" if path.is_dir() else path.name
            assert f"({target})" in text, path.name
