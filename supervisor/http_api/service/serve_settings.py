"""`ServeSettings`: the one table of what `supervise serve` can be told.

Flags, variables, the file and the documents are made from it. Light, since the help of `supervise` loads it: the
standard library alone. Reads nothing; that is done by `config_file` and the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from infervisor.supervisor.http_api.service.setting_kinds import Kind, Setting

VARIABLE_PREFIX = "SUPERVISE_"
CONFIG_VARIABLE = "SUPERVISE_CONFIG"
"""The variable that names the file. It isn't a setting: a file can't name itself."""

ADDRESS, ACCESS, MODEL, REQUESTS, DEADLINES, LIMITS, TELLING = (
    "address",
    "access",
    "models and workers",
    "requests",
    "deadlines of requests, in seconds",
    "limits",
    "what is told",
)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def _setting(default: Any, kind: Kind, group: str, text: str, **more: Any) -> Any:
    is_table = isinstance(default, Mapping)
    made: dict[str, Any] = {"default_factory": lambda: NOTHING} if is_table else {"default": default}
    setting = Setting(kind, text, group, **more)
    return field(**made, repr=not setting.is_secret, metadata={"setting": setting})


def _deadline(default: float | None, text: str) -> Any:
    return _setting(default, Kind.SECONDS, DEADLINES, text, low=0, takes_none=True, metavar="SECONDS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What `supervise serve` can be told. Units are in the names; outside, `_s` and `_bytes` are left off."""

    # fmt: off
    models: tuple[str, ...] = _setting(
        (), Kind.WORDS, MODEL, "A .gguf file, or NAME=PATH; several are served side by side, each in workers of "
        "its own. The first answers requests that name none. Without any the embedded default.", metavar="MODEL")
    aliases: Mapping[str, str] = _setting(
        NOTHING, Kind.PAIRS, MODEL, "A further name for a model. Repeatable.", flags=("--alias",),
        metavar="ALIAS=NAME")
    engine: str = _setting("llama", Kind.TEXT, MODEL, "Engine of the workers: llama, or scripted (needs no model).",
        metavar="NAME")
    options: Mapping[str, Any] = _setting(
        NOTHING, Kind.OPTIONS, MODEL, "An option of the engine; a JSON value, or else text. Repeatable.",
        flags=("-o", "--option"), metavar="NAME=VALUE")
    ctx: int | None = _setting(
        None, Kind.WHOLE, MODEL, "Context of one answer.", low=1, takes_none=True, metavar="TOKENS")
    threads: int | None = _setting(
        None, Kind.WHOLE, MODEL, "Threads of the llama engine.", low=1, takes_none=True, metavar="N")
    gpu_layers: int | None = _setting(
        None, Kind.WHOLE, MODEL, "Layers on the GPU; -1 is all.", low=-1, takes_none=True, metavar="N")
    slots: int | None = _setting(
        None, Kind.WHOLE, MODEL, "Answers that a worker computes side by side; the engine's default otherwise.",
        low=1, high=4096, takes_none=True, metavar="N")
    workers: int = _setting(
        1, Kind.WHOLE, MODEL, "Workers that serve at once, each with a model of its own.", low=1, high=64,
        metavar="N")
    standby: int = _setting(
        0, Kind.WHOLE, MODEL, "Further workers, loaded, that take over at once.", low=0, high=64, metavar="N")
    memory_soft_bytes: int | None = _setting(
        None, Kind.SIZE, MODEL, "A worker that takes more is replaced, without a lost stream.", takes_none=True,
        metavar="SIZE")
    memory_hard_bytes: int | None = _setting(
        None, Kind.SIZE, MODEL, "A worker that takes more is killed; its streams go on in the next one.",
        takes_none=True, metavar="SIZE")
    snapshots: bool = _setting(
        True, Kind.SWITCH, MODEL, "Keep copies of running requests, so that a next worker needn't read all again.")
    step_budget_ms: float | None = _setting(
        None, Kind.SECONDS, MODEL, "Longest step of running answers while a prompt is read.", low=0,
        takes_none=True, metavar="MS")
    python: str | None = _setting(
        None, Kind.PATH, MODEL, "Interpreter for the workers, with infervisor in it.", metavar="PATH")

    host: str = _setting(
        "127.0.0.1", Kind.TEXT, ADDRESS, "Address to listen on. Another than this machine's own needs a key.",
        metavar="ADDRESS")
    port: int = _setting(
        8080, Kind.WHOLE, ADDRESS, "Port to listen on; 0 takes a free one and tells which.", low=0, high=65535,
        metavar="N")
    unix_socket: str | None = _setting(
        None, Kind.PATH, ADDRESS, "Listen on this Unix socket instead.", metavar="PATH")
    tls_cert: str | None = _setting(
        None, Kind.PATH, ADDRESS, "Certificate, with its chain, in PEM.", metavar="FILE")
    tls_key: str | None = _setting(
        None, Kind.PATH, ADDRESS, "Private key in PEM, if it isn't in the certificate's file.", metavar="FILE")

    api_key_file: str | None = _setting(
        None, Kind.PATH, ACCESS, "Keys that clients may use, one a line.", metavar="FILE")
    api_keys: tuple[str, ...] = _setting(
        (), Kind.WORDS, ACCESS, "Keys that clients may use, parted by commas.", is_secret=True)
    allow_without_key: bool = _setting(
        False, Kind.SWITCH, ACCESS, "Serve other machines, too, without any key.")
    allowed_hosts: tuple[str, ...] = _setting(
        (), Kind.WORDS, ACCESS, "A name that the service may be called by, beyond those of this machine; * is any. "
        "Repeatable.", flags=("--allowed-host",), metavar="HOST")
    cors_origins: tuple[str, ...] = _setting(
        (), Kind.WORDS, ACCESS, "A web page's origin that may use the service from a browser. Repeatable.",
        flags=("--cors-origin",), metavar="ORIGIN")
    console: bool = _setting(True, Kind.SWITCH, ACCESS, "The page at /, with a chat and the state of all requests.")

    window: int = _setting(
        32, Kind.WHOLE, REQUESTS, "Tokens computed ahead of a client.", low=1, high=1 << 20, metavar="N")
    max_queue: int = _setting(
        64, Kind.WHOLE, REQUESTS, "Requests of a model that may wait; more are refused.", low=0, high=1 << 20,
        metavar="N")
    max_wait_s: float | None = _setting(
        None, Kind.SECONDS, REQUESTS, "Refuse requests that would wait longer, as far as can be told.", low=0,
        takes_none=True, metavar="SECONDS")
    on_crash: Literal["resume", "fail"] = _setting(
        "resume", Kind.CHOICE, REQUESTS, "When a worker dies: answers go on in the next one, or fail.",
        choices=("resume", "fail"))
    unknown_fields: Literal["refuse", "ignore"] = _setting(
        "refuse", Kind.CHOICE, REQUESTS, "Fields of a request's body that nobody knows.",
        choices=("refuse", "ignore"))
    report: Literal["body", "header", "off"] = _setting(
        "body", Kind.CHOICE, REQUESTS, "Where an answer tells its times, if its request doesn't say.",
        choices=("body", "header", "off"))

    queue_timeout_s: float | None = _deadline(None, "Waiting in the queue.")
    startup_timeout_s: float | None = _deadline(120.0, "Loading without progress.")
    first_token_timeout_s: float | None = _deadline(None, "From submit to the first token.")
    stall_timeout_s: float | None = _deadline(None, "Between two tokens.")
    total_timeout_s: float | None = _deadline(None, "The whole request, loading not included.")
    consumer_timeout_s: float | None = _deadline(300.0, "A client that takes nothing.")

    max_body_bytes: int = _setting(16 << 20, Kind.SIZE, LIMITS, "Largest body of a request.", metavar="SIZE")
    max_connections: int = _setting(
        1024, Kind.WHOLE, LIMITS, "Connections at once.", low=1, high=1 << 20, metavar="N")
    max_requests: int = _setting(
        1024, Kind.WHOLE, LIMITS, "HTTP requests in progress at once.", low=1, high=1 << 20, metavar="N")
    header_timeout_s: float = _setting(
        10.0, Kind.SECONDS, LIMITS, "Longest time for the head of a request.", low=0.001, high=86400,
        metavar="SECONDS")
    body_timeout_s: float = _setting(
        30.0, Kind.SECONDS, LIMITS, "Longest time for the body of a request.", low=0.001, high=86400,
        metavar="SECONDS")
    keep_alive_s: float = _setting(
        75.0, Kind.SECONDS, LIMITS, "How long an idle connection is kept.", low=0, high=86400, metavar="SECONDS")
    drain_grace_s: float = _setting(
        30.0, Kind.SECONDS, LIMITS, "After SIGTERM: so long may running answers finish.", low=0, high=86400,
        metavar="SECONDS")

    log_format: Literal["text", "json"] = _setting(
        "text", Kind.CHOICE, TELLING, "Lines of the log, on standard error.", choices=("text", "json"))
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", Kind.CHOICE, TELLING, "What is logged; info has a line for every request.",
        choices=("debug", "info", "warning", "error"))
    log_prompts: bool = _setting(False, Kind.SWITCH, TELLING, "Log what was asked, too.")
    # fmt: on


def key_of(name: str) -> str:
    """Return a field's key in the file; its flag and its variable are made of the same."""
    return name.removesuffix("_s").removesuffix("_bytes")


def flags_of(name: str, setting: Setting) -> tuple[str, ...]:
    """Return a field's flags as typer takes them; none for a secret, and for the models, which are arguments."""
    if setting.is_secret or name == "models":
        return ()
    flag = "--" + key_of(name).replace("_", "-")
    return setting.flags or ((f"{flag}/--no-{flag[2:]}",) if setting.kind is Kind.SWITCH else (flag,))


def variable_of(name: str) -> str:
    """Return the environment variable of a field."""
    return VARIABLE_PREFIX + key_of(name).upper()


def settings_table() -> Iterator[tuple[str, Setting, Any]]:
    """Yield each field's name, what it is, and its default."""
    for each in fields(ServeSettings):
        yield each.name, each.metadata["setting"], _default(each)


def _default(each: Field[Any]) -> Any:
    return each.default if each.default is not MISSING else NOTHING
