"""What an answer brings beside its text: tool calls and log-probabilities, for people and for JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infervisor import Chunk, TokenLogprob, ToolCall, TopLogprob
from infervisor.supervisor.cli.terminal import for_terminal

MOST_TABLE_LINES = 100
TOKEN_COLUMNS = 20


def chunk_as_dict(chunk: Chunk) -> dict[str, Any]:
    """Return the fields of a token line; log-probabilities and calls only where there are some."""
    told: dict[str, Any] = {
        "text": chunk.text,
        "index": chunk.index,
        "token_ids": list(chunk.token_ids),
        "t_ns": chunk.t_ns,
    }
    if chunk.logprobs:
        told["logprobs"] = [
            {**_logprob_as_dict(token), "top": [_logprob_as_dict(other) for other in token.top]}
            for token in chunk.logprobs
        ]
    if chunk.tool_calls:
        told["tool_calls"] = [asdict(call) for call in chunk.tool_calls]
    return told


def _logprob_as_dict(token: TopLogprob) -> dict[str, Any]:
    # JSON has no infinity: null is a token that can't come.
    logprob = token.logprob if math.isfinite(token.logprob) else None
    return {
        "token_id": token.token_id,
        "text": token.text,
        "bytes": list(token.data),
        "logprob": logprob,
    }


def call_line(call: ToolCall) -> str:
    """Return a call as one line of JSON in ASCII, its arguments as an object."""
    return json.dumps({"tool_calls": [{**asdict(call), "arguments": json.loads(call.arguments)}]}) + "\n"


class LogprobTable:
    """The first tokens of an answer with their probabilities: lines for people."""

    def __init__(self) -> None:
        self._tokens: list[TokenLogprob] = []
        self._left_out = 0

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        """Take the tokens of a chunk."""
        room = MOST_TABLE_LINES - len(self._tokens)
        self._tokens += tokens[:room]
        self._left_out += max(0, len(tokens) - room)

    def lines(self) -> list[str]:
        """Return a heading and a line for each token, or nothing if there are none."""
        if not self._tokens:
            return []
        others = any(token.top for token in self._tokens)
        lines = [f"{'token':{TOKEN_COLUMNS}}  logprob      p" + ("  most probable" if others else "")]
        for token in self._tokens:
            top = "  ".join(f"{_shown(other)} {_share(other)}" for other in token.top)
            line = f"{_shown(token):{TOKEN_COLUMNS}} {token.logprob:8.3f} {_share(token):>6}  {top}"
            lines.append(line.rstrip())
        if self._left_out:
            lines.append(f"and {self._left_out} more: --json has all of them")
        return lines


def _shown(token: TopLogprob) -> str:
    text = json.dumps(token.text, ensure_ascii=False)
    return for_terminal(text if len(text) <= TOKEN_COLUMNS else text[: TOKEN_COLUMNS - 2] + '…"')


def _share(token: TopLogprob) -> str:
    return f"{math.exp(token.logprob):.1%}"
