"""The same supervisor for code without an event loop: threads, GUIs, WSGI servers, scripts.

Owns one thread that runs an event loop with the asynchronous `Supervisor` in it; every call goes there through
anyio's blocking portal and waits. Decides nothing. Any thread may call. Never usable where an event loop runs: it
would stand still.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

import anyio

from infervisor.protocol.errors import UsageError
from infervisor.supervisor import events
from infervisor.supervisor.blocking_embedding import BlockingEmbeddingRequest
from infervisor.supervisor.blocking_stream import BlockingStream, BlockingStreams
from infervisor.supervisor.embedding import Embeddings
from infervisor.supervisor.loop_thread import LoopThread, check_may_block
from infervisor.supervisor.request_input import ChatMessage
from infervisor.supervisor.request_options import RequestOptions, SamplingOptions
from infervisor.supervisor.settings import (
    Deadlines,
    Escalation,
    Liveness,
    MemoryLimits,
    RestartPolicy,
    Snapshots,
    StopGraces,
)
from infervisor.supervisor.status import Status
from infervisor.supervisor.stream import Answer
from infervisor.supervisor.supervisor import DEFAULT_SNAPSHOTS, Supervisor

T = TypeVar("T")


class BlockingSupervisor:
    """A model in a crash-isolated worker, for threads. Use it as a context manager.

    Takes what `Supervisor` takes, and any thread may use it. Its calls block; what bounds them are the deadlines
    of the request. on_event is called in the supervisor's own thread: it must not block, and of this class it may
    call only what doesn't wait (`status`, `cancel`, `kill`). One that is dropped without being left is stopped
    when it is collected, one that still runs when the interpreter ends is stopped then.
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
        self._supervisor = Supervisor(
            model,
            engine=engine,
            options=options,
            window=window,
            window_s=window_s,
            max_queue=max_queue,
            max_wait_s=max_wait_s,
            deadlines=deadlines,
            escalation=escalation,
            restart=restart,
            graces=graces,
            liveness=liveness,
            python=python,
            env=env,
            on_event=on_event,
            wait_until_ready=wait_until_ready,
            on_crash=on_crash,
            max_resumes=max_resumes,
            snapshots=snapshots,
            workers=workers,
            standby=standby,
            max_requests=max_requests,
            memory=memory,
            slots=slots,
            step_budget_s=step_budget_s,
        )
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    @property
    def model(self) -> str | None:
        """Path of the model's file, or None for an engine that needs none."""
        return self._supervisor.model

    @property
    def deadlines(self) -> Deadlines:
        """The budgets of a request that is given none."""
        return self._supervisor.deadlines

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._supervisor)[1:]}"

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> BlockingSupervisor:
        """Start the worker, and wait until it is ready unless told otherwise. Raises what kept it from that."""
        self._supervisor._check_process()
        check_may_block()
        with self._lock:
            if self._loop is not None:
                raise UsageError("this supervisor was entered before; make a new one")
            self._loop = loop = LoopThread(self._supervisor)
        loop.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close: see `stop`."""
        self.stop()

    def start(self) -> BlockingSupervisor:
        """Do what entering does, for programs without a place for `with`, such as a module that a server loads.

        Call `stop` when the program ends; at the interpreter's end it is done for you. A server that forks must
        call this in each of its processes.
        """
        return self.__enter__()

    def stop(self) -> None:
        """End all requests as `shutting_down`, stop the worker with its graces, and return when it is collected.

        Idempotent, from any thread; leaving the context does it too. Bounded by the graces.
        """
        self._supervisor._check_process()
        check_may_block()
        if self._loop is not None:
            self._loop.close()

    def wait_ready(self, timeout: float | None = None, *, all_workers: bool = False) -> Mapping[str, Any]:
        """Wait until a worker is ready, or all of them; return the first one's facts.

        Raises what opened the breaker (`ModelLoadError`, `WorkerDied`, `WorkerSpawnError`, …), and TimeoutError
        after `timeout` seconds.
        """

        async def wait() -> Mapping[str, Any]:
            with anyio.fail_after(timeout):
                return await self._supervisor.wait_ready(all_workers=all_workers)

        return self._running().run(wait)

    def restart_worker(self) -> None:
        """Replace each worker by a new one once its requests have ended; close an open breaker."""

        async def restart() -> None:
            self._supervisor.restart_worker()

        self._running().run(restart)

    def recycle(self, grace_s: float | None = None) -> None:
        """Replace all workers, one after the other, without a gap: see `Supervisor.recycle`. Returns when it is
        done."""
        self._running().run(partial(self._supervisor.recycle, grace_s))

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
    ) -> BlockingStream:
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
        loop = self._running()

        async def make() -> BlockingStream:
            made = self._supervisor.stream(prompt, messages=messages, **options, **sampling)  # type: ignore[arg-type]
            return BlockingStream(self, loop, made)

        return loop.run(make)

    def streams(
        self,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[ChatMessage] | None = None,
        **options: Unpack[RequestOptions],
    ) -> BlockingStreams:
        """Return n streams for the same prompt, at most as many as a worker has slots. Takes what `stream` takes.

        They go to the same worker if it has room, which reads the prompt once. The first has the seed, the others
        count it up.
        """
        loop = self._running()

        async def make() -> BlockingStreams:
            made = self._supervisor.streams(prompt, n=n, messages=messages, **options)
            return BlockingStreams([BlockingStream(self, loop, stream) for stream in made])

        return loop.run(make)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Return the whole answer. Takes what `stream` takes.

        Raises the error of every end that isn't natural; its `report` tells the rest. Interrupted by Ctrl-C, it
        cancels the request.
        """
        make = partial(self._supervisor.generate, prompt, messages=messages, **options)
        return self._running().run(make)

    def answers(
        self,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[ChatMessage] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Answer]:
        """Return n whole answers to the same prompt: see `streams`. Raises what `generate` raises."""
        make = partial(self._supervisor.answers, prompt, n=n, messages=messages, **options)
        return self._running().run(make)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        normalise: bool = True,
        deadlines: Deadlines | None = None,
        on_crash: str | None = None,
        priority: int = 0,
    ) -> Embeddings:
        """Return a vector for each text, in order: see `Supervisor.embed`."""
        make = partial(
            self._supervisor.embed,
            texts,
            normalise=normalise,
            deadlines=deadlines,
            on_crash=on_crash,
            priority=priority,
        )
        return self._running().run(make)

    def embedding_request(
        self,
        texts: str | Sequence[str],
        *,
        normalise: bool = True,
        deadlines: Deadlines | None = None,
        on_crash: str | None = None,
        priority: int = 0,
    ) -> BlockingEmbeddingRequest:
        """Return the request that `embed` makes: see `Supervisor.embedding_request`."""
        loop = self._running()

        async def make() -> BlockingEmbeddingRequest:
            request = self._supervisor.embedding_request(
                texts, normalise=normalise, deadlines=deadlines, on_crash=on_crash, priority=priority
            )
            return BlockingEmbeddingRequest(self, loop, request)

        return loop.run(make)

    # --- questions -------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = True, timeout_s: float = 30.0) -> list[int]:
        """Return the tokens of a text and nothing but it: see `Supervisor.tokenize`."""
        make = partial(self._supervisor.tokenize, text, special=special, timeout_s=timeout_s)
        return self._running().run(make)

    def detokenize(self, tokens: Sequence[int], *, timeout_s: float = 30.0) -> str:
        """Return the text of tokens: see `Supervisor.detokenize`."""
        return self._running().run(partial(self._supervisor.detokenize, tokens, timeout_s=timeout_s))

    def count_tokens(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special: bool = True,
        timeout_s: float = 30.0,
    ) -> int:
        """Return how many tokens a request's prompt has: see `Supervisor.count_tokens`."""
        make = partial(
            self._supervisor.count_tokens,
            prompt,
            messages=messages,
            tools=tools,
            special=special,
            timeout_s=timeout_s,
        )
        return self._running().run(make)

    # --- looking at it ---------------------------------------------------------------------------

    def add_listener(self, on_event: Callable[[events.Event], None]) -> Callable[[], None]:
        """Call a function with every `Event` from now on, in the loop's thread: see `Supervisor.add_listener`."""
        return self._supervisor.add_listener(on_event)

    def status(self) -> Status:
        """Return the state as of now. Waits for nothing: also for event loops and `on_event`."""
        self._running()
        return self._supervisor.status()

    def _running(self) -> LoopThread:
        self._supervisor._check_process()
        if self._loop is None:
            raise UsageError(
                "this supervisor isn't running: use 'with BlockingSupervisor(...) as supervisor'"
            )
        return self._loop

    def __del__(self) -> None:
        # Race "collected in any thread, in the middle of anything": post, don't wait.
        loop: LoopThread | None = getattr(self, "_loop", None)
        if loop is not None and loop.let_go():
            warnings.warn(f"{self!r} was never left: use 'with'", ResourceWarning, stacklevel=2, source=self)
