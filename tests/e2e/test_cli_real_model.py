"""The command line with the embedded default model."""

from __future__ import annotations

import json

import pytest

from tests.helpers.command_line import assert_gone, running, supervise

pytestmark = pytest.mark.real_model


def test_a_greedy_answer_is_whole_and_the_same_twice() -> None:
    arguments = ("run", "--temperature", "0", "--max-tokens", "12", "What is the capital of France?")
    first, second = supervise(*arguments), supervise(*arguments)
    assert first.returncode == second.returncode == 0
    assert len(first.stdout) > 12
    assert first.stdout == second.stdout
    assert b"12 tokens" in first.stderr


def test_a_raw_prompt_is_continued_and_a_chat_is_answered() -> None:
    arguments = ("run", "--json", "--temperature", "0", "--max-tokens", "4", "The capital of France is")
    counts = []
    for raw in ((), ("--raw",)):
        done = supervise(*arguments, *raw)
        assert done.returncode == 0
        counts.append(json.loads(done.stdout.splitlines()[-1])["usage"]["prompt_tokens"])
    chat, raw_count = counts
    assert raw_count < chat


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    done = supervise("run", "--ctx", "256", "--raw", "-q", stdin=b"word " * 300)
    assert done.returncode == 3
    assert b"256" in done.stderr
    assert b"30" in done.stderr


def test_ctrl_c_in_a_long_prefill_releases_in_band() -> None:
    with running("run", "-v", "--raw", "word " * 3000) as command:
        pid = command.worker_pid()
        command.read_until("err", "RequestQueued")
        command.interrupt()
        assert command.finish() == 130
    assert "after the cancel (in_band)" in command.report
    assert "0 tokens · cancelled" in command.report
    assert_gone(pid)


def test_every_step_of_a_probe_passes() -> None:
    done = supervise("probe", "--json")
    *steps, verdict = [json.loads(line) for line in done.stdout.splitlines()]
    assert {step["name"]: step["status"] for step in steps if step["status"] != "ok"} == {}
    assert (verdict["ok"], done.returncode) == (True, 0)
    assert steps[1]["figures"]["facts"]["context_tokens"] == 4096
