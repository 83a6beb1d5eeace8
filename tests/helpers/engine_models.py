"""Drive an engine object directly, without a worker: requests, answers, and the engines to try them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infervisor.protocol.generation import Limits, Sampling
from infervisor.protocol.messages import Submit
from infervisor.worker.engine import Engine, ModelFacts, Opened, Prefilled, Sampled
from infervisor.worker.engines import create_engine

MAX_STEPS = 5_000


def no_progress(_phase: str, _fraction: float) -> None:
    """Take progress and do nothing."""


def request(
    prompt: str | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    *,
    seed: int = 1,
    special: bool = True,
    clock_s: float | None = None,
    delivered: Sequence[int] = (),
    **sampling: Any,
) -> Submit:
    """Return a submit, greedy unless told otherwise."""
    chosen = Sampling(**{"temperature": 0.0, **sampling})
    return Submit(
        1, prompt, messages, chosen.to_wire(), seed, clock_s, special, Limits().to_wire(), 1 << 20, delivered
    )


def open_in(engine: Engine, slot: int, submit: Submit) -> Opened:
    """Prepare a request and take it into this slot."""
    opened = engine.open([slot], submit, engine.prepare(submit))
    assert opened.slot == slot
    return opened


@dataclass
class Answer:
    """What one sequence said. ended: the model's end token came (it is in tokens, not in data)."""

    tokens: list[int] = field(default_factory=list)
    data: bytes = b""
    ended: bool = False
    prefills: list[Prefilled] = field(default_factory=list)

    def take(self, outcome: Prefilled | Sampled) -> None:
        """Add what a step said."""
        if isinstance(outcome, Prefilled):
            self.prefills.append(outcome)
            return
        self.tokens.append(outcome.token)
        self.ended = outcome.end
        if not outcome.end:
            self.data += outcome.data

    @property
    def text(self) -> str:
        """The answer as text."""
        return self.data.decode()


def run(engine: Engine, slot: int, tokens: int) -> Answer:
    """Step an opened slot until its end or until `tokens` were sampled. The slot stays open."""
    answer = Answer()
    for _ in range(MAX_STEPS):
        outcomes = engine.step([slot])
        assert outcomes is not None, "a step was cut though nobody interrupted it"
        answer.take(outcomes[0])
        if answer.ended or len(answer.tokens) >= tokens:
            return answer
    raise AssertionError(f"no end after {MAX_STEPS} steps")


def answer(engine: Engine, submit: Submit, tokens: int, slot: int = 0) -> Answer:
    """Open, run and release."""
    open_in(engine, slot, submit)
    try:
        return run(engine, slot, tokens)
    finally:
        engine.release(slot)


@dataclass(frozen=True)
class EngineCase:
    """An engine to hold to the contract.

    prompts: at least two of different lengths, each with its exact greedy text, or None where only
    repeatability can be asked for. max_tokens: how far an answer is followed. exact: whether two slots in one
    step must give the texts that each gives alone. cold: options with which nothing is taken over from earlier
    sequences. context_options: options that make a context so small
    that long_prompt can't fit.
    """

    name: str
    engine: str
    model: str | None
    options: Mapping[str, Any]
    prompts: Mapping[str, str | None]
    long_prompt: str
    context_options: Mapping[str, Any]
    max_tokens: int = 12
    cold: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def load(self, models: Path, real_model: Callable[[], Path], **options: Any) -> tuple[Engine, ModelFacts]:
        """Return the engine, loaded."""
        path: str | None = None
        if self.model == "smollm2":
            path = str(real_model())
        elif self.model is not None:
            path = str(models / f"{self.model}.gguf")
        engine = create_engine(self.engine)
        return engine, engine.load(path, {**self.options, **options}, no_progress)


_LLAMA = {"threads": 2, "reproducible": True}
_COLD = {"prefix_reuse": False}
CASES = (
    EngineCase(
        "llama-words", "llama", "words", _LLAMA,
        {"a": " alpha beta gamma delta", "abcabc" * 30: " alpha beta gamma delta"},
        "abc" * 100, {"n_ctx": 64}, cold=_COLD,
    ),
    EngineCase(
        "llama-emoji", "llama", "emoji", _LLAMA,
        {"a": "🦙", "c" * 90: "🦙"}, "abc" * 100, {"n_ctx": 64}, cold=_COLD,
    ),
    EngineCase(
        "llama-loop", "llama", "loop", _LLAMA,
        {"c": "abcabcabcabc", "a" * 70: "bcabcabcabca"}, "abc" * 100, {"n_ctx": 64}, cold=_COLD,
    ),
    EngineCase(
        "llama-smollm2", "llama", "smollm2", _LLAMA,
        {"The capital of France is": None, "One two three four five six seven eight. " * 8: None},
        "word " * 400, {"n_ctx": 256}, cold=_COLD,
    ),
    EngineCase(
        "scripted-text", "scripted", None,
        {"text": "so it goes", "prefill_tokens_per_s": 1000, "slice_s": 0.002, "step_tokens": 3},
        {"a": "so it goes", "a b c d e f": "so it goes"}, "word " * 40, {"context_tokens": 32},
    ),
    EngineCase(
        "scripted-echo", "scripted", None, {"mode": "echo"},
        {"one two": "one two", "a b c d e f": "a b c d e f"}, "word " * 40, {"context_tokens": 32},
    ),
)  # fmt: skip
