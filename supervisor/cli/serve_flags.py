"""The flags of `supervise serve` and `supervise config`, made from the table of settings. Light, for the help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal

import typer

from infervisor.supervisor.cli import arguments
from infervisor.supervisor.http_api.service.serve_settings import CONFIG_VARIABLE, flags_of, settings_table
from infervisor.supervisor.http_api.service.setting_kinds import Kind, Setting, from_text, pair

LISTS = (Kind.WORDS, Kind.PAIRS, Kind.OPTIONS)
Config = Annotated[
    str | None,
    typer.Option(metavar="FILE", help=f"Settings in TOML; otherwise the file that {CONFIG_VARIABLE} names."),
]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a flag for every setting; it gets those that were given as `given`, by field.

    Its own parameters come last. typer reads the signature that is put together here.
    """
    own = {
        name: parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "given"
    }
    made = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, setting, default)
        )
        for name, setting, default in settings_table()
        if not setting.is_secret
    ]
    table = {name: setting for name, setting, _ in settings_table()}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {
            name: _read(name, table[name], value)
            for name, value in values.items()
            if name in table and value not in (None, [])
        }
        command(given=given, **{name: value for name, value in values.items() if name in own})

    parameters = [*made, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    del run.__wrapped__
    return run


def _annotation(name: str, setting: Setting, default: Any) -> Any:
    kind: Any = str
    if setting.kind is Kind.CHOICE:
        kind = Literal[setting.choices]
    elif setting.kind is Kind.SWITCH:
        kind = bool
    elif setting.kind in LISTS:
        kind = list[str]
    wanted: UnionType = kind | None
    if name == "models":
        return Annotated[
            wanted, typer.Argument(metavar=setting.metavar, show_default=False, help=setting.help)
        ]
    help_text = (
        setting.help if default in (None, (), {}) else f"{setting.help} [{shown_default(setting, default)}]"
    )
    return Annotated[
        wanted,
        typer.Option(*flags_of(name, setting), metavar=setting.metavar, show_default=False, help=help_text),
    ]


def shown_default(setting: Setting, default: Any) -> str:
    """Return a default for people."""
    if default in (None, (), {}):
        return "none"
    if setting.kind is Kind.SIZE:
        return f"{default >> 20}M"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _read(name: str, setting: Setting, value: Any) -> Any:
    """Return what a flag's words mean. Raises `typer.BadParameter` if they mean nothing."""
    flag = next(iter(flags_of(name, setting)), setting.metavar or name)
    if setting.kind is Kind.OPTIONS:
        return arguments.engine_options(value)
    if setting.kind is Kind.PAIRS:
        return dict(_pair(flag, word) for word in value)
    if setting.kind is Kind.WORDS:
        return [arguments.text_of(word, flag) for word in value]
    if not isinstance(value, str) or setting.kind is Kind.CHOICE:
        return value
    text = arguments.text_of(value, flag)
    try:
        read = from_text(setting, text)
    except ValueError:
        raise typer.BadParameter(f"{flag} must be {setting.wanted()}, not {text!r:.80}") from None
    return "none" if read is None else read


def _pair(flag: str, word: str) -> tuple[str, str]:
    try:
        return pair(arguments.text_of(word, flag))
    except ValueError:
        raise typer.BadParameter(f"{flag}: {word!r:.80} isn't of the form NAME=VALUE") from None
