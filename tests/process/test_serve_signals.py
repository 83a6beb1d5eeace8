"""How the service ends, and what signals do to it: to it alone, to its group, and as the first process."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.http_api.service.pid_one import exit_code
from infervisor.supervisor.http_api.service.service import LAST_WORDS_S, STOP_S
from tests.helpers.command_line import WITHIN_S, assert_gone
from tests.helpers.serving import CHAT, Events, Serving, family, serving

PACE = {"pace_s": 0.005}
DEAF = {"at": "decode", "kind": "ignore_cancel", "after": 3}
CONTAINED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def no_traceback(service: Serving) -> None:
    assert "Traceback" not in service.log
    assert "KeyboardInterrupt" not in service.log


def says(service: Serving, wanted: str) -> None:
    service.command.read_until("err", wanted)


def last_error(events: Events) -> Any:
    """Return the error that is the last event of a stream."""
    *others, last = events.rest()
    assert not any('"error"' in event for event in others)
    assert "[DONE]" not in events.data
    return json.loads(last)["error"]


# --- the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_service_ends_at_once(number: signal.Signals) -> None:
    with serving() as service:
        service.ready()
        pids = family(service.command.process.pid)
        assert service.end(number) == ExitCode.OK
    no_traceback(service)
    for pid in pids:
        assert_gone(pid)


def test_sigterm_lets_running_answers_finish_and_refuses_new_ones() -> None:
    with serving(**PACE) as service:
        service.ready()
        with service.stream(max_tokens=300) as events:
            events.until("w2 ")
            service.command.process.send_signal(signal.SIGTERM)
            says(service, "info draining requests=1 grace_s=30.0")
            status, body = service.ask("POST", "/v1/chat/completions", CHAT)
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            status, body = service.ask("GET", "/health/ready")
            assert (status, body["status"]) == (503, "unready")
            assert service.ask("GET", "/health/live")[0] == 200
            assert events.rest()[-1] == "[DONE]"
            assert events.text == "".join(f"w{number} " for number in range(300))
        assert service.command.finish() == ExitCode.OK
    assert "end_reason=length" in service.log
    no_traceback(service)


def test_an_endless_stream_gets_its_end_when_the_grace_is_over() -> None:
    with serving("--drain-grace", "0.3", **PACE) as service:
        service.ready()
        pids = family(service.command.process.pid)
        with service.stream() as events:
            events.until("w2 ")
            service.command.process.send_signal(signal.SIGTERM)
            assert last_error(events)["code"] == "shutting_down"
        assert service.command.finish() == ExitCode.OK
    assert "end_reason=shutting_down" in service.log
    no_traceback(service)
    for pid in pids:
        assert_gone(pid)


def test_a_whole_answer_gets_its_end_too() -> None:
    with serving("--drain-grace", "0", prefill_s=600) as service:
        service.ready()
        ask = (
            "import http.client, json, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); "
            "c.request('POST', '/v1/chat/completions', sys.argv[2], {'Content-Type': 'application/json'}); "
            "a = c.getresponse(); print(a.status, json.loads(a.read())['error']['code'])"
        )
        client = subprocess.Popen(
            [sys.executable, "-c", ask, str(service.port), json.dumps(CHAT)], stdout=subprocess.PIPE
        )
        until_phase(service, "prefill")
        assert service.end() == ExitCode.OK
        out, _ = client.communicate(timeout=WITHIN_S)
        assert out == b"503 shutting_down\n"


def until_phase(service: Serving, *phases: str) -> None:
    """Wait until the one request is in one of these phases."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        _, body = service.ask("GET", "/api/requests")
        if [one["phase"] in phases for one in body["requests"]] == [True]:
            return
        assert time.monotonic() < deadline, body
        time.sleep(0.02)


def test_a_client_that_takes_nothing_does_not_hold_the_end_up() -> None:
    with serving("--drain-grace", "0") as service:
        service.ready()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(WITHIN_S)
            client.connect(("127.0.0.1", service.port))
            body = json.dumps({**CHAT, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until_phase(service, "paused")
            began = time.monotonic()
            assert service.end() == ExitCode.OK
            assert time.monotonic() - began < 2 * STOP_S
    no_traceback(service)


def test_a_second_signal_skips_the_grace() -> None:
    with serving("--drain-grace", "600", **PACE) as service:
        service.ready()
        with service.stream() as events:
            events.until("w2 ")
            service.command.process.send_signal(signal.SIGTERM)
            says(service, "info draining")
            service.command.process.send_signal(signal.SIGTERM)
            assert last_error(events)["code"] == "shutting_down"
        assert service.command.finish() == ExitCode.OK
    no_traceback(service)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_third_signal_leaves_at_once(number: signal.Signals, code: int) -> None:
    # The worker sits in a step that nothing interrupts, so that stopping it takes its graces.
    with serving(faults=[DEAF]) as service:
        service.ready()
        pids = family(service.command.process.pid)
        with service.stream() as events:
            events.until("w2 ")
            for said in ("info draining", "info ending"):
                service.command.process.send_signal(number)
                says(service, said)
            service.command.process.send_signal(number)
            assert service.command.finish() == code
    no_traceback(service)
    for pid in pids:
        assert_gone(pid)


def test_a_ctrl_c_to_the_whole_group_counts_once_and_no_worker_sees_it() -> None:
    with serving("--log-level", "debug", **PACE) as service:
        service.ready()
        with service.stream(max_tokens=200) as events:
            events.until("w2 ")
            service.command.interrupt()
            says(service, "info draining requests=1")
            assert events.rest()[-1] == "[DONE]"
        assert service.command.finish() == ExitCode.OK
    assert re.search(
        r"info WorkerExited model=scripted pid=\d+ cause=stopped status=\"exit code 0\"", service.log
    )
    no_traceback(service)


def test_a_ctrl_c_while_the_model_loads_ends_it() -> None:
    with serving(load_s=600) as service:
        service.listening()
        service.command.interrupt()
        assert service.command.finish() == ExitCode.OK
    no_traceback(service)


def test_a_ctrl_c_that_the_caller_ignores_stays_ignored() -> None:
    with serving(prefix=["sh", "-c", 'trap "" INT; exec "$@"', "sh"]) as service:
        service.ready()
        service.command.interrupt()
        assert service.ask("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 3})[0] == 200
        assert service.end() == ExitCode.OK


def test_no_worker_outlives_a_service_that_is_killed() -> None:
    with serving() as service:
        service.ready()
        pids = family(service.command.process.pid)
        assert len(pids) == 2
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
    for pid in pids:
        assert_gone(pid)


# --- SIGHUP ------------------------------------------------------------------------------------------


def test_hangup_replaces_the_workers_without_losing_a_stream() -> None:
    with serving(**PACE) as service:
        service.ready()
        (old,) = service.worker_pids()
        with service.stream(max_tokens=300) as events:
            events.until("w2 ")
            service.command.process.send_signal(signal.SIGHUP)
            says(service, "info replacing workers, as SIGHUP asks")
            assert events.rest()[-1] == "[DONE]"
            assert events.text == "".join(f"w{number} " for number in range(300))
        says(service, "info workers replaced model=scripted")
        assert old not in service.worker_pids()
        assert service.end() == ExitCode.OK
    no_traceback(service)


# --- the first process of a container ----------------------------------------------------------------


def contained() -> tuple[str, ...]:
    """Return what puts a command into a pid namespace of its own as process 1."""
    if shutil.which("unshare") is None or subprocess.run([*CONTAINED, "true"], check=False).returncode:
        pytest.skip("pid namespaces are not permitted here")
    return CONTAINED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_the_first_process_it_takes_signals_and_drains(number: signal.Signals) -> None:
    with serving(prefix=contained(), **PACE) as service:
        service.ready()
        (first,) = psutil.Process(service.command.process.pid).children()
        members = [first, *first.children(recursive=True)]
        assert len(members) == 3, "the first process, the service, and a worker"
        with service.stream(max_tokens=200) as events:
            events.until("w2 ")
            first.send_signal(number)
            says(service, "info draining requests=1")
            assert events.rest()[-1] == "[DONE]"
        assert service.command.finish() == ExitCode.OK
    no_traceback(service)
    for member in members:
        assert_gone(member.pid)


def test_a_ctrl_c_at_the_terminal_of_a_container_counts_once() -> None:
    with serving(prefix=contained(), **PACE) as service:
        service.ready()
        with service.stream(max_tokens=200) as events:
            events.until("w2 ")
            # To all that have the terminal; `unshare` itself takes none.
            service.command.interrupt()
            says(service, "info draining requests=1")
            assert events.rest()[-1] == "[DONE]"
        assert service.command.finish() == ExitCode.OK


def test_as_the_first_process_it_passes_on_hangup_and_three_times_the_end() -> None:
    with serving(prefix=contained(), faults=[DEAF]) as service:
        service.ready()
        (first,) = psutil.Process(service.command.process.pid).children()
        first.send_signal(signal.SIGHUP)
        says(service, "info workers replaced model=scripted")
        with service.stream() as events:
            events.until("w2 ")
            for said in ("info draining", "info ending"):
                first.send_signal(signal.SIGTERM)
                says(service, said)
            first.send_signal(signal.SIGTERM)
            assert service.command.finish() == 143


def test_the_first_process_collects_orphans() -> None:
    # A process whose parent ends at once: the first process becomes its parent.
    orphan = 'sh -c "(sleep 0.01; sleep 0.01) & echo \\$!" >/dev/null; exec "$@"'
    with serving(prefix=[*contained(), "sh", "-c", f"{orphan}", "sh"]) as service:
        service.ready()
        (first,) = psutil.Process(service.command.process.pid).children()
        # One more, that is born while the service runs.
        subprocess.run(
            ["nsenter", "-t", str(first.pid), "-p", "sh", "-c", "sleep 0.05 & sleep 0.01 & :"], check=True
        )
        deadline = time.monotonic() + 10
        while (
            any(child.status() == psutil.STATUS_ZOMBIE for child in first.children())
            or len(first.children()) > 1
        ):
            assert time.monotonic() < deadline, first.children()
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        assert service.command.finish() == ExitCode.OK


def test_the_first_process_says_how_its_service_ended() -> None:
    with serving(prefix=contained()) as service:
        service.ready()
        (first,) = psutil.Process(service.command.process.pid).children()
        (child,) = first.children()
        child.kill()
        assert service.command.finish() == 128 + signal.SIGKILL
    with serving("--cors-origin", "*", prefix=contained()) as service:
        assert service.command.finish() == ExitCode.USAGE


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(status) for status in (0, 6 << 8, int(signal.SIGKILL), int(signal.SIGTERM))] == [
        0,
        6,
        137,
        143,
    ]


def test_a_drain_lets_a_slow_client_read_its_answer_to_the_end():
    with serving("--drain-grace", "60", text="word " * 100, end="cycle", step_tokens=1000) as service:
        service.ready()
        with socket.create_connection(("127.0.0.1", service.port), timeout=WITHIN_S) as client:
            body = json.dumps({**CHAT, "max_tokens": 60_000}).encode()
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            raw = client.recv(2000)
            head, _, rest = raw.partition(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", head)
            assert found is not None
            service.command.process.send_signal(signal.SIGTERM)
            left = int(found[1]) - len(rest)
            # The answer is made, and most of it is still in the service: slower than its last words may take.
            began = time.monotonic()
            while left:
                piece = client.recv(min(left, 4000))
                assert piece, f"cut off with {left} bytes to come after {time.monotonic() - began:.1f} s"
                left -= len(piece)
                time.sleep(0.06)
            assert time.monotonic() - began > LAST_WORDS_S
        assert service.command.finish() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_come_while_it_ends_make_no_failure_of_it(number: signal.Signals):
    with serving() as service:
        service.ready()
        process = service.command.process
        process.send_signal(number)
        process.send_signal(number)
        service.command.read_until("err", r"ending")
        # From then on it only ends; a third one before would leave at once, which is another thing.
        code = service.command.finish()
        assert code == 0
