"""The documents agree with the code: links, tables, names."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

import infervisor
from infervisor import Deadlines, EndClass, EndReason, Escalation, Timeline
from infervisor.protocol.errors import InfervisorError
from infervisor.protocol.messages import FROM_WORKER, TO_WORKER, Message
from infervisor.supervisor.cli.app import app
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.end_errors import ERROR_OF
from infervisor.worker.engine import AbortGranularity
from infervisor.worker.exits import Exit
from tests.docs.markdown import ROOT, anchors, code_names, documents, links, table

README = ROOT / "README.md"
PROTOCOL = ROOT / "docs/protocol.md"
CANCELLATION = ROOT / "docs/cancellation.md"
CLI = ROOT / "docs/cli.md"


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


def test_cli_page_has_every_exit_code() -> None:
    described = {int(row[0]): row[1] for row in table(CLI, "exit code")}
    assert described == {code.value: code.meaning for code in ExitCode}


def test_cli_page_has_every_flag_of_every_command_and_no_other() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {
        option
        for command in commands.values()
        for parameter in command.params
        for option in parameter.opts
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
