"""The worker's door to the sandbox: render messages and try grammars where a stranger's text can do no harm.

Owns the sandbox process, which it replaces when it is lost, what is known of grammars already, and what a
job's death is called. Methods block and may be called from several threads at once; none is called by a thread
that computes tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.literal_text import ControlTexts, Markers
from infervisor.worker.engines.llama.sandbox_host import SandboxGone, SandboxProcess
from infervisor.worker.engines.llama.sandbox_job import (
    LIMITS,
    NEEDS_TEMPLATE,
    NEEDS_VOCABULARY,
    Death,
    Incomplete,
    Limits,
    Setup,
    packed,
    read_value,
    write_frame,
)
from infervisor.worker.engines.llama.template import NO_TEMPLATE

JOBS_AT_ONCE = 8
STARTUP_S = 30.0
"""How long a new process may take until it answers: it imports, compiles, reads a vocabulary."""
SLACK_S = 2.0
CLOSE_S = 2.0
KNOWN_GRAMMARS = 64
MAX_KNOWN_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt with markers in it, and what they stand for."""

    text: str
    literals: Markers


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An `InvalidRequest` to raise, without what it was raised among."""

    message: str
    field: str | None


class _Died(Exception):
    """A job's process died."""

    def __init__(self, death: Death) -> None:
        super().__init__(str(death))
        self.death = death


class Sandbox:
    """Renders one model's template and tries grammars on its vocabulary, in a process that may be killed."""

    def __init__(
        self,
        model_path: str,
        template: str | None,
        origin: str,
        bos: str,
        eos: str,
        spellings: Sequence[str],
        limits: Limits = LIMITS,
    ) -> None:
        """Take what a process needs; start none. template: its source; origin: how errors name it.

        bos, eos, spellings: the texts of these tokens and of all control tokens.
        """
        self.has_template = template is not None
        self.control = ControlTexts(spellings, "")
        self._origin = origin
        self._limits = limits
        self._setup = packed(Setup(model_path, template, origin, bos, eos, list(spellings), limits).to_wire())
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(JOBS_AT_ONCE)
        self._process: SandboxProcess | None = None
        self._is_closed = False
        self._known: OrderedDict[bytes, str | _Refusal] = OrderedDict()
        self._template_error: str | None = None if self.has_template else NO_TEMPLATE
        self._template_is_tried = not self.has_template

    @property
    def pid(self) -> int | None:
        """The id of the running process, or None."""
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Begin to start the process, if there is none; return at once."""
        self._serving()

    def template_error(self) -> str | None:
        """Return why messages can't be rendered at all, or None. Waits until the template has been tried."""
        if not self._template_is_tried:
            try:
                self._template_error = self._ask(NEEDS_TEMPLATE, "template_error", {})
            except _Died as died:
                raise RuntimeError(
                    f"asking the sandbox about the template {died.death.told(self._limits)}"
                ) from None
            self._template_is_tried = True
        return self._template_error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        clock_s: float | None,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Return the prompt of `messages`. clock_s: the time that the template may show, since the epoch.

        Raises `InvalidRequest` if there is no usable template, or it refuses, fails, or takes too much.
        """
        if not self.has_template:
            raise InvalidRequest(NO_TEMPLATE, "messages")
        arguments = {
            "messages": messages, "tools": tools, "clock_s": clock_s, "add_generation_prompt": add_generation_prompt
        }  # fmt: skip
        try:
            text, text_of = self._ask(NEEDS_TEMPLATE, "render", arguments)
        except _Died as died:
            why = died.death.told(self._limits)
            raise InvalidRequest(f"{self._origin} fails at these messages: it {why}", "messages") from None
        return Rendered(text, Markers(text_of))

    def check_grammar(self, gbnf: str, field: str = "grammar") -> None:
        """Return if llama.cpp can follow the grammar. Raises `InvalidRequest`, naming `field`, otherwise."""
        self._about_grammar("grammar", {"gbnf": gbnf, "field": field}, "the grammar", field)

    def grammar_of_schema(self, schema: str, field: str = "json_schema") -> str:
        """Return the GBNF, tried, of a JSON schema (JSON text). Raises `InvalidRequest`, naming `field`."""
        return self._about_grammar("schema", {"schema": schema, "field": field}, field, field)

    def close(self) -> None:
        """End the process and its jobs, and collect it. A job that runs raises RuntimeError. Idempotent."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close(CLOSE_S)

    def _about_grammar(self, kind: str, arguments: dict[str, str], subject: str, field: str) -> str:
        key = hashlib.sha256(packed([kind, arguments])).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:
            known, lasts = self._tried(kind, arguments, subject, field)
            if lasts and (isinstance(known, _Refusal) or len(known) <= MAX_KNOWN_CHARACTERS):
                with self._lock:
                    self._known[key] = known
                    if len(self._known) > KNOWN_GRAMMARS:
                        self._known.popitem(last=False)
        if isinstance(known, _Refusal):
            raise InvalidRequest(known.message, known.field)
        return known

    def _tried(
        self, kind: str, arguments: dict[str, str], subject: str, field: str
    ) -> tuple[str | _Refusal, bool]:
        """Return what trying led to, and whether it would lead there again."""
        try:
            return self._ask(NEEDS_VOCABULARY, kind, arguments) or "", True
        except InvalidRequest as error:
            return _Refusal(str(error), error.field), True
        except _Died as died:
            why = died.death.told(self._limits)
            told = f"{subject} can't be used: llama.cpp, trying it, {why}; simplify it"
            return _Refusal(told, field), not died.death.by_clock

    def _serving(self) -> SandboxProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the sandbox is closed")
            if self._process is None or not self._process.serves:
                self._process = SandboxProcess(self._setup)
            return self._process

    def _ask(self, needs: bytes, kind: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a job. Raises `InvalidRequest`, `_Died`, or RuntimeError: the sandbox failed."""
        try:
            frame = packed([kind, arguments])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"the request holds what is no plain data: {error}", "messages") from None
        lost = ""
        with self._places:
            # A stranger may have ended the process, or a job's; once more, in a new one, is enough.
            for _ in range(2):
                process = self._serving()
                try:
                    return _read_reply(self._run(process, needs, frame))
                except SandboxGone as gone:
                    # Race "its end is seen here first": killed, it isn't asked again.
                    process.kill()
                    lost = str(gone)
                except _Died as died:
                    if not died.death.from_outside:
                        raise
                    lost = died.death.told(self._limits)
            self._serving()  # raises if it was closed
        raise RuntimeError(f"the sandbox process was lost twice during a {kind} job: {lost}")

    def _run(self, process: SandboxProcess, needs: bytes, frame: bytes) -> Any:
        patience_s = self._limits.wall_s + SLACK_S + (0 if process.has_answered else STARTUP_S)
        deadline_s = time.monotonic() + patience_s
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process.submit(needs, theirs, patience_s)
            try:
                # Race "it dies while it is being asked": how it died can still be read.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    write_frame(ours, frame, deadline_s)
                reply = read_value(ours, deadline_s)
            except TimeoutError:
                raise SandboxGone(f"it has not answered within {patience_s:g} s") from None
            except Incomplete as end:
                death = Death.at_end_of(end.received)
                if death is None:
                    raise SandboxGone("it ended during a job") from None
                raise _Died(death) from None
            except OSError as error:
                raise SandboxGone(f"it ended during a job ({error})") from None
        process.has_answered = True
        return reply


def _read_reply(reply: Any) -> Any:
    outcome, value, field = reply
    if outcome == "done":
        return value
    if outcome == "refused":
        raise InvalidRequest(value, field)
    raise RuntimeError(f"the sandbox failed: {value}")
