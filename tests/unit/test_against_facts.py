"""What a model can't do for a request, known from its facts; and what isn't known is no reason to refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infervisor.supervisor.against_facts import problem
from infervisor.supervisor.embedding import check_texts
from infervisor.supervisor.request_input import RequestInput, check_request

FACTS: dict[str, Any] = {"vocabulary_tokens": 100, "slots": 2, "has_chat_template": True, "extra": {}}
CHAT = [{"role": "user", "content": "hi"}]


def check(prompt: str | None = "x", messages: Any = None, **given: Any) -> RequestInput:
    return check_request(prompt, messages, seed=1, **given)


NO_TEMPLATE: dict[str, Any] = {"has_chat_template": False}
ONLY_EMBEDS: dict[str, Any] = {"extra": {"generates": False}}


@pytest.mark.parametrize(
    ("given", "facts", "field", "said"),
    [
        (
            check(sampling={"logit_bias": {3: 1.0, 100: -1.0}}),
            {},
            "logit_bias",
            r"token 100, .* has 100 tokens",
        ),
        (check(choices=3), {}, "n", r"2 slots: ask for at most 2"),
        (check(choices=2), {"slots": 1}, "n", r"1 slot: "),
        (check(None, CHAT), NO_TEMPLATE, "messages", r"no chat template: pass the text as prompt"),
        (check(None, CHAT), NO_TEMPLATE | {"extra": {"template_error": "its own"}}, "messages", r"^its own$"),
        (
            check(None, CHAT),
            NO_TEMPLATE | {"extra": {"template_error": None}},
            "messages",
            r"no chat template",
        ),
        (check(), ONLY_EMBEDS, "prompt", r"only embeds"),
        (check(None, CHAT), ONLY_EMBEDS, "messages", r"only embeds"),
    ],
)
def test_what_a_model_cannot_do(given: RequestInput, facts: Any, field: str, said: str) -> None:
    found = problem(given, FACTS | facts)
    assert found is not None
    assert found.field == field
    assert re.search(said, str(found))


@pytest.mark.parametrize(
    "given",
    [
        check(sampling={"logit_bias": {99: 1.0}}),
        check(choices=2),
        check(None, CHAT, choices=2),
        check(),
    ],
)
def test_what_it_can(given: RequestInput) -> None:
    assert problem(given, FACTS) is None


def test_a_model_that_only_embeds_embeds() -> None:
    assert problem(check_texts(["a", "b"]), FACTS | {"extra": {"generates": False}}) is None


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"slots": "2", "vocabulary_tokens": None, "has_chat_template": None, "extra": None},
        {"slots": True, "vocabulary_tokens": 1.5, "has_chat_template": 0, "extra": [1]},
    ],
)
def test_what_a_worker_does_not_tell_is_not_held_against_anybody(facts: dict[str, Any]) -> None:
    given = check(None, CHAT, choices=9, sampling={"logit_bias": {10**6: 1.0}})
    assert problem(given, facts) is None
