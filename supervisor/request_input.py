"""Turns what a caller passes into a checked request. Nothing that fails here has reached a worker.

The same function serves the library, the CLI and the HTTP service, so that all refuse the same things.
"""

from __future__ import annotations

import difflib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from infervisor.protocol.codec import MAX_TO_WORKER_BYTES
from infervisor.protocol.credit import MAX_WINDOW_TOKENS
from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import SEED_LIMIT, Limits, Sampling, check_seed, check_text
from infervisor.protocol.messages import Submit
from infervisor.protocol.quoting import quoted

MAX_PROMPT_BYTES = MAX_TO_WORKER_BYTES - (1 << 20)
"""The rest of a frame is room for everything else."""
MAX_MESSAGES = 10_000
MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Values in all messages together: checking them takes time, in which the event loop stands still."""

REQUEST_OPTIONS = (
    "prompt", "messages", "max_tokens", "stop", "seed", "ignore_eos", "special", "window", "deadlines",
    "on_crash",
)  # fmt: skip
SAMPLING_OPTIONS = tuple(field.name for field in fields(Sampling))

ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestInput:
    """A checked request. Exactly one of prompt and messages is set. window: tokens."""

    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    sampling: Sampling
    limits: Limits
    seed: int
    special: bool
    window: int
    template_clock_s: float

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
        )


def check_request(
    prompt: object,
    messages: object,
    *,
    window: object,
    max_tokens: object,
    stop: object,
    ignore_eos: object,
    seed: object,
    special: object,
    sampling: Mapping[str, Any],
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
    request = RequestInput(
        prompt=None if prompt is None else _prompt(prompt),
        messages=None if messages is None else _messages(messages),
        sampling=Sampling.from_wire(sampling),
        limits=Limits.from_wire({"max_tokens": max_tokens, "stop": stop, "ignore_eos": ignore_eos}),
        seed=secrets.randbelow(SEED_LIMIT) if seed is None else check_seed(seed),
        special=special,
        window=int(window),
        template_clock_s=time.time(),
    )
    return request


def _unknown(name: str) -> str:
    known = (*REQUEST_OPTIONS, *SAMPLING_OPTIONS)
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown option {quoted(name, 80)}: {meant}there are {', '.join(known)}"


def _prompt(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest(f"prompt must be a string, not {type(prompt).__name__}", "prompt")
    if not prompt:
        raise InvalidRequest("the prompt is empty: there is nothing to continue", "prompt")
    _check_size("prompt", prompt)
    return prompt


def _check_size(name: str, text: str) -> int:
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
    plain = _Plain()
    checked = tuple(_message(f"messages[{index}]", message, plain) for index, message in enumerate(messages))
    size = sum(_size_of(message) for message in checked)
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"messages have {size} bytes; at most {MAX_PROMPT_BYTES} are taken", "messages")
    return checked


def _message(name: str, message: object, plain: _Plain) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{name} must be an object with role and content, not {quoted(message, 80)}", name
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(
            f"{name}.role must be a string such as 'user', not {quoted(role, 80)}", f"{name}.role"
        )
    if "content" not in message:
        raise InvalidRequest(f"{name}.content is missing", f"{name}.content")
    for key in message:
        if not isinstance(key, str):
            raise InvalidRequest(f"{name} has the key {quoted(key, 80)}, which isn't a string", name)
        check_text(name, key)
    checked = {
        key: plain.copy(f"{name}.{key:.40}", value) for key, value in message.items() if key != "content"
    }
    checked["content"] = _content(f"{name}.content", message["content"], plain)
    return checked


def _content(name: str, content: object, plain: _Plain) -> str:
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


class _Plain:
    """Copies plain data (what JSON can hold), at most `MAX_VALUES` values of it."""

    def __init__(self) -> None:
        self._values = 0

    def count(self) -> None:
        """Count one value. Raises `InvalidRequest` if there are too many."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise InvalidRequest(f"messages hold more than {MAX_VALUES} values", "messages")

    def copy(self, name: str, value: object, depth: int = 0) -> Any:
        """Return a copy. Raises `InvalidRequest` naming what isn't plain data."""
        self.count()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} levels deep", name)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return check_text(name, value)
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {
                check_text(name, key): self.copy(f"{name}.{key:.40}", entry, depth + 1)
                for key, entry in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.copy(f"{name}[{index}]", entry, depth + 1) for index, entry in enumerate(value)]
        raise InvalidRequest(f"{name} must be plain data, not {quoted(value, 80)}", name)


def _size_of(value: object) -> int:
    """Return at least the bytes that plain data takes on the wire: a header before each value, at most 9."""
    if isinstance(value, str):
        return len(value.encode()) + 5
    if isinstance(value, Mapping):
        return 5 + sum(_size_of(k) + _size_of(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return 5 + sum(_size_of(entry) for entry in value)
    return 9
