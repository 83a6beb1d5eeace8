"""What an application of `create_app` can be told. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the service, all of them with defaults for one person on one machine.

    api_keys: who may ask; none, and everybody may. allowed_hosts: names beyond those of this machine under which it
    may be reached, "*" for all. cors_origins: whose pages may use it, such as "https://app.example".
    max_requests: in progress at once, health not counted. log_prompts: whether prompts may be in the log.
    unknown_fields: of a body; refused, or ignored. report: where `x_infervisor` goes if the client doesn't say.
    keep_reports: finished requests that can still be looked at. header_after_s: a stream's status is told with its
    first chunk, or after this. heartbeat_s: a comment is sent when nothing else was for so long.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 30.0
    max_requests: int = 1024
    console: bool = True
    log_prompts: bool = False
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    report: Literal["body", "header", "off"] = "body"
    keep_reports: int = 256
    header_after_s: float = 5.0
    heartbeat_s: float = 15.0
