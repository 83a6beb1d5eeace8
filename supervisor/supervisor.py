"""`Supervisor`: the front door. Owns the tasks of one supervised model and nothing global.

Everything runs in the event loop's thread, on asyncio or trio: no signal handlers, no child watchers, no
threads of its own. The internal tasks are shielded from the host's cancellation, so
that a cancelled host still releases what it used; closing ends them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any

import anyio
import anyio.abc

from infervisor.protocol.errors import (
    ConfigurationError,
    InfervisorError,
    InvalidRequest,
    ShuttingDown,
    UsageError,
)
from infervisor.protocol.machines.slot import SlotPhase
from infervisor.protocol.quoting import quoted
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor import events
from infervisor.supervisor.dispatcher import Dispatcher
from infervisor.supervisor.environment import worker_environment
from infervisor.supervisor.launch import WorkerSettings, interpreter, load_message, model_path
from infervisor.supervisor.mailbox import Mailbox
from infervisor.supervisor.model_identity import FileIdentity, change_between, identity_of
from infervisor.supervisor.notice import Notice
from infervisor.supervisor.process import Sample
from infervisor.supervisor.request_input import ChatMessage, check_request
from infervisor.supervisor.settings import (
    Deadlines,
    Escalation,
    Liveness,
    RestartPolicy,
    StopGraces,
    check_count,
    check_kind,
    check_seconds,
)
from infervisor.supervisor.status import Status
from infervisor.supervisor.stream import Answer, Stream
from infervisor.supervisor.worker import Worker

SAMPLE_PERIOD_NS = NS_PER_S


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
    ) -> None:
        self._deadlines = check_kind("deadlines", deadlines or Deadlines(), Deadlines)
        self._escalation = check_kind("escalation", escalation or Escalation(), Escalation)
        self._restart = check_kind("restart", restart or RestartPolicy(), RestartPolicy)
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"on_event must be a function of one event, not {quoted(on_event)}")
        self._window = check_count("window", window, 1, 1 << 20)
        self._window_s = None if window_s is None else check_seconds("window_s", window_s)
        self._max_queue = check_count("max_queue", max_queue, 0, 1 << 20)
        self._max_wait_s = None if max_wait_s is None else check_seconds("max_wait_s", max_wait_s)
        self._wait_until_ready = wait_until_ready
        self._user_event = on_event or (lambda event: None)
        # Resolved once, so that a later chdir changes nothing; links are kept, since shards find each other
        # by the names beside them.
        self._path = model_path(model, engine)
        self._worker_settings = WorkerSettings(
            command=(interpreter(python), "-P", "-m", "infervisor.worker"),
            environment=worker_environment(os.environ, env or {}),
            load=load_message(engine, self._path, options or {}),
            startup_s=self._deadlines.startup_s,
            graces=check_kind("graces", graces or StopGraces(), StopGraces),
            liveness=check_kind("liveness", liveness or Liveness(), Liveness),
        )
        self._pid = os.getpid()
        self._thread: int | None = None
        self._dispatcher: Dispatcher | None = None
        self._mailbox: Mailbox | None = None
        self._outer: anyio.abc.TaskGroup | None = None
        self._changed = Notice()
        self._closed = False
        self._loaded: FileIdentity | None = None
        self._model_change: str | None = None
        self._sample: Sample | None = None
        self._peak_rss_bytes = 0

    def __repr__(self) -> str:
        state = "not entered" if self._dispatcher is None else self._dispatcher.slot.state.phase.value
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
        self._dispatcher = dispatcher = Dispatcher(
            make_worker=self._make_worker,
            start_task=start_task,
            restart=self._restart,
            escalation=self._escalation,
            max_queue=self._max_queue,
            max_wait_s=self._max_wait_s,
            on_event=self._on_event,
        )
        dispatcher.on_state_change = self._changed.ring
        tasks.start_soon(self._mailbox.run)
        tasks.start_soon(dispatcher.timers.run)
        self._sample_alarm = dispatcher.timers.alarm(self._look)
        self._sample_alarm.aim(time.monotonic_ns() + SAMPLE_PERIOD_NS)
        dispatcher.slot.start()

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
            while dispatcher.slot.worker is not None:
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

    async def wait_ready(self) -> Mapping[str, Any]:
        """Wait until a worker is ready and return its facts.

        Raises what opened the breaker (`ModelLoadError`, `WorkerDied`, `WorkerSpawnError`, …). Safe to cancel.
        """
        dispatcher = self._check_usable()
        while True:
            worker = dispatcher.slot.worker
            if worker is not None and worker.is_ready:
                return worker.facts
            if dispatcher.slot.is_open:
                make_error = dispatcher.slot.last_error
                raise dispatcher.slot.refusal() if make_error is None else make_error()
            if self._closed or dispatcher.slot.state.phase is SlotPhase.STOPPED:
                raise ShuttingDown("the supervisor is closed")
            await self._changed.wait()

    def _make_worker(self, dispatcher: Dispatcher) -> Worker:
        self._look_at_model()
        self._loaded = identity_of(self._path)
        self._model_change = None
        return Worker(self._worker_settings, dispatcher, dispatcher.timers)

    def restart_worker(self) -> None:
        """Replace the worker by a new one once its requests have ended; close an open breaker."""
        self._check_usable().slot.replace()

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
        **sampling: Any,
    ) -> Stream:
        """Return a stream for a raw prompt, or for chat messages through the model's template.

        prompt: continued as it is; with special=True texts of control tokens in it become those tokens.
        messages: objects with role and content; their content is always literal text. max_tokens: at least 1;
        None is until the context is full. stop: up to 64 strings that end the answer and are not part of it.
        seed: 0 to 2**32 − 1; None draws one, which the report tells. window: tokens computed ahead of the
        reader. sampling: the fields of `protocol.generation.Sampling` (temperature, top_k, …).

        Raises `InvalidRequest` naming the field. Nothing happens until the stream is entered or read.
        """
        dispatcher = self._check_usable()
        assert self._mailbox is not None
        if deadlines is not None and not isinstance(deadlines, Deadlines):
            raise InvalidRequest(
                f"deadlines must be made with Deadlines(…), not {quoted(deadlines)}", "deadlines"
            )
        given = check_request(
            prompt,
            messages,
            window=self._default_window() if window is None else window,
            max_tokens=max_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
            seed=seed,
            special=special,
            sampling=sampling,
        )
        request = dispatcher.create(given, deadlines or self._deadlines)
        # A short answer is whole before the next look at the file.
        self._look_at_model()
        if self._model_change is not None:
            request.warnings.append(f"the model file changed while it was loaded: {self._model_change}")
        return Stream(dispatcher, self._mailbox, request)

    def _default_window(self) -> int:
        assert self._dispatcher is not None
        if self._window_s is None:
            return self._window
        return self._dispatcher.rates.window_tokens(self._window_s, self._window)

    async def generate(
        self, prompt: str | None = None, *, messages: Sequence[ChatMessage] | None = None, **options: Any
    ) -> Answer:
        """Return the whole answer. Takes what `stream` takes.

        Raises the error of every end that isn't natural; its `report` tells the rest. A cancelled call cancels
        the request and waits for its release.
        """
        stream = self.stream(prompt, messages=messages, **options)
        try:
            async with stream:
                text = await stream.text()
        except InfervisorError as error:
            error.report = stream.report  # it was made at the end; by now the release is known, too
            raise
        return Answer(text, stream.report)

    # --- looking at it ---------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the state as of now. From any thread."""
        dispatcher = self._check_usable(closed_is_fine=True, any_thread=True)
        if dispatcher is None:
            raise UsageError("this supervisor was never entered: use 'async with'")
        worker = dispatcher.slot.worker
        return Status(
            slot=dispatcher.slot.state.phase.value,
            worker=None if worker is None else worker.state.phase.value,
            worker_pid=None if worker is None else worker.pid,
            facts={} if worker is None else dict(worker.facts),
            versions={} if worker is None else dict(worker.versions),
            queue_depth=len(dispatcher.queue),
            queue_peak=dispatcher.queue_peak,
            in_flight=len(dispatcher.attempts),
            restarts=dict(dispatcher.slot.restarts),
            sample=self._sample,
            peak_rss_bytes=self._peak_rss_bytes,
        )

    def _look(self) -> None:
        now = time.monotonic_ns()
        self._sample_alarm.aim(now + SAMPLE_PERIOD_NS)
        assert self._dispatcher is not None
        worker = self._dispatcher.slot.worker
        self._sample = None if worker is None else worker.sample(now)
        if self._sample is not None:
            self._peak_rss_bytes = max(self._peak_rss_bytes, self._sample.rss_bytes)
        self._look_at_model()

    def _look_at_model(self) -> None:
        change = change_between(self._loaded, identity_of(self._path))
        if change is None or change == self._model_change:
            return
        self._model_change = change
        assert self._dispatcher is not None
        for request in self._dispatcher.requests.values():
            request.warnings.append(f"the model file changed while it was loaded: {change}")
        self._dispatcher.emit(events.ModelFileChanged(str(self._path), change))

    def _on_event(self, event: events.Event) -> None:
        self._user_event(event)

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
