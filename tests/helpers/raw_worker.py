"""A real worker process on raw pipes: no supervisor, no event loop, only the protocol.

Every wait is bounded and for a message, the end of a pipe or the end of the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from infervisor.protocol.codec import Decoder, encode
from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.generation import Limits, Sampling
from infervisor.protocol.messages import (
    Beat,
    Cancel,
    Credit,
    Drain,
    Ended,
    Hello,
    Load,
    Log,
    Message,
    Progress,
    Ready,
    Released,
    Shutdown,
    Started,
    Submit,
    Tokens,
)

PATIENCE_S = 20.0
NOISE = (Beat, Log, Progress)
M = TypeVar("M", bound=Message)


def submit(
    attempt_id: int,
    prompt: str | None = "one two three",
    *,
    messages: list[dict[str, Any]] | None = None,
    sampling: Sampling | Mapping[str, Any] | None = None,
    limits: Limits | Mapping[str, Any] | None = None,
    credit: int = 1_000_000,
    seed: int = 1,
    delivered: Sequence[int] = (),
    snapshot: Sequence[int] | None = None,
    **more: Any,
) -> Submit:
    """Return a submit with defaults. sampling, limits: also raw wire mappings, to send bad ones. more: others."""
    if sampling is None or isinstance(sampling, Sampling):
        sampling = (sampling or Sampling()).to_wire()
    if limits is None or isinstance(limits, Limits):
        limits = (limits or Limits()).to_wire()
    return Submit(
        attempt_id, prompt, messages, sampling, seed, None, True, limits, credit, delivered, snapshot, **more
    )


class RawWorker:
    """One worker and the parent's ends of its pipes."""

    def __init__(
        self,
        *,
        arguments: list[str] | None = None,
        program: Sequence[str] = ("-P", "-m", "infervisor.worker"),
        snapshots: int | None = None,
    ) -> None:
        control, self.control = os.pipe()
        self.frames, frames = os.pipe()
        urgent, self.urgent_fd = os.pipe()
        self.output_fd, output = os.pipe()
        given = arguments or [
            "--control", str(control), "--frames", str(frames), "--urgent", str(urgent),
            "--parent", str(os.getpid()), *(() if snapshots is None else ("--snapshots", str(snapshots))),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, *program, *given],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(control, frames, urgent, *(() if snapshots is None else (snapshots,))),
            process_group=0,
        )
        for fd in (control, frames, urgent, output):
            os.close(fd)
        self._open = {self.control, self.frames, self.urgent_fd}
        self._decoder = Decoder.from_worker()
        self._arrived: list[Any] = []
        self._broken: RemoteProtocolError | None = None
        self.seen: list[Message] = []
        self._output = bytearray()
        self._output_read = threading.Thread(target=self._drain_output)
        self._output_read.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    # --- to the worker -----------------------------------------------------------------------------

    def send(self, *messages: Message) -> None:
        """Write frames, all in one piece."""
        self.send_bytes(b"".join(encode(message) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.control, view) :]

    def cancel_urgently(self, *attempt_ids: int) -> None:
        """The second stage: ids into the urgent pipe, then the signal."""
        os.write(self.urgent_fd, b"".join(i.to_bytes(8, "big") for i in attempt_ids))
        os.kill(self.pid, signal.SIGUSR1)

    def load(
        self,
        options: Mapping[str, Any] | None = None,
        engine: str = "scripted",
        model: str | None = None,
        snapshot_share: float | None = None,
    ) -> Ready:
        """Take hello, load, and return ready."""
        self.expect(Hello)
        self.send(Load(engine, model, options or {}, snapshot_share))
        return self.expect(Ready)

    def close(self, *fds: int) -> None:
        """Close the parent's ends of some pipes."""
        for fd in fds:
            if fd in self._open:
                self._open.remove(fd)
                os.close(fd)

    # --- from the worker ---------------------------------------------------------------------------

    def next_message(self, *, noise: bool = False) -> Message:
        """Return the next message. noise: also beats, logs and progress."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while self._arrived:
                message = self._arrived.pop(0)
                self.seen.append(message)
                if noise or not isinstance(message, NOISE):
                    return message
            data = self._read(deadline)
            if not data:
                raise EOFError(f"the worker's frames ended; it said:\n{self.output()}")
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        # A broken frame counts when its turn comes: the same read may have brought good ones before it.
        if self._broken is not None:
            raise self._broken
        try:
            self._arrived += self._decoder.feed(data)
        except RemoteProtocolError as error:
            self._arrived += error.before
            self._broken = error
            if not error.before:
                raise

    def expect(self, kind: type[M], attempt_id: int | None = None) -> M:
        """Return the next message, which must be of this kind (beats, logs, progress are passed over)."""
        message = self.next_message(noise=issubclass(kind, NOISE))
        while issubclass(kind, NOISE) and not isinstance(message, kind):
            message = self.next_message(noise=True)
        assert isinstance(message, kind), f"{message} instead of {kind.name}"
        if attempt_id is not None:
            assert getattr(message, "id", None) == attempt_id
        return message

    def nothing_but_noise_arrived(self) -> None:
        """Assert that no message about an attempt is in the pipe or was read ahead."""
        while select.select([self.frames], [], [], 0)[0]:
            self._feed(os.read(self.frames, 1 << 16))
        assert [message for message in self._arrived if not isinstance(message, NOISE)] == []

    def tokens(self, attempt_id: int, count: int) -> str:
        """Return the text of the next `count` tokens, which must come in order."""
        texts = []
        for _ in range(count):
            texts.append(self.expect(Tokens, attempt_id).tokens[0][1])
        return "".join(texts)

    def answer(self, attempt_id: int) -> tuple[str, Ended]:
        """Return the whole text of an attempt and its end, with started before and released after."""
        self.expect(Started, attempt_id)
        return self.rest(attempt_id)

    def rest(self, attempt_id: int, first: int = 0) -> tuple[str, Ended]:
        """Return the text from token `first` on and the end; released has been taken too."""
        text = ""
        while True:
            message = self.next_message()
            if isinstance(message, Ended):
                assert message.id == attempt_id
                self.expect(Released, attempt_id)
                return text + message.text, message
            assert isinstance(message, Tokens), message
            assert (message.id, message.index) == (attempt_id, first)
            first += len(message.tokens)
            text += "".join(token[1] for token in message.tokens)

    @property
    def torn_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return self._decoder.buffered_bytes

    def wait_for_bytes(self) -> None:
        """Wait until part of a frame has arrived."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.torn_bytes:
            self._feed(self._read(deadline))

    def ended_frames(self) -> None:
        """Wait for the end of the frames pipe."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass

    def _read(self, deadline: float) -> bytes:
        readable, _, _ = select.select([self.frames], [], [], max(0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError(
                f"nothing came for {PATIENCE_S} s; seen {self.seen[-5:]}; output:\n{self.output()}"
            )
        return os.read(self.frames, 1 << 16)

    # --- its output and its end --------------------------------------------------------------------

    def _drain_output(self) -> None:
        while data := os.read(self.output_fd, 1 << 16):
            self._output += data

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._output.decode(errors="replace")

    def wait_for_output(self, found: Callable[[str], bool]) -> str:
        """Return the output once it satisfies `found`."""
        deadline = time.monotonic() + PATIENCE_S
        while not found(self.output()):
            # The draining thread has no event to wait for: poll, bounded.
            assert time.monotonic() < deadline, f"the output isn't what was waited for:\n{self.output()}"
            self._output_read.join(0.005)
        return self.output()

    def exit_code(self) -> int:
        """Wait for the end of the process; return its code, or minus the signal."""
        return self.process.wait(PATIENCE_S)

    def shut_down(self) -> None:
        """Ask for the end, which must come without complaint."""
        self.send(Shutdown())
        assert self.exit_code() == 0, self.output()

    def destroy(self) -> None:
        """End the process if it lives, and leave nothing open."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        self.close(*list(self._open))
        self._output_read.join(PATIENCE_S)
        assert not self._output_read.is_alive(), "somebody still holds the worker's output open"
        os.close(self.output_fd)


@contextlib.contextmanager
def raw_worker(**options: Any) -> Iterator[RawWorker]:
    """Yield a worker; afterwards it is gone, with every descriptor that it cost."""
    before = set(os.listdir("/dev/fd"))
    worker = RawWorker(**options)
    try:
        yield worker
    finally:
        worker.destroy()
    # listdir's own descriptor is in both listings under the same number unless something leaked.
    assert set(os.listdir("/dev/fd")) == before


__all__ = [
    "Cancel", "Credit", "Drain", "Ended", "Load", "RawWorker", "Ready", "Released", "Shutdown", "Started",
    "Submit", "Tokens", "raw_worker", "submit",
]  # fmt: skip
