"""Log-probabilities: equal to the bare library's, and plain data whatever the logits are."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.greedy import Argmax, Rows
from infervisor.worker.engines.llama.logprobs import FLOOR, Logprobs
from tests.helpers.models import smollm2_path
from tests.helpers.native_context import NativeContext

PROMPT = "The capital of France is"
LN_9 = math.log(9)


class Library:
    """Has one row of logits."""

    def __init__(self, *values: float) -> None:
        self.row = (ctypes.c_float * len(values))(*values)

    def llama_get_logits_ith(self, context: object, output: int) -> Any:
        return ctypes.cast(self.row, ctypes.POINTER(ctypes.c_float)) if output == 0 else None


def logprobs_of(*values: float, token: int = 0, top: int = 20) -> list[Any]:
    rows = Rows(Library(*values), len(values))
    return Logprobs(rows).of(None, 0, token, top, lambda token: b"piece %d" % token)


@pytest.fixture(scope="module")
def real() -> Iterator[NativeContext]:
    context = NativeContext(smollm2_path())
    yield context
    context.close()


def test_equal_to_the_bare_library(real: NativeContext) -> None:
    # What it tells of its answer, and what we tell of each step in its context when the same is computed again.
    bare = real.llama.Llama(str(smollm2_path()), n_ctx=512, n_threads=1, logits_all=True, verbose=False)
    told = bare.create_completion(PROMPT, max_tokens=8, temperature=0, logprobs=5)["choices"][0]["logprobs"]
    rows = Rows(real.llama, real.words.size)
    argmax, logprobs = Argmax(rows), Logprobs(rows)
    bare.reset()
    bare.eval(real.tokens(PROMPT))
    for index in range(8):
        token = argmax.token(bare.ctx, -1)
        assert token is not None
        value, alternatives = logprobs.of(bare.ctx, -1, token, 5, real.words.piece)
        assert real.words.piece(token).decode() == told["tokens"][index]
        assert value == pytest.approx(told["token_logprobs"][index], abs=1e-4)
        ours = {piece.decode("utf-8", "ignore"): logprob for _, piece, logprob in alternatives}
        assert ours == pytest.approx(told["top_logprobs"][index], abs=1e-4)
        bare.eval([token])
    bare.close()


def test_equal_to_the_bare_library_on_the_same_logits(real: NativeContext) -> None:
    # Of every token, the improbable ones too; computed from the same numbers, so it is exact.
    real.begin(real.tokens(PROMPT))
    row = real.rows.row(real.context, -1).copy()
    expected = real.llama.Llama.logits_to_logprobs(row)
    logprobs = Logprobs(real.rows)
    for token in range(0, real.words.size, 499):
        value, _ = logprobs.of(real.context, -1, token, 0, real.words.piece)
        assert value == pytest.approx(float(expected[token]), abs=1e-5)
    _, alternatives = logprobs.of(real.context, -1, 0, 20, real.words.piece)
    assert [token for token, _, _ in alternatives] == np.argsort(-expected, kind="stable")[:20].tolist()
    assert all(piece == real.words.piece(token) for token, piece, _ in alternatives)


def test_the_most_probable_come_first_and_of_equals_the_lower_token() -> None:
    value, alternatives = logprobs_of(0.0, LN_9, -LN_9, 0.0, token=3, top=3)
    total = 1 + 9 + 1 / 9 + 1
    assert value == pytest.approx(math.log(1 / total))
    assert [(token, piece) for token, piece, _ in alternatives] == [
        (1, b"piece 1"),
        (0, b"piece 0"),
        (3, b"piece 3"),
    ]
    assert [logprob for _, _, logprob in alternatives] == pytest.approx([math.log(9 / total), value, value])


@pytest.mark.parametrize(("top", "told"), [(0, 0), (1, 1), (3, 3), (20, 3)])
def test_as_many_alternatives_as_asked_for_and_there_are(top: int, told: int) -> None:
    assert len(logprobs_of(1.0, 2.0, 3.0, top=top)[1]) == told


@pytest.mark.parametrize(
    "values",
    [
        (0.0, -math.inf, 5.0),
        (math.nan, 1.0, 2.0),
        (math.inf, 1.0, 2.0),
        (-math.inf, -math.inf, -math.inf),
        (math.nan, math.nan, math.nan),
        (3e38, -3e38, 0.0),
        (50_000.0, 0.0, 0.0),
    ],
)
def test_what_travels_is_plain_finite_data(values: tuple[float, ...]) -> None:
    for token in range(3):
        told = logprobs_of(*values, token=token)
        assert msgpack.unpackb(msgpack.packb(told)) == told
        numbers = [told[0], *(logprob for _, _, logprob in told[1])]
        assert all(type(number) is float and FLOOR <= number <= 0 for number in numbers)
        assert all(type(token) is int for token, _, _ in told[1])
        assert json.loads(json.dumps(numbers)) == numbers
        assert numbers[1:] == sorted(numbers[1:], reverse=True)


def test_what_is_no_number_is_as_good_as_impossible_and_spoils_no_other() -> None:
    value, alternatives = logprobs_of(math.nan, LN_9, 0.0)
    assert value == FLOOR
    assert [token for token, _, _ in alternatives] == [1, 2, 0]
    assert alternatives[0][2] == pytest.approx(math.log(0.9))


def test_a_token_that_is_nearly_certain_is_not_more_than_certain() -> None:
    assert logprobs_of(100.0, 0.0, 0.0)[0] == 0


def test_the_row_is_read_anew_each_time() -> None:
    library = Library(0.0, 0.0)
    logprobs = Logprobs(Rows(library, 2))
    assert logprobs.of(None, 0, 1, 0, bytes)[0] == pytest.approx(math.log(0.5))
    library.row[1] = LN_9
    assert logprobs.of(None, 0, 1, 0, bytes)[0] == pytest.approx(math.log(0.9))


def test_an_output_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no output 1"):
        Logprobs(Rows(Library(0.0), 1)).of(None, 1, 0, 0, bytes)


def test_without_numpy_it_is_refused_at_the_request() -> None:
    rows = Rows(Library(0.0), 1)
    Logprobs(rows).check()
    rows.numpy = None
    with pytest.raises(InvalidRequest, match="pip install numpy") as refused:
        Logprobs(rows).check()
    assert refused.value.field == "logprobs"
