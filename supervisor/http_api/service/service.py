"""The service: sockets, supervisors and the HTTP server of one process, from the start to the end.

Owns their order and the signals. Sockets first: a taken port fails before a model is loaded. Then everything at
once, so that health is told while models load. How it ends is decided in `drain`; here it is carried out. Runs in
the event loop of the process, asyncio alone, as the HTTP server does.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import fields

import anyio
import anyio.abc

from infervisor import ConfigurationError, Event, InfervisorError, ShuttingDown, Supervisor
from infervisor.supervisor.http_api.app import create_app
from infervisor.supervisor.http_api.server.server import (
    ConnectionLimits,
    HttpServer,
    Listening,
    open_sockets,
    tls_context,
)
from infervisor.supervisor.http_api.service import drain
from infervisor.supervisor.http_api.service.notify import Notifier
from infervisor.supervisor.http_api.service.request_log import log_request
from infervisor.supervisor.http_api.service.serve_models import make_supervisors
from infervisor.supervisor.http_api.service.serve_settings import ServeSettings
from infervisor.supervisor.http_api.service.worker_log import WorkerLog
from infervisor.supervisor.http_api.settings import HttpSettings

LOOK_S = 0.05
LAST_WORDS_S = 3.0
"""How long the ends of streams may take on their way to clients, once the workers are gone."""
CUT_OFF_S = 0.5
STOP_S = 20.0
"""More than the graces of stopping workers, and the last words, take together."""
LONGEST_LOAD_S = 3600.0
"""So long the service manager is asked to wait for the next sign of progress where no deadline says."""


class End(enum.Enum):
    """Why the service ended."""

    ASKED = "asked"
    LOAD_FAILED = "load_failed"
    NO_ADDRESS = "no_address"


async def serve(
    settings: ServeSettings, keys: tuple[str, ...], *, logger: logging.Logger, say: Callable[[str], None]
) -> End:
    """Serve until a signal asks for the end, or a model can't be loaded at the start.

    settings, keys: as `serve_checks.check` found them right. say: called with the few lines that are told whatever
    the log's level is. Raises `ConfigurationError`. A third signal ends the process from in here.
    """
    try:
        unix_socket = settings.unix_socket
        listening = open_sockets(None if unix_socket else settings.host, settings.port, unix_socket)
    except ConfigurationError as error:
        say(str(error))
        return End.NO_ADDRESS
    with listening:
        return await _Service(settings, keys, logger, say, listening).run()


class _Service:
    def __init__(
        self,
        settings: ServeSettings,
        keys: tuple[str, ...],
        logger: logging.Logger,
        say: Callable[[str], None],
        listening: Listening,
    ) -> None:
        self._settings = settings
        self._log, self._say = logger, say
        self._listening = listening
        self._notifier = Notifier(os.environ)
        self._worker_log = WorkerLog(logger)
        self._supervisors = make_supervisors(settings, self._on_event)
        self._app = create_app(
            self._supervisors,
            settings=_http_settings(settings, keys),
            aliases=settings.aliases,
            on_finished=lambda entry: log_request(logger, entry, prompts=settings.log_prompts),
        )
        self._ledger = self._app.state.context.ledger
        self._server = HttpServer(
            self._app,
            listening,
            limits=_connection_limits(settings),
            tls=None if settings.tls_cert is None else tls_context(settings.tls_cert, settings.tls_key),
        )
        self._state = drain.Ending()
        self._end = End.ASKED
        self._cancelling, self._served = anyio.Event(), anyio.Event()
        self._is_recycling = False
        self._told_loading_s = -1.0

    async def run(self) -> End:
        """Serve, and end."""
        try:
            async with anyio.create_task_group() as tasks, AsyncExitStack() as running:
                self._tasks = tasks
                # Before the first worker, so that no signal finds the service half started.
                await tasks.start(self._watch_signals)
                for supervisor in self._supervisors.values():
                    await running.enter_async_context(supervisor)
                tasks.start_soon(self._serve)
                tasks.start_soon(self._notifier.keep_alive)
                tasks.start_soon(self._until_ready)
                await self._cancelling.wait()
                await self._finish()
                tasks.cancel_scope.cancel()
        finally:
            self._notifier.close()
        return self._end

    async def _serve(self) -> None:
        """Task: the HTTP server."""
        await self._server.serve()
        self._served.set()

    # --- the start ---------------------------------------------------------------------------------

    async def _until_ready(self) -> None:
        """Task: wait for all models, and say so; or end the service if one of them can't be loaded."""
        where = " and ".join(self._listening.addresses)
        self._log.info("loading", extra={"values": {"models": list(self._supervisors), "address": where}})
        self._notifier.status(f"loading {', '.join(self._supervisors)}")
        async with anyio.create_task_group() as tasks:
            for name, supervisor in self._supervisors.items():
                tasks.start_soon(self._until_loaded, name, supervisor)
        if self._state.phase is drain.Phase.SERVING:
            line = f"{self._url()} serves {', '.join(self._supervisors)}"
            self._say(line + (f"; console {self._url(console=True)}" if self._has_console() else ""))
            self._notifier.ready(line)

    async def _until_loaded(self, name: str, supervisor: Supervisor) -> None:
        try:
            await supervisor.wait_ready()
        except ShuttingDown:
            return
        except InfervisorError as error:
            self._say(f"{error.code}: {name}: {error}")
            if self._state.phase is drain.Phase.SERVING:
                self._end = End.LOAD_FAILED
            self._take(drain.on_failure(self._state))

    def _url(self, *, console: bool = False) -> str:
        address = self._listening.addresses[0]
        if address.startswith("unix:"):
            return address
        if console:
            # What is listened on is no name that a browser on this machine could use.
            address = address.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
        scheme = "http" if self._settings.tls_cert is None else "https"
        return f"{scheme}://{address}{'/' if console else ''}"

    def _has_console(self) -> bool:
        return self._settings.console and self._settings.unix_socket is None

    def _on_event(self, model: str, event: Event) -> None:
        self._worker_log(model, event)
        if type(event).__name__ == "LoadProgress" and self._notifier.is_wanted:
            now_s = time.monotonic()
            if now_s - self._told_loading_s >= 1:
                self._told_loading_s = now_s
                # The same time that the worker has for its next sign of progress, and some more.
                self._notifier.extend_timeout((self._settings.startup_timeout_s or LONGEST_LOAD_S) + STOP_S)

    # --- signals -----------------------------------------------------------------------------------

    async def _watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Task: take signals until cancelled. What this process was started to ignore stays ignored."""
        wanted = [
            number
            for number in (*sorted(drain.ENDS), signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        if not wanted:
            task_status.started()
            return
        try:
            with anyio.open_signal_receiver(*wanted) as received:
                task_status.started()
                async for number in received:
                    grace_ns = int(self._settings.drain_grace_s * 1e9)
                    self._take(drain.on_signal(self._state, number, time.monotonic_ns(), grace_ns), number)
        finally:
            # Everything is over: one more signal must not make a failure of it.
            for number in wanted:
                signal.signal(number, signal.SIG_IGN)

    def _take(self, decided: tuple[drain.Ending, drain.Act | None], number: int = signal.SIGTERM) -> None:
        self._state, act = decided
        if act is drain.Act.LEAVE:
            # Workers end with this process: their control pipes close, and the system kills them.
            os._exit(128 + number)
        if act is drain.Act.RECYCLE:
            self._tasks.start_soon(self._recycle)
        elif act is drain.Act.BEGIN_DRAIN:
            self._tasks.start_soon(self._drain)
        elif act is drain.Act.CANCEL:
            self._ledger.begin_drain()
            self._cancelling.set()

    async def _recycle(self) -> None:
        """Task: replace the workers of all models."""
        if self._is_recycling:
            self._log.info("workers are being replaced already")
            return
        self._is_recycling = True
        self._notifier.reloading()
        self._log.info("replacing workers, as SIGHUP asks")
        try:
            async with anyio.create_task_group() as tasks:
                for name, supervisor in self._supervisors.items():
                    tasks.start_soon(self._recycle_one, name, supervisor)
        finally:
            self._is_recycling = False
            # Whatever came of it: the service serves.
            self._notifier.ready(f"{self._url()} serves {', '.join(self._supervisors)}")

    async def _recycle_one(self, name: str, supervisor: Supervisor) -> None:
        try:
            if supervisor.status().slot == "open":
                # It had given up; somebody may have mended what kept it from starting.
                supervisor.restart_worker()
            await supervisor.recycle()
        except ShuttingDown:
            return
        except InfervisorError as error:
            self._log.error(f"the workers of {name} stay: {error.code}: {error}")
        else:
            self._log.info("workers replaced", extra={"values": {"model": name}})

    # --- the end -----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Task: refuse new requests, and wait for the running ones as long as the grace lasts."""
        self._ledger.begin_drain()
        live = len(self._ledger.live())
        grace_s = self._settings.drain_grace_s
        self._log.info("draining", extra={"values": {"requests": live, "grace_s": grace_s}})
        self._notifier.stopping(f"draining {live} requests, for at most {grace_s:g} s")
        self._notifier.extend_timeout(grace_s + STOP_S)
        while self._state.until_ns is not None:
            with anyio.move_on_after(max(0.0, (self._state.until_ns - time.monotonic_ns()) / 1e9)):
                await self._ledger.wait_idle()
                # What is answered may still be on its way to a client that reads slowly.
                while self._server.unsent_bytes():  # noqa: ASYNC110 - nothing tells of it
                    await anyio.sleep(LOOK_S)
                self._take(drain.on_idle(self._state))
            self._take(drain.on_time(self._state, time.monotonic_ns()))

    async def _finish(self) -> None:
        """End what is left, give its ends time to reach the clients, and let the server go."""
        self._log.info("ending", extra={"values": {"requests": len(self._ledger.live())}})
        self._notifier.stopping("ending")
        self._notifier.extend_timeout(STOP_S)
        async with anyio.create_task_group() as tasks:
            for supervisor in self._supervisors.values():
                tasks.start_soon(supervisor.stop)
        with anyio.move_on_after(LAST_WORDS_S):
            await self._ledger.wait_idle()
        # Who hasn't taken its end by now won't: only what is on its way in the sockets may still go out.
        self._server.stop(CUT_OFF_S if self._ledger.live() else LAST_WORDS_S)
        await self._served.wait()


def _http_settings(settings: ServeSettings, keys: tuple[str, ...]) -> HttpSettings:
    """Return what the application is told: the settings of the same name."""
    ours = {each.name for each in fields(ServeSettings)}
    shared = {each.name: getattr(settings, each.name) for each in fields(HttpSettings) if each.name in ours}
    return HttpSettings(**{**shared, "api_keys": keys})


def _connection_limits(settings: ServeSettings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        keep_alive_s=settings.keep_alive_s,
    )
