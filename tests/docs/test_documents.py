"""The documents agree with the code: links, tables, names."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

import infervisor
from infervisor import Deadlines, EndClass, EndReason, Escalation, Liveness, StopGraces, Timeline
from infervisor.protocol.codec import MAX_FROM_WORKER_BYTES, MAX_TO_WORKER_BYTES, encode
from infervisor.protocol.errors import InfervisorError
from infervisor.protocol.field_checks import MAX_DEPTH
from infervisor.protocol.generation import Limits, Sampling
from infervisor.protocol.json_schema import MAX_DEPTH as MAX_SCHEMA_DEPTH
from infervisor.protocol.json_schema import MAX_PARTS
from infervisor.protocol.messages import FROM_WORKER, TO_WORKER, Cancel, Credit, Drain, Message
from infervisor.protocol.output import MAX_GRAMMAR_BYTES, MAX_PRIORITY, MAX_TOP_LOGPROBS, TOOL_CHOICES, Output
from infervisor.protocol.schema_merge import FORMATS, Unsupported, keywords
from infervisor.protocol.schema_values import MAX_ITEMS, MAX_LENGTH
from infervisor.supervisor.cli.app import app
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.embedding import MAX_TEXTS
from infervisor.supervisor.end_errors import ERROR_OF
from infervisor.supervisor.output_input import MAX_TOOLS, RESPONSE_FORMATS
from infervisor.supervisor.queries import DEFAULT_TIMEOUT_S
from infervisor.supervisor.request_queue import LEVEL_NS
from infervisor.worker import scheduler
from infervisor.worker.engine import AbortGranularity, ModelFacts
from infervisor.worker.engines.llama.grammar_source import MAX_TOKEN_S
from infervisor.worker.engines.llama.options import (
    DEFAULT_SLOTS,
    MAX_SLOTS,
    REPRODUCIBLE_SLICE_TOKENS,
    LlamaOptions,
)
from infervisor.worker.engines.llama.prefix import LEAST_COPY_TOKENS
from infervisor.worker.engines.llama.sandbox_job import LIMITS
from infervisor.worker.engines.scripted.options import ScriptedOptions
from infervisor.worker.exits import Exit
from tests.docs.markdown import ROOT, anchors, code_names, documents, links, table

README = ROOT / "README.md"
PROTOCOL = ROOT / "docs/protocol.md"
CANCELLATION = ROOT / "docs/cancellation.md"
CLI = ROOT / "docs/cli.md"
STREAMS = ROOT / "docs/streams.md"
STRUCTURED = ROOT / "docs/structured_output.md"
ENGINES = ROOT / "docs/engines.md"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {link}"
        assert file.is_relative_to(ROOT), f"{path.name} links out of the project: {link}"
        if anchor:
            assert anchor in anchors(file), f"{path.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("messages", [TO_WORKER, FROM_WORKER], ids=["to_worker", "from_worker"])
def test_protocol_page_has_every_message_with_its_fields_in_order(messages: dict[str, type[Message]]) -> None:
    described = {code_names(row[0])[0]: code_names(row[1]) for row in table(PROTOCOL, "message")}
    assert set(described) == {*TO_WORKER, *FROM_WORKER}
    for name, message in messages.items():
        assert described[name] == [field.name for field in fields(message)], name


def test_protocol_page_shows_frames_as_they_are() -> None:
    shown = {row[0]: bytes.fromhex(code_names(row[1])[0]) for row in table(PROTOCOL, "frame")}
    assert shown == {
        "`cancel` of attempt 7": encode(Cancel(7)),
        "`credit` for attempt 300 up to 64": encode(Credit(300, 64)),
        "`drain`": encode(Drain()),
    }


@pytest.mark.parametrize(
    ("header", "described_type"),
    [
        ("field of `sampling`", Sampling),
        ("field of `limits`", Limits),
        ("field of `output`", Output),
        ("fact", ModelFacts),
    ],
)
def test_protocol_page_has_every_field_of_what_is_in_a_message(header: str, described_type: type) -> None:
    described = [name for row in table(PROTOCOL, header) for name in code_names(row[0])]
    assert sorted(described) == sorted(field.name for field in fields(described_type))


def test_protocol_page_has_the_sizes_and_times_of_the_code() -> None:
    text = plain(PROTOCOL)
    for size in (MAX_TO_WORKER_BYTES, MAX_FROM_WORKER_BYTES):
        assert f"{size >> 20} MiB" in text
        assert f"{size >> 4:,}" in text
    liveness, graces = Liveness(), StopGraces()
    assert f"({liveness.hang_after_s:g} s)" in text
    assert f"after {liveness.unmeasured_s:g} s while no `beat`" in text
    assert f"{liveness.dump_s:g} s later SIGKILL" in text
    assert f"after {graces.exit_s:g} s without an exit" in text
    assert f"empty {graces.drain_s:g} s after `drain`" in text
    assert f"nested more than {MAX_DEPTH} deep" in text


def test_protocol_page_has_every_exit_code_of_the_worker() -> None:
    assert {int(row[0]) for row in table(PROTOCOL, "exit code")} == {code.value for code in Exit}


def test_readme_has_every_end_reason_in_its_class_with_its_error() -> None:
    described = {}
    for end_class, reason, error, _meaning in table(README, "class"):
        described[code_names(reason)[0]] = (end_class, code_names(error))
    assert described == {
        reason.value: (
            reason.end_class.value,
            [ERROR_OF[reason].__name__] if reason.end_class is not EndClass.NATURAL else [],
        )
        for reason in EndReason
    }


def test_readme_has_every_deadline_with_its_default_and_reason() -> None:
    described = {code_names(row[0])[0]: row for row in table(README, "deadline")}
    for field in fields(Deadlines):
        _, _counts, default, reason = described.pop(field.name)
        assert default == ("none" if field.default is None else f"{field.default:g} s")
        assert code_names(reason) == [f"{field.name.removesuffix('_s')}_timeout"]
        EndReason(code_names(reason)[0])
    assert not described


def test_cancellation_page_has_the_ladder_with_its_default_graces() -> None:
    rows = table(CANCELLATION, "stage")
    rungs = Escalation().rungs()
    assert [code_names(row[0])[0] for row in rows] == [rung.stage.value for rung in rungs]
    for row, rung in zip(rows[1:], rungs[1:], strict=True):
        assert f"max({rung.floor_ns / 1e9:g} s, {rung.step_factor:g} × the longest step seen)" in row[2]


def test_cancellation_page_has_every_abort_granularity_and_time_point() -> None:
    granularities = [code_names(row[0])[0] for row in table(CANCELLATION, '`facts["abort"]`')]
    assert granularities == [granularity.value for granularity in AbortGranularity]
    described = {name for row in table(CANCELLATION, "field") for name in code_names(" ".join(row[:2]))}
    stamps = {f.name for f in fields(Timeline) if f.name.endswith("_ns") and "gap" not in f.name}
    assert stamps == described


def test_api_page_has_every_sampling_keyword_with_its_default() -> None:
    keywords = dict(re.findall(r"`(\w+)=([^`]+)`", (ROOT / "docs/api.md").read_text()))
    assert {name: keywords.get(name) for name in Sampling().to_wire()} == {
        name: str(default) for name, default in Sampling().to_wire().items()
    }


def plain(path: Path) -> str:
    """Return a page with its lines joined, so that a sentence can be found across them."""
    return re.sub(r"\s+", " ", path.read_text())


def test_streams_page_has_the_numbers_of_the_code() -> None:
    text = plain(STREAMS)
    for said in (
        f"for the engine `llama` from 1 to {MAX_SLOTS}. Without it there are {DEFAULT_SLOTS},",
        f"`scripted` has {'one' if ScriptedOptions().slots == 1 else ScriptedOptions().slots}.",
        f"about {scheduler.LONE_STEPS:g} times as long as a step of one stream alone",
        f"to about {1 + scheduler.LONE_STEPS:g} times",
        f"a step reads for {scheduler.LONGEST_STEP_S:g} s",
        f"at least {scheduler.LEAST_SLICE_TOKENS} tokens",
        f"all slices have {REPRODUCIBLE_SLICE_TOKENS} tokens",
        f"from −{MAX_PRIORITY} to {MAX_PRIORITY}",
        f"Fewer than {LEAST_COPY_TOKENS} tokens aren't copied",
    ):
        assert said in text, said
    assert (LEVEL_NS, scheduler.LEVEL) == (10_000_000_000, 1.25)
    assert "a level counts as ten seconds of waiting" in text
    assert "share of the reading by a quarter" in text


def test_structured_output_page_has_every_keyword_that_is_refused() -> None:
    refused = {name for row in table(STRUCTURED, "keyword") for name in code_names(row[0])}
    for name in refused:
        with pytest.raises(Unsupported, match=re.escape(name)):
            keywords({"type": "array", name: 3})
    source = (ROOT / "protocol/schema_merge.py").read_text()
    table_of_code = source.partition("_CANT = {")[2].partition("\n}")[0]
    assert refused == set(re.findall(r'^    "([$\w]+)":', table_of_code, flags=re.MULTILINE))


def test_structured_output_page_has_the_numbers_and_names_of_the_code() -> None:
    text = plain(STRUCTURED)
    for said in (
        f"({MAX_LENGTH:,} characters, {MAX_ITEMS:,} items)",
        f"more than {MAX_SCHEMA_DEPTH} deep or with more than {MAX_PARTS:,} parts",
        f"at most {MAX_GRAMMAR_BYTES >> 20} MiB",
        f"for at most {LIMITS.cpu_s} s of computing, {LIMITS.wall_s:g} s by the clock and "
        f"{LIMITS.memory_bytes >> 20} MB",
        f"(up to {MAX_TOP_LOGPROBS})",
        f"at most {MAX_TOOLS}, and need `messages`",
        f"up to {MAX_TEXTS:,} of them",
        f"({DEFAULT_TIMEOUT_S:g} s)",
        "formats " + ", ".join(f"`{name}`" for name in FORMATS[:-1]) + f" and `{FORMATS[-1]}`",
    ):
        assert said in text, said
    assert MAX_TOKEN_S == 0.5
    assert "half a second for a token" in text
    assert all(f'"{kind}"' in text for kind in RESPONSE_FORMATS)
    choices = [name for row in table(STRUCTURED, "`tool_choice`") for name in code_names(row[0])]
    assert choices[: len(TOOL_CHOICES)] == [f'"{choice}"' for choice in TOOL_CHOICES]


def test_engines_page_has_every_option_of_the_llama_engine_with_its_default() -> None:
    described = {}
    for names, default, _meaning in table(ENGINES, "option"):
        described.update(dict.fromkeys(code_names(names), default))
    defaults = {field.name: getattr(LlamaOptions(), field.name) for field in fields(LlamaOptions)}
    assert described == {name: _shown(value) for name, value in defaults.items()}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, ()) else f"{value:g}" if isinstance(value, float) else str(value)


def test_cli_page_has_every_exit_code() -> None:
    described = {int(row[0]): row[1] for row in table(CLI, "exit code")}
    assert described == {code.value: code.meaning for code in ExitCode}


def test_cli_page_has_every_flag_of_every_command_and_no_other() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {
        option
        for command in commands.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-")
    }
    described = {name for row in table(CLI, "flag") for name in code_names(row[0]) if name.startswith("-")}
    assert described == flags - {"--help"}
    text = CLI.read_text()
    for name in commands:
        assert f"## supervise {name} " in text


def test_public_names_resolve_and_are_documented() -> None:
    text = "\n".join(path.read_text() for path in documents())
    for name in infervisor.__all__:
        value = getattr(infervisor, name)
        assert name in text, f"{name} isn't mentioned in any document"
        if isinstance(value, type):
            assert value.__doc__, f"{name} has no docstring"
            if issubclass(value, InfervisorError):
                assert value.code, f"{name} has no code"
    assert set(infervisor.__all__) <= set(dir(infervisor))
    assert len(set(infervisor.__all__)) == len(infervisor.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Superviser'"):
        _ = infervisor.Superviser  # type: ignore[attr-defined]
