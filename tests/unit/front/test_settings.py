"""berth's own settings: where they come from, what is printed about a mistake, and that no secret is ever shown."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.commands.as_toml import as_toml
from berth.settings import Settings, TraceSettings, read_settings
from berth.tracing import make_tracer
from bus.service.settings import HIDDEN, SettingsError, describe, describe_fields, redact
from lab.reference.settings import _struct
from scheduler_worker.config import DEFAULT_FLAVORS, Flavor


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "berth.toml"
    path.write_text(text)
    return path


def test_a_variable_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, '[bus]\nurl = "amqp://file/"\nprefix = "f."\n[cells.west]\n')
    found = read_settings(path, {"BERTH_BUS__URL": "amqp://variable/"})
    assert (found.bus.url, found.bus.prefix, tuple(found.cells)) == ("amqp://variable/", "f.", ("west",))
    assert found.database == Settings().database


def test_the_file_is_the_one_named_or_the_one_lying_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(None, {}) == Settings()
    written(tmp_path, "[up]\nnodes = 3\n")
    assert read_settings(None, {}).up.nodes == 3
    other = tmp_path / "other.toml"
    other.write_text("[up]\nnodes = 4\n")
    assert read_settings(None, {"BERTH_CONFIG": str(other)}).up.nodes == 4
    assert read_settings(tmp_path / "berth.toml", {"BERTH_CONFIG": str(other)}).up.nodes == 3


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("[buss]\n", {}, "did you mean bus"),
        ("[scheduler]\nhost_subset_sise = 3\n", {}, "did you mean host_subset_size"),
        ("", {"BERTH_IRONIC_SYNC__TOKN": "x"}, "did you mean token"),
        ("[up]\nnodes = -1\n", {}, "up.nodes"),
        ("bus = 3\n", {}, "$.bus"),
        ("[cells.'a b']\n", {}, "1 to 64 letters, digits, _ and -"),
        ("not toml", {}, "is not TOML"),
        ("", {"BERTH_CELLS": "{}"}, "at least one cell"),
        ("[cells.api]\n", {}, "'api' is the bus of clients"),
        ('state_dir = "a\\u0000b"\n', {}, "character NUL"),
        ('[scheduler]\ndefault_flavors = ["m1.smal"]\n', {}, "there is no 'm1.smal'; berth has m1.tiny"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, env: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        read_settings(written(tmp_path, text), env)
    assert message in str(wrong.value) and wrong.value.code.startswith("settings.")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        read_settings(tmp_path / "nowhere.toml", {})


SECRET_WORDS = ("token", "password", "secret", "key")


def secrets(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where a setting's name shows that it is a secret."""
    if not isinstance(tree, dict):
        return [path] if path and any(path[-1].endswith(word) for word in SECRET_WORDS) else []
    return [found for name, below in tree.items() for found in secrets(below, (*path, name))]


def test_whatever_is_named_like_a_secret_is_hidden() -> None:
    """A new setting with such a name that is not marked Secret fails here."""
    named = secrets(msgspec.to_builtins(Settings()))
    assert ("ironic_sync", "token") in named and ("compute", "ironic", "token") in named
    for path in named:
        env = {"BERTH_" + "__".join(path).upper(): "hunter2"}
        try:
            shown = redact(read_settings(None, env))
        except SettingsError:
            continue  # not a text: nothing to hide
        assert "hunter2" not in repr(shown), path


def test_passwords_inside_urls_are_hidden_and_the_rest_is_shown() -> None:
    env = {"BERTH_BUS__URL": "amqp://me:hunter2@mq:5672/berth", "BERTH_CELLS__WEST__URL": "amqp://w:hunter2@mq/west"}
    shown = redact(read_settings(None, env))
    assert shown["bus"]["url"] == f"amqp://me:{HIDDEN}@mq:5672/berth"
    assert "hunter2" not in repr(shown)


def test_what_config_prints_is_a_settings_file(tmp_path: Path) -> None:
    settings = read_settings(None, {"BERTH_UP__NODES": "7", "BERTH_CELLS__WEST__URL": "amqp://mq/west"})
    assert read_settings(written(tmp_path, as_toml(msgspec.to_builtins(settings))), {}) == settings


plain = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_any_tree_survives_being_written_as_toml(tree: dict[str, Any]) -> None:
    assert tomllib.loads(as_toml(tree)) == tree


def test_a_flavor_of_ones_own_stands_beside_the_default_ones(tmp_path: Path) -> None:
    own = '[scheduler.flavors."c9.big"]\nvcpus = 9\n[scheduler.flavors."m1.tiny"]\nvcpus = 3\n'
    flavors = read_settings(written(tmp_path, own), {}).scheduler.flavors
    assert flavors.keys() == {*DEFAULT_FLAVORS, "c9.big"}
    assert flavors["m1.tiny"] == Flavor(vcpus=3), "one of a default's name is instead of it"
    few = read_settings(written(tmp_path, f'[scheduler]\ndefault_flavors = ["m1.small"]\n{own}'), {})
    assert few.scheduler.flavors.keys() == {"m1.small", "c9.big", "m1.tiny"}
    none = read_settings(written(tmp_path, f"[scheduler]\ndefault_flavors = []\n{own}"), {})
    assert none.scheduler.flavors.keys() == {"c9.big", "m1.tiny"}
    again = read_settings(written(tmp_path, as_toml(msgspec.to_builtins(few))), {})
    assert again.scheduler.flavors == few.scheduler.flavors, "what `berth config` prints means the same"


def settings_structs(kind: type[msgspec.Struct] = Settings) -> set[type[msgspec.Struct]]:
    """A struct and those that its settings are made of."""
    hints = get_type_hints(kind, include_extras=True)
    inner = {found for hint in hints.values() if (found := _struct(hint)) is not None}
    return {kind}.union(*(settings_structs(one) for one in inner))


STRUCTS = sorted(settings_structs(), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_setting_is_described(kind: type[msgspec.Struct]) -> None:
    texts = describe_fields(kind)
    assert [name for name in kind.__struct_fields__ if name not in texts] == []
    assert [name for name, text in texts.items() if not text.endswith(".") or len(text) < 12] == []
    # An interval or a limit without its unit is no description of it.
    seconds = {name: text for name, text in texts.items() if name.endswith("_s")}
    assert [name for name, text in seconds.items() if "second" not in text.lower()] == []


def test_a_setting_is_explained_above_it() -> None:
    plain = redact(Settings())
    text = as_toml(plain, describe(Settings, plain))
    lines = text.splitlines()
    assert lines[lines.index("pool_size = 8") - 1].startswith("# ")
    assert lines[lines.index("[telemetry]") - 1] == "# Logs and health of every worker."
    assert "# http_port is not set" in lines
    assert "# CPUs: `VCPU`, unless `extra_specs` override it." in lines, "of a table by name, too"
    assert tomllib.loads(text) == tomllib.loads(as_toml(plain))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", "http://[::1"])
def test_an_address_of_traces_that_is_none_is_named_at_the_start(endpoint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        make_tracer(TraceSettings(endpoint=endpoint), "scheduler-1")
    assert refused.value.code == "traces.endpoint"
