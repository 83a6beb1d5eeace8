"""`supervise serve` as a process: its start, what it says, and what it takes for granted of its surroundings."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from infervisor.supervisor.cli.exit_codes import ExitCode
from tests.helpers.command_line import (
    ASCII_LOCALE,
    COMMAND,
    WITHIN_S,
    assert_gone,
    running,
    scripted,
    supervise,
)
from tests.helpers.serving import CHAT, family, kill, service_environment, serving

REFUSES = {"at": "load", "kind": "load_refused", "code": "broken_model", "permanent": True}


def lines_of_log(text: str) -> list[dict[str, Any]]:
    """Return the lines of a log in JSON."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# --- the start ---------------------------------------------------------------------------------------


def test_it_says_where_it_serves_and_answers_there() -> None:
    with serving(text="To be, or not to be") as service:
        said = service.ready()
        address = f"http://127.0.0.1:{service.port}"
        assert said == f"{address} serves scripted; console {address}/"
        status, answer = service.ask("POST", "/v1/chat/completions", CHAT)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "To be, or not to be")
        workers = service.worker_pids()
        assert service.end() == ExitCode.OK
    (line,) = re.findall(r"^\S+ info request (.*)$", service.log, flags=re.MULTILINE)
    assert "endpoint=" in line
    assert "model=scripted status=200 end_reason=stop" in line
    for pid in workers:
        assert_gone(pid)


def test_health_is_told_while_the_model_loads() -> None:
    with serving(load_s=600) as service:
        service.listening()
        assert service.ask("GET", "/health/live")[0] == 200
        status, body = service.ask("GET", "/health/ready")
        assert (status, body["status"]) == (503, "unready")
        pids = family(service.command.process.pid)
        assert len(pids) == 2
        assert service.end() == ExitCode.OK
    for pid in pids:
        assert_gone(pid)
    assert " serves " not in service.log


def test_a_taken_port_fails_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = supervise(
            "serve", *scripted(), "--port", str(port), "--log-level", "debug", env=service_environment()
        )
    said = done.stderr.decode()
    assert done.returncode == ExitCode.NO_ADDRESS
    assert f"127.0.0.1:{port} is in use by another process" in said
    assert "WorkerSpawned" not in said
    assert said.count("\n") == 1


def test_a_model_that_cannot_be_loaded_ends_it_with_a_code_of_its_own() -> None:
    with serving(faults=[REFUSES]) as service:
        assert service.command.finish() == ExitCode.LOAD_FAILED
    assert "\nsupervise: broken_model: scripted: " in service.log
    assert "Traceback" not in service.log


def test_one_of_several_models_that_cannot_be_loaded_ends_it_while_the_other_loads(tmp_path: Path) -> None:
    words = [str(tmp_path / name) for name in ("one", "two")]
    for word in words:
        Path(word).touch()
    fault = {**REFUSES, "once_file": str(tmp_path / "once")}
    with serving(*words, faults=[fault], load_s=600) as service:
        assert service.command.finish() == ExitCode.LOAD_FAILED
    assert re.search(r"^supervise: broken_model: (one|two): ", service.log, flags=re.MULTILINE)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    done = supervise("serve", "--port", "0", str(broken), env=service_environment())
    assert done.returncode == ExitCode.LOAD_FAILED
    assert re.search(rb"^supervise: \w+: broken: ", done.stderr, flags=re.MULTILINE)


def test_a_worker_that_dies_later_ends_nothing() -> None:
    with serving(pace_s=0.002) as service:
        service.ready()
        (pid,) = service.worker_pids()
        with service.stream(max_tokens=200) as events:
            events.until("w2 ")
            kill(pid)
            assert events.rest()[-1] == "[DONE]"
            assert events.text == "".join(f"w{number} " for number in range(200))
        assert service.worker_pids() != [pid]
        service.until("/health/ready", 200)
        assert service.end() == ExitCode.OK
    assert re.search(rf"warning WorkerExited model=scripted pid={pid} cause=crashed", service.log)


def test_a_model_that_is_lost_later_keeps_the_service_up(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    with serving(faults=[{**REFUSES, "armed_file": str(armed)}]) as service:
        service.ready()
        (pid,) = service.worker_pids()
        armed.touch()
        kill(pid)
        service.command.read_until("err", "error BreakerOpened model=scripted")
        status, body = service.ask("GET", "/health/ready")
        assert (status, body["models"]["scripted"]["state"]) == (503, "open")
        assert service.ask("GET", "/health/live")[0] == 200
        # Whoever has mended it says so by a reload.
        service.command.process.send_signal(signal.SIGHUP)
        service.until("/health/ready", 200)
        assert service.end() == ExitCode.OK


def test_several_models_and_other_names_for_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").touch()
    words = [str(tmp_path / "one.gguf"), f"deux={tmp_path}/two.gguf", "--alias", "gpt=deux"]
    with serving(*words, text="hello") as service:
        assert service.ready().startswith(f"http://127.0.0.1:{service.port} serves one, deux; ")
        assert len(service.worker_pids()) == 2
        for asked, answered in ((None, "one"), ("one", "one"), ("deux", "deux"), ("gpt", "deux")):
            body = CHAT if asked is None else {**CHAT, "model": asked}
            status, answer = service.ask("POST", "/v1/chat/completions", body)
            assert (status, answer["model"]) == (200, answered)
        assert service.ask("POST", "/v1/chat/completions", {**CHAT, "model": "three"})[0] == 404
        assert service.end() == ExitCode.OK


# --- settings ----------------------------------------------------------------------------------------


def test_flags_variables_and_a_file_come_together(tmp_path: Path) -> None:
    config = tmp_path / "service.toml"
    config.write_text(
        'engine = "scripted"\nport = 1\nhost = "192.0.2.1"\n[options]\ntext = "from the file"\n'
    )
    env = service_environment(SUPERVISE_CONFIG=str(config), SUPERVISE_HOST="127.0.0.1", SUPERVISE_PROT="1")
    with serving(env=env) as service:
        service.ready()
        _, answer = service.ask("POST", "/v1/chat/completions", CHAT)
        assert answer["choices"][0]["message"]["content"] == "from the file"
        assert service.end() == ExitCode.OK
    assert "warning the variable SUPERVISE_PROT is no setting; did you mean SUPERVISE_PORT?" in service.log


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "and no key is set"),
        (["--port", "http"], "--port must be a whole number from 0 to 65535, not 'http'"),
        (["--config", "/missing.toml"], "/missing.toml: the configuration can't be read"),
        (["--alias", "a=b"], "'a' stands for 'b', but the models are scripted"),
        (["--cors-origin", "*"], "cors_origins: '*' is no origin"),
        (["--tls-cert", "/missing.pem"], "/missing.pem can't be read"),
    ],
)
def test_wrong_settings_start_nothing(words: list[str], said: str) -> None:
    done = supervise("serve", *scripted(), "--port", "0", *words, env=service_environment())
    assert done.returncode == ExitCode.USAGE
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_without_the_extra_a_line_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "pydantic_settings.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'pydantic_settings'\", name='pydantic_settings')\n"
    )
    env = service_environment(PYTHONPATH=str(tmp_path))
    done = supervise("serve", *scripted(), env=env)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.decode() == (
        "supervise: the package pydantic_settings isn't installed, which the service needs: install infervisor "
        "with its extra serve (pip install '.[serve]' in its folder)\n"
    )
    # Everything else does without it.
    assert supervise("run", *scripted(text="hi"), "hi", env=env).returncode == ExitCode.OK
    assert supervise("serve", "--help", env=env).returncode == ExitCode.OK


def test_keys_are_asked_for_and_never_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame-of-the-file\n")
    env = service_environment(SUPERVISE_API_KEYS="sesame-of-the-variable")
    with serving("--api-key-file", str(keys), "--log-level", "debug", env=env) as service:
        service.ready()
        assert service.ask("GET", "/v1/models")[0] == 401
        assert service.ask("GET", "/v1/models", headers={"Authorization": "Bearer sesame"})[0] == 401
        for key in ("sesame-of-the-file", "sesame-of-the-variable"):
            assert service.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
        assert service.ask("GET", "/health/live")[0] == 200
        for pid in family(service.command.process.pid):
            assert "sesame" not in " ".join(psutil.Process(pid).cmdline())
        assert service.end() == ExitCode.OK
    assert "sesame" not in service.log


def test_a_unix_socket_that_others_cannot_open(tmp_path: Path) -> None:
    path = tmp_path / "service.sock"
    with running("serve", *scripted(), "--unix-socket", str(path), env=service_environment()) as command:
        command.read_until("err", re.escape(f"supervise: unix:{path} serves scripted\n"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(WITHIN_S)
            client.connect(str(path))
            client.sendall(b"GET /health/ready HTTP/1.1\r\nHost: anything\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        command.process.terminate()
        assert command.finish() == ExitCode.OK
    assert not path.exists()


def test_it_speaks_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -nodes -subj /CN=localhost"
    subject = ["-addext", "subjectAltName=DNS:localhost", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*make.split(), *subject], check=True, capture_output=True)
    words = ["--port", "0", "--tls-cert", str(certificate), "--tls-key", str(key)]
    with running("serve", *scripted(), *words, env=service_environment()) as command:
        port = command.read_until("err", r"supervise: https://127\.0\.0\.1:(\d+) serves [^\n]*\n")[1]
        context = ssl.create_default_context(cafile=str(certificate))
        with (
            socket.create_connection(("127.0.0.1", int(port)), WITHIN_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        command.process.terminate()
        assert command.finish() == ExitCode.OK


# --- the log -----------------------------------------------------------------------------------------


def test_a_line_of_json_for_a_request_without_what_was_asked() -> None:
    with serving("--log-format", "json", text="an answer") as service:
        service.ready()
        body = {"messages": [{"role": "user", "content": "a secret"}]}
        assert service.ask("POST", "/v1/chat/completions", body, {"X-Client-Request-Id": "mine"})[0] == 200
        assert service.end() == ExitCode.OK
    (line,) = [line for line in lines_of_log(service.log) if line["message"] == "request"]
    told = {name: line[name] for name in ("client_request_id", "model", "status", "end_reason", "tokens")}
    assert told == {
        "client_request_id": "mine",
        "model": "scripted",
        "status": 200,
        "end_reason": "stop",
        "tokens": 2,
    }
    assert line["id"].startswith("req")
    assert line["total_ms"] >= line["ttft_ms"] > 0
    assert line["release_ms"] is None or line["release_ms"] >= 0
    assert "secret" not in service.log
    assert "an answer" not in service.log


def test_prompts_are_logged_for_those_who_ask_for_it() -> None:
    with serving("--log-format", "json", "--log-prompts", text="hi") as service:
        service.ready()
        service.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "no secret"}]})
        assert service.end() == ExitCode.OK
    (line,) = [line for line in lines_of_log(service.log) if line["message"] == "request"]
    assert "no secret" in line["prompt"]


# --- surroundings ------------------------------------------------------------------------------------


def test_it_works_without_standard_streams(tmp_path: Path) -> None:
    path = tmp_path / "service.sock"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    words = [*closed, *COMMAND, "serve", *scripted(text="hi"), "--unix-socket", str(path)]
    process = subprocess.Popen(words, env=service_environment(), start_new_session=True)
    try:
        for _ in range(2):
            status, answer = _through(path, process)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "hi")
        process.terminate()
        assert process.wait(WITHIN_S) == ExitCode.OK
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WITHIN_S)


def _through(path: Path, process: subprocess.Popen[bytes]) -> tuple[int, Any]:
    """Ask through a Unix socket, once it is there."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        connection = http.client.HTTPConnection("localhost", timeout=WITHIN_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(WITHIN_S)
        try:
            connection.sock.connect(str(path))
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(CHAT), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (FileNotFoundError, ConnectionRefusedError):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        finally:
            connection.close()


def test_names_of_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    folder = tmp_path / "dépôt"
    folder.mkdir()
    (folder / "modèle.gguf").touch()
    (folder / "clés").write_text("sesame")
    (folder / "réglages.toml").write_text('models = ["modèle.gguf"]\napi_key_file = "clés"\n')
    config = str(folder / "réglages.toml")
    with serving("--config", config, env=service_environment(**ASCII_LOCALE), text="é") as service:
        service.ready()
        body = {**CHAT, "model": "modèle"}
        status, answer = service.ask("POST", "/v1/chat/completions", body, {"X-Api-Key": "sesame"})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "é")
        assert service.end() == ExitCode.OK


def test_a_job_in_the_background_of_a_terminal_never_stops_and_reads_nothing() -> None:
    # The shell of a terminal starts it as a job; a read from the terminal would stop it.
    master, slave = os.openpty()
    shell = (
        "import os, pty, signal, subprocess, sys; os.setsid(); "
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "child = subprocess.Popen(sys.argv[1:], process_group=0); print(child.pid, flush=True); "
        "sys.exit(child.wait())"
    )
    words = ["-c", shell, *COMMAND, "serve", *scripted(), "--port", "0"]
    process = subprocess.Popen(
        [COMMAND[0], *words],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=service_environment(),
    )
    try:
        os.write(master, b"typed before\n")
        assert process.stdout is not None
        assert process.stderr is not None
        job = int(process.stdout.readline())
        while b" serves " not in (line := process.stderr.readline()):
            assert line, "it ended"
        for pid in family(job):
            assert psutil.Process(pid).status() != psutil.STATUS_STOPPED
            is_worker = pid != job
            assert (os.readlink(f"/proc/{pid}/fd/0") == os.ttyname(slave)) != is_worker
        assert os.read(slave, 100) == b"typed before\n"
        os.kill(job, signal.SIGTERM)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode == ExitCode.OK
    finally:
        for pid in family(process.pid) if process.poll() is None else ():
            kill(pid)
        process.wait(WITHIN_S)
        for end in (master, slave):
            os.close(end)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_a_service_manager_is_told_of_loading_readiness_life_and_the_end(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(WITHIN_S)
        manager.bind(str(address))
        env = service_environment(NOTIFY_SOCKET=str(address), WATCHDOG_USEC="100000")
        heard: list[str] = []

        def hear(wanted: str) -> None:
            while not any(line.startswith(wanted) for line in heard):
                heard.extend(manager.recv(4096).decode().split("\n"))

        with serving(env=env, load_s=0.2) as service:
            hear("EXTEND_TIMEOUT_USEC=")
            assert "READY=1" not in heard
            hear("READY=1")
            service.ready()
            heard.clear()
            hear("WATCHDOG=1")
            service.command.process.send_signal(signal.SIGHUP)
            hear("RELOADING=1")
            hear("READY=1")
            assert heard.index("RELOADING=1") < heard.index("READY=1")
            service.command.process.terminate()
            hear("STOPPING=1")
            assert service.command.finish() == ExitCode.OK
