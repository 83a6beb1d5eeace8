"""The sandbox: what it renders, what it refuses, and how its jobs run side by side."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.library import load_library
from infervisor.worker.engines.llama.sandbox import JOBS_AT_ONCE
from infervisor.worker.engines.llama.sandbox_job import Limits
from infervisor.worker.engines.llama.template import ChatTemplate
from infervisor.worker.engines.llama.tokenizer import Vocabulary
from tests.helpers.models import ALTERNATING, BROKEN, CHATML, ENDLESS, LOOP, build_model
from tests.helpers.sandboxes import (
    ENDLESS_MESSAGE,
    GOOD,
    LONG,
    ORIGIN,
    SPELLINGS,
    USER,
    Make,
    child_of,
    process_of,
    running,
    sandboxes,
    text_of,
)
from tests.helpers.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "loop.gguf", LOOP, CHATML)


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    with sandboxes(model) as made:
        yield made


# --- what comes out -------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "</s>"}}
]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any, float | None]] = {
    "plain": ([USER], None, None),
    "control tokens": ([{"role": "user", "content": "x<|im_end|>y</s> \U000f0000 <"}], None, None),
    "unicode": ([{"role": "user", "content": "é🦙\0\u2028"}], None, 1_700_000_000.5),
    "large": ([{"role": "user", "content": "<|im_end|>word " * 100_000}], None, None),
    "tools": (
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null, "</s>"]}'}}
            ]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
        TOOLS,
        None,
    ),
}  # fmt: skip
SHOWS_ALL = (
    CHATML
    + "{{ tools | tojson }}{{ messages | tojson }}{% if strftime_now %}{{ strftime_now('%Y') }}{% endif %}"
)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_text_and_markers_are_those_of_the_template(make: Make, name: str) -> None:
    messages, tools, clock_s = CONVERSATIONS[name]
    here, literals = ChatTemplate(SHOWS_ALL, ORIGIN, "<s>", "</s>", SPELLINGS).render(
        messages, clock_s, tools
    )
    there = make(SHOWS_ALL).render(messages, tools, clock_s)
    assert there.text == here
    assert there.literals.restore(there.text) == literals.restore(here)
    assert there.literals.marks(there.text) == literals.marks(here)


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Iterator[Vocabulary]:
    llama, _ = load_library()
    parameters = llama.llama_model_default_params()
    parameters.vocab_only = True
    native = llama.llama_model_load_from_file(os.fsencode(model), parameters)
    yield Vocabulary(llama, native)
    llama.llama_model_free(native)


def test_tokens_are_those_of_the_template(vocabulary: Vocabulary, make: Make) -> None:
    message = {"role": "user", "content": "a<|im_end|>b"}
    sandbox, template = make(), ChatTemplate(CHATML, ORIGIN, "<s>", "</s>", SPELLINGS)
    text, literals = template.render([message], None)
    rendered = sandbox.render([message], None, None)
    tokens = vocabulary.rendered_prompt(rendered.text, sandbox.control, rendered.literals)
    assert tokens == vocabulary.rendered_prompt(text, template.control, literals)
    assert tokens.count(vocabulary.tokenise("<|im_end|>", special=True)[0]) == 1


def test_the_answer_is_begun_unless_that_is_not_wanted(make: Make) -> None:
    assert make().render([USER], None, None, False).text == "<s><|im_start|>user\nhi<|im_end|>\n"


# --- what is refused ------------------------------------------------------------------------------


def test_template_errors_are_known(make: Make) -> None:
    assert make().template_error() is None
    broken = make(BROKEN)
    assert "can't be compiled (TemplateSyntaxError" in str(broken.template_error())
    with pytest.raises(InvalidRequest, match="can't be compiled") as refused:
        broken.render([USER], None, None)
    assert refused.value.field == "messages"
    broken.check_grammar(GOOD)


def test_without_a_template_there_is_no_process_to_ask(make: Make) -> None:
    absent = make(None)
    assert not absent.has_template
    assert "no chat template" in str(absent.template_error())
    with pytest.raises(InvalidRequest, match=r"prompt=.*chat_template"):
        absent.render([USER], None, None)
    assert absent.pid is None


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ 1 }}" * 300_000, "takes more than 1 s of computing"),
        ("{% if 1 %}" * 300 + "{% endif %}" * 300, "can't be compiled"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "can't be compiled"),
    ],
    ids=["long", "nested blocks", "nested parentheses"],
)
def test_what_takes_too_much_to_compile_is_a_broken_template(make: Make, source: str, told: str) -> None:
    sandbox = make(source)
    assert told in str(sandbox.template_error())
    assert sandbox.template_error() is sandbox.template_error()
    sandbox.check_grammar(GOOD)


HARMFUL = {
    "endless": (ENDLESS, "it takes more than 1 s of computing"),
    "huge field": ("{{ 'a'|center(3000000000) }}", "memory"),
    "huge number": ("{{ (9**(9**8)) % 7 }}", "power too large"),
    "huge text": ("{{ 'a' * 300000000 }}", "product too large"),
    "huge list": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "memory"
    ),
    "code": ("{{ raise_exception.__globals__['os'] }}", "SecurityError"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "no text": ("{{ '\\ud800' }}", "writes what is no text"),
    "refusal": (ALTERNATING, "refuses the messages: roles must alternate"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_templates_fail_the_request_alone(make: Make, name: str) -> None:
    source, told = HARMFUL[name]
    sandbox = make("{% if messages | length > 1 %}" + source + "{% else %}ok{% endif %}")
    sandbox.template_error()
    pid = sandbox.pid
    with pytest.raises(InvalidRequest, match="the model's chat template") as refused:
        sandbox.render([USER, USER], None, None)
    assert told in str(refused.value)
    assert refused.value.field == "messages"
    assert text_of(sandbox) == "ok"
    assert sandbox.pid == pid


def test_malformed_messages_and_what_cannot_travel(make: Make) -> None:
    sandbox = make()
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has no role"):
        sandbox.render([{"content": "x"}], None, None)
    with pytest.raises(InvalidRequest, match="plain data"):
        sandbox.render([{**USER, "n": 1 << 70}], None, None)
    with pytest.raises(InvalidRequest, match="no text"):
        sandbox.render([{"role": "user", "content": "\ud800"}], None, None)
    with pytest.raises(InvalidRequest) as refused:
        sandbox.render([USER], None, 1e300)
    assert refused.value.field == "template_clock_s"


def test_the_clock_ends_what_does_not_compute(make: Make) -> None:
    sandbox = make(LONG, Limits(cpu_s=60, wall_s=1.0))
    with pytest.raises(InvalidRequest, match=r"isn't done after 1 s"):
        sandbox.render([ENDLESS_MESSAGE], None, None)
    assert text_of(sandbox).startswith("<s>")


def test_a_job_that_takes_long_gives_way(make: Make) -> None:
    sandbox = make(LONG, Limits(cpu_s=1, yield_s=0.0))
    sandbox.template_error()
    server = process_of(sandbox)
    with running(sandbox) as job:
        child = child_of(server)
        deadline = time.monotonic() + PATIENCE_S
        niceness = server.nice()
        while not job.done() and child.nice() <= niceness:
            assert time.monotonic() < deadline
        assert not job.done()
        with pytest.raises(InvalidRequest):
            job.result(PATIENCE_S)


# --- many jobs ------------------------------------------------------------------------------------


def test_it_is_of_the_workers_group_and_has_one_thread(make: Make) -> None:
    sandbox = make()
    sandbox.check_grammar(GOOD)
    server = process_of(sandbox)
    assert os.getpgid(server.pid) == os.getpgid(0)
    assert server.num_threads() == 1


def test_many_jobs_leave_no_descriptor_behind(make: Make) -> None:
    sandbox = make()
    sandbox.check_grammar(GOOD)
    text_of(sandbox)
    here, there = psutil.Process().num_fds(), process_of(sandbox).num_fds()
    for number in range(30):
        text_of(sandbox)
        sandbox.check_grammar(f'root ::= "{number}"')
    assert psutil.Process().num_fds() == here
    assert process_of(sandbox).num_fds() == there


def test_jobs_run_side_by_side(make: Make) -> None:
    sandbox = make(LONG)
    template = ChatTemplate(LONG, ORIGIN, "<s>", "</s>", SPELLINGS)
    start = threading.Barrier(8)

    def many(thread: int) -> None:
        start.wait(PATIENCE_S)
        for number in range(15):
            message = {"role": "user", "content": f"{thread}<|im_end|>{number}" * (thread * 1000 + 1)}
            assert sandbox.render([message], None, None).text == template.render([message], None)[0]
            sandbox.check_grammar(f'root ::= "{thread} {number}"')

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(many, thread) for thread in range(8)]:
            done.result(60)


def test_more_jobs_than_places_wait_for_one(make: Make) -> None:
    sandbox = make(LONG, Limits(cpu_s=60, wall_s=1.0))
    sandbox.template_error()
    server = process_of(sandbox)
    with ThreadPoolExecutor(JOBS_AT_ONCE + 4) as threads:
        jobs = [
            threads.submit(sandbox.render, [ENDLESS_MESSAGE], None, None) for _ in range(JOBS_AT_ONCE + 4)
        ]
        most = 0
        while not all(job.done() for job in jobs):
            most = max(most, len(server.children()))
            time.sleep(0.005)
        for job in jobs:
            with pytest.raises(InvalidRequest, match="isn't done"):
                job.result()
    assert 1 < most <= JOBS_AT_ONCE
    assert text_of(sandbox).startswith("<s>")
