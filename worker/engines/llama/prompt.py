"""From a request to tokens: rendering, tokenising, checking lengths, making and trying its grammar.

Runs in threads beside steps, several at once: it reads the vocabulary, which never changes, and asks the sandbox
for all that could take the process down. Computes nothing with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.messages import Submit
from infervisor.protocol.output import PLAIN_OUTPUT, Output
from infervisor.worker.engines.llama.embedder import Embedder
from infervisor.worker.engines.llama.grammar import GrammarVocabulary
from infervisor.worker.engines.llama.logprobs import Logprobs
from infervisor.worker.engines.llama.options import LlamaOptions
from infervisor.worker.engines.llama.sandbox import Sandbox
from infervisor.worker.engines.llama.tokenizer import Vocabulary
from infervisor.worker.engines.llama.tool_formats import (
    format_of,
    grammar_for_call,
    marks,
    uses_tools,
    with_tools_in_system,
)

PROBE_CHARACTERS = 16
"""Characters for each token of context that are tried of a very long text: four times what text takes."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the engine takes it. tokens: of the prompt; texts: those of each text to embed, else empty.

    grammar: what the answer must follow, tried and found good; output: what else is asked of it. marks: control
    tokens that are shown all the same, since a tool call is told by them, with their bytes.
    """

    tokens: Sequence[int]
    texts: Sequence[Sequence[int]] = ()
    grammar: str | None = None
    output: Output = PLAIN_OUTPUT
    marks: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


class Prompts:
    """Makes prompts for one loaded model. template: its source, or None."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sandbox: Sandbox,
        embedder: Embedder,
        grammars: GrammarVocabulary,
        logprobs: Logprobs,
        template: str | None,
        context_tokens: int,
    ) -> None:
        self.tool_format = format_of(template)
        self._vocabulary = vocabulary
        self._sandbox = sandbox
        self._embedder = embedder
        self._grammars = grammars
        self._logprobs = logprobs
        self._shows_tools = template is not None and uses_tools(template)
        self._context_tokens = context_tokens

    def of(self, submit: Submit) -> Prompt:
        """Return the request's prompt. Raises `InvalidRequest` naming the field."""
        output = Output.from_wire(submit.output)
        if sum(each is not None for each in (submit.prompt, submit.messages, submit.texts)) != 1:
            raise InvalidRequest("exactly one of prompt, messages and texts is needed", "prompt")
        if submit.texts is not None:
            return Prompt((), texts=self._embedder.prepare(self._vocabulary, submit.texts), output=output)
        if output.logprobs:
            self._logprobs.check()
        tokens = self._tokens(
            submit.prompt, submit.messages, submit.tools if output.tool_choice != "none" else None,
            submit.special, submit.template_clock_s, self._check_text_length,
        )  # fmt: skip
        self._check_length(len(tokens), "prompt" if submit.messages is None else "messages")
        for token in submit.delivered:
            if token >= self._vocabulary.size:
                raise InvalidRequest(
                    f"delivered holds token {token}, which the model doesn't have", "delivered"
                )
        shown = self._marks() if submit.tools else {}
        return Prompt(tokens, grammar=self._grammar(output, submit.tools), output=output, marks=shown)

    def _marks(self) -> dict[int, bytes]:
        control = self._vocabulary.control_tokens()
        return {control[text][0]: text.encode() for text in marks(self.tool_format) if text in control}

    def _tokens(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        special: bool,
        clock_s: float | None,
        check: Callable[[str], None],
    ) -> list[int]:
        """Return the tokens of a raw prompt, or of messages through the model's template. check: sees its text."""
        if prompt is not None:
            check(prompt)
            return self._vocabulary.raw_prompt(prompt, special=special)
        messages = messages or ()
        if not self._shows_tools:
            messages = with_tools_in_system(messages, tools or (), self.tool_format)
        rendered = self._sandbox.render(messages, tools if self._shows_tools else None, clock_s)
        check(rendered.text)
        return self._vocabulary.rendered_prompt(rendered.text, self._sandbox.control, rendered.literals)

    def count(self, arguments: Mapping[str, Any]) -> int:
        """Return how many tokens a request's prompt has, beyond the context, too. arguments: as in `Submit`."""
        return len(
            self._tokens(
                arguments.get("prompt"), arguments.get("messages"), arguments.get("tools"),
                bool(arguments.get("special", True)), arguments.get("template_clock_s"), lambda text: None,
            )
        )  # fmt: skip

    def _grammar(self, output: Output, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Return the grammar that the answer must follow, or None; it has been tried."""
        if output.json_schema is not None:
            grammar = self._sandbox.grammar_of_schema(output.json_schema)
        elif output.must_call and tools:
            grammar = grammar_for_call(self.tool_format, tools, output.tool)
            self._sandbox.check_grammar(grammar, "tools")
        elif output.grammar is not None:
            grammar = output.grammar
            self._sandbox.check_grammar(grammar)
        else:
            return None
        self._grammars.check()
        self._grammars.learn()
        return grammar

    def _check_text_length(self, text: str) -> None:
        # Tokenising takes seconds per megabyte, so a text that is hopelessly long is refused by its beginning.
        probe = PROBE_CHARACTERS * self._context_tokens
        if len(text) <= 2 * probe:
            return
        tokens = len(self._vocabulary.tokenise(text[:probe], special=False))
        if tokens > self._context_tokens:
            raise InvalidRequest(
                f"the prompt has more than {tokens} tokens, and the context holds {self._context_tokens}: "
                "shorten the prompt or load with a larger n_ctx",
                "prompt",
            )

    def _check_length(self, prompt_tokens: int, field: str) -> None:
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty, and this model has no token to begin with", field)
        if prompt_tokens >= self._context_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens, and the context holds {self._context_tokens}, "
                "of which the answer needs at least one: shorten the prompt or load with a larger n_ctx",
                field,
            )


def chat_template(llama: Any, model: Any, options: LlamaOptions) -> tuple[str | None, str]:
    """Return the source of the template to use, or None, and how errors name it."""
    if options.chat_template is not None:
        return options.chat_template, "the chat_template option"
    stored: bytes | None = llama.llama_model_chat_template(model, None)
    return stored.decode("utf-8", "replace") if stored else None, "the model's chat template"
