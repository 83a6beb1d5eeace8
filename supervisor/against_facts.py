"""What a request asks of a model that can't give it: known in the parent, from the facts in `ready`.

A pure function. Asked when a request comes while a worker is ready, and before it is submitted to one: what is
wrong costs no worker anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.supervisor.request_input import RequestInput


def problem(given: RequestInput, facts: Mapping[str, Any]) -> InvalidRequest | None:
    """Return why a model with these facts can't serve the request, naming the field; None if nothing is known.

    What a worker doesn't tell is not held against the request.
    """
    told = facts.get("extra")
    extra: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    if given.texts is None and extra.get("generates") is False:
        return InvalidRequest(
            "this model only embeds: use embed(), or load a model that generates text",
            "prompt" if given.messages is None else "messages",
        )
    slots = facts.get("slots")
    if type(slots) is int and given.choices > slots:
        return InvalidRequest(
            f"n is {given.choices}, and the worker has {slots} slot{'s' if slots > 1 else ''}: ask for at most "
            f"{slots} answers at once, or load the model with slots={given.choices}",
            "n",
        )
    vocabulary = facts.get("vocabulary_tokens")
    if type(vocabulary) is int and given.sampling.logit_bias:
        largest = max(given.sampling.logit_bias)
        if largest >= vocabulary:
            return InvalidRequest(
                f"logit_bias names the token {largest}, and the vocabulary has {vocabulary} tokens, "
                f"from 0 to {vocabulary - 1}",
                "logit_bias",
            )
    if given.messages is not None and facts.get("has_chat_template") is False:
        said = extra.get("template_error")
        return InvalidRequest(
            said
            if isinstance(said, str) and said
            else "this model has no chat template: pass the text as prompt= instead of messages=",
            "messages",
        )
    return None
