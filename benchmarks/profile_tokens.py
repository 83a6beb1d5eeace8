"""Where the time of a token goes, in the parent and in the worker: py-spy's samples while SmolLM2 answers.

The parent's time is the CPU time that the operating system counts. The worker's is what a token takes besides
`llama_decode`, since the model's own time is none of ours. A function's share is that of the main thread's samples
in which it was the innermost one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import anyio
import psutil

from benchmarks.figures import Figure
from infervisor import Supervisor, default_model

ROWS = 12
WAITING = "EpollSelector.select"
DECODE = "Decoder._call (decoder.py)"
RATE_HZ = 500
FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^:]*)(:\d+)?\)$")


def _recorder(pid: int, seconds: int, to: Path) -> subprocess.Popen[bytes]:
    # fmt: off
    command = [
        "--pid", str(pid), "--duration", str(seconds), "--rate", str(RATE_HZ), "--threads",
        "--format", "raw", "-o", str(to),
    ]
    # fmt: on
    py_spy = Path(sys.executable).with_name("py-spy")
    return subprocess.Popen(
        [str(py_spy), "record", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _own_time(raw: str) -> dict[str, float]:
    """Return function → share of the samples in which it is the innermost frame."""
    samples: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, count = line.rsplit(" ", 1)
        thread, *frames = stack.split(";")
        if "MainThread" not in thread or not frames or frames[-1].startswith(WAITING):
            continue
        innermost = frames[-1]
        found = FRAME.match(innermost)
        name = innermost if found is None else f"{found['function']} ({Path(found['file']).name})"
        samples[name] += int(count)
    total = sum(samples.values()) or 1
    return {name: count / total for name, count in samples.most_common()}


async def _profile(seconds: int) -> list[Figure]:
    me = psutil.Process()
    options = {"n_ctx": 8192, "threads": 2}
    async with Supervisor(default_model(), options=options) as supervisor:
        pid = supervisor.status().worker_pid
        assert pid is not None
        worker = psutil.Process(pid)
        tokens = 0

        async def read_on() -> None:
            nonlocal tokens
            while True:
                async with supervisor.stream(
                    "Once upon a time", max_tokens=400, ignore_eos=True, temperature=0
                ) as stream:
                    async for chunk in stream:
                        tokens += len(chunk.token_ids)

        with tempfile.TemporaryDirectory() as folder:
            files = {"parent": Path(folder) / "parent", "worker": Path(folder) / "worker"}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_on)
                await anyio.sleep(2)
                # First what a token costs, undisturbed; then where it goes.
                before, first = sum(me.cpu_times()[:2]), tokens
                await anyio.sleep(seconds)
                counted = tokens - first
                parent_us = (sum(me.cpu_times()[:2]) - before) / counted * 1e6
                token_us = seconds / counted * 1e6
                for name, process in (("parent", me), ("worker", worker)):
                    with _recorder(process.pid, seconds, files[name]) as recorder:
                        code = await anyio.to_thread.run_sync(recorder.wait)
                        if code:
                            assert recorder.stderr is not None
                            raise RuntimeError(f"py-spy failed: {recorder.stderr.read().decode()[-500:]}")
                tasks.cancel_scope.cancel()
            shares = {name: _own_time(path.read_text()) for name, path in files.items()}
    decode = shares["worker"].pop(DECODE, 0.0)
    what = {
        "parent": ("CPU time of the parent for a token", parent_us),
        "worker": ("time of the worker for a token, besides `llama_decode`", token_us * (1 - decode)),
    }
    return [
        Figure(
            f"profile_{name}", f"{sentence} (SmolLM2)", round(value), "µs", counted,
            details={"token_us": round(token_us), "own_time_percent": _top(shares[name])},
        )
        for name, (sentence, value) in what.items()
    ]  # fmt: skip


def _top(shares: dict[str, float]) -> dict[str, float]:
    total = sum(shares.values())
    return {function: round(share / total * 100, 1) for function, share in list(shares.items())[:ROWS]}


def measure(quick: bool) -> list[Figure]:
    """Profile both for some seconds each."""
    return anyio.run(_profile, 3 if quick else 15)
