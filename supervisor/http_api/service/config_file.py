"""From flags, variables and the file to `ServeSettings`, in this order of precedence; and back to a file.

Needs pydantic-settings, which comes with the extra `serve`: whoever imports this says so where it is missing. Looks
at no file but the one that holds the settings; what they name is checked in `serve_checks`.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.service.serve_models import split_model
from infervisor.supervisor.http_api.service.serve_settings import (
    CONFIG_VARIABLE,
    VARIABLE_PREFIX,
    ServeSettings,
    flags_of,
    key_of,
    settings_table,
    variable_of,
)
from infervisor.supervisor.http_api.service.setting_kinds import (
    Kind,
    Setting,
    from_text,
    plain,
    printable,
    to_toml,
)

MAX_FILE_BYTES = 1 << 20
_SETTINGS = {key_of(name): (name, setting, default) for name, setting, default in settings_table()}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, where each comes from (by its key in the file), and what is worth a warning."""

    settings: ServeSettings
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load(flags: Mapping[str, Any], config: str | None) -> Loaded:
    """Return the settings of flags (by field), variables, the file `config` and defaults.

    Raises `ConfigurationError` with a line for each thing that is wrong: where it stands, and what is right.
    """
    path = config or os.environ.get(CONFIG_VARIABLE) or None
    in_file = {} if path is None else _read(path)
    given = {key_of(name): value for name, value in flags.items()}
    model = _model(in_file)
    try:
        variables = _Variables(model)()
    except SettingsError as error:
        # It wraps what is said there.
        raise error.__cause__ or error from None
    origins = {key: _origin(key, given, variables, in_file, path) for key in _SETTINGS}
    try:
        values = model(**given).model_dump()
    except ValidationError as error:
        raise ConfigurationError("\n".join(_said(error, origins))) from None
    made: dict[str, Any] = {}
    for key, (name, setting, _) in _SETTINGS.items():
        is_of_file = path is not None and origins[key] == _place(path, key)
        base = os.path.dirname(os.path.abspath(os.path.expanduser(path or ""))) if is_of_file else os.getcwd()
        made[name] = _finished(setting, name, values[key], base)
    return Loaded(ServeSettings(**made), origins, tuple(_unknown_variables()))


# --- the three sources -----------------------------------------------------------------------------


def _read(path: str) -> dict[str, Any]:
    """Return what the file holds. Raises `ConfigurationError` for what no setting is called."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: the configuration can't be read: {why}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB: that is no configuration")
    try:
        given = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from None
    wrong = [f"{path}: {_unknown_key(key)}" for key in given if key not in _SETTINGS]
    wrong += [
        f"{path}: {key} doesn't belong into a file that others may read: name a file of keys with api_key_file, "
        f"or set {variable_of(key)}"
        for key in given
        if key in _SETTINGS and _SETTINGS[key][1].is_secret
    ]
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return given


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), _SETTINGS, n=1, cutoff=0.6)
    return f"there is no setting {key!r}" + (
        f"; did you mean {near[0]}?" if near else ": see `supervise config` for all of them"
    )


class _Variables(EnvSettingsSource):
    """The variables SUPERVISE_…, read by the kind of each setting."""

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        if value is None:
            return None
        name, setting, _ = _SETTINGS[field_name]
        try:
            read = from_text(setting, value)
        except (ValueError, RecursionError):
            shown = "what it is" if setting.is_secret else repr(value)[:80]
            raise ConfigurationError(
                f"{variable_of(name)} must be {_wanted_as_text(setting)}, not {shown}"
            ) from None
        # The source takes None for "not given"; the model reads the word again.
        return "none" if read is None else read


def _wanted_as_text(setting: Setting) -> str:
    """Return what is right for a variable, where a list is text."""
    return {
        Kind.WORDS: "texts parted by commas, or a list in JSON",
        Kind.PAIRS: "NAME=VALUE parted by commas, or an object of JSON",
        Kind.OPTIONS: "an object of JSON",
        Kind.SIZE: "a size such as 512M or 2G",
    }.get(setting.kind) or setting.wanted()


def _unknown_variables() -> Iterator[str]:
    known = {variable_of(name) for name, _, _ in _SETTINGS.values()} | {CONFIG_VARIABLE}
    for variable in sorted(os.environ):
        if variable.startswith(VARIABLE_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            yield f"the variable {variable} is no setting" + (f"; did you mean {near[0]}?" if near else "")


def _origin(
    key: str,
    flags: Mapping[str, Any],
    variables: Mapping[str, Any],
    in_file: Mapping[str, Any],
    path: str | None,
) -> str:
    name, setting, _ = _SETTINGS[key]
    if key in flags:
        names = flags_of(name, setting)
        return (names[-1] if names else "argument").partition("/")[0]
    if key in variables:
        return variable_of(name)
    return _place(path or "", key) if key in in_file else "default"


def _place(path: str, key: str) -> str:
    return f"{path}: {key}"


# --- the model -------------------------------------------------------------------------------------


def _model(in_file: Mapping[str, Any]) -> type[BaseSettings]:
    """Return a model of all settings whose last source is what the file holds."""

    class Sources(BaseSettings):
        model_config = SettingsConfigDict(
            strict=True,
            allow_inf_nan=False,
            extra="forbid",
            env_prefix=VARIABLE_PREFIX,
            env_ignore_empty=True,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                init_settings,
                _Variables(settings_cls),
                InitSettingsSource(settings_cls, init_kwargs=dict(in_file)),
            )

    made: dict[str, Any] = {}
    for key, (_, setting, default) in _SETTINGS.items():
        kind = _type_of(setting)
        if setting.takes_none or default is None:
            kind = kind | None
        reads = BeforeValidator(functools.partial(plain, setting))
        limits = Field(default=_as_model(default), ge=setting.low, le=setting.high)
        made[key] = (Annotated.__class_getitem__((kind, reads)), limits)  # type: ignore[attr-defined]
    return create_model("ServeModel", __base__=Sources, **made)


def _type_of(setting: Setting) -> Any:
    if setting.kind is Kind.CHOICE:
        return Literal[setting.choices]
    return {
        Kind.WHOLE: int,
        Kind.SECONDS: float,
        Kind.SIZE: int,
        Kind.SWITCH: bool,
        Kind.WORDS: list[str],
        Kind.PAIRS: dict[str, str],
        Kind.OPTIONS: dict[str, Any],
    }.get(setting.kind, str)


def _as_model(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _said(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    seen = set()
    for wrong in error.errors(include_url=False, include_context=False):
        key = str(wrong["loc"][0])
        if key in seen:
            continue
        seen.add(key)
        name, setting, _ = _SETTINGS[key]
        shown = "what it is" if setting.is_secret else repr(wrong["input"])[:80]
        is_variable = origins[key] == variable_of(name)
        wanted = _wanted_as_text(setting) if is_variable else setting.wanted()
        yield f"{origins[key]} must be {wanted}, not {shown}"


def _finished(setting: Setting, name: str, value: Any, base: str) -> Any:
    """Return a checked value as the settings hold it: paths absolute, lists and tables unchangeable."""
    if name == "models":
        return tuple(_absolute_model(word, base) for word in value)
    if setting.kind is Kind.PATH and value is not None and (name != "python" or os.sep in value):
        return _absolute(value, base)
    if isinstance(value, dict):
        return MappingProxyType(value)
    return tuple(value) if isinstance(value, list) else value


def _absolute(path: str, base: str) -> str:
    return os.path.normpath(os.path.join(base, os.path.expanduser(path)))


def _absolute_model(word: str, base: str) -> str:
    name, path = split_model(word, base)
    return _absolute(path, base) if name is None else f"{name}={_absolute(path, base)}"


# --- back to a file --------------------------------------------------------------------------------


def to_file(loaded: Loaded) -> str:
    """Return the settings as a file that is read to the same, each with where it comes from. Keys are masked."""
    lines: list[str] = []
    group = None
    for key, (name, setting, _) in _SETTINGS.items():
        value, origin = getattr(loaded.settings, name), loaded.origins[key]
        if setting.group != group:
            group = setting.group
            lines += ["", f"# {group}"]
        note = f"  # {printable(origin)}"
        if setting.is_secret:
            lines.append(f"# {key}: {len(value)} given, not shown{note}")
        elif value is None and not setting.takes_none:
            lines.append(f"# {key} = (not set){note}")
        else:
            lines.append(f"{key} = {to_toml(value)}{note}")
    return "\n".join(lines[1:]) + "\n"
