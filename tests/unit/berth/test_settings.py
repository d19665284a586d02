"""Settings, permissions, and the accepted texts in words."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect, structs
from typer.testing import CliRunner

from berth.cli.common import Exit
from berth.cli.main import app
from berth.cli.site.as_toml import as_toml
from berth.config.settings import BusSettings, CellSettings, Settings, TraceSettings, read_settings
from berth.config.site import Site
from berth.config.tracing import make_tracer
from berth.database_rights import statements
from berth.permissions import Grant, PermissionRole, bus_locations, commands, definitions, exchanges, of_role
from berth.project_vhost import virtual_host
from bus.contracts.base import OTHER, matching, reason_of
from bus.contracts.catalogue import MESSAGES
from bus.contracts.objects import CellBus
from bus.contracts.queues import FRONTEND, QUEUES, Where
from bus.rights import sample_keys
from bus.service.settings import HIDDEN, SettingsError, describe, describe_fields, redact
from bus.topology import QueueNames
from gateway.config import GatewayConfig
from lab.reference.settings import _struct
from nova_scheduler.config import NotificationSettings, NovaConfig
from scheduler_worker.config import DEFAULT_FLAVORS, Flavor
from scheduler_worker.records.object_records import BODIES

# --- berth's own settings: where they come from, what is printed about a mistake, and that no secret is ever shown


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
        ("[cells.'a b']\n", {}, "1 to 47 letters, digits, _ and -"),
        (f"[cells.{'c' * 48}]\n", {}, "1 to 47 letters, digits, _ and -"),
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
    max_leaves=6,
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


# --- the accepted texts are given in words: no user reads a regular expression of msgspec's


ROOT = Path(__file__).parents[3]
OURS = (
    "berth",
    "bus",
    "cell_conductor",
    "compute_agent",
    "compute_sim",
    "gateway",
    "ironic_sync",
    "nova_scheduler",
    "placement_worker",
    "scheduler_worker",
)
# Bodies of Placement's REST API are refused in the real Placement's words, which have its patterns.
PLACEMENTS_WORDS = {"placement_worker/rest/bodies.py"}
DECODING = {"ValidationError", "DecodeError", "MsgspecError"}


def patterns(found: Any) -> Iterator[str]:
    """Every pattern in a tree of msgspec's descriptions of types."""
    seen: dict[int, None] = {}
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = None
        if isinstance(one, list | tuple):
            waiting.extend(one)
        elif isinstance(one, inspect.StrType) and one.pattern is not None:
            yield one.pattern
        elif isinstance(one, inspect.Type | inspect.Field):
            waiting.extend(getattr(one, name) for name in one.__struct_fields__)


def test_every_pattern_of_messages_objects_and_settings_is_given_in_words() -> None:
    kinds = [*(row.message for row in MESSAGES), *BODIES.values(), Settings]
    found = {one for kind in kinds for one in patterns(inspect.type_info(kind))}
    assert len(found) > 10
    for pattern in found:
        words = reason_of(ValueError(f"Expected `str` matching regex {pattern!r} - at `$.x`"))
        assert words.startswith("Expected ") and OTHER not in words and "regex" not in words, pattern
        assert words.endswith(" - at `$.x`")


def test_a_file_name_that_is_a_path_is_refused_in_words() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"url_file": "../../etc/passwd"}, CellBus)
    assert reason_of(raised.value).startswith("Expected the name of a file alone, without a directory")
    assert reason_of(raised.value).endswith(" - at `$.url_file`")


@pytest.mark.parametrize("pattern", ["^a'b$", '^a"b$', "^a'\"b$", r"^a\"'\\b$"])
def test_a_pattern_with_quotes_is_found(pattern: str) -> None:
    kind = Annotated[str, matching(pattern, "an a and a b")]
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"k": "x"}, dict[str, kind])  # type: ignore[valid-type]
    assert reason_of(raised.value) == "Expected an a and a b - at `$[...]`"


def test_an_unknown_pattern_is_not_shown_either() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert("x", Annotated[str, msgspec.Meta(pattern="^unknown$")])
    assert reason_of(raised.value) == f"Expected {OTHER}"


def raw_uses(handler: ast.ExceptHandler) -> Iterator[int]:
    """The lines that use the exception otherwise than in reason_of, type or as the cause of another."""
    allowed = {
        id(one)
        for node in ast.walk(handler)
        for one in (
            [node.cause]
            if isinstance(node, ast.Raise)
            else node.args
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("reason_of", "type")
            else []
        )
    }
    for node in ast.walk(handler):
        if isinstance(node, ast.Name) and node.id == handler.name and id(node) not in allowed:
            yield node.lineno


def test_no_handler_shows_what_msgspec_printed() -> None:
    wrong = []
    for path in sorted(path for package in OURS for path in (ROOT / package).rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        looked_at = name not in PLACEMENTS_WORDS and any(kind in text for kind in DECODING)
        for node in ast.walk(ast.parse(text)) if looked_at else ():
            if isinstance(node, ast.ExceptHandler) and node.type is not None and node.name is not None:
                caught = set(re.findall(r"\w+", ast.unparse(node.type)))
                wrong += [f"{name}:{line}" for line in raw_uses(node) if caught & DECODING]
    assert wrong == [], "use reason_of of bus/contracts/base.py"


# --- the permissions as they are derived and printed; tests/system/test_permissions.py tries them on a RabbitMQ


REAL = Settings(
    bus=BusSettings(url="amqp://u:p@mq.example:5673/be%2Frth", prefix="s1."),
    cells={
        "near": CellSettings(),
        "own": CellSettings(url="amqp://u:p@mq.example:5673/own"),
        "far": CellSettings(url="amqp://u:p@far.example/"),
    },
    nova=NovaConfig(
        transport_url="rabbit://u:p@nova.example:5672/nova",
        fallback_url="rabbit://u:p@nova.example:5672/stock",
        control_exchange="novas",
        notifications=NotificationSettings(notification_format="versioned"),
    ),
)
RUNNER = CliRunner()
HOST = "10000000-0000-4000-8000-000000000001"


def all_of(settings: Settings) -> list[Grant]:
    return [grant for role in PermissionRole for grant in of_role(role, settings)]


def allows(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def test_the_commands_that_are_piped_into_a_shell_all_run(tmp_path: Path) -> None:
    """rabbitmqctl reads its standard input: of 98 commands the first ran."""
    grants = all_of(REAL)
    rabbitmqctl = tmp_path / "rabbitmqctl"
    arguments = r"""printf '%s\n' rabbitmqctl "$@" END"""
    rabbitmqctl.write_text(f"#!/bin/sh\ncat > /dev/null\n{arguments}\n")
    rabbitmqctl.chmod(0o755)
    piped, path = "\n".join(commands(grants)), f"{tmp_path}:{os.environ['PATH']}"
    run = subprocess.run(["sh"], input=piped, text=True, check=True, capture_output=True, env={"PATH": path})
    lines = [block.split("\n") for block in run.stdout.removesuffix("\nEND\n").split("\nEND\n")]
    printed = []
    for grant in grants:
        where = ["-p", grant.vhost, grant.user]
        for exchange, topic in grant.topics.items():
            printed.append(["rabbitmqctl", "set_topic_permissions", *where, exchange, topic.write, topic.read])
        printed.append(["rabbitmqctl", "set_permissions", *where, grant.configure, grant.write, grant.read])
    assert lines == printed


def test_one_file_of_definitions_grants_what_the_commands_do() -> None:
    grants = all_of(Settings())
    made = definitions(grants)
    assert [tuple(one.values()) for one in made["permissions"]] == [
        (g.user, g.vhost, g.configure, g.write, g.read) for g in grants
    ]
    assert [tuple(one.values()) for one in made["topic_permissions"]] == [
        (g.user, g.vhost, exchange, topic.write, topic.read) for g in grants for exchange, topic in g.topics.items()
    ]


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        ('[{"user": "guest", "tags": []}, {"user": "berth-gateway"}]', None),
        ('[{"user": "guest"}]', "permissions.user_missing"),
        ("[]", "permissions.user_missing"),
        ("{}", "permissions.users"),
        ("", "permissions.users"),
        (None, "permissions.users"),
    ],
)
def test_a_user_that_the_broker_has_not_is_named_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, code: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if listed is not None:
        Path("users.json").write_text(listed)
    for more in (["--definitions"], []):
        shown = RUNNER.invoke(app, ["permissions", "--role", "gateway", "--users", "users.json", *more])
        assert (shown.exit_code == 0) == (code is None)
        assert bool(shown.stdout) == (code is None) and (code is None or code in shown.stderr)
    if code is None:
        shown = RUNNER.invoke(app, ["permissions", "--role", "gateway", "--users", "-"], input=listed)
        assert shown.exit_code == 0


def test_the_rights_in_the_database_are_printed_for_all_roles_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/system/test_least_rights.py runs them."""
    monkeypatch.chdir(tmp_path)
    shown = RUNNER.invoke(app, ["permissions", "--database"])
    assert shown.stdout.splitlines() == "\n".join(statements(Settings())).splitlines()
    assert "PASSWORD" not in shown.stdout
    refused = RUNNER.invoke(app, ["permissions", "--database", "--role", "placement"])
    assert (refused.exit_code, refused.stdout) == (2, "") and "permissions.database" in refused.stderr


def test_the_exchanges_of_the_definitions_are_those_that_workers_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ 4 took none of the printed permissions on a broker where no worker had been."""
    grants = all_of(REAL)
    made = exchanges(grants, REAL)["exchanges"]
    named = {(one["vhost"], one["exchange"]) for one in definitions(grants)["topic_permissions"]}
    named -= {("nova", "novas"), ("stock", "novas")}  # which Nova's services have declared
    assert {(one["vhost"], one["name"]) for one in made} == named and len(made) == len(named)
    ironic = REAL.ironic_sync.exchange
    assert {one["durable"] for one in made if one["name"] != ironic} == {True}
    assert {one["durable"] for one in made if one["name"] == ironic} == {False}
    returned = [one for one in made if one["name"].endswith("return")]
    assert returned and all(
        one["arguments"] == {"alternate-exchange": one["name"].replace("return", "dead")} for one in returned
    )
    monkeypatch.chdir(tmp_path)
    shown = RUNNER.invoke(app, ["permissions", "--role", "gateway", "--exchanges"])
    assert {one["name"] for one in json.loads(shown.stdout)["exchanges"]} >= {"berth", "berth.events", "berth.replies"}


@pytest.mark.parametrize("settings", [Settings(), REAL], ids=["memory", "real"])
def test_every_pattern_is_anchored_and_every_topic_exchange_has_some(settings: Settings) -> None:
    """An exchange without topic permissions of a user is open to it."""
    for grant in all_of(settings):
        patterns = [grant.configure, grant.write, grant.read]
        patterns += [pattern for topic in grant.topics.values() for pattern in (topic.write, topic.read)]
        for pattern in patterns:
            assert pattern.startswith("^") and pattern.endswith("$")
            re.compile(pattern)
            assert "|" not in pattern or pattern[1] == "("
        for exchange in (
            "s1.berth",
            "s1.berth.events",
            "s1.berth.dead",
            "berth",
            "berth.events",
            "berth.dead",
            *("s1.berth.return", "s1.berth.delay.200", "berth.return", "berth.delay.200", "berth.delay.20000"),
            *("s1.berth.replies", "s1.berth.replays", "berth.replies", "berth.replays"),
            "ironic",
        ):
            if allows(grant.write, exchange) or allows(grant.read, exchange):
                assert exchange in grant.topics, (grant.user, exchange)
        assert not allows(grant.read, "amq.default") and not allows(grant.write, "amq.topic")
        assert allows(grant.write, "amq.default") is (grant.vhost == "nova")


def test_virtual_hosts_and_prefixes_are_the_settings() -> None:
    scheduler = {(grant.broker, grant.vhost): grant for grant in of_role(PermissionRole.SCHEDULER, REAL)}
    assert list(scheduler) == [("mq.example:5673", "be/rth"), ("mq.example:5673", "own"), ("far.example", "/")]
    shared = scheduler["mq.example:5673", "be/rth"]  # the API bus, and the cell without a URL of its own
    assert allows(shared.read, "s1.scheduler.requests") and allows(shared.read, "s1.near.scheduler.builds")
    assert not allows(shared.read, "scheduler.requests") and not allows(shared.read, "s1.scheduler.builds")
    assert not allows(shared.read, "s1xscheduler.requests")
    assert set(shared.topics) >= {"s1.berth", "s1.berth.events", "s1.near.berth", "s1.near.berth.events"}


def test_a_cells_worker_is_only_in_its_cell() -> None:
    for role in (PermissionRole.CONDUCTOR, PermissionRole.COMPUTE):
        assert {(g.user, g.vhost) for g in of_role(role, REAL, cell="own")} == {(f"berth-{role}-own", "own")}
        (near,) = of_role(role, REAL, cell="near")
        assert not any(allows(near.write, name) or allows(near.read, name) for name in ("s1.berth", "s1.berth.events"))


def test_the_catalogues_rows_are_allowed_to_those_they_name() -> None:
    role_of = {
        "placement_worker": PermissionRole.PLACEMENT,
        "scheduler_worker": PermissionRole.SCHEDULER,
        "cell_conductor": PermissionRole.CONDUCTOR,
        "compute_agent": PermissionRole.COMPUTE,
        "ironic_sync": PermissionRole.IRONIC_SYNC,
        "gateway": PermissionRole.GATEWAY,
        "operator": PermissionRole.OPERATOR,
        "client": PermissionRole.PUBLISHER,
    }
    settings = Settings()
    for queue in [row for row in QUEUES if row.where is not Where.PROJECT]:
        name = re.sub(r"\{[a-z]+\}", "some-1", queue.name)
        grants = of_role(role_of[queue.consumer], settings)
        assert any(allows(one.read, name) and allows(one.configure, name) and allows(one.write, name) for one in grants)
    for message in [one for one in MESSAGES if one.where is not Where.PROJECT]:
        own = re.sub(r"\{[a-z_]+\}", "some-1", message.key)
        for publisher in message.publishers:
            key = "door.request.some-1" if (publisher, "client" in message.publishers) == ("gateway", True) else own
            grants = of_role(role_of[publisher], settings)
            assert any(
                allows(one.topics[message.exchange].write, key) for one in grants if message.exchange in one.topics
            )


@pytest.mark.parametrize(
    ("role", "package", "bus"),
    [
        (PermissionRole.PLACEMENT, "placement_worker", "api"),
        (PermissionRole.PLACEMENT, "placement_worker", "near"),
        (PermissionRole.SCHEDULER, "scheduler_worker", "api"),
        (PermissionRole.SCHEDULER, "scheduler_worker", "near"),
        (PermissionRole.CONDUCTOR, "cell_conductor", "near"),
        (PermissionRole.COMPUTE, "compute_agent", "near"),
        (PermissionRole.IRONIC_SYNC, "ironic_sync", "api"),
        (PermissionRole.GATEWAY, "gateway", "api"),
        (PermissionRole.NOVA_SCHEDULER, FRONTEND, "api"),
    ],
)
def test_what_a_worker_tries_at_its_start_is_all_that_its_user_may_publish(
    role: PermissionRole, package: str, bus: str
) -> None:
    place = bus_locations(REAL)[bus]
    (grant,) = [one for one in of_role(role, REAL) if (one.broker, one.vhost) == (place.broker, place.vhost)]
    names = QueueNames(place.prefix)
    tried = {
        (names.exchange(exchange), names.key(exchange, key))
        for exchange, key in sample_keys(package, Where.API if bus == "api" else Where.CELL)
    }
    for exchange, key in tried:
        assert allows(grant.write, exchange) and allows(grant.topics[exchange].write, key), (exchange, key)
    own = {name for name, topic in grant.topics.items() if topic.write != "^$" and name.startswith(place.prefix)}
    others = tuple(one.prefix for one in bus_locations(REAL).values() if len(one.prefix) > len(place.prefix))
    assert {name for name in own if not name.startswith(others)} == {exchange for exchange, _ in tried}


@pytest.mark.parametrize("name", ["", "a.b", ".*", "a b", "p\n", "ü", "#", "p" * 65, "{username}"])
def test_item_7_a_project_id_that_is_no_word_has_no_virtual_host(name: str) -> None:
    with pytest.raises(ValueError, match="no project id"):
        virtual_host(name, Settings())


def test_a_publishers_patterns_take_requests_and_no_operators_rights() -> None:
    (grant,) = of_role(PermissionRole.PUBLISHER, Settings())
    commands_, events = grant.topics["berth"], grant.topics["berth.events"]
    for key in ("build.request.p-0", "build.delete.p-0", "instance.action.p", "build.query", "instance.query"):
        assert allows(commands_.write, key), key
    for key in (
        "operator.request.p-0",
        "door.request.p-0",
        "objects.change",
        "xbuild.request.p-0",
        "build.request.p.q",
    ):
        assert not allows(commands_.write, key), key
    for key in ("build.event.#", "build.event.*.p-0", "instance.event.done.p"):
        assert allows(events.read, key), key
    for key in ("#", "build.#", "build.events", "host.metrics.#"):
        assert not allows(events.read, key), key
    assert (events.write, commands_.read) == ("^$", "^$")
    assert allows(grant.configure, "amq.gen-x") and not allows(grant.read, "scheduler.requests")
    assert not allows(grant.topics["berth.replies"].read, "berth.reply.cli-h-1.0a")


def test_the_command_prints_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = RUNNER.invoke(app, ["permissions", "--role", "publisher", "--user", "me", "-o", "json"])
    (one,) = json.loads(shown.stdout)["items"]
    assert (one["user"], one["vhost"], one["role"]) == ("me", "berth", "publisher")
    shown = RUNNER.invoke(app, ["permissions"])
    assert shown.stdout.count("set_permissions") == 3 + 3 + 2 + 2 + 1 + 1 + 1 + 3 + 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--project", "a.b"], "project.invalid"),
        (["--user", "x"], "permissions.user"),
        (["--role", "compute", "--user", "x"], "permissions.user"),
        (["--role", "compute", "--cell", "moon"], "cell.unknown"),
    ],
)
def test_a_mistake_is_a_sentence(
    arguments: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = RUNNER.invoke(app, ["permissions", *arguments])
    assert (shown.exit_code, code in shown.stderr, "Traceback" in shown.stderr) == (2, True, False)


def test_only_a_cells_conductor_may_release_a_host_to_another_compute_service() -> None:
    """A compute service that could would have any host of its cell by naming its owner."""
    for role in (PermissionRole.CONDUCTOR, PermissionRole.COMPUTE):
        written = [topic.write for grant in of_role(role, REAL) for topic in grant.topics.values()]
        for key, owner in (
            ("inventory.released", PermissionRole.CONDUCTOR),
            (f"inventory.update.{HOST}", PermissionRole.COMPUTE),
        ):
            assert any(allows(pattern, key) for pattern in written) is (role is owner), (role, key, written)


def test_a_front_of_nova_may_take_the_schedulers_calls_and_nothing_else_of_nova() -> None:
    of_bus, of_nova, of_stock = of_role(PermissionRole.NOVA_SCHEDULER, REAL)
    assert [one.vhost for one in (of_bus, of_nova, of_stock)] == ["be/rth", "nova", "stock"]
    for name, expected in {
        "novas": (True, True, True), "scheduler": (True, True, True), "scheduler.host1": (True, True, True),
        "scheduler_frontends": (True, True, True), "scheduler_fanout": (True, True, True),
        "scheduler_fanout_0af": (True, True, True), "amq.default": (False, True, False),
        "conductor": (False, False, False), "schedulerx": (False, False, False), "reply_1": (False, False, False),
    }.items():  # fmt: skip
        assert tuple(allows(one, name) for one in (of_nova.configure, of_nova.write, of_nova.read)) == expected, name
    keys = of_nova.topics["novas"]
    assert allows(keys.read, "scheduler.host1") and not allows(keys.read, "compute")
    assert allows(keys.write, "versioned_notifications.info") and not allows(keys.write, "scheduler")
    assert allows(of_stock.topics["novas"].write, "scheduler") and not allows(of_stock.topics["novas"].write, "compute")
    assert allows(of_stock.write, "scheduler_fanout") and not allows(of_stock.read, "scheduler")
    (whole,) = (one for one in of_role(PermissionRole.SCHEDULER, REAL) if one.vhost == "be/rth")
    for exchange, topic in of_bus.topics.items():
        written = set(topic.write.strip("^$()").split("|")) - {""}
        assert written <= set(whole.topics[exchange].write.strip("^$()").split("|")), "no more than a scheduler's"
    assert of_role(PermissionRole.NOVA_SCHEDULER, Settings()) == []
    alone = of_role(PermissionRole.NOVA_SCHEDULER, structs.replace(REAL, bus=BusSettings()))
    assert [one.vhost for one in alone] == ["nova", "stock"], "with placement in its process"


# --- a project whose clients nobody trusts: its virtual host


def test_a_project_of_the_gateways_has_a_virtual_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTH_GATEWAY__PROJECTS", '["p0", "p1"]')
    monkeypatch.setenv("BERTH_GATEWAY__URL", "amqp://berth-gateway:secret@clients:5671")
    made = RUNNER.invoke(app, ["permissions", "--project", "p0"]).stdout
    assert "clients:5671" in made and "secret" not in made and made.count("set_permissions") == 2
    for command in ("add_vhost client.p0", "set_vhost_limits -p client.p0", "set_user_limits berth-project-p0"):
        assert command in made
    shown = RUNNER.invoke(app, ["permissions", "--project", "p0", "--project", "p1", "--definitions"])
    defined = json.loads(shown.stdout)
    assert shown.stderr.count("set_user_limits") == 2, "they are no definitions"
    assert [one["name"] for one in defined["vhosts"]] == ["client.p0", "client.p1"]
    own = next(one for one in defined["permissions"] if one["user"] == "berth-project-p0")
    for pattern, names in (("configure", ()), ("write", ("berth",)), ("read", ("berth.events", "berth.replies"))):
        every = ("berth", "berth.events", "berth.replies", "gateway.requests", "gateway.queries", "mine")
        assert {name for name in every if allows(own[pattern], name)} == set(names)
    removed = RUNNER.invoke(app, ["permissions", "--project", "p9", "--remove"]).stdout  # the settings forgot it before
    assert "delete_vhost client.p9" in removed and "delete_queue -p berth gateway.events.p9" in removed


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--remove",), "permissions.vhosts"),
        (("--project", "p0", "--role", "gateway"), "permissions.vhosts"),
        (("--project", "p0", "--exchanges"), "permissions.vhosts"),
        (("--project", "p0", "--remove", "--definitions"), "permissions.vhosts"),
        (("--project", "p0", "--project", "p1", "--user", "me"), "permissions.user"),
        (("--project", "a b", "--remove"), "project.invalid"),
    ],
)
def test_a_virtual_host_is_printed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTH_GATEWAY__PROJECTS", '["p0", "p1"]')
    shown = RUNNER.invoke(app, ["permissions", *arguments])
    assert shown.exit_code == Exit.USAGE and f"({code})" in shown.output.replace("\n", " ")


def test_a_projects_bus_is_its_virtual_host_of_the_clients_broker() -> None:
    shared = Site(Settings(bus=BusSettings(url="amqp://u:p%40@a:1,b:2/berth?verify=verify_none")))
    assert shared.place_of("client.p0") == ("amqp://u:p%40@a:1,b:2/client.p0?verify=verify_none", "")
    apart = Settings(bus=BusSettings(url="amqp://u:p@a/berth"), gateway=GatewayConfig(url="amqps://g:p@clients"))
    assert Site(apart).place_of("client.p0") == ("amqps://g:p@clients/client.p0", "")
