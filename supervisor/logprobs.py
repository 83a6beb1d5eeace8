"""How probable a token was, and which others were: values for the caller, read from what a worker claims.

Pure: what isn't of the right shape is the worker's fault, and raises `RemoteProtocolError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.quoting import quoted

ROUNDING = 1e-3
"""How far above 0 a log-probability may come out of adding up a large vocabulary."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that could have been chosen. data: its bytes, perhaps a part of a character.

    logprob: natural logarithm of its probability, before temperature and other samplers.
    """

    token_id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """Its bytes as text; what is no character by itself is U+FFFD."""
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TokenLogprob(TopLogprob):
    """The token that was chosen. top: the most probable ones, best first; it needn't be among them."""

    top: tuple[TopLogprob, ...] = ()


def read_logprobs(tokens: Sequence[Sequence[Any]], most: int) -> list[TokenLogprob]:
    """Return what a worker told of each token `[id, text, logprobs]`, with at most so many others.

    logprobs: `[log-probability, [[token, bytes, log-probability], …], bytes of the chosen token]`.
    """
    read: list[TokenLogprob] = []
    for token, _, told in tokens:
        if type(told) is not list or len(told) != 3 or type(told[1]) is not list or len(told[1]) > most:
            raise RemoteProtocolError(f"tokens: log-probabilities {quoted(told)} of token {token}")
        logprob, others, data = told
        top = tuple(_one(other) for other in others)
        read.append(TokenLogprob(token, _bytes(data), _logprob(logprob), top))
    return read


def _one(told: object) -> TopLogprob:
    if type(told) is not list or len(told) != 3 or type(told[0]) is not int or told[0] < 0:
        raise RemoteProtocolError(f"tokens: {quoted(told)} instead of a token and its log-probability")
    return TopLogprob(told[0], _bytes(told[1]), _logprob(told[2]))


def _bytes(data: object) -> bytes:
    if type(data) is not bytes:
        raise RemoteProtocolError(f"tokens: {quoted(data)} instead of a token's bytes")
    return data


def _logprob(value: object) -> float:
    # What is no number is not less either.
    if (type(value) is float or type(value) is int) and value <= ROUNDING:
        # Rounded above 0 it would be a probability of more than 1.
        return min(0.0, float(value))
    raise RemoteProtocolError(f"tokens: {quoted(value)} isn't a log-probability")
