"""The largest difference between our log-probabilities and those of the bare library. SmolLM2, greedy, 2 threads.

The bare library reads the same prompt and then, token by token, what our stream answered; its logits are turned
into log-probabilities here, in double precision. Compared are the chosen token and the five most probable ones. The
prompts are short, so that both read them in one slice, up to their last token.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks.figures import Figure
from benchmarks.streams import fresh_text
from infervisor import Supervisor, TokenLogprob, default_model

CONTEXT = 1024
THREADS = 2
SLOTS = 4
TOKENS = 64
TOP = 5
PROMPT_TOKENS = 16


class Bare:
    """One sequence in llama.cpp's own API."""

    def __init__(self, llama: Any, model: Any, context: Any) -> None:
        self._llama, self._model, self._context = llama, model, context
        self._vocabulary = llama.llama_model_get_vocab(model)
        self._size = llama.llama_vocab_n_tokens(self._vocabulary)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a raw prompt, with what the model puts before one."""
        ids = (ctypes.c_int32 * 256)()
        data = text.encode()
        count = self._llama.llama_tokenize(self._vocabulary, data, len(data), ids, 256, True, True)
        assert count > 0, count
        return list(ids[:count])

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget everything and read these."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._decode(tokens)

    def logprobs(self, token: int) -> Any:
        """Decode one token; return the log-probability of each token of the vocabulary to follow it."""
        import numpy

        self._decode([token])
        row = numpy.ctypeslib.as_array(
            self._llama.llama_get_logits_ith(self._context, -1), (self._size,)
        ).astype(numpy.float64)
        row -= row.max()
        return row - numpy.log(numpy.exp(row).sum())

    def _decode(self, tokens: Sequence[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        result = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(tokens)))
        assert result == 0, result


@contextmanager
def bare(path: Path) -> Iterator[Bare]:
    """Yield the library with the model loaded."""
    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, path
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = CONTEXT, THREADS, THREADS
    context = llama.llama_init_from_model(model, settings)
    assert context, "the library made no context"
    try:
        yield Bare(llama, model, context)
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


async def told(prompts: Sequence[str], together: bool) -> list[tuple[TokenLogprob, ...]]:
    """Return what the supervisor tells of the answers, one after the other or all in the same steps."""
    found: list[tuple[TokenLogprob, ...]] = [()] * len(prompts)
    options = {"n_ctx": CONTEXT, "threads": THREADS}

    async def ask(index: int) -> None:
        answer = await supervisor.generate(
            prompts[index], max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=True, top_logprobs=TOP
        )
        found[index] = answer.logprobs

    async with Supervisor(default_model(), slots=SLOTS, options=options) as supervisor:
        if together:
            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(ask, index)
        else:
            for index in range(len(prompts)):
                await ask(index)
    return found


def differences(library: Bare, prompt: str, logprobs: Sequence[TokenLogprob]) -> list[float]:
    """Return the difference of each number that was told of an answer. Raises RuntimeError if some are missing."""
    *before, last = library.tokens(prompt)
    library.begin(before)
    found: list[float] = []
    for one in logprobs:
        if len(one.top) != TOP:
            raise RuntimeError(f"{len(one.top)} alternatives instead of {TOP}: {one}")
        right = library.logprobs(last)
        found += [abs(alike.logprob - float(right[alike.token_id])) for alike in (one, *one.top)]
        last = one.token_id
    # Those at the end that are half a character stand for no text, and nothing is told of them.
    if not TOKENS - 4 < len(logprobs) <= TOKENS:
        raise RuntimeError(f"log-probabilities of {len(logprobs)} tokens instead of {TOKENS}")
    return found


def measure(quick: bool) -> list[Figure]:
    """Compare streams that run alone, and streams that share their steps."""
    random.seed(1)
    prompts = [fresh_text(PROMPT_TOKENS) for _ in range(SLOTS if quick else 2 * SLOTS)]
    figures: list[Figure] = []
    for name, together, how in (
        ("logprobs_difference", False, "a stream alone"),
        ("logprobs_difference_company", True, f"{SLOTS} streams in the same steps"),
    ):
        answers = anyio.run(told, prompts, together)
        with bare(default_model()) as library:
            each = [differences(library, *pair) for pair in zip(prompts, answers, strict=True)]
        found = [difference for one in each for difference in one]
        figures.append(
            Figure(
                name,
                f"log-probabilities ({how}) − the bare library's, chosen token and top {TOP}: largest difference",
                float(f"{max(found):.2g}"), "nats", len(found), None if together else ("≤", 1e-4),
                details={"mean": sum(found) / len(found), "tokens": len(found) // (1 + TOP)},
            )
        )  # fmt: skip
    return figures
