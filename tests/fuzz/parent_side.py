"""The parent's side of the protocol, run step by step without a process, an event loop or a wait.

`ParentSide` owns a real dispatcher, slot, worker, link and streams over real pipes; only the process and the clock
are stand-ins. It carries out the steps of a script and checks after each what must hold whatever a worker says.
`conclude` then lets time pass with a silent worker and nobody reading: every stream must end and be released.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack

from infervisor import Deadlines, Escalation, InfervisorError, Liveness, RestartPolicy, StopGraces
from infervisor.protocol.codec import LENGTH_BYTES, MAX_FROM_WORKER_BYTES
from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import ProtocolError
from infervisor.protocol.machines import process as p
from infervisor.protocol.machines.slot import SlotPhase
from infervisor.protocol.messages import PROTOCOL_VERSION, Load
from infervisor.supervisor import dispatcher as dispatcher_module
from infervisor.supervisor import events
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.dispatcher import Dispatcher
from infervisor.supervisor.embedding import check_texts
from infervisor.supervisor.launch import WorkerSettings
from infervisor.supervisor.link import READ_BYTES, READS_A_TURN
from infervisor.supervisor.mailbox import Mailbox
from infervisor.supervisor.pool import Pool
from infervisor.supervisor.process import ExitStatus
from infervisor.supervisor.queries import MAX_UNANSWERED, OpenQuery, _read_count, _read_ids, _read_text
from infervisor.supervisor.request import Chunk, Request
from infervisor.supervisor.request_input import RequestInput, check_request
from infervisor.supervisor.resume import OnCrash
from infervisor.supervisor.settings import PoolSettings
from infervisor.supervisor.stream import Stream
from infervisor.supervisor.timers import STALL_NS
from infervisor.supervisor.worker import END_WITHOUT_EXIT_NS, Worker
from tests.fuzz.script import Do, Step
from tests.fuzz.stand_in import Clock, StandIn, in_place

S = 1_000_000_000
MAX_STREAMS = 8
MAX_ERROR_CHARACTERS = 600
MAX_WAITING_FRAMES = 4 * MAX_STREAMS
"""To the worker: some for each stream, however much the worker says."""
MAX_SILENT_IDS = (1 << 20) + (1 << 16)
"""A million tokens in a row without text, and what one frame may bring beyond them."""
MAX_STEP_CPU_S = 5.0
"""The thread's own time, so that a busy machine changes nothing; the slowest frame takes a tenth of it."""
PATIENCE_S = 20_000
"""Virtual: eight streams, each of which may first starve for its 300 s and wait for two starts of 120 s."""
KINDS = (
    "hello", "ready", "started", "tokens", "ended", "released", "beat", "progress", "log", "failed", "vectors",
    "answered",
)  # fmt: skip
WHY = ("stop", "stop_sequence", "length", "context_full", "cancelled", "invalid_request", "engine_error")
FACTS = {"context_tokens": 4096, "has_chat_template": True, "extra": {"tool_format": "hermes"}}
DIMENSIONS = 3
CALLS = ("<tool_call>", '{"name": "look", ', '"arguments": {}}', "</tool_call>", "so ", "<", "{ ")
"""What streams with tools are told: calls, and what begins like one."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = {"tokenize": (_read_ids, bytes(8)), "detokenize": (_read_text, b"text"), "count": (_read_count, 7)}
"""Queries by kind: what reads the answer, and a proper one."""
TIGHT = Deadlines(queue_s=5, startup_s=10, first_token_s=5, stall_s=3, total_s=60, consumer_s=20)
SETTINGS = WorkerSettings(
    command=("worker",),
    environment={},
    load=Load("fuzz", None, {}),
    startup_s=120.0,
    graces=StopGraces(),
    liveness=Liveness(),
)


class Broken(AssertionError):
    """Something doesn't hold that must."""


def expect(condition: object, message: str | Callable[[], str]) -> None:
    """Raise `Broken` unless `condition`."""
    if not condition:
        raise Broken(message if isinstance(message, str) else message())


class _NothingUnexpected(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise Broken(f"logged as unexpected: {record.getMessage()}")


@dataclass(slots=True)
class Opened:
    """A stream of the caller's, with what was read of it."""

    stream: Stream
    request: Request
    refused: bool = False
    text: list[str] = field(default_factory=list)
    end: str | None = None


class ParentSide:
    """One supervisor's insides. Make it within `harness()`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.streams: list[Opened] = []
        self.queries: list[tuple[str, OpenQuery]] = []
        """Every question so far, by kind."""
        self.causes: list[p.DeathCause] = []
        self.messages: list[str] = []
        self.errors: list[ProtocolError] = []
        self.ready_pids: set[int] = set()
        """Which workers were ready once."""
        self.released: Counter[int] = Counter()
        self.said = bytearray()
        self.frames = 0
        self._holding = self._lingering = False
        self._last_frame = b""
        self._reasons: dict[int, EndReason] = {}
        self._hung_up: Worker | None = None
        self._workers: list[Worker] = []
        dispatcher_module._attempt_ids = itertools.count(1)
        self.mailbox = Mailbox()
        self.dispatcher = Dispatcher(
            make_worker=self._make_worker,
            start_task=lambda run: None,
            pool=PoolSettings(restart=RestartPolicy(jitter=0.0)),
            escalation=Escalation(),
            max_queue=MAX_STREAMS,
            max_wait_s=None,
            max_resumes=5,
            snapshots=None,
            listeners=[self._told],
        )
        self.dispatcher.pool.start()
        self._settle()

    def _make_worker(self, pool: Pool) -> Worker:
        worker = Worker(SETTINGS, pool, self.dispatcher.timers)
        self._workers.append(worker)
        return worker

    def _told(self, event: events.Event) -> None:
        match event:
            case events.WorkerExited():
                self.causes.append(event.cause)
                self.messages.append(event.message)
            case events.WorkerBecameReady():
                self.ready_pids.add(event.pid)
            case events.RequestReleased():
                self.released[event.report.request_id] += 1

    # --- the worker ------------------------------------------------------------------------------

    @property
    def worker(self) -> Worker | None:
        """The worker that is there."""
        return self.dispatcher.pool.first

    @property
    def process(self) -> StandIn | None:
        """Its process."""
        worker = self.worker
        return None if worker is None else worker.process  # type: ignore[return-value]

    def send(self, data: bytes) -> None:
        """Let the worker write bytes, and the parent read them as they come."""
        worker, process = self.worker, self.process
        if worker is None or process is None or not process.can_speak:
            return
        left = memoryview(data)
        while left and process.can_speak:
            written = process.say(left)  # type: ignore[arg-type]
            self.said += left[:written]
            left = left[written:]
            if left or not self._holding:
                self._read(worker)
            if self.worker is not worker:
                return

    def send_frame(self, payload: bytes) -> None:
        """Let the worker send a frame with the right length, whatever is in it."""
        self._last_frame = len(payload).to_bytes(LENGTH_BYTES, "big") + payload
        self.frames += 1
        self.send(self._last_frame)

    def _read(self, worker: Worker) -> None:
        """What the task that attends the frames does when they are readable."""
        if worker.link.frames_ended:
            return
        worker.link.read_frames(READS_A_TURN)
        if worker.link.frames_ended:
            worker._end_alarm.aim(self.clock.now_ns + END_WITHOUT_EXIT_NS)

    def _settle(self) -> None:
        """What the tasks do that run as soon as something has happened."""
        while self.mailbox._posts:
            self.mailbox._posts.popleft()()
        for _ in range(100):
            worker, process = self.worker, self.process
            if worker is None or process is None:
                return
            if worker.state.phase is p.ProcessPhase.SPAWNED:
                worker.apply(p.Connected())
            if process.ending is None or (self._lingering and process.was_killed):
                return
            self._collect(worker)
        raise Broken("workers are started without end")

    def _collect(self, worker: Worker) -> None:
        worker._collect()
        expect(worker.state.phase is p.ProcessPhase.EXITED, "collected, and not exited")
        expect(not worker.attempts, "an attempt is left in a collected worker")
        if worker.frames.broken is not None:
            self.errors.append(worker.frames.broken)

    # --- proper frames ---------------------------------------------------------------------------

    def proper(self, kind: str, which: int, count: int) -> list[Any] | None:
        """Return a frame that the protocol allows now, as a list, or None if this kind can't come."""
        worker = self.worker
        if worker is None:
            return None
        now, phase = self.clock.now_ns, worker.state.phase
        loading = phase is p.ProcessPhase.LOADING
        match kind:
            case "hello":
                return (
                    ["hello", now, PROTOCOL_VERSION, worker.pid, {"python": "3"}]
                    if phase is p.ProcessPhase.HANDSHAKE
                    else None
                )
            case "progress":
                return ["progress", now, "load", (count % 11) / 10] if loading else None
            case "ready":
                return ["ready", now, "f", {"slots": 1 + count % 3, **FACTS}] if loading else None
            case "failed":
                return ["failed", now, "model_load", "no", "", bool(count % 2)] if loading else None
            case "beat":
                return ["beat", now, count, {"prefill": count, "decode": 2 * count}, 1, 0]
            case "log":
                return ["log", now, "info", "x" * count, 0]
            case "answered":
                return self._proper_answer(which, count, worker)
        return self._proper_of_attempt(kind, which, count, worker)

    def _proper_of_attempt(self, kind: str, which: int, count: int, worker: Worker) -> list[Any] | None:
        attempts = [
            a
            for a in worker.attempts.values()
            if a.state.phase in _BEFORE[kind] and (kind not in _OF_TEXTS or a._embeds is _OF_TEXTS[kind])
        ]
        if not attempts:
            return None
        attempt: Attempt = attempts[which % len(attempts)]
        now, window = self.clock.now_ns, attempt.request.window
        match kind:
            case "started":
                return ["started", now, attempt.id, 0, 0, count]
            case "tokens":
                room = min(1 + count % 64, window.limit - window.received)
                tokens = [_proper_token(attempt.request, t, count) for t in range(room)]
                return ["tokens", now, attempt.id, window.received, tokens] if room else None
            case "vectors":
                due = min(1 + count % 4, attempt._vectors_due - attempt._vectors)
                vectors = [bytes(4 * DIMENSIONS)] * due
                return ["vectors", now, attempt.id, attempt._vectors, vectors] if due else None
            case "ended":
                # What embeds ends by itself only when all is there.
                why = WHY if not attempt._vectors_due > attempt._vectors else WHY[-3:]
                usage = {
                    "prompt_tokens": 1, "cached_tokens": 0,
                    "completion_tokens": window.received, "computed_tokens": window.received,
                }  # fmt: skip
                return ["ended", now, attempt.id, why[count % len(why)], "." * (count % 2), usage, None]
            case _:
                return ["released", now, attempt.id, now if count % 2 else None, now]

    def _proper_answer(self, which: int, count: int, worker: Worker) -> list[Any] | None:
        kinds = {query.id: kind for kind, query in self.queries}
        open_ones = list(worker.queries._open)
        if not open_ones:
            return None
        query_id = open_ones[which % len(open_ones)]
        if count % 4 == 3:
            error = {"code": "invalid_request", "message": "no", "field": "text"}
            return ["answered", self.clock.now_ns, query_id, None, error]
        return ["answered", self.clock.now_ns, query_id, ASKED[kinds[query_id]][1], None]

    # --- the caller ------------------------------------------------------------------------------

    def open(self, window: int, asked: int) -> None:
        """Start a stream. asked: with tight deadlines (1), log-probabilities (2), tools (4)."""
        wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if asked & 2 else {}
        if asked & 4:
            messages = [{"role": "user", "content": "hello"}]
            given = check_request(None, messages, window=window, seed=1, tools=[TOOL], **wanted)
        else:
            given = check_request("hello", None, window=window, seed=1, **wanted)
        self._start(given, TIGHT if asked & 1 else Deadlines())

    def embed(self, texts: int) -> None:
        """Ask for the vectors of so many texts."""
        self._start(check_texts([f"text {number}" for number in range(texts)]), Deadlines())

    def ask(self, kind: str) -> None:
        """Ask the worker what computes nothing."""
        worker = self.worker
        if worker is not None and worker.is_ready and len(worker.queries) < MAX_STREAMS:
            read = partial(ASKED[kind][0], facts=worker.facts)
            self.queries.append((kind, worker.queries.ask(kind, {"text": "hello"}, read)))

    def _start(self, given: RequestInput, deadlines: Deadlines) -> None:
        if len(self.streams) >= MAX_STREAMS:
            return
        # Every second one outlives its worker.
        on_crash = OnCrash.RESUME if len(self.streams) % 2 else OnCrash.FAIL
        request = self.dispatcher.create(given, deadlines, on_crash)
        opened = Opened(Stream(self.dispatcher, self.mailbox, request), request)
        self.streams.append(opened)
        try:
            opened.stream._admit()
        except InfervisorError:
            opened.refused = True

    def take(self, opened: Opened, chunks: int) -> None:
        """Read what can be read without waiting."""
        for _ in range(chunks):
            if opened.refused or not (opened.request.has_chunk or opened.request.has_ended):
                return
            try:
                # What may be the beginning of a call is held back: then there is nothing yet.
                if opened.request.input.tools is not None and not opened.request.has_ended:
                    chunk = opened.stream._next_now()
                    if chunk is None:
                        return
                    raise StopIteration(chunk)
                opened.stream.__anext__().send(None)
            except StopIteration as got:
                expect(opened.end is None, "a chunk came after the end")
                self._check_chunk(got.value, opened.request.input)
                opened.text.append(got.value.text)
            except (StopAsyncIteration, InfervisorError) as end:
                ended = f"{opened.request.state.reason}: {type(end).__name__}"
                expect(opened.end in (None, ended), f"two ends: {opened.end} and {ended}")
                opened.end = ended
                return
            else:
                raise Broken("a read that had something to read waited")

    def _check_chunk(self, chunk: Chunk, given: RequestInput) -> None:
        expect(chunk.text or chunk.tool_calls, "a chunk has neither text nor calls")
        told = len(chunk.token_ids) if given.output.logprobs else 0
        expect(len(chunk.logprobs) == told, f"{len(chunk.logprobs)} log-probabilities of {told} tokens")

    # --- time ------------------------------------------------------------------------------------

    def wait(self, ns: int) -> None:
        """Let time pass; every alarm rings when it is due."""
        until = self.clock.now_ns + ns
        self._settle()
        for _ in range(200_000):
            heap = self.dispatcher.timers._heap
            if not heap or heap[0][0] > until:
                self.clock.now_ns = until
                return
            self.clock.now_ns = max(self.clock.now_ns, heap[0][0])
            self.dispatcher.timers._ring_due(self.clock.now_ns)
            self._settle()
        raise Broken("alarms ring without end")

    def stall(self, ns: int) -> None:
        """Let time pass at once, as if the loop had been blocked; then ring what is due."""
        self.clock.now_ns += ns
        timers = self.dispatcher.timers
        if timers._heap and self.clock.now_ns - timers._heap[0][0] > STALL_NS:
            timers._on_stall(self.clock.now_ns - timers._heap[0][0])
        timers._ring_due(self.clock.now_ns)

    # --- steps -----------------------------------------------------------------------------------

    def run(self, steps: Iterable[Step]) -> None:
        """Carry out steps and check what must hold after each."""
        for each in steps:
            began = time.thread_time()
            self._do(each)
            if self.worker is not None and not self._holding:
                self._read(self.worker)
            self._settle()
            took = time.thread_time() - began
            expect(took < MAX_STEP_CPU_S, f"{each.do.name} took {took:.1f} s")
            self.check()

    def _do(self, each: Step) -> None:
        number, process, worker = each.number, self.process, self.worker
        match each.do:
            case Do.PROPER:
                frame = self.proper(KINDS[number(0) % len(KINDS)], number(1), number(2))
                if frame is not None:
                    self.send_frame(msgpack.packb(frame))
            case Do.BUT:
                frame = self.proper(KINDS[number(0) % len(KINDS)], number(1), number(2))
                if frame is not None:
                    head, value = _packed(frame), each.payload[4:]
                    head[number(3) % len(head)] = value
                    self.send_frame(bytes([0x90 + len(head)]) + b"".join(head))
            case Do.FRAME:
                self.send_frame(each.payload)
            case Do.RAW:
                self.send(each.payload)
            case Do.STRETCH:
                self.send_frame(stretched(each.payload[1:], 250 * (1 + number(0) % 8)))
            case Do.AGAIN:
                for _ in range(4 * (1 + number(0))):
                    self.send(self._last_frame)
            case Do.HOLD:
                self._holding = not self._holding
            case Do.OUTPUT if process is not None and worker is not None and process.ending is None:
                process.print(each.payload)
                worker.link.read_output()
            case Do.HEAR if process is not None and process.ending is None:
                process.hear()
                if worker is not None:
                    worker.link._flush()
            case Do.CLOSE if process is not None:
                process.hang_up()
            case Do.EXIT if process is not None:
                code = number(0)
                process.exit(ExitStatus(code) if code < 128 else ExitStatus(signal_number=code - 127))
            case Do.LINGER:
                self._lingering = not self._lingering
            case Do.OPEN:
                self.open(1 + number(0), number(1))
            case Do.EMBED:
                self.embed(1 + number(0) % 8)
            case Do.ASK:
                self.ask(list(ASKED)[number(0) % len(ASKED)])
            case Do.JAM if process is not None and process.ending is None:
                process.jam()
            case Do.WAIT:
                self.wait((number(0) + 256 * number(1)) * S // 10)
            case Do.STALL:
                self.stall(number(0) * S // 10)
            case Do.REPLACE if self.dispatcher.pool.phase is not SlotPhase.STOPPED:
                self.dispatcher.pool.replace_all()
            case Do.SHUT:
                self.dispatcher.close()
            case Do.TAKE | Do.CANCEL | Do.KILL if self.streams:
                opened = self.streams[number(0) % len(self.streams)]
                if each.do is Do.TAKE:
                    self.take(opened, number(1))
                elif each.do is Do.CANCEL:
                    opened.stream.cancel()
                else:
                    opened.stream.kill()

    # --- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `Broken` if something doesn't hold that must, whatever the worker said."""
        for opened in self.streams:
            self._check_request(opened.request)
        expect(len(self.dispatcher.timers._heap) < 4096, "alarms pile up")
        for worker in self._workers[-2:]:
            self._check_worker(worker)

    def _check_request(self, request: Request) -> None:
        window = request.window
        expect(window.buffered <= window.window, "more is buffered than the window")
        expect(window.received <= window.limit <= window.taken + window.window, "credit is broken")
        expect(len(request._buffer) <= window.window + 1, "the buffer outgrew the window")
        expect(len(request._ids) <= MAX_SILENT_IDS, "ids of tokens without text pile up")
        reason = request.state.reason
        texts = () if request.input.texts is None else request.input.texts
        expect(len(request.vectors) <= len(texts), "more vectors than texts")
        expect(len({len(vector) for vector in request.vectors}) <= 1, "vectors of different lengths")
        if texts and reason is EndReason.STOP:
            expect(len(request.vectors) == len(texts), "an embedding that ended well lacks vectors")
        if reason is not None:
            first = self._reasons.setdefault(request.id, reason)
            expect(first is reason, f"it ended as {first} and then as {reason}")
        expect(self.released[request.id] <= 1, "released twice")
        expect(not request.released.is_set() or request.has_ended, "released without an end")

    def _check_worker(self, worker: Worker) -> None:
        process: StandIn = worker.process  # type: ignore[assignment]
        error, cause = worker.frames.broken, worker.state.cause
        if error is not None:
            expect(isinstance(error, ProtocolError), f"{type(error).__name__} is no ProtocolError")
            expect(process.was_killed, "it broke the protocol and lives")
            expect(len(str(error)) <= MAX_ERROR_CHARACTERS, f"an error of {len(str(error))} characters")
            expect(str(error).isprintable(), lambda: f"a control character in {str(error)!r:.200}")
        expect(error is not None or cause is not p.DeathCause.PROTOCOL_ERROR, "killed for no error")
        ready = worker.pid in self.ready_pids
        expect(
            worker.frames.failed is None or not ready, "a failure to load was believed after it had loaded"
        )
        expect(len(worker.queries) <= MAX_UNANSWERED, "queries pile up")
        link = worker.link
        expect(len(link._first) <= MAX_WAITING_FRAMES, "credit frames pile up")
        expect(
            link._decoder.buffered_bytes <= MAX_FROM_WORKER_BYTES + READ_BYTES, "the decoder outgrew a frame"
        )

    def conclude(self) -> None:
        """Let time pass with a silent worker and no reader: all must end, be released, and leave nothing."""
        self._lingering = self._holding = False
        if self.worker is not None:
            self._read(self.worker)
        self._settle()
        waited = 0
        while self.dispatcher.requests:
            expect(waited < PATIENCE_S, self._what_hangs)
            self.wait(10 * S)
            waited += 10
        self.check()
        for opened in self.streams:
            request = opened.request
            expect(request.has_ended and request.released.is_set(), "an end without a release")
            expect(opened.refused or self.released[request.id] == 1, "not told once that it is released")
            self.take(opened, request.window.window + 2)
            expect(
                opened.refused or opened.end is not None, "a stream that has ended can't be read to its end"
            )
            expect(request.report().to_dict() and request.report().to_line(), "no report")
        self.dispatcher.close()
        self.wait(60 * S)
        expect(self.worker is None, "closing left a worker")
        expect(not self.dispatcher.attempts, "closing left an attempt")
        for kind, query in self.queries:
            expect(query.settled.is_set(), "a query of a dead worker waits")
            outcomes = (query.value is not None, query.error is not None, query.lost is not None)
            expect(outcomes.count(True) == 1, f"{kind}: value, error, lost: {outcomes}")

    def _what_hangs(self) -> str:
        states = [
            f"{request.state.phase} {request.state.reason}"
            + (" in a worker" if number in self.dispatcher.attempts else "")
            for number, request in self.dispatcher.requests.items()
        ]
        phase = None if self.worker is None else self.worker.state.phase
        return f"streams hang: {states} with a worker {phase} and a slot {self.dispatcher.pool.phase}"

    def close(self) -> None:
        """Leave no descriptor, also after a failure."""
        for worker in self._workers:
            if worker.process.status is None:
                worker.process.kill_group()
                worker.process.collect()
        for opened in self.streams:
            opened.stream._admitted = False
        self.mailbox.close()


def _proper_token(request: Request, number: int, count: int) -> list[Any]:
    """Return a token. Every third has no text, as if it were held back."""
    text = "" if (count + number) % 3 == 0 else f"w{number} "
    if request.input.tools is not None:
        text = CALLS[(request.window.received + number + count // 64) % len(CALLS)]
    told = [-0.5, [[number, b"w", -0.5], [0, b"", -1]], b"w"] if request.input.output.logprobs else None
    return [number, text, told]


_OF_TEXTS = {"tokens": False, "vectors": True}
_BEFORE = {
    "started": ("submitted",),
    "tokens": ("prefill", "decode"),
    "vectors": ("prefill", "decode"),
    "ended": ("submitted", "prefill", "decode", "paused"),
    "released": ("ending",),
}


def _packed(frame: list[Any]) -> list[bytes]:
    return [msgpack.packb(value) for value in frame]


def stretched(payload: bytes, times: int) -> bytes:
    """Return a frame with every text and array in it that much longer, as far as two frames' worth goes."""
    try:
        wire = msgpack.unpackb(payload, strict_map_key=False)
        if not isinstance(wire, list):
            return payload
        longer = [
            value * times if at and isinstance(value, (str, bytes, list)) else value
            for at, value in enumerate(wire)
        ]
        data: bytes = msgpack.packb(longer)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return payload
    return data[: 2 * MAX_FROM_WORKER_BYTES]


@contextlib.contextmanager
def harness() -> Iterator[Callable[[], contextlib.AbstractContextManager[ParentSide]]]:
    """Put the stand-ins in place; yield what makes one parent side after the other, each closed in the end."""
    logger, handler = logging.getLogger("infervisor"), _NothingUnexpected()
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False

    with in_place() as clock:

        @contextlib.contextmanager
        def one() -> Iterator[ParentSide]:
            StandIn.pids = itertools.count(1)
            side = ParentSide(clock)
            try:
                yield side
            finally:
                side.close()

        try:
            yield one
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagates
