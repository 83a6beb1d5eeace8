"""How lines of the log look, whatever is in them, and whether they are lost without harm."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest

from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import BreakerOpened, LoadProgress, WorkerExited, WorkerLogged
from infervisor.supervisor.http_api.service import request_log
from infervisor.supervisor.http_api.service.worker_log import level_of

ODD = 'a "b" = c\n\x1b[2J\u202e ä 🦙'


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Return a stream for the log, and put the loggers back afterwards."""
    names = ("infervisor", "uvicorn", "asyncio")
    before = {
        name: (log.handlers, log.propagate, log.level) for name in names for log in [logging.getLogger(name)]
    }
    yield io.StringIO()
    for name, (handlers, propagate, level) in before.items():
        log = logging.getLogger(name)
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def test_a_line_of_text_is_one_line_without_control_characters(written: io.StringIO) -> None:
    logger = request_log.set_up("text", "info", written)
    values = {"plain": "word", "odd": ODD, "empty": "", "none": None, "time_ms": 1.25, "count": 3}
    logger.info("it is %s", "so\n\x07", extra={"values": values})
    (line,) = written.getvalue().splitlines()
    assert line.isprintable()
    when, level, rest = line.split(" ", 2)
    assert (len(when), when[-1], level) == (24, "Z", "info")
    assert rest.startswith('it is so\\n\\x07 plain=word odd="a \\"b\\" = c\\n')
    assert rest.endswith('empty="" time_ms=1.2 count=3')
    assert "none=" not in rest


def test_a_line_of_json_is_one_object_in_ascii(written: io.StringIO) -> None:
    logger = request_log.set_up("json", "info", written)
    logger.warning(
        "it is %s", ODD, extra={"values": {"odd": ODD, "none": None, "reason": DeathCause.CRASHED}}
    )
    (line,) = written.getvalue().splitlines()
    assert line.isascii()
    told = json.loads(line)
    assert told.pop("t_s") > 1e9
    assert told == {
        "level": "warning",
        "message": f"it is {ODD}",
        "odd": ODD,
        "none": None,
        "reason": "crashed",
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_stays_with_its_line(written: io.StringIO, log_format: str) -> None:
    logger = request_log.set_up(log_format, "info", written)
    try:
        raise ValueError(ODD)
    except ValueError:
        logger.exception("failed")
    lines = written.getvalue().splitlines()
    assert "ValueError" in written.getvalue()
    assert all(line.isprintable() for line in lines)
    if log_format == "json":
        assert json.loads(lines[0])["traceback"].endswith(f"ValueError: {ODD}")
    else:
        assert all(line.startswith("  ") for line in lines[1:])


def test_the_level_holds_for_all_but_announcements(written: io.StringIO) -> None:
    logger = request_log.set_up("text", "error", written)
    logger.warning("not this")
    logging.getLogger("infervisor.http").warning("nor this")
    logging.getLogger("uvicorn.error").error("but this")
    request_log.announce(logger, "and this")
    assert [line.split(" ", 2)[2] for line in written.getvalue().splitlines()] == ["but this", "and this"]


def test_libraries_tell_of_trouble_alone(written: io.StringIO) -> None:
    request_log.set_up("text", "info", written)
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("asyncio").warning("slow")
    assert [line.split(" ", 2)[2] for line in written.getvalue().splitlines()] == ["slow"]


@pytest.mark.usefixtures("written")
def test_a_log_that_nobody_reads_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    broken = open(writer, "wb", buffering=0)
    logger = request_log.set_up("text", "info", io.TextIOWrapper(broken, write_through=True))
    logger.info("into the void")
    broken.close()
    logger.info("into what is closed")
    assert capsys.readouterr() == ("", "")


def test_how_much_an_event_matters() -> None:
    def exited(cause: DeathCause) -> WorkerExited:
        return WorkerExited(1, cause, "exit code 0", "", "", (), 0.0)

    assert level_of(exited(DeathCause.STOPPED)) == level_of(exited(DeathCause.RECYCLED)) == logging.INFO
    assert level_of(exited(DeathCause.CRASHED)) == logging.WARNING
    assert level_of(BreakerOpened("why", None)) == logging.ERROR
    assert level_of(LoadProgress(1, "load", 0.5)) == logging.DEBUG
    assert level_of(WorkerLogged(1, "warning", "x")) == logging.WARNING
    assert level_of(WorkerLogged(1, "info", "x")) == logging.DEBUG
