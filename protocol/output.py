"""What a request asks of its answer beside the text: log-probabilities, a form, and which tools it may call.

Pure values, checked at both ends like `protocol.generation`. The names follow OpenAI's and llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import check_integer, check_text, refuse_unknown
from infervisor.protocol.quoting import quoted

MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 1 << 20
"""Of a grammar or a JSON schema; what is longer takes minutes to understand."""
TOOL_CHOICES = ("auto", "none", "required")
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Output:
    """What an answer must look like, and what is told of each token.

    logprobs: tell each token's natural log-probability, before temperature and other samplers; top_logprobs:
    and those of so many of the most probable tokens, 0 to 20. grammar: GBNF that the answer follows.
    json_schema: a JSON schema, as JSON text, that the answer follows; at most one of the two. tool_choice: "auto",
    "none" or "required"; tool: the name of the one tool that must be called, or None. normalise: of embeddings,
    whether each vector is made one of length 1.
    """

    logprobs: bool = False
    top_logprobs: int = 0
    grammar: str | None = None
    json_schema: str | None = None
    tool_choice: str = "auto"
    tool: str | None = None
    normalise: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.logprobs, bool):
            raise InvalidRequest(
                f"logprobs must be true or false, not {quoted(self.logprobs, 80)}; "
                "top_logprobs takes the number of alternatives",
                "logprobs",
            )
        if not isinstance(self.normalise, bool):
            raise InvalidRequest(
                f"normalise must be true or false, not {quoted(self.normalise, 80)}", "normalise"
            )
        check_integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=True", "top_logprobs")
        for name in ("grammar", "json_schema", "tool"):
            _check_optional_text(name, getattr(self, name))
        if self.grammar is not None and not self.grammar.strip():
            raise InvalidRequest("the grammar is empty: leave it out for a free answer", "grammar")
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidRequest("give either a grammar or a JSON schema, not both", "grammar")
        if self.tool_choice not in TOOL_CHOICES:
            raise InvalidRequest(
                f"tool_choice must be one of {', '.join(TOOL_CHOICES)}, or name a function, "
                f"not {quoted(self.tool_choice, 80)}",
                "tool_choice",
            )
        if self.tool is not None and self.tool_choice == "none":
            raise InvalidRequest(
                f"tool_choice is none, but {quoted(self.tool, 80)} must be called", "tool_choice"
            )
        if self.must_call and self.form is not None:
            raise InvalidRequest(
                f"{self.form} asks for another answer than the tool call that tool_choice requires: "
                "give one of the two",
                "tool_choice",
            )

    @property
    def form(self) -> str | None:
        """The name of what the answer must follow, grammar or json_schema, or None if its text is free."""
        if self.grammar is not None:
            return "grammar"
        return None if self.json_schema is None else "json_schema"

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool is not None or self.tool_choice == "required"

    def to_wire(self) -> dict[str, Any]:
        """Return the plain mapping that travels: what isn't a default."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Output:
        """Rebuild from `to_wire`. Raises `InvalidRequest` for unknown names and bad values."""
        refuse_unknown(cls, wire)
        return cls(**wire)


def refuse_endless(output: Output, ignore_eos: bool) -> None:
    """Raise `InvalidRequest` if an answer is to go on past its end, and its form knows where that is."""
    form = "tool_choice" if output.must_call else output.form
    if ignore_eos and form is not None:
        raise InvalidRequest(
            f"ignore_eos lets an answer go on past its end, and {form} says where that is: leave one of them out",
            "ignore_eos",
        )


def check_priority(priority: object) -> int:
    """Return the priority, −100 to 100. Raises `InvalidRequest` otherwise."""
    return check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def _check_optional_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, not {quoted(value, 80)}", name)
    size = len(check_text(name, value).encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken", name)


PLAIN_OUTPUT = Output()
