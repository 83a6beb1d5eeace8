"""`Supervisor`: the front door. Owns the tasks of one supervised model and nothing global.

Everything runs in the event loop's thread, on asyncio or trio: no signal handlers, no child watchers, no
threads of its own. The internal tasks are shielded from the host's cancellation, so
that a cancelled host still releases what it used; closing ends them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack

import anyio
import anyio.abc

from infervisor.protocol.errors import (
    ConfigurationError,
    InfervisorError,
    ShuttingDown,
    UsageError,
)
from infervisor.protocol.machines.slot import SlotPhase
from infervisor.protocol.quoting import quoted
from infervisor.supervisor import events
from infervisor.supervisor.dispatcher import Dispatcher
from infervisor.supervisor.embedding import Embeddings, check_texts
from infervisor.supervisor.embedding_request import EmbeddingRequest
from infervisor.supervisor.environment import worker_environment
from infervisor.supervisor.intake import Intake
from infervisor.supervisor.launch import WorkerSettings, interpreter, load_message, model_path
from infervisor.supervisor.lookout import Lookout
from infervisor.supervisor.mailbox import Mailbox
from infervisor.supervisor.notice import Notice
from infervisor.supervisor.pool import Pool
from infervisor.supervisor.queries import Queries
from infervisor.supervisor.request_input import ChatMessage, check_request
from infervisor.supervisor.request_options import RequestOptions, SamplingOptions
from infervisor.supervisor.resume import check_on_crash
from infervisor.supervisor.settings import (
    Deadlines,
    Escalation,
    Liveness,
    MemoryLimits,
    PoolSettings,
    RestartPolicy,
    Snapshots,
    StopGraces,
    check_count,
    check_kind,
    check_seconds,
    to_ns,
)
from infervisor.supervisor.snapshot_memory import SnapshotMemory
from infervisor.supervisor.status import Status, status_of
from infervisor.supervisor.stream import Answer, Stream, answer_of
from infervisor.supervisor.streams import Streams
from infervisor.supervisor.worker import Worker

DEFAULT_SNAPSHOTS = Snapshots()
KEPT_AREAS = 1 << 16
"""All: pages that are in use already make the snapshots of the next request cheap. They go back when all is
idle."""


class Supervisor:
    """A model in a crash-isolated worker. Use it as an async context manager.

    model: path of a .gguf file; None only for engines that need none. options: the engine's load options.
    window: tokens that the worker may compute ahead of a reader; or window_s: seconds' worth of tokens at the rate
    measured so far, and `window` until there is one. max_queue: requests that may wait; max_wait_s: refuse those
    that would wait longer, as far as the requests so far tell.
    python: interpreter for the worker (3.11 or newer, with infervisor in it). env: variables for the worker, on
    top of a short list that it inherits; None removes one. on_event: called with every `Event`, in the loop's
    thread; it must not block. wait_until_ready: entering returns when the model is loaded and raises if it can't
    be; otherwise it returns at once and requests wait.

    on_crash: what becomes of a running request when its worker goes: "resume", it goes on in the next one where
    it was, at most max_resumes times; "fail", it ends. snapshots: what copies of its state may cost that make
    that fast; None takes none. workers: that serve at once, each with a model of its own; standby: more that are
    loaded and take over at once. max_requests: a worker is replaced after so many.
    memory: what a worker may take before it is replaced, or killed.

    slots: requests that one worker serves side by side; short for the option of that name. step_budget_s: how long
    a step may take in which running streams wait for others' prompts; None lets the worker choose.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: str = "llama",
        options: Mapping[str, Any] | None = None,
        window: int = 32,
        window_s: float | None = None,
        max_queue: int = 64,
        max_wait_s: float | None = None,
        deadlines: Deadlines | None = None,
        escalation: Escalation | None = None,
        restart: RestartPolicy | None = None,
        graces: StopGraces | None = None,
        liveness: Liveness | None = None,
        python: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Callable[[events.Event], None] | None = None,
        wait_until_ready: bool = True,
        on_crash: str = "resume",
        max_resumes: int = 5,
        snapshots: Snapshots | None = DEFAULT_SNAPSHOTS,
        workers: int = 1,
        standby: int = 0,
        max_requests: int | None = None,
        memory: MemoryLimits | None = None,
        slots: int | None = None,
        step_budget_s: float | None = None,
    ) -> None:
        self._deadlines = check_kind("deadlines", deadlines or Deadlines(), Deadlines)
        self._escalation = check_kind("escalation", escalation or Escalation(), Escalation)
        policy = RestartPolicy() if restart is None else check_kind("restart", restart, RestartPolicy)
        self._pool = PoolSettings(workers, standby, max_requests, policy)
        self._on_crash = check_on_crash(on_crash)
        self._max_resumes = check_count("max_resumes", max_resumes, 0, 1_000_000)
        self._snapshots = None if snapshots is None else check_kind("snapshots", snapshots, Snapshots)
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"on_event must be a function of one event, not {quoted(on_event)}")
        self._window = check_count("window", window, 1, 1 << 20)
        self._window_s = None if window_s is None else check_seconds("window_s", window_s)
        self._max_queue = check_count("max_queue", max_queue, 0, 1 << 20)
        self._max_wait_s = None if max_wait_s is None else check_seconds("max_wait_s", max_wait_s)
        self._wait_until_ready = wait_until_ready
        self._listeners: list[Callable[[events.Event], None]] = [] if on_event is None else [on_event]
        # Resolved once, so that a later chdir changes nothing; links are kept, since shards find each other
        # by the names beside them.
        self._path = model_path(model, engine)
        self._worker_settings = WorkerSettings(
            command=(interpreter(python), "-P", "-m", "infervisor.worker"),
            environment=worker_environment(os.environ, env or {}),
            load=load_message(
                engine,
                self._path,
                options or {},
                None if self._snapshots is None else self._snapshots.share,
                slots=slots,
                step_budget_s=step_budget_s,
                workers=workers,
            ),
            startup_s=self._deadlines.startup_s,
            graces=check_kind("graces", graces or StopGraces(), StopGraces),
            liveness=check_kind("liveness", liveness or Liveness(), Liveness),
            memory=None if memory is None else check_kind("memory", memory, MemoryLimits),
        )
        self._pid = os.getpid()
        self._thread: int | None = None
        self._dispatcher: Dispatcher | None = None
        self._mailbox: Mailbox | None = None
        self._outer: anyio.abc.TaskGroup | None = None
        self._changed = Notice()
        self._closed = False
        self._snapshot_memory: SnapshotMemory | None = None

    @property
    def model(self) -> str | None:
        """Path of the model's file, or None for an engine that needs none."""
        return self._path

    @property
    def deadlines(self) -> Deadlines:
        """The budgets of a request that is given none."""
        return self._deadlines

    def __repr__(self) -> str:
        state = "not entered" if self._dispatcher is None else self._dispatcher.pool.phase.value
        return f"<Supervisor of {self._path or 'no model'}: {state}>"

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Supervisor:
        """Start the worker, and wait until it is ready unless told otherwise. Raises what kept it from that."""
        self._check_process()
        if self._dispatcher is not None:
            raise UsageError("this supervisor was entered before; make a new one")
        self._thread = threading.get_ident()
        self._mailbox = Mailbox()
        # Not in __init__: a scope can be made only in a running loop, a supervisor anywhere.
        self._scope = anyio.CancelScope(shield=True)
        self._begun, self._served = anyio.Event(), anyio.Event()
        self._outer = anyio.create_task_group()
        await self._outer.__aenter__()
        try:
            # Not with `start`: on trio it would wait for the end of a task that no cancel reaches.
            self._outer.start_soon(self._serve)
            with anyio.CancelScope(shield=True):
                await self._begun.wait()
            if self._wait_until_ready:
                await self.wait_ready()
        except BaseException:
            await self._close()
            raise
        return self

    async def _serve(self) -> None:
        """Task: all tasks of this supervisor, in a scope that only closing cancels."""
        try:
            # Race "cancelled before this task began": nothing is started any more.
            if not self._closed:
                with self._scope:
                    async with anyio.create_task_group() as tasks:
                        self._start(tasks)
                        self._begun.set()
                        await anyio.sleep_forever()
        finally:
            self._begun.set()
            self._served.set()

    def _start(self, tasks: anyio.abc.TaskGroup) -> None:
        def start_task(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
            tasks.start_soon(run)

        assert self._mailbox is not None
        if self._snapshots is not None:
            self._snapshot_memory = memory = SnapshotMemory.create(
                self._snapshots.max_bytes, keep_areas=KEPT_AREAS
            )
            if memory is not None:
                self._worker_settings = replace(self._worker_settings, snapshots=memory.fd)
        dispatcher = Dispatcher(
            make_worker=self._make_worker,
            start_task=start_task,
            pool=self._pool,
            escalation=self._escalation,
            max_queue=self._max_queue,
            max_wait_s=self._max_wait_s,
            max_resumes=self._max_resumes,
            snapshots=self._snapshot_memory,
            listeners=self._listeners,
        )
        dispatcher.pool.on_change = self._changed.ring
        self._lookout = Lookout(dispatcher, self._path, self._worker_settings.memory, self._snapshot_memory)
        self._intake = Intake(
            dispatcher,
            self._mailbox,
            self._lookout,
            window=self._window,
            window_s=self._window_s,
            deadlines=self._deadlines,
            on_crash=self._on_crash,
        )
        self._queries = Queries(dispatcher.pool, self.wait_ready, self._changed)
        # Race "another thread asks for the status": what it looks at is there before this is.
        self._dispatcher = dispatcher
        tasks.start_soon(self._mailbox.run)
        tasks.start_soon(dispatcher.timers.run)
        tasks.start_soon(self._lookout.run)
        dispatcher.pool.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close: see `stop`."""
        await self._close()

    async def stop(self) -> None:
        """End all requests as `shutting_down`, stop the worker with its graces, and return when it is collected.

        Idempotent; leaving the context does it too. Shielded from cancellation and bounded by the graces.
        """
        self._check_usable(closed_is_fine=True)
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        if not self._closed:
            self._closed = True
            dispatcher.close()
            # Whoever waits for a worker waits in vain from now on.
            self._changed.ring()
        # Race "two tasks stop it": the second one, too, returns when the worker is collected.
        with anyio.CancelScope(shield=True):
            while dispatcher.pool.first is not None:
                await self._changed.wait()

    async def _close(self) -> None:
        self._check_process()
        assert self._outer is not None
        assert self._mailbox is not None
        try:
            if self._dispatcher is not None:
                await self.stop()
        finally:
            self._closed = True
            self._scope.cancel()
            try:
                # The host's own exception isn't shown to the task group, which would wrap it; what is left in
                # the group needs no cancelling, since the scope above ends it.
                with anyio.CancelScope(shield=True):
                    await self._served.wait()
            finally:
                try:
                    await self._outer.__aexit__(None, None, None)
                finally:
                    self._mailbox.close()
                    if self._snapshot_memory is not None:
                        self._snapshot_memory.close()

    async def wait_ready(self, *, all_workers: bool = False) -> Mapping[str, Any]:
        """Wait until a worker is ready, or all of them, those included that stand by; return the first one's facts.

        Raises what opened the breaker (`ModelLoadError`, `WorkerDied`, `WorkerSpawnError`, …). Safe to cancel.
        """
        pool = self._check_usable().pool
        while True:
            if pool.is_ready and (pool.is_complete or not all_workers):
                return pool.serving[0].facts
            if pool.is_open or (all_workers and pool.has_given_up):
                raise pool.last_error()
            if self._closed or pool.phase is SlotPhase.STOPPED:
                raise ShuttingDown("the supervisor is closed")
            await self._changed.wait()

    def _make_worker(self, pool: Pool) -> Worker:
        assert self._dispatcher is not None
        model = self._lookout.note_start()
        worker = Worker(self._worker_settings, pool, self._dispatcher.timers)
        self._lookout.worker_started(worker, model)
        return worker

    def restart_worker(self) -> None:
        """Replace each worker by a new one once its requests have ended; close an open breaker."""
        self._check_usable().pool.replace_all()

    async def recycle(self, grace_s: float | None = None) -> None:
        """Replace all workers, one after the other, without a gap: the next one is ready before the old one goes.

        Requests that run finish in the old one, however long that takes; or, if they take longer than grace_s
        seconds, go on in the next one. Returns when the old ones are gone. Raises what keeps new ones from
        starting; the old ones then stay. Safe to cancel: the replacement goes on.
        """
        pool = self._check_usable().pool
        grace_ns = None if grace_s is None else to_ns(check_seconds("grace_s", grace_s, zero=True))
        old = [worker for worker in pool.workers if worker.is_ready]
        pool.recycle(old, grace_ns)
        while not self._closed:
            left = [worker for worker in pool.workers if worker in old]
            if not left:
                return
            if not pool.is_recycling and not any(worker.is_retiring for worker in left):
                raise pool.last_error()
            await self._changed.wait()

    # --- requests --------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
        special: bool = True,
        window: int | None = None,
        deadlines: Deadlines | None = None,
        on_crash: str | None = None,
        priority: int = 0,
        logprobs: bool = False,
        top_logprobs: int = 0,
        grammar: str | None = None,
        json_schema: Mapping[str, Any] | str | None = None,
        response_format: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Return a stream for a raw prompt, or for chat messages through the model's template.

        prompt: continued as it is; with special=True texts of control tokens in it become those tokens.
        messages: objects with role and content; their content is always literal text. max_tokens: at least 1;
        None is until the context is full. stop: up to 64 strings that end the answer and are not part of it.
        seed: 0 to 2**32 − 1; None draws one, which the report tells. window: tokens computed ahead of the
        reader. on_crash: "resume" or "fail", for this request. priority: −100 to 100; a level counts as 10 s of
        waiting. sampling: the fields of `protocol.generation.Sampling` (temperature, top_k, …).

        logprobs, top_logprobs: tell how probable each token was, and up to 20 others. The answer follows, if given:
        grammar, a GBNF grammar; json_schema, a JSON schema as a mapping or text; or response_format, as OpenAI's.
        tools: functions that the model may call, as OpenAI's, with messages only; tool_choice: "auto", "none",
        "required", or a mapping that names one.

        Raises `InvalidRequest` naming the field. Nothing happens until the stream is entered or read.
        """
        options = {
            "max_tokens": max_tokens, "stop": stop, "seed": seed, "ignore_eos": ignore_eos, "special": special,
            "window": window, "deadlines": deadlines, "on_crash": on_crash, "priority": priority,
            "logprobs": logprobs, "top_logprobs": top_logprobs, "grammar": grammar, "json_schema": json_schema,
            "response_format": response_format, "tools": tools, "tool_choice": tool_choice,
        }  # fmt: skip
        (stream,) = self._taking().streams(prompt, messages, {**options, **sampling})
        return stream

    def streams(
        self,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[ChatMessage] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Streams:
        """Return n streams for the same prompt, at most as many as a worker has slots. Takes what `stream` takes.

        They go to the same worker if it has room, which reads the prompt once. The first has the seed, the others
        count it up.
        """
        return Streams(self._taking().streams(prompt, messages, options, n))

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Return the whole answer. Takes what `stream` takes.

        Raises the error of every end that isn't natural; its `report` tells the rest. A cancelled call cancels
        the request and waits for its release.
        """
        stream = self.stream(prompt, messages=messages, **options)
        try:
            async with stream:
                chunks = await stream._rest()
        except InfervisorError as error:
            error.report = stream.report  # it was made at the end; by now the release is known, too
            raise
        return answer_of(chunks, stream.report)

    async def answers(
        self,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[ChatMessage] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Answer]:
        """Return n whole answers to the same prompt: see `streams`. Raises what `generate` raises."""
        return await self.streams(prompt, n=n, messages=messages, **options).answers()

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        normalise: bool = True,
        deadlines: Deadlines | None = None,
        on_crash: str | None = None,
        priority: int = 0,
    ) -> Embeddings:
        """Return a vector for each text, in order; of length 1 unless normalise is False.

        A request like any other: it waits its turn, can be cancelled, and survives its worker. Raises what
        `generate` raises.
        """
        asked = self.embedding_request(
            texts, normalise=normalise, deadlines=deadlines, on_crash=on_crash, priority=priority
        )
        return await asked.embeddings()

    def embedding_request(
        self,
        texts: str | Sequence[str],
        *,
        normalise: bool = True,
        deadlines: Deadlines | None = None,
        on_crash: str | None = None,
        priority: int = 0,
    ) -> EmbeddingRequest:
        """Return the request that `embed` makes, to be cancelled, watched and asked for its result.

        Raises `InvalidRequest` naming the text. Nothing happens until it is entered or asked.
        """
        given = check_texts(texts, normalise=normalise, priority=priority)
        return self._taking().embedding(given, deadlines, on_crash)

    def _taking(self) -> Intake:
        self._check_usable()
        return self._intake

    # --- questions -------------------------------------------------------------------------------

    async def tokenize(self, text: str, *, special: bool = True, timeout_s: float = 30.0) -> list[int]:
        """Return the tokens of a text and nothing but it. special: spellings of control tokens become those.

        Takes no slot and waits behind no stream. Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`, and
        what keeps a worker from being had. Safe to cancel.
        """
        self._check_usable()
        return await self._queries.tokenize(text, special, timeout_s)

    async def detokenize(self, tokens: Sequence[int], *, timeout_s: float = 30.0) -> str:
        """Return the text of tokens, control tokens spelled out; what is no character is U+FFFD. As `tokenize`."""
        self._check_usable()
        return await self._queries.detokenize(tokens, timeout_s)

    async def count_tokens(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special: bool = True,
        timeout_s: float = 30.0,
    ) -> int:
        """Return how many tokens a request's prompt has, with what model or template adds. As `tokenize`."""
        self._check_usable()
        given = check_request(prompt, messages, tools=tools, special=special, seed=0)
        return await self._queries.count(given, timeout_s)

    # --- looking at it ---------------------------------------------------------------------------

    def add_listener(self, on_event: Callable[[events.Event], None]) -> Callable[[], None]:
        """Call a function with every `Event` from now on, as `on_event` is; return what stops that. Idempotent."""
        if not callable(on_event):
            raise ConfigurationError(f"on_event must be a function of one event, not {quoted(on_event)}")
        self._check_process()

        def listener(event: events.Event) -> None:
            # A function of its own, so that the same callback can be there twice and each be removed.
            on_event(event)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        self._listeners.append(listener)
        return remove

    def status(self) -> Status:
        """Return the state as of now. From any thread."""
        dispatcher = self._check_usable(closed_is_fine=True, any_thread=True)
        if dispatcher is None:
            raise UsageError("this supervisor was never entered: use 'async with'")
        memory = self._snapshot_memory
        snapshot_bytes = 0 if memory is None else memory.used_bytes()
        return status_of(dispatcher, self._lookout.peak_rss_bytes, snapshot_bytes)

    # --- misuse ----------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this supervisor belongs to another process: a forked child can't use its parent's; "
                "make a new one in the child"
            )

    def _check_usable(self, *, closed_is_fine: bool = False, any_thread: bool = False) -> Dispatcher:
        self._check_process()
        if self._dispatcher is None:
            raise UsageError("this supervisor isn't running: use 'async with Supervisor(...) as supervisor'")
        if not any_thread and threading.get_ident() != self._thread:
            raise UsageError(
                "use this supervisor in the thread of its event loop; only status and cancel go anywhere"
            )
        if self._closed and not closed_is_fine:
            raise ShuttingDown("the supervisor is closed; make a new one")
        return self._dispatcher
