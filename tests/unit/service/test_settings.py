"""Settings: a file, variables over it, and errors a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Struct

from bus.service.settings import HIDDEN, Secret, SettingsError, hide_password, load, redact


class BusSettings(Struct, frozen=True):
    url: str = "memory://"
    prefetch: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 256
    token: Secret = ""


class Cell(Struct, frozen=True):
    url: str
    weight: float = 1.0


class Everything(Struct, frozen=True):
    bus: BusSettings = BusSettings()
    cells: dict[str, Cell] = {}
    filters: tuple[str, ...] = ()
    durable: bool | None = None
    note: str = ""
    secret: Secret | None = None


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "berth.toml"
    path.write_text(text)
    return path


def test_without_anything_the_defaults_hold() -> None:
    assert load(Everything, toml=None, env={"PATH": "/bin", "BERTH_CONFIG": "x.toml"}) == Everything()


def test_variables_override_the_file_at_any_depth(tmp_path: Path) -> None:
    path = written(tmp_path, '[bus]\nurl = "amqp://a"\nprefetch = 8\n[cells.Cell1]\nurl = "amqp://c"\n')
    env = {
        "BERTH_BUS__URL": "amqp://b",
        "BERTH_CELLS__CELL1__WEIGHT": "2.5",
        "BERTH_CELLS__CELL2__URL": "amqp://d",
        "BERTH_FILTERS": '["a", "b"]',
        "BERTH_DURABLE": "true",
        "BERTH_NOTE": "7",
    }
    assert load(Everything, toml=path, env=env) == Everything(
        bus=BusSettings(url="amqp://b", prefetch=8),
        cells={"Cell1": Cell("amqp://c", 2.5), "cell2": Cell("amqp://d")},
        filters=("a", "b"),
        durable=True,
        note="7",
    )


@pytest.mark.parametrize(
    ("text", "env", "code", "message"),
    [
        ("[buss]\n", {}, "settings.unknown", "did you mean bus?"),
        ("[cells.a]\nurl = 'x'\nwieght = 1\n", {}, "settings.unknown", "did you mean weight?"),
        ("", {"BERTH_BUS__URI": "x"}, "settings.unknown", "did you mean url?"),
        ("", {"BERTH_NOTE__X": "1"}, "settings.unknown", "note has no parts"),
        ("[bus]\nprefetch = '8'\n", {}, "settings.invalid", "$.bus.prefetch"),
        ("", {"BERTH_BUS__PREFETCH": "many"}, "settings.invalid", "BERTH_BUS__PREFETCH"),
        ("", {"BERTH_BUS__PREFETCH": "0"}, "settings.invalid", ">= 1"),
        ("", {"BERTH_FILTERS": "[1"}, "settings.invalid", "not JSON"),
        ("cells = 3\n", {}, "settings.invalid", "$.cells"),
        ("cells = 3\n", {"BERTH_CELLS__A__URL": "x"}, "settings.invalid", "cells is not a table"),
        ("[[", {}, "settings.file", "not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, env: dict[str, str], code: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Everything, toml=written(tmp_path, text), env=env)
    assert caught.value.code == code
    assert message in caught.value.reason


@pytest.mark.parametrize(
    "text",
    [f"note = {'9' * 5_000}", f"filters = {'[' * 5_000}", "note = '\x00'", "filters = " + "[" * 500 + "]" * 500],
    ids=["digits", "depth", "NUL", "closed depth"],
)
def test_a_file_that_no_parser_takes_is_a_settings_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Everything, toml=written(tmp_path, text), env={})
    assert caught.value.code in {"settings.file", "settings.invalid"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BERTH_FILTERS", "[" * 100_000),
        ("BERTH_FILTERS", '["\udcff"]'),
        ("BERTH_NOTE", "\udcff"),
        ("BERTH_BUS__URL", "\udcff"),
        ("BERTH_BUS__PREFETCH", "9" * 5_000),
    ],
    ids=["depth", "bytes in JSON", "bytes", "bytes of a part", "digits"],
)
def test_a_variable_that_is_no_value_is_a_settings_error(variable: str, text: str) -> None:
    with pytest.raises(SettingsError, match=variable) as caught:
        load(Everything, toml=None, env={variable: text})
    assert caught.value.code == "settings.invalid"


def test_a_missing_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Everything, toml=tmp_path / "none.toml", env={})
    assert caught.value.code == "settings.file"


def test_secrets_and_passwords_in_urls_are_hidden() -> None:
    settings = Everything(
        bus=BusSettings(url="amqp://me:hush@host:1/v", token="hush"),
        cells={"a": Cell("amqp://u:hush@h/%2F?x=1")},
        secret="hush",
    )
    shown = redact(settings)
    assert "hush" not in str(shown)
    assert shown["bus"] == {"url": f"amqp://me:{HIDDEN}@host:1/v", "prefetch": 256, "token": HIDDEN}
    assert shown["cells"]["a"]["url"] == f"amqp://u:{HIDDEN}@h/%2F?x=1"


@pytest.mark.parametrize("text", ["plain", "http://host/a:b@c", "amqp://user@h/", ""])
def test_what_holds_no_password_stays(text: str) -> None:
    assert hide_password(text) == text
