"""Render a model's chat template: code from a model file, run in a sandbox, about text from a stranger.

Owns compiling, jinja's sandbox, and what a template gets to see. A bad template never fails the load: it fails
the chat requests that need it, and raw prompts go on working. Runs in the sandbox process and its children, whose
limits end what never ends; what is cut off here are the common single operations that would hold the
interpreter, because then the error can say which.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.literal_text import ControlTexts, Literals

MAX_RENDERED_CHARACTERS = 64 << 20
MAX_OPERAND_LENGTH = 1 << 20
MAX_NUMBER_BITS = 4096
NO_TEMPLATE = (
    "this model has no chat template: pass the text as prompt= instead of messages=, "
    "or load it with the option chat_template="
)
_WIDE_FIELD = re.compile(r"%[^%a-zA-Z]*\d{5}")


class _Refused(Exception):
    """The template called raise_exception: it doesn't take these messages."""


class JsonObject(dict[Any, Any]):
    """Arguments of a call: a mapping, as most templates want them, that prints as JSON, as others expect."""

    def __str__(self) -> str:
        return _tojson(self)


class ChatTemplate:
    """One compiled template. origin: how errors name it. source None: the model has none."""

    def __init__(self, source: str | None, origin: str, bos: str, eos: str, spellings: Sequence[str]) -> None:
        self.origin = origin
        self.present = source is not None
        self.control = ControlTexts(spellings, (source or "") + bos + eos)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._template: Any = None
        self.error: str | None = None
        if source is None:
            self.error = NO_TEMPLATE
            return
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            # Whatever compiling a stranger's template raises (syntax, recursion, memory) is its fault.
            self.give_up(_told(error))

    def give_up(self, why: str) -> None:
        """Make it unusable, for a reason that compiling it has shown."""
        self._template = None
        self.error = (
            f"{self.origin} can't be compiled ({why}): pass the text as prompt= instead of "
            "messages=, or load the model with another chat_template="
        )

    @property
    def usable(self) -> bool:
        """Whether messages can be rendered."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        clock_s: float | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[str, Literals]:
        """Return the prompt with markers in it, and what they stand for.

        clock_s: the time that the template may show, in seconds since the epoch. tools: what it may offer to the
        model; none and an empty list are the same to it. Raises `InvalidRequest` if there is no usable
        template, the messages are malformed, or the template refuses or fails.
        """
        if self._template is None:
            raise InvalidRequest(self.error or "", "messages")
        literals = Literals(self.control)
        context: dict[str, Any] = {
            "messages": literals.protect(_checked(messages)),
            "add_generation_prompt": add_generation_prompt,
            "tools": literals.protect(list(tools), "tools") if tools else None,
            "documents": None,
            "raise_exception": _raise_exception,
            **self._special,
        }
        if clock_s is not None:
            context["strftime_now"] = _clock(clock_s)
        try:
            rendered = self._run(context)
            rendered.encode()
            return rendered, literals
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{self.origin} writes what is no text: {error}", "messages") from None
        except _Refused as error:
            raise InvalidRequest(f"{self.origin} refuses the messages: {error}", "messages") from None
        except Exception as error:
            raise InvalidRequest(
                f"{self.origin} fails at these messages: {_told(error)}", "messages"
            ) from None

    def _run(self, context: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(context):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARACTERS:
                raise ValueError(f"it writes more than {MAX_RENDERED_CHARACTERS} characters")
        return "".join(pieces)


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class IgnoreGeneration(jinja2.ext.Extension):
        """`{% generation %}` marks training data; for a prompt only what it encloses counts."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares a set

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        # Single operations that don't return to the interpreter for minutes: no exception can end those.
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not _small_power(left, right):
                raise OverflowError("a power too large to compute")
            if operator == "*" and not _small_product(left, right):
                raise OverflowError("a product too large to compute")
            if operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
                raise OverflowError("a field too wide to write")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[IgnoreGeneration, jinja2.ext.loopcontrols],
        # Nothing is computed while compiling, at load and outside every guard: neither by the optimiser nor by
        # the code generator, which computes constant output unless what finalises it needs the context.
        optimized=False,
        finalize=jinja2.pass_context(_unchanged),
    )
    environment.filters["tojson"] = _tojson
    return environment


def _unchanged(context: Any, value: Any) -> Any:
    return value


def _small_power(left: Any, right: Any) -> bool:
    if not (isinstance(left, int) and isinstance(right, int)):
        return True
    return right <= 0 or left.bit_length() * right <= MAX_NUMBER_BITS


def _small_product(left: Any, right: Any) -> bool:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            return len(sequence) * times <= MAX_OPERAND_LENGTH
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length() <= MAX_NUMBER_BITS
    return True


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    # Jinja's own tojson escapes for HTML; the models were trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> str:
    raise _Refused(str(message))


def _clock(clock_s: float) -> Any:
    try:
        now = time.localtime(clock_s)
    except (OverflowError, ValueError, OSError) as error:
        raise InvalidRequest(
            f"template_clock_s {clock_s!r} is not a time: {error}", "template_clock_s"
        ) from None

    def strftime_now(layout: str) -> str:
        return time.strftime(layout, now)

    return strftime_now


def _told(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than it may have"
    text = str(error) or "no more is known"
    line = getattr(error, "lineno", None)
    where = f" at line {line}" if isinstance(line, int) else ""
    return f"{type(error).__name__}{where}: {text:.500}"


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with plain string contents: templates would print anything else as Python."""
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed", "messages")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"messages[{index}] has no role", "messages")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(index, part) for part in content)
    if not isinstance(content, str):
        raise InvalidRequest(
            f"messages[{index}].content must be a string or a list of text parts, not {content!r:.60}",
            "messages",
        )
    checked = {**message, "content": content}
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        checked["tool_calls"] = [_with_readable_arguments(call) for call in calls]
    return checked


def _with_readable_arguments(call: Any) -> Any:
    """Return the call with arguments that are the text of a JSON object, as OpenAI has them, as that object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return call  # what isn't JSON is the text that the model wrote; the template may still take it
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "function": {**function, "arguments": JsonObject(arguments)}}


def _part_text(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(
        f"messages[{index}].content holds a part that isn't text: {part!r:.60}; this engine takes only "
        '{"type": "text", "text": …}',
        "messages",
    )
