"""Settings of the service: one table, and flags, variables, file and documents that are made from it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from infervisor import ConfigurationError, Deadlines
from infervisor.supervisor.cli import serve_flags
from infervisor.supervisor.cli.app import app
from infervisor.supervisor.http_api.service import serve_models
from infervisor.supervisor.http_api.service.config_file import Loaded, load, to_file
from infervisor.supervisor.http_api.service.serve_settings import (
    ServeSettings,
    flags_of,
    key_of,
    settings_table,
    variable_of,
)
from infervisor.supervisor.http_api.service.setting_kinds import Kind, Setting, to_toml
from tests.docs.markdown import ROOT, code_names, table

PAGE = ROOT / "examples/service/README.md"
TABLE = list(settings_table())
# For each kind a value other than every default: in words, as the file has it, and as the settings have it.
SAMPLES: Mapping[Kind, tuple[str, Any, Any]] = {
    Kind.TEXT: ("some", "some", "some"),
    Kind.PATH: ("/a/path", "/a/path", "/a/path"),
    Kind.WHOLE: ("7", 7, 7),
    Kind.SECONDS: ("7.5", 7.5, 7.5),
    Kind.SIZE: ("3G", "3G", 3 << 30),
    Kind.WORDS: ("/a,/b", ["/a", "/b"], ("/a", "/b")),
    Kind.PAIRS: ("a=b,c=d", {"a": "b", "c": "d"}, {"a": "b", "c": "d"}),
    Kind.OPTIONS: ('{"n": 1}', {"n": 1}, {"n": 1}),
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the surroundings set."""
    for variable in list(os.environ):
        if variable.startswith("SUPERVISE_"):
            monkeypatch.delenv(variable)


def sample(setting: Setting, default: Any) -> tuple[str, Any, Any]:
    if setting.kind is Kind.SWITCH:
        return ("off", False, False) if default else ("on", True, True)
    if setting.kind is Kind.CHOICE:
        other = next(choice for choice in setting.choices if choice != default)
        return other, other, other
    return SAMPLES[setting.kind]


EACH = [pytest.param(name, setting, default, id=name) for name, setting, default in TABLE]


def file(folder: Path, text: str) -> str:
    path = folder / "service.toml"
    path.write_text(text)
    return str(path)


# --- one table ---------------------------------------------------------------------------------------


def test_the_table_has_every_field_once() -> None:
    assert [name for name, _, _ in TABLE] == [field.name for field in fields(ServeSettings)]
    keys = [key_of(name) for name, _, _ in TABLE]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("name", "setting", "default"), EACH)
def test_every_setting_has_its_default_without_any_source(name: str, setting: Setting, default: Any) -> None:
    loaded = load({}, None)
    assert getattr(loaded.settings, name) == default
    assert loaded.origins[key_of(name)] == "default"
    assert getattr(ServeSettings(), name) == default


@pytest.mark.parametrize(("name", "setting", "default"), EACH)
def test_every_setting_is_a_variable(
    name: str, setting: Setting, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, _, value = sample(setting, default)
    monkeypatch.setenv(variable_of(name), words)
    loaded = load({}, None)
    assert getattr(loaded.settings, name) == value != default
    assert loaded.origins[key_of(name)] == variable_of(name)
    assert loaded.warnings == ()


@pytest.mark.parametrize(("name", "setting", "default"), EACH)
def test_every_setting_but_the_keys_is_in_the_file(
    name: str, setting: Setting, default: Any, tmp_path: Path
) -> None:
    _, in_file, value = sample(setting, default)
    path = file(tmp_path, f"{key_of(name)} = {to_toml(in_file)}")
    if setting.is_secret:
        with pytest.raises(
            ConfigurationError, match="name a file of keys with api_key_file, or set SUPERVISE"
        ):
            load({}, path)
        return
    loaded = load({}, path)
    assert getattr(loaded.settings, name) == value != default
    assert loaded.origins[key_of(name)] == f"{path}: {key_of(name)}"


@pytest.mark.parametrize(("name", "setting", "default"), EACH)
def test_every_setting_but_the_keys_is_a_flag(name: str, setting: Setting, default: Any) -> None:
    words, _, value = sample(setting, default)
    given: list[Mapping[str, Any]] = []
    flags = [spelling for flag in flags_of(name, setting) for spelling in flag.split("/")]
    command = typer.Typer(add_completion=False)
    command.command()(serve_flags.with_settings(_taker(given)))
    if setting.is_secret:
        arguments = [f"--{key_of(name).replace('_', '-')}", words]
        assert CliRunner().invoke(command, arguments).exit_code == 2
        return
    if name == "models":
        arguments = words.split(",")
    elif setting.kind is Kind.SWITCH:
        arguments = [flags[0] if value else flags[1]]
    elif setting.kind in (Kind.PAIRS, Kind.WORDS):
        arguments = [word for part in words.split(",") for word in (flags[-1], part)]
    else:
        arguments = [flags[-1], "n=1" if setting.kind is Kind.OPTIONS else words]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    loaded = load(given[0], None)
    assert getattr(loaded.settings, name) == value != default
    assert loaded.origins[key_of(name)] == (
        "argument" if name == "models" else flags_of(name, setting)[-1].split("/")[0]
    )


def _taker(taken: list[Mapping[str, Any]]) -> Any:
    def take(given: Mapping[str, Any]) -> None:
        taken.append(given)

    return take


@pytest.mark.parametrize("command", ["serve", "config"])
def test_the_commands_have_a_flag_for_every_setting_and_few_others(command: str) -> None:
    made = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    spelt = {flag for parameter in made.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    wanted = {
        flag for name, setting, _ in TABLE for flags in flags_of(name, setting) for flag in flags.split("/")
    }
    own = {"serve": {"--config", "--verbose", "-v"}, "config": {"--config", "--check"}}[command]
    assert spelt == wanted | own | {"models"}


def test_the_page_has_every_setting_with_its_names_and_its_default() -> None:
    described = {code_names(row[0])[0]: row for row in table(PAGE, "setting")}
    assert list(described) == [key_of(name) for name, _, _ in TABLE]
    for name, setting, default in TABLE:
        _, flags, variable, shown, meaning = described[key_of(name)]
        spelt = [flag for each in flags_of(name, setting) for flag in each.split("/")]
        assert code_names(flags) == (["MODEL"] if name == "models" else spelt)
        assert code_names(variable) == [variable_of(name)]
        assert shown == serve_flags.shown_default(setting, default)
        assert meaning == setting.help


# --- precedence --------------------------------------------------------------------------------------


def test_flags_go_before_variables_and_those_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path, "port = 1\nmax_queue = 1\nwindow = 1\n[options]\na = 1\nb = 1\nc = 1\n")
    monkeypatch.setenv("SUPERVISE_PORT", "2")
    monkeypatch.setenv("SUPERVISE_MAX_QUEUE", "2")
    monkeypatch.setenv("SUPERVISE_OPTIONS", '{"b": 2, "c": 2}')
    settings = load({"port": 3, "options": {"c": 3}}, path).settings
    assert (settings.port, settings.max_queue, settings.window, settings.workers) == (3, 2, 1, 1)
    assert settings.options == {"a": 1, "b": 2, "c": 3}


def test_a_variable_names_the_file_unless_a_flag_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text("port = 2")
    monkeypatch.setenv("SUPERVISE_CONFIG", file(tmp_path, "port = 1"))
    assert load({}, None).settings.port == 1
    assert load({}, str(other)).settings.port == 2


def test_none_goes_before_a_limit_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, 'queue_timeout = 5\nstall_timeout = 5\nstartup_timeout = "none"\ntotal_timeout = 0')
    monkeypatch.setenv("SUPERVISE_QUEUE_TIMEOUT", "none")
    monkeypatch.setenv("SUPERVISE_CONSUMER_TIMEOUT", "0")
    settings = load({"stall_timeout_s": "none"}, path).settings
    none = Deadlines(startup_s=None, consumer_s=None)
    assert serve_models.deadlines(settings) == none


def test_an_empty_variable_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISE_PORT", "")
    assert load({}, None).settings.port == 8080


def test_paths_are_those_of_the_folder_in_which_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc, here = tmp_path / "etc", tmp_path / "here"
    etc.mkdir()
    here.mkdir()
    path = file(etc, 'models = ["m.gguf", "b=../b.gguf"]\ntls_cert = "c.pem"\npython = "python3"')
    monkeypatch.chdir(here)
    settings = load({"tls_key": "k.pem"}, path).settings
    assert settings.models == (f"{etc}/m.gguf", f"b={tmp_path}/b.gguf")
    assert (settings.tls_cert, settings.tls_key) == (f"{etc}/c.pem", f"{here}/k.pem")
    assert settings.python == "python3"


# --- what is wrong -----------------------------------------------------------------------------------


def refusal(text: str, folder: Path) -> str:
    path = file(folder, text)
    with pytest.raises(ConfigurationError) as caught:
        load({}, path)
    return str(caught.value).replace(path, "FILE")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "FILE: there is no setting 'prot'; did you mean port?"),
        ("max-queue = 1", "FILE: there is no setting 'max-queue'; did you mean max_queue?"),
        ("zzz = 1", "FILE: there is no setting 'zzz': see `supervise config` for all of them"),
        ('port = "http"', "FILE: port must be a whole number from 0 to 65535, not 'http'"),
        ("port = 65536", "FILE: port must be a whole number from 0 to 65535, not 65536"),
        ("port = true", "FILE: port must be a whole number from 0 to 65535, not True"),
        ("port = 80.0", "FILE: port must be a whole number from 0 to 65535, not 80.0"),
        ("console = 1", "FILE: console must be true or false, not 1"),
        ('console = "yes"', "FILE: console must be true or false, not 'yes'"),
        ("queue_timeout = -1", "FILE: queue_timeout must be a number 0 or more, or none, not -1"),
        ("queue_timeout = true", "FILE: queue_timeout must be a number 0 or more, or none, not True"),
        ("queue_timeout = nan", "FILE: queue_timeout must be a number 0 or more, or none, not nan"),
        ("drain_grace = inf", "FILE: drain_grace must be a number from 0 to 86400, not inf"),
        (
            'max_body = "16X"',
            "FILE: max_body must be a number of bytes, or text such as 512M or 2G, not '16X'",
        ),
        ('on_crash = "go"', "FILE: on_crash must be resume or fail, not 'go'"),
        ('allowed_hosts = "a"', "FILE: allowed_hosts must be a list of texts, not 'a'"),
        ("allowed_hosts = [1]", "FILE: allowed_hosts must be a list of texts, not 1"),
        ("aliases = {a = 1}", "FILE: aliases must be a table of texts, not 1"),
        ("options = 1", "FILE: options must be a table, not 1"),
        ("host = 1", "FILE: host must be text, not 1"),
        ("tls_cert = false", "FILE: tls_cert must be a path, not False"),
        ("port = ", "FILE: not TOML: Invalid value (at end of document)"),
        ("port = 1\nport = 2\n", "FILE: not TOML: Cannot overwrite a value (at line 2, column 9)"),
    ],
)
def test_what_the_file_has_wrong_is_told_with_its_place_and_what_is_right(
    text: str, said: str, tmp_path: Path
) -> None:
    assert refusal(text, tmp_path) == said


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    assert refusal('port = "x"\nwindow = 0\n', tmp_path).count("\n") == 1
    assert refusal("prot = 1\nwindwo = 0\n", tmp_path).count("did you mean") == 2


def test_a_file_that_is_not_there_or_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be read: No such file or directory"):
        load({}, str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigurationError, match="can't be read: Is a directory"):
        load({}, str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="binary: not TOML"):
        load({}, str(tmp_path / "binary"))
    with pytest.raises(ConfigurationError, match="larger than 1 MiB"):
        load({}, "/dev/zero")


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("SUPERVISE_PORT", "http", "SUPERVISE_PORT must be a whole number from 0 to 65535, not 'http'"),
        ("SUPERVISE_PORT", "70000", "SUPERVISE_PORT must be a whole number from 0 to 65535, not 70000"),
        ("SUPERVISE_CONSOLE", "maybe", "SUPERVISE_CONSOLE must be true or false, not 'maybe'"),
        (
            "SUPERVISE_ALIASES",
            "a",
            "SUPERVISE_ALIASES must be NAME=VALUE parted by commas, or an object of JSON",
        ),
        ("SUPERVISE_OPTIONS", "a=1", "SUPERVISE_OPTIONS must be an object of JSON, not 'a=1'"),
        ("SUPERVISE_MAX_BODY", "big", "SUPERVISE_MAX_BODY must be a size such as 512M or 2G, not 'big'"),
        ("SUPERVISE_ALLOWED_HOSTS", '{"a"', "allowed_hosts"),
        ("SUPERVISE_API_KEYS", '["sesame"', "SUPERVISE_API_KEYS must be texts parted by commas"),
    ],
)
def test_what_a_variable_has_wrong_is_told_by_its_name(
    variable: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    if said == "allowed_hosts":
        # Not a list of JSON, so a list of words: its form is looked at later.
        assert load({}, None).settings.allowed_hosts == ('{"a"',)
        return
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        load({}, None)
    assert "sesame" not in str(caught.value)


def test_a_variable_that_is_no_setting_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISE_PROT", "1")
    monkeypatch.setenv("SUPERVISE_XYZZY", "1")
    assert load({}, None).warnings == (
        "the variable SUPERVISE_PROT is no setting; did you mean SUPERVISE_PORT?",
        "the variable SUPERVISE_XYZZY is no setting",
    )


# --- back to a file ----------------------------------------------------------------------------------


def again(loaded: Loaded, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.delenv("SUPERVISE_API_KEYS", raising=False)
    return load({}, file(folder, to_file(loaded)))


def test_what_is_printed_is_read_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert again(load({}, None), tmp_path, monkeypatch).settings == ServeSettings()
    everything = {
        name: sample(setting, default)[1] for name, setting, default in TABLE if not setting.is_secret
    }
    loaded = load(everything, None)
    assert again(loaded, tmp_path, monkeypatch).settings == loaded.settings


def test_odd_texts_survive_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = 'a "b" \\ \n \x00\x7f\x9b \u2028 \u202e ä 🦙 \t'
    loaded = load({"options": {odd: [odd, {"x": odd, "n": None}, 1.5, True]}, "engine": odd}, None)
    read = again(loaded, tmp_path, monkeypatch).settings
    assert read.engine == odd
    assert read.options == {odd: [odd, {"x": odd}, 1.5, True]}
    assert all(line.isprintable() for line in to_file(loaded).split("\n"))


def test_keys_are_never_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISE_API_KEYS", "sesame-1,sesame-2")
    loaded = load({}, None)
    assert loaded.settings.api_keys == ("sesame-1", "sesame-2")
    assert "sesame" not in repr(loaded) + to_file(loaded)
    assert "# api_keys: 2 given, not shown" in to_file(loaded)


# --- the command -------------------------------------------------------------------------------------


def config(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["config", *arguments])
    if isinstance(done.exception, ConfigurationError):
        # What `main` makes of it, outside of the runner.
        return 2, str(done.exception)
    return done.exit_code, done.output


def test_config_prints_settings_that_it_takes(tmp_path: Path) -> None:
    code, printed = config("--engine", "scripted", "-o", "text=hi there", "--alias", "gpt=scripted")
    assert code == 0
    assert tomllib.loads(printed)["options"] == {"text": "hi there"}
    path = file(tmp_path, printed)
    assert config("--check", "--config", path) == (0, "the settings are right\n")
    assert [line.partition("  # ")[0] for line in config("--config", path)[1].splitlines()] == [
        line.partition("  # ")[0] for line in printed.splitlines()
    ]


def test_config_check_says_everything_that_is_wrong(tmp_path: Path) -> None:
    code, said = config(
        "--check", "--host", "0.0.0.0", "--tls-key", "k.pem", "missing.gguf", "--alias", "a=b"
    )
    assert code == 2
    assert said.splitlines() == [
        f"models: missing: there is no file {os.getcwd()}/missing.gguf",
        "aliases: 'a' stands for 'b', but the models are missing",
        "tls_key is given, but tls_cert isn't: TLS needs a certificate",
        "host: 0.0.0.0 can be reached by other machines, and no key is set: name a file of keys with api_key_file, "
        "or say that nobody needs one with allow_without_key",
    ]
