"""How probable the model itself held a token, and which others came close.

From the raw logits of the last decode: temperature, bias, penalties and grammar have no part in it. Runs in the
work loop's thread, right after sampling and before the next decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.greedy import Rows, largest

FLOOR = -9999.0
"""Stands for "impossible", and for what isn't a number, as in OpenAI's answers: infinities don't travel in JSON."""


class Logprobs:
    """Natural log-probabilities from output rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def check(self) -> None:
        """Raise `InvalidRequest` if log-probabilities can't be had here. Any thread."""
        if self._rows.numpy is None:
            raise InvalidRequest(
                "logprobs needs numpy, which this installation lacks: pip install numpy, or leave logprobs out",
                "logprobs",
            )

    def of(self, context: Any, output: int, token: int, top: int, piece: Callable[[int], bytes]) -> list[Any]:
        """Return [log-probability of `token`, [[token, bytes, log-probability], …]], plain data.

        The list holds the `top` most probable tokens, the most probable first, of equals the lower number first;
        piece: returns a token's bytes.
        Raises `RuntimeError` if the last decode has no such output.
        """
        numpy = self._rows.numpy
        row = self._rows.row(context, output)
        if row is None:
            raise RuntimeError(f"the last decode has no output {output}")
        total = _log_of_sum(numpy, row)
        if total != total:
            # A broken row. What isn't a number would count as the largest of all.
            row = numpy.where(row == row, row, -numpy.inf)
            total = _log_of_sum(numpy, row)
        alternatives = [
            [other, piece(other), _clean(float(row[other]) - total)]
            for other in largest(numpy, row, top).tolist()
        ]
        return [_clean(float(row[token]) - total), alternatives]


def _log_of_sum(numpy: Any, row: Any) -> float:
    """Return ln Σ exp(row)."""
    with numpy.errstate(all="ignore"):
        most = row.max()
        return float(most) + float(numpy.log(numpy.exp(row - most).sum(dtype=numpy.float64)))


def _clean(value: float) -> float:
    # The comparison is false for what isn't a number, too. Rounding may lift a certain token above ln 1.
    return min(value, 0.0) if value > FLOOR else FLOOR
