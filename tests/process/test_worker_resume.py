"""A real worker goes on where another one was: the same text, cut at any token, with and without a snapshot."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.generation import Sampling
from infervisor.protocol.messages import Log, Message
from infervisor.supervisor.snapshot_memory import Area as Place
from infervisor.supervisor.snapshot_memory import SnapshotMemory
from infervisor.worker.snapshot_area import DATA_OFFSET, HEADER_BYTES, Header
from tests.helpers.models import build_models, smollm2_path
from tests.helpers.raw_worker import (
    NOISE,
    PATIENCE_S,
    Credit,
    Ended,
    RawWorker,
    Released,
    Started,
    Submit,
    Tokens,
    raw_worker,
    submit,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")

MIB = 1 << 20
GREEDY = Sampling(temperature=0)
LOOSE = Sampling(
    temperature=100.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repeat_penalty=1.2,
    frequency_penalty=0.1,
    repeat_last_n=16,
)
ALL_AT_ONCE = 1.0
"""A share at which a snapshot comes whenever one is due by its distance."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that holds every table model."""
    return build_models(tmp_path_factory.mktemp("models"))


@contextlib.contextmanager
def shared_memory(max_bytes: int = 64 * MIB) -> Iterator[tuple[SnapshotMemory, Place]]:
    """Yield the parent's memory and one area of it, which is all."""
    memory = SnapshotMemory.create(max_bytes)
    assert memory is not None
    memory.divide(1)
    area = memory.take()
    assert area is not None
    try:
        yield memory, area
    finally:
        memory.close()


def place(area: Place) -> list[int]:
    return [area.offset, area.size_bytes]


def headers(memory: SnapshotMemory, area: Place) -> list[tuple[Header | None, bytes]]:
    """Return what the parent's memory holds: each buffer's header and data."""
    with mmap.mmap(memory.fd, area.size_bytes, offset=area.offset, prot=mmap.PROT_READ) as mapped:
        half = area.size_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        found: list[tuple[Header | None, bytes]] = []
        for start in (0, half):
            header = Header.unpack(mapped[start : start + HEADER_BYTES])
            size = 0 if header is None else header.data_bytes
            found.append((header, mapped[start + DATA_OFFSET : start + DATA_OFFSET + size]))
        return found


def snapshot_tokens(memory: SnapshotMemory, area: Place) -> int:
    """Return how many tokens the newest snapshot has, 0 without one."""
    whole = [header for header, _ in headers(memory, area) if header is not None]
    return max(whole, key=lambda header: header.generation).tokens if whole else 0


@dataclass
class Answer:
    """What a worker said from some token on."""

    started: Started
    ids: list[int]
    texts: list[str]
    ended: Ended

    @property
    def text(self) -> str:
        """The text from there on."""
        return "".join(self.texts) + self.ended.text


def ask(worker: RawWorker, request: Submit) -> Answer:
    """Submit and take everything until the release."""
    worker.send(request)
    return follow(worker, request.id, len(request.delivered))


def follow(worker: RawWorker, attempt_id: int, first: int) -> Answer:
    started = worker.expect(Started, attempt_id)
    ids: list[int] = []
    texts: list[str] = []
    while True:
        message = next_of_attempt(worker)
        if isinstance(message, Ended):
            worker.expect(Released, attempt_id)
            return Answer(started, ids, texts, message)
        assert isinstance(message, Tokens)
        assert (message.id, message.index) == (attempt_id, first + len(ids))
        ids += [token[0] for token in message.tokens]
        texts += [token[1] for token in message.tokens]


def next_of_attempt(worker: RawWorker) -> Message:
    """Return the next message that isn't noise; patience begins anew with each beat, since a prompt may be long."""
    while isinstance(message := worker.next_message(noise=True), NOISE):
        pass
    return message


def some_tokens(worker: RawWorker, attempt_id: int, count: int) -> tuple[list[int], str]:
    """Take at least `count` tokens that come one by one."""
    ids: list[int] = []
    text = ""
    while len(ids) < count:
        message = next_of_attempt(worker)
        assert isinstance(message, Tokens)
        assert message.id == attempt_id
        ids += [token[0] for token in message.tokens]
        text += "".join(token[1] for token in message.tokens)
    return ids, text


def kill(worker: RawWorker, attempt_id: int) -> list[int]:
    """Kill the worker; return the ids of the tokens that were still in the pipe."""
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.exit_code() == -signal.SIGKILL
    ids: list[int] = []
    with contextlib.suppress(EOFError):
        while True:
            message = worker.expect(Tokens, attempt_id)
            ids += [token[0] for token in message.tokens]
    return ids


# --- every index -------------------------------------------------------------------------------------

SCRIPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "words": ({"text": "so it goes on and on"}, {}),
    "half characters": ({"text": "ä🦙ö🦙", "split": "bytes"}, {}),
    "a broken character at the end": ({"tokens": [b"a", b"\xf0\x9f", b"\xa6"]}, {}),
    "a stop string held back, then released": ({"text": "abcabxabcy", "split": "characters"}, {"stop": ["abcy!"]}),
    "a stop string across tokens": ({"text": "one two three four"}, {"stop": ["wo thr", "zzz"]}),
    "a stop string on the last token": ({"text": "one two"}, {"stop": ["two"]}),
    "max_tokens": ({}, {"max_tokens": 5}),
    "max_tokens inside a stop string": ({"text": "a b c d"}, {"max_tokens": 3, "stop": ["b c d"]}),
    "a full context": ({"context_tokens": 8}, {}),
    "several tokens in a step": ({"text": "a b c d e f g", "step_tokens": 3}, {"stop": [" f"]}),
    "ignore_eos": ({"text": "a b c"}, {"ignore_eos": True, "max_tokens": 8}),
    "echo": ({"mode": "echo"}, {}),
    "random": ({"mode": "random"}, {"max_tokens": 6}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_answers_go_on_at_every_token(name: str) -> None:
    options, limits = SCRIPTED[name]
    with raw_worker() as worker:
        worker.load(options)
        goes_on_at_every_token(worker, {"limits": limits})
        worker.shut_down()


TABLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "end token": ("words", {"prompt": "a"}, {}),
    "half characters": ("emoji", {"prompt": "a"}, {}),
    "half characters as a stop string": ("emoji", {"prompt": "a"}, {"stop": ["🦙"]}),
    "held back and released": ("stop", {"prompt": "a"}, {"stop": ["FGHIx", "J!"]}),
    "stop string across tokens": ("stop", {"prompt": "a"}, {"stop": ["FGH"]}),
    "max_tokens": ("loop", {"prompt": "c"}, {"max_tokens": 9}),
    "a full context": ("loop", {"prompt": "a" * 245}, {}),
    "ignore_eos": ("words", {"prompt": "a"}, {"ignore_eos": True, "max_tokens": 10}),
    "drawn, with penalties": ("loop", {"prompt": "cab", "sampling": LOOSE}, {"max_tokens": 24, "ignore_eos": True}),
    "a long prompt": ("loop", {"prompt": "abc" * 50}, {"max_tokens": 6}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_table_models_go_on_at_every_token(models: Path, name: str) -> None:
    model, asked, limits = TABLES[name]
    with raw_worker() as worker:
        worker.load({"threads": 1, "reproducible": True}, "llama", str(models / f"{model}.gguf"))
        goes_on_at_every_token(worker, {"sampling": GREEDY, **asked, "limits": limits})
        worker.shut_down()


def goes_on_at_every_token(worker: RawWorker, asked: dict[str, Any]) -> None:
    whole = ask(worker, submit(1, **asked))
    assert len(whole.ids) >= 2
    for cut in range(1, len(whole.ids) + 1):
        rest = ask(worker, submit(1 + cut, delivered=whole.ids[:cut], **asked))
        assert rest.ids == whole.ids[cut:], cut
        assert rest.texts == whole.texts[cut:], cut
        assert (rest.ended.text, rest.ended.why) == (whole.ended.text, whole.ended.why), cut
        assert rest.ended.usage["completion_tokens"] == len(whole.ids)
        ended_at_once = cut == len(whole.ids) and whole.ended.why != "stop"
        assert (rest.ended.usage["computed_tokens"] == 0) == ended_at_once, cut
        assert rest.ended.usage["prompt_tokens"] == whole.ended.usage["prompt_tokens"]


# --- across a kill, with snapshots ---------------------------------------------------------------------


def test_scripted_prompt_is_not_read_again() -> None:
    options = {"prefill_s": 1.0, "slice_s": 0.1, "pace_s": 0.002}
    asked: dict[str, Any] = {"prompt": "w " * 400, "limits": {"max_tokens": 60}}
    with shared_memory() as (memory, area):
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, snapshot_share=ALL_AT_ONCE)
            worker.send(submit(1, snapshot=place(area), **asked))
            assert worker.expect(Started, 1).cached_tokens == 0
            ids, text = some_tokens(worker, 1, 30)
            ids += kill(worker, 1)
        kept = snapshot_tokens(memory, area)
        assert kept >= 400 + 30 - 8 - 1, "the newest snapshot is a few tokens old"
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, snapshot_share=ALL_AT_ONCE)
            rest = ask(worker, submit(1, snapshot=place(area), delivered=ids, **asked))
            assert rest.started.cached_tokens == rest.ended.usage["cached_tokens"] == kept
            assert len(ids) + len(rest.ids) == 60
            assert rest.text.startswith(f"w{len(ids)} ")
            assert text.startswith("w0 ")
            worker.shut_down()


def test_a_killed_reading_goes_on_at_its_snapshot() -> None:
    options = {"prefill_s": 400.0, "slice_s": 0.01}
    asked: dict[str, Any] = {"prompt": "w " * 40_000, "limits": {"max_tokens": 1}}
    with shared_memory() as (memory, area):
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, snapshot_share=ALL_AT_ONCE)
            worker.send(submit(1, snapshot=place(area), **asked))
            worker.expect(Started, 1)
            wait_for_snapshot(memory, area, worker)
            assert kill(worker, 1) == []
        kept = snapshot_tokens(memory, area)
        assert 8 <= kept < 40_000
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, snapshot_share=ALL_AT_ONCE)
            worker.send(submit(2, snapshot=place(area), **asked))
            assert worker.expect(Started, 2).cached_tokens == kept


def wait_for_snapshot(memory: SnapshotMemory, area: Place, worker: RawWorker) -> None:
    for _ in range(int(PATIENCE_S / 0.005)):
        if snapshot_tokens(memory, area):
            return
        # Memory has no event to wait for: poll, bounded.
        worker._output_read.join(0.005)
    pytest.fail("no snapshot came")


@pytest.mark.parametrize("sampling", [GREEDY, LOOSE], ids=["greedy", "drawn"])
def test_table_model_goes_on_from_a_snapshot_after_each_of_several_kills(
    models: Path, sampling: Sampling
) -> None:
    model = str(models / "long_loop.gguf")
    options = {"threads": 1, "reproducible": True}
    limits = {"max_tokens": 160, "ignore_eos": True}
    asked: dict[str, Any] = {"prompt": "cab" * 40, "sampling": sampling, "limits": limits}
    with raw_worker() as worker:
        worker.load(options, "llama", model)
        whole = ask(worker, submit(1, **asked))
        worker.shut_down()
    ids: list[int] = []
    with shared_memory() as (memory, area):
        for count in (20, 30, 25):
            with raw_worker(snapshots=memory.fd) as worker:
                worker.load(options, "llama", model, ALL_AT_ONCE)
                kept = snapshot_tokens(memory, area)
                worker.send(submit(1, snapshot=place(area), delivered=ids, credit=len(ids) + count, **asked))
                assert worker.expect(Started, 1).cached_tokens == kept
                ids += some_tokens(worker, 1, count)[0]
                assert kill(worker, 1) == [], "credit was used up"
            assert snapshot_tokens(memory, area) > kept
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, "llama", model, ALL_AT_ONCE)
            rest = ask(worker, submit(1, snapshot=place(area), delivered=ids, **asked))
            assert ids + rest.ids == whole.ids
            assert rest.started.cached_tokens > len("cab" * 40)
            worker.shut_down()


@pytest.mark.real_model
def test_the_real_model_reads_nothing_again_of_a_long_prompt() -> None:
    model = str(smollm2_path())
    options = {"threads": 2, "reproducible": True}
    asked: dict[str, Any] = {
        "prompt": "The quick brown fox jumps over the lazy dog. " * 150,
        "sampling": Sampling(temperature=0.8, repeat_penalty=1.1),
        "limits": {"max_tokens": 60, "ignore_eos": True},
    }
    size = 256 * MIB
    with shared_memory(size) as (memory, area), shared_memory(size) as (copy, _):
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, "llama", model, 0.1)
            worker.send(submit(1, snapshot=place(area), credit=35, **asked))
            prompt_tokens = worker.expect(Started, 1).prompt_tokens
            assert prompt_tokens > 1_500
            ids, _ = some_tokens(worker, 1, 35)
            # What a death would leave behind now; then see how it goes on without one.
            copy_memory(memory, copy)
            worker.send(Credit(1, 59))
            undisturbed, _ = some_tokens(worker, 1, 24)
            kill(worker, 1)
        kept = snapshot_tokens(copy, area)
        with raw_worker(snapshots=copy.fd) as worker:
            worker.load(options, "llama", model, 0.1)
            rest = ask(worker, submit(1, snapshot=place(area), delivered=ids, **asked))
            assert rest.started.cached_tokens == kept >= prompt_tokens - 1
            assert rest.ids[:-1] == undisturbed
            worker.shut_down()


def copy_memory(source: SnapshotMemory, target: SnapshotMemory) -> None:
    """Copy what has been written."""
    offset = 0
    with contextlib.suppress(OSError):  # no more data
        while True:
            offset = os.lseek(source.fd, offset, os.SEEK_DATA)
            os.pwrite(target.fd, os.pread(source.fd, MIB, offset), offset)
            offset += MIB


# --- what may never do harm ----------------------------------------------------------------------------


def spoil(memory: SnapshotMemory, area: Place, what: str) -> None:
    with mmap.mmap(memory.fd, area.size_bytes, offset=area.offset) as mapped:
        half = area.size_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        for start in (0, half):
            if what == "garbage":
                mapped[start : start + 4096] = random.Random(start).randbytes(4096)
            elif what == "cut":
                mapped[start + 40 : start + half] = bytes(half - 40)
            elif what == "bit":
                mapped[start + 50] ^= 4


@pytest.mark.parametrize("what", ["garbage", "cut", "bit", "other options", "other prompt"])
def test_a_bad_snapshot_is_not_used_and_the_text_is_right(models: Path, what: str) -> None:
    model = str(models / "loop.gguf")
    options: dict[str, Any] = {"threads": 1}
    asked: dict[str, Any] = {"prompt": "c" * 40, "sampling": GREEDY, "limits": {"max_tokens": 60}}
    with shared_memory() as (memory, area):
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, "llama", model, ALL_AT_ONCE)
            worker.send(submit(1, snapshot=place(area), credit=30, **asked))
            worker.expect(Started, 1)
            ids, _ = some_tokens(worker, 1, 30)
            kill(worker, 1)
        assert snapshot_tokens(memory, area) >= 40
        spoil(memory, area, what)
        if what == "other options":
            options["rope_freq_base"] = 5000.0
        if what == "other prompt":
            asked["prompt"] = "b" + "c" * 39
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load(options, "llama", model, ALL_AT_ONCE)
            rest = ask(worker, submit(1, snapshot=place(area), delivered=ids, **asked))
            assert rest.started.cached_tokens == 0
            assert rest.text == ("abc" * 20)[30:]
            assert not any(isinstance(message, Log) for message in worker.seen), "that is no fault"
            worker.shut_down()


def test_a_snapshot_whose_data_the_library_refuses_is_read_again(models: Path) -> None:
    asked: dict[str, Any] = {"prompt": "c" * 40, "sampling": GREEDY, "limits": {"max_tokens": 60}}
    with shared_memory() as (memory, area):
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load({"threads": 1}, "llama", str(models / "loop.gguf"), ALL_AT_ONCE)
            worker.send(submit(1, snapshot=place(area), credit=30, **asked))
            worker.expect(Started, 1)
            ids, _ = some_tokens(worker, 1, 30)
            kill(worker, 1)
        with mmap.mmap(memory.fd, area.size_bytes, offset=area.offset) as mapped:
            for start in (0, area.size_bytes // 2):
                mapped[start + DATA_OFFSET : start + DATA_OFFSET + 64] = b"\xff" * 64
        with raw_worker(snapshots=memory.fd) as worker:
            worker.load({"threads": 1}, "llama", str(models / "loop.gguf"), ALL_AT_ONCE)
            rest = ask(worker, submit(1, snapshot=place(area), delivered=ids, **asked))
            assert rest.started.cached_tokens == 0
            assert rest.text == ("abc" * 20)[30:]
            worker.shut_down()


@pytest.mark.parametrize(
    "bad",
    [[1 << 40, 1 << 20], [0, 1 << 40], [1, 8192], [0, 0], [0, 4096], [(1 << 64) - 4096, 8192]],
    ids=str,
)
def test_a_bad_place_is_told_once_and_costs_snapshots_alone(bad: Sequence[int]) -> None:
    with shared_memory() as (memory, area), raw_worker(snapshots=memory.fd) as worker:
        worker.load({"text": "so it goes", "prefill_s": 0.05}, snapshot_share=ALL_AT_ONCE)
        for attempt_id in (1, 2):
            answer = ask(worker, submit(attempt_id, "w " * 40, snapshot=bad))
            assert answer.text == "so it goes"
            assert answer.started.cached_tokens == 0
        assert ask(worker, submit(3, "w " * 40, snapshot=place(area))).text == "so it goes"
        logs = [message.text for message in worker.seen if isinstance(message, Log)]
        assert len(logs) == 1
        assert str(bad[0]) in logs[0]
        assert "going on without" in logs[0]
        assert snapshot_tokens(memory, area) > 0, "a good place is still used"
        worker.shut_down()


def test_without_a_descriptor_or_a_share_nothing_is_written() -> None:
    with shared_memory() as (memory, area):
        with raw_worker() as worker:
            worker.load({"text": "so it goes"}, snapshot_share=ALL_AT_ONCE)
            assert ask(worker, submit(1, "w " * 40, snapshot=place(area))).text == "so it goes"
            logs = [message.text for message in worker.seen if isinstance(message, Log)]
            assert ["no shared memory" in text for text in logs] == [True]
            worker.shut_down()
        for share in (None, 0.0):
            with raw_worker(snapshots=memory.fd) as worker:
                worker.load({"text": "so it goes", "prefill_s": 0.05}, snapshot_share=share)
                assert ask(worker, submit(1, "w " * 40, snapshot=place(area))).text == "so it goes"
                worker.shut_down()
        assert memory.used_bytes() == 0


def test_a_buffer_that_is_too_small_keeps_what_it_has(models: Path) -> None:
    # The table model takes about 1,200 bytes a token: a buffer holds some of the prompt, never all of the answer.
    asked: dict[str, Any] = {"prompt": "c" * 60, "sampling": GREEDY, "limits": {"max_tokens": 150}}
    with shared_memory(256 << 10) as (memory, area), raw_worker(snapshots=memory.fd) as worker:
        worker.load({"threads": 1}, "llama", str(models / "loop.gguf"), ALL_AT_ONCE)
        assert ask(worker, submit(1, snapshot=place(area), **asked)).text == "abc" * 50
        kept = snapshot_tokens(memory, area)
        assert 60 <= kept < 200
        delivered = ask(worker, submit(2, **asked)).ids[:100]
        rest = ask(worker, submit(3, snapshot=place(area), delivered=delivered, **asked))
        assert rest.started.cached_tokens == kept
        assert rest.text == ("abc" * 50)[100:]
        worker.shut_down()


def test_snapshot_memory_is_nobodys_to_inherit() -> None:
    with shared_memory() as (memory, _), raw_worker(snapshots=memory.fd) as worker:
        worker.load({}, snapshot_share=ALL_AT_ONCE)
        flags = Path(f"/proc/{worker.pid}/fdinfo/{memory.fd}").read_text()
        octal = next(line for line in flags.splitlines() if line.startswith("flags"))
        assert int(octal.split()[1], 8) & os.O_CLOEXEC
        worker.shut_down()


WRITER = """
import mmap, os, sys
from infervisor.worker.snapshot_area import Area, hash_of
fd, size = int(sys.argv[1]), int(sys.argv[2])
area = Area(memoryview(mmap.mmap(fd, size)), hash_of(b"model"))
for tokens in range(1, 1 << 20):
    piece = tokens.to_bytes(8, "little") * 1024
    def write(memory, piece=piece):
        pieces = area.capacity_bytes // len(piece)
        for index in range(pieces):
            memory[index * len(piece) : (index + 1) * len(piece)] = piece
            os.write(1, b".")
        return pieces * len(piece)
    area.save(range(tokens), write)
"""


def test_a_writer_killed_at_any_moment_leaves_nothing_torn() -> None:
    chance = random.Random(4)
    torn = 0
    with shared_memory(2 * MIB) as (memory, area):
        for _ in range(25):
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(memory.fd), str(area.size_bytes)],
                stdout=subprocess.PIPE, pass_fds=[memory.fd],
            )  # fmt: skip
            assert writer.stdout is not None
            for _ in range(chance.randrange(300, 900)):  # a snapshot has some 120 pieces
                assert os.read(writer.stdout.fileno(), 1)
            writer.kill()
            writer.wait(PATIENCE_S)
            writer.stdout.close()
            found = headers(memory, area)
            whole = [(header, data) for header, data in found if header is not None]
            torn += len(found) - len(whole)
            assert whole, "one was always there"
            for header, data in whole:
                assert data == header.tokens.to_bytes(8, "little") * (header.data_bytes // 8)
    assert torn, "no kill fell into a write: they all came between two"
