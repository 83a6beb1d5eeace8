"""`supervise probe` over the scripted engine: what passes, what is skipped, what fails and how that is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from infervisor.supervisor.cli.exit_codes import ExitCode
from tests.helpers.command_line import assert_gone, scripted, supervise
from tests.helpers.models import smollm2_path

NAMES = [
    "spawn",
    "load",
    "first token",
    "slow reader",
    "cancel in prefill",
    "cancel in decode",
    "release",
    "kill and resume",
    "threads",
    "exit",
]


def _steps(done: subprocess.CompletedProcess[bytes]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *steps, verdict = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["name"] for step in steps] == NAMES
    assert verdict["type"] == "probe"
    assert verdict["exit_code"] == done.returncode
    return steps, verdict


def _statuses(steps: list[dict[str, Any]]) -> dict[str, str]:
    return {step["name"]: step["status"] for step in steps}


def test_a_healthy_engine_passes_every_step() -> None:
    # 1500 words take long enough to be cancelled in the middle; 11 words next to nothing.
    done = supervise("probe", *scripted(prefill_tokens_per_s=2000), "--json")
    steps, verdict = _steps(done)
    statuses = _statuses(steps)
    assert statuses.pop("threads") == "skipped"
    assert set(statuses.values()) == {"ok"}, done.stdout.decode()
    assert (verdict["ok"], done.returncode) == (True, 0)
    figures = {step["name"]: step["figures"] for step in steps}
    assert figures["slow reader"]["computed_tokens"] <= figures["slow reader"]["taken_tokens"] + 2
    for name in ("cancel in prefill", "cancel in decode"):
        assert figures[name]["stage"] == "in_band"
        assert 0 <= figures[name]["release_s"] < 10
    assert figures["load"]["facts"]["context_tokens"] == 1_000_000
    assert figures["kill and resume"]["pid"] != figures["spawn"]["pid"]
    assert figures["kill and resume"]["same_text"] is True
    assert figures["exit"]["pid"] == figures["kill and resume"]["pid"]
    for name in ("spawn", "exit"):
        assert_gone(figures[name]["pid"])


def test_a_prompt_that_is_read_at_once_is_skipped_and_that_is_no_failure() -> None:
    done = supervise("probe", *scripted(), "--json")
    steps, _ = _steps(done)
    assert done.returncode == 0
    assert [name for name, status in _statuses(steps).items() if status != "ok"] == [
        "cancel in prefill",
        "threads",
    ]


def test_a_failed_load_says_why_and_skips_the_rest() -> None:
    refusal = {"at": "load", "kind": "load_refused", "message": "it doesn't fit"}
    done = supervise("probe", *scripted(faults=[refusal]), "--json")
    steps, verdict = _steps(done)
    assert (verdict["ok"], done.returncode) == (False, 6)
    statuses = _statuses(steps)
    assert (statuses.pop("spawn"), statuses.pop("load"), statuses.pop("exit")) == ("ok", "failed", "ok")
    assert set(statuses.values()) == {"skipped"}
    assert "it doesn't fit" in steps[1]["detail"]


def test_a_step_that_fails_is_named_and_the_others_go_on() -> None:
    broken = {"at": "prefill", "kind": "raise", "prompt_contains": "word"}
    done = supervise("probe", *scripted(faults=[broken]), "--json")
    steps, _ = _steps(done)
    assert done.returncode == 7
    failed = [name for name, status in _statuses(steps).items() if status == "failed"]
    assert failed == ["cancel in prefill"]
    assert "the scripted fault" in steps[4]["detail"]


def test_a_release_that_takes_a_kill_fails() -> None:
    # Three requests are released before the one that is cancelled in its decode.
    stuck = {"at": "release", "kind": "refuse_release", "after": 3}
    done = supervise("probe", *scripted(faults=[stuck]), "--json")
    steps, _ = _steps(done)
    assert done.returncode == 7
    assert _statuses(steps)["cancel in decode"] == "failed"
    assert "released only by killing the worker" in steps[5]["detail"]


def test_a_step_that_takes_too_long_fails_in_time() -> None:
    done = supervise("probe", *scripted(prefill_tokens_per_s=0.01), "--step-timeout", "1", "--json")
    steps, _ = _steps(done)
    assert done.returncode == 7
    assert "not done after 1 s" in steps[2]["detail"]


def test_people_get_one_line_a_step_and_a_sum() -> None:
    done = supervise("probe", *scripted())
    lines = done.stdout.decode().splitlines()
    assert len(lines) == len(NAMES) + 1
    for line, name in zip(lines, NAMES, strict=False):
        assert name in line
    assert lines[-1] == "8 ok, 2 skipped"
    assert b"\x1b" not in done.stdout


@pytest.mark.real_model
def test_numbers_of_threads_are_compared_and_one_is_recommended() -> None:
    done = supervise("probe", str(smollm2_path()), "--json")
    steps, _ = _steps(done)
    step = steps[NAMES.index("threads")]
    figures = step["figures"]
    if len(os.sched_getaffinity(0)) == 1:
        assert step["status"] == "skipped"
        return
    assert step["status"] == "ok", step
    rates = {rate["threads"]: rate for rate in figures["rates"]}
    assert 1 in rates
    assert figures["current_threads"] in rates
    for rate in rates.values():
        assert rate["prefill_tokens_per_s"] > rate["decode_tokens_per_s"] > 0
    assert figures["recommended_threads"] in (None, *rates)
    for threads in rates:
        assert f"{threads}: reads " in step["detail"]


def test_results_that_cannot_be_written_are_no_success() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "infervisor.supervisor.cli", "probe", "--engine", "scripted"],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=120,
        )  # fmt: skip
    assert done.returncode == ExitCode.OUTPUT_FAILED
    assert b"can't be written" in done.stderr


def test_a_short_answer_is_no_reason_to_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infervisor.supervisor.cli", "probe", "--engine", "scripted", "-o", "text=a b"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == ExitCode.OK, done.stdout.decode()
