"""Decode rate through `Supervisor`, against llama-cpp-python in the same process and a bare low-level loop.

SmolLM2, greedy, 128 tokens, 2 threads, the same raw prompt. The rate is (tokens − 1) ÷ (last − first token), as
each side's reader sees it. The three take turns, each in a process of its own that stays loaded; `supervise run` is
measured beside them, in a fresh process each time.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.figures import Figure, ratio, take_turns
from infervisor import default_model

PROMPT = "Once upon a time there was a small village by the sea, where"
TOKENS = 128
THREADS = 2
CONTEXT = 4096

_RATE = "print((len(stamps) - 1) / ((stamps[-1] - stamps[0]) / 1e9), flush=True)"

SUPERVISOR = f"""
import sys, time, anyio
from infervisor import Supervisor
path, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
async def main():
    async with Supervisor(path, options={{"n_ctx": {CONTEXT}, "threads": {THREADS}}}) as supervisor:
        print("ready", flush=True)
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            stamps = []
            async with supervisor.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
                async for chunk in stream:
                    stamps += [time.monotonic_ns()] * len(chunk.token_ids)
            assert len(stamps) == tokens, len(stamps)
            {_RATE}
anyio.run(main)
"""

CREATE_COMPLETION = f"""
import sys, time, llama_cpp
path, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = llama_cpp.Llama(path, n_ctx={CONTEXT}, n_threads={THREADS}, n_threads_batch={THREADS}, verbose=False)
print("ready", flush=True)
while sys.stdin.readline():
    stamps = []
    for _ in model.create_completion(prompt, max_tokens=tokens, temperature=0, stream=True):
        stamps.append(time.monotonic_ns())
    stamps = stamps[:tokens]  # the last chunk carries only the finish reason
    assert len(stamps) == tokens, len(stamps)
    {_RATE}
"""

BARE_LOOP = f"""
import ctypes, sys, time, llama_cpp as llama
path, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
quiet = llama.llama_log_callback(lambda level, text, data: None)
llama.llama_log_set(quiet, ctypes.c_void_p(0))
llama.llama_backend_init()
model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
settings = llama.llama_context_default_params()
settings.n_ctx, settings.n_threads, settings.n_threads_batch = {CONTEXT}, {THREADS}, {THREADS}
context = llama.llama_init_from_model(model, settings)
vocabulary = llama.llama_model_get_vocab(model)
sampler = llama.llama_sampler_init_greedy()
text = prompt.encode()
ids = (ctypes.c_int32 * 256)()
count = llama.llama_tokenize(vocabulary, text, len(text), ids, 256, True, True)
piece = ctypes.create_string_buffer(256)
token = (ctypes.c_int32 * 1)()
print("ready", flush=True)
while sys.stdin.readline():
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    assert llama.llama_decode(context, llama.llama_batch_get_one(ids, count)) == 0
    stamps = []
    while len(stamps) < tokens:
        token[0] = llama.llama_sampler_sample(sampler, context, -1)
        llama.llama_token_to_piece(vocabulary, token[0], piece, 256, 0, True)
        stamps.append(time.monotonic_ns())
        assert llama.llama_decode(context, llama.llama_batch_get_one(token, 1)) == 0
    {_RATE}
"""


class Side:
    """A process that measures a rate each time that it is asked."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(default_model()), PROMPT, str(TOKENS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measuring process ended with code {self.process.wait()}")
        return line.strip()

    def rate(self) -> float:
        """Return tokens/s of one answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._line())


@contextlib.contextmanager
def side(program: str) -> Iterator[Side]:
    """Yield a measuring process and end it afterwards."""
    made = Side(program)
    try:
        yield made
    finally:
        assert made.process.stdin is not None
        made.process.stdin.close()
        made.process.wait(timeout=30)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy meanwhile."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        try:
            yield
        finally:
            burner.kill()


def supervise_run() -> float:
    """Return tokens/s of one `supervise run`, from the stamps of its JSON lines."""
    done = subprocess.run(
        [
            sys.executable, "-m", "infervisor.supervisor.cli", "run", "--json", "--raw",
            "--max-tokens", str(TOKENS), "--temperature", "0", "--ctx", str(CONTEXT), "--threads", str(THREADS),
            str(default_model()), PROMPT,
        ],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    report = next(line for line in map(json.loads, done.stdout.splitlines()) if line["type"] == "report")
    assert report["usage"]["completion_tokens"] == TOKENS, report
    return float(report["figures"]["tokens_per_s"])


def measure(quick: bool) -> list[Figure]:
    """Measure all four in turn."""
    rounds = 3 if quick else 21
    with side(SUPERVISOR) as supervisor, side(CREATE_COMPLETION) as in_process, side(BARE_LOOP) as bare:
        measured = take_turns([supervisor.rate, in_process.rate, bare.rate, supervise_run], rounds)
        with busy_core():
            busy = take_turns([supervisor.rate, in_process.rate], 2 if quick else 7)
    return [
        ratio(
            "decode_vs_in_process",
            "decode rate through `Supervisor` ÷ llama-cpp-python in the application's process",
            [(ours, theirs) for ours, theirs, _, _ in measured], ("≥", 1.0),
        ),
        ratio(
            "decode_vs_bare_loop",
            "decode rate through `Supervisor` ÷ a bare loop on llama.cpp's own API",
            [(ours, bare_rate) for ours, _, bare_rate, _ in measured], ("≥", 0.95),
        ),
        ratio(
            "run_vs_in_process",
            "decode rate of `supervise run` ÷ llama-cpp-python in the application's process",
            [(run, theirs) for _, theirs, _, run in measured], ("≥", 0.95),
        ),
        ratio(
            "decode_vs_in_process_busy",
            "the same as the first, while another program keeps one core busy",
            [(ours, theirs) for ours, theirs in busy], None,
        ),
    ]  # fmt: skip
