"""Turns what a caller passes into a checked request. Nothing that fails here has reached a worker.

The same function serves the library, the CLI and the HTTP service, so that all refuse the same things.
"""

from __future__ import annotations

import difflib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from infervisor.protocol.codec import MAX_TO_WORKER_BYTES
from infervisor.protocol.credit import MAX_WINDOW_TOKENS
from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import (
    SEED_LIMIT,
    Limits,
    Sampling,
    check_integer,
    check_seed,
    check_text,
)
from infervisor.protocol.messages import Submit
from infervisor.protocol.output import PLAIN_OUTPUT, Output, check_priority
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.output_input import Tool, check_output
from infervisor.supervisor.plain_values import PlainValues, size_of

MAX_PROMPT_BYTES = MAX_TO_WORKER_BYTES - (1 << 20)
"""The rest of a frame is room for everything else."""
MAX_MESSAGES = 10_000
MAX_CHOICES = 128

REQUEST_OPTIONS = (
    "prompt", "messages", "max_tokens", "stop", "seed", "ignore_eos", "special", "window", "deadlines",
    "on_crash", "priority", "logprobs", "top_logprobs", "grammar", "json_schema", "response_format", "tools",
    "tool_choice",
)  # fmt: skip
SAMPLING_OPTIONS = tuple(field.name for field in fields(Sampling))

_NO_SAMPLING: Mapping[str, Any] = {}

ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestInput:
    """A checked request. Exactly one of prompt, messages and texts is set. window: tokens.

    texts: what is to be embedded. tools: None if there are none. choices: how many answers its caller wants of the
    same prompt; this is one of them.
    """

    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    sampling: Sampling
    limits: Limits
    seed: int
    special: bool
    window: int
    template_clock_s: float
    output: Output = PLAIN_OUTPUT
    tools: tuple[Tool, ...] | None = None
    priority: int = 0
    choices: int = 1
    texts: tuple[str, ...] | None = None

    def choice(self, index: int) -> RequestInput:
        """Return one of several answers to the same: its own seed, counted up from the first one's."""
        return replace(self, seed=(self.seed + index) % SEED_LIMIT)

    def to_submit(
        self,
        attempt_id: int,
        credit: int,
        delivered: Sequence[int] = (),
        snapshot: tuple[int, int] | None = None,
    ) -> Submit:
        """Return the message that starts an attempt. delivered: token ids; snapshot: offset and bytes."""
        return Submit(
            id=attempt_id,
            prompt=self.prompt,
            messages=self.messages,
            sampling=self.sampling.to_wire(),
            seed=self.seed,
            template_clock_s=self.template_clock_s,
            special=self.special,
            limits=self.limits.to_wire(),
            credit=credit,
            delivered=tuple(delivered),
            snapshot=snapshot,
            texts=self.texts,
            output=self.output.to_wire(),
            tools=self.tools,
            priority=self.priority,
        )


def check_request(
    prompt: object,
    messages: object,
    *,
    window: object = 1,
    max_tokens: object = None,
    stop: object = None,
    ignore_eos: object = False,
    seed: object = None,
    special: object = True,
    sampling: Mapping[str, Any] = _NO_SAMPLING,
    logprobs: object = False,
    top_logprobs: object = 0,
    grammar: object = None,
    json_schema: object = None,
    response_format: object = None,
    tools: object = None,
    tool_choice: object = None,
    priority: object = 0,
    choices: object = 1,
) -> RequestInput:
    """Return the checked request. Raises `InvalidRequest` naming the field; without a seed one is drawn."""
    if (prompt is None) == (messages is None):
        raise InvalidRequest(
            "give either a prompt or messages, not both and not neither",
            "prompt" if messages is None else "messages",
        )
    if not isinstance(special, bool):
        raise InvalidRequest(f"special must be true or false, not {quoted(special, 80)}", "special")
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_WINDOW_TOKENS:
        raise InvalidRequest(
            f"window must be a whole number of tokens from 1 to {MAX_WINDOW_TOKENS}, not {quoted(window, 80)}",
            "window",
        )
    for name in sampling:
        if name not in SAMPLING_OPTIONS:
            raise InvalidRequest(_unknown(name), name[:80])
    checked_prompt = None if prompt is None else _prompt(prompt)
    checked_messages = None if messages is None else _messages(messages)
    limits = Limits.from_wire({"max_tokens": max_tokens, "stop": stop, "ignore_eos": ignore_eos})
    output, checked_tools = check_output(
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        grammar=grammar,
        json_schema=json_schema,
        response_format=response_format,
        tools=tools,
        tool_choice=tool_choice,
        has_messages=messages is not None,
        ignore_eos=limits.ignore_eos,
    )
    request = RequestInput(
        prompt=checked_prompt,
        messages=checked_messages,
        sampling=Sampling.from_wire(sampling),
        limits=limits,
        seed=secrets.randbelow(SEED_LIMIT) if seed is None else check_seed(seed),
        special=special,
        window=int(window),
        template_clock_s=time.time(),
        output=output,
        tools=checked_tools,
        priority=check_priority(priority),
        choices=check_integer("n", choices, 1, MAX_CHOICES),
    )
    if output != PLAIN_OUTPUT or checked_tools is not None:
        _check_together(request)
    return request


def _check_together(request: RequestInput) -> None:
    """Raise `InvalidRequest` if what is small enough by itself is too large for one frame together."""
    parts = (request.prompt, request.messages, request.tools, request.output.to_wire())
    size = sum(size_of(part) for part in parts if part is not None)
    if size > MAX_PROMPT_BYTES + 64:
        name = "prompt" if request.messages is None else "messages"
        raise InvalidRequest(
            f"{name}, tools and the form of the answer have {size} bytes together; "
            f"at most {MAX_PROMPT_BYTES} are taken",
            name,
        )


def _unknown(name: str) -> str:
    if name == "n":
        return "a stream is one answer: call streams(…, n=…) or answers(…, n=…) for several"
    known = (*REQUEST_OPTIONS, *SAMPLING_OPTIONS)
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown option {quoted(name, 80)}: {meant}there are {', '.join(known)}"


def _prompt(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest(f"prompt must be a string, not {type(prompt).__name__}", "prompt")
    if not prompt:
        raise InvalidRequest("the prompt is empty: there is nothing to continue", "prompt")
    check_size("prompt", prompt)
    return prompt


def check_size(name: str, text: str) -> int:
    """Return the bytes of a text. Raises `InvalidRequest` if they are too many, or it isn't valid text."""
    check_text(name, text)
    size = len(text.encode())
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; at most {MAX_PROMPT_BYTES} are taken", name)
    return size


def _messages(messages: object) -> tuple[ChatMessage, ...]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages must be a list of objects with role and content, not {type(messages).__name__}",
            "messages",
        )
    if not messages:
        raise InvalidRequest("messages is empty: there is nothing to answer", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(messages)} messages; at most {MAX_MESSAGES} are taken", "messages")
    plain = PlainValues("messages")
    checked = tuple(_message(f"messages[{index}]", message, plain) for index, message in enumerate(messages))
    size = sum(size_of(message) for message in checked)
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"messages have {size} bytes; at most {MAX_PROMPT_BYTES} are taken", "messages")
    return checked


def _message(name: str, message: object, plain: PlainValues) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{name} must be an object with role and content, not {quoted(message, 80)}", name
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(
            f"{name}.role must be a string such as 'user', not {quoted(role, 80)}", f"{name}.role"
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        # An answer of calls alone. Templates join texts, and fail at what is none.
        content = ""
    elif "content" not in message:
        raise InvalidRequest(f"{name}.content is missing", f"{name}.content")
    for key in message:
        if not isinstance(key, str):
            raise InvalidRequest(f"{name} has the key {quoted(key, 80)}, which isn't a string", name)
        check_text(name, key)
    checked = {
        key: plain.copy(f"{name}.{key:.40}", value) for key, value in message.items() if key != "content"
    }
    checked["content"] = _content(f"{name}.content", content, plain)
    return checked


def _content(name: str, content: object, plain: PlainValues) -> str:
    """Return the text of a content: a string, or a list of text parts, which are joined."""
    if isinstance(content, str):
        return check_text(name, content)
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        texts: list[str] = []
        for index, part in enumerate(content):
            plain.count()
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InvalidRequest(
                    f"{name}[{index}] must be a part like {{'type': 'text', 'text': '…'}}, not {quoted(part, 80)}",
                    f"{name}[{index}]",
                )
            texts.append(check_text(f"{name}[{index}]", part["text"]))
        return "".join(texts)
    raise InvalidRequest(f"{name} must be a string or a list of text parts, not {quoted(content, 80)}", name)
