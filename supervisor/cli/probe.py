"""`supervise probe`: everything that matters tried once on a real worker, each step timed.

The steps are in `probe_steps`; here they are run in order, bounded, and shown: one line each, green or red on a
terminal, or one JSON object each:

    {"type": "step", "name": "load", "status": "ok", "seconds": 1.2, "detail": "…", "figures": {…}}
    {"type": "probe", "ok": true, "exit_code": 0}
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio

from infervisor import Deadlines, Event, InfervisorError, Supervisor
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.cli.interrupts import Interrupts
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.presentation import FLUSH_S, Diagnostics, as_line, detail_of
from infervisor.supervisor.cli.probe_steps import EXIT, LOAD, STEPS, Failed, Outcome, Probe, Skipped, Told
from infervisor.supervisor.cli.terminal import for_terminal

_COLOURS: Mapping[str, str] = {"ok": "\x1b[32m", "failed": "\x1b[31m", "skipped": "\x1b[33m"}


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What the command line asks for. step_timeout_s: longest time of each step in seconds."""

    model: str | None
    engine: str = "llama"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    python: str | None = None
    step_timeout_s: float = 60.0
    json: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step went. status: ok, failed or skipped."""

    name: str
    status: str
    seconds: float
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])


async def probe(settings: ProbeSettings) -> ExitCode:
    """Run all steps and return the exit code."""
    stdout, stderr = Output(1), Output(2)
    diagnostics = Diagnostics(stderr, verbose=settings.verbose)
    show = _Lines(stdout, as_json=settings.json)
    interrupts = Interrupts(lambda line: diagnostics.line(f"supervise: {line}"))
    code = ExitCode.INTERNAL
    async with anyio.create_task_group() as tasks:
        await tasks.start(interrupts.watch_signals)
        tasks.start_soon(interrupts.watch_reader, stdout)
        code = await _run_steps(settings, show, diagnostics, interrupts)
        tasks.cancel_scope.cancel()
    try:
        with anyio.move_on_after(FLUSH_S):
            await stdout.write(b"")
    except ConnectionError:
        code = ExitCode.READER_GONE
    except OSError as error:
        diagnostics.line(f"supervise: the results can't be written: {error.strerror}")
        code = ExitCode.OUTPUT_FAILED
    await stderr.flush(FLUSH_S)
    return code


async def _run_steps(
    settings: ProbeSettings, show: _Lines, diagnostics: Diagnostics, interrupts: Interrupts
) -> ExitCode:
    told = Told(diagnostics.event)

    def supervised(more: Mapping[str, Any], on_event: Callable[[Event], None], *, wait: bool) -> Supervisor:
        return Supervisor(
            settings.model,
            engine=settings.engine,
            options={**settings.options, **more},
            deadlines=Deadlines(startup_s=settings.step_timeout_s),
            python=settings.python,
            on_event=on_event,
            wait_until_ready=wait,
        )

    def another(more: Mapping[str, Any]) -> Supervisor:
        return supervised(more, diagnostics.event, wait=True)

    supervisor = supervised({}, told, wait=False)
    results: list[StepResult] = []
    with anyio.CancelScope() as working:
        interrupts.guard(working)
        async with supervisor:
            subject = Probe(supervisor, told, another, settings.step_timeout_s)
            for name, action in STEPS:
                if name == EXIT:
                    interrupts.leaving()
                if name != EXIT and any(r.name == LOAD and r.status != "ok" for r in results):
                    result = StepResult(name, "skipped", 0.0, "the model isn't loaded")
                else:
                    result = await _timed(
                        name, action(subject), settings.step_timeout_s, verbose=settings.verbose
                    )
                results.append(result)
                show.step(result)
    code = interrupts.code or _code(results)
    show.verdict(results, code)
    return code


async def _timed(name: str, action: Awaitable[Outcome], timeout_s: float, *, verbose: bool) -> StepResult:
    started = time.monotonic()
    status, detail = "failed", ""
    figures: Mapping[str, Any] = {}
    try:
        with anyio.fail_after(timeout_s):
            detail, figures = await action
            status = "ok"
    except Skipped as reason:
        status, detail = "skipped", str(reason)
    except Failed as reason:
        detail = str(reason)
    except TimeoutError:
        detail = f"not done after {timeout_s:g} s (--step-timeout)"
    except InfervisorError as error:
        detail = f"{error.code}: {error}"
        if verbose and detail_of(error):
            detail += "\n" + detail_of(error)
    return StepResult(name, status, time.monotonic() - started, detail, figures)


def _code(results: list[StepResult]) -> ExitCode:
    failed = [result.name for result in results if result.status == "failed"]
    if LOAD in failed:
        return ExitCode.LOAD_FAILED
    return ExitCode.PROBE_FAILED if failed else ExitCode.OK


class _Lines:
    """One line a step on standard output."""

    def __init__(self, stdout: Output, *, as_json: bool) -> None:
        self._stdout = stdout
        self._as_json = as_json
        self._colour = stdout.is_terminal and not os.environ.get("NO_COLOR")

    def step(self, result: StepResult) -> None:
        """Show how a step went."""
        if self._as_json:
            self._stdout.post(as_line({"type": "step", **asdict(result)}))
            return
        status = f"{result.status:<7}"
        if self._colour:
            status = f"{_COLOURS[result.status]}{status}\x1b[0m"
        seconds = f"{result.seconds:8.3f} s"
        detail = for_terminal(result.detail).replace("\n", "\n    ")
        self._stdout.post(f"{status} {seconds}  {result.name:<17} {detail}\n".encode())

    def verdict(self, results: list[StepResult], code: ExitCode) -> None:
        """Show the sum of it."""
        if self._as_json:
            self._stdout.post(as_line({"type": "probe", "ok": code is ExitCode.OK, "exit_code": code}))
            return
        counts = {name: sum(result.status == name for result in results) for name in _COLOURS}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        self._stdout.post(f"{told or 'nothing was tried'}\n".encode())
