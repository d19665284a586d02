"""The permissions as they are derived and printed; tests/system/test_permissions.py tries them on a RabbitMQ."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from berth.cli import app
from berth.permissions import Grant, PermissionRole, commands, of_project, of_role
from berth.settings import BusSettings, CellSettings, Settings
from bus.contracts.catalogue import MESSAGES, QUEUES, projects_key

REAL = Settings(
    bus=BusSettings(url="amqp://u:p@mq.example:5673/be%2Frth", prefix="s1."),
    cells={
        "near": CellSettings(),
        "own": CellSettings(url="amqp://u:p@mq.example:5673/own"),
        "far": CellSettings(url="amqp://u:p@far.example/"),
    },
)
RUNNER = CliRunner()
HOST = "10000000-0000-4000-8000-000000000001"


def all_of(settings: Settings) -> list[Grant]:
    return [grant for role in PermissionRole for grant in of_role(role, settings)] + [of_project("p-0", settings)]


def allows(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def test_the_commands_print_what_the_json_holds() -> None:
    grants = all_of(REAL)
    lines = [shlex.split(line) for line in commands(grants) if not line.startswith("#")]
    printed = []
    for grant in grants:
        where = ["-p", grant.vhost, grant.user]
        printed.append(["rabbitmqctl", "set_permissions", *where, grant.configure, grant.write, grant.read])
        for exchange, topic in grant.topics.items():
            printed.append(["rabbitmqctl", "set_topic_permissions", *where, exchange, topic.write, topic.read])
    assert lines == printed


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
            "ironic",
        ):
            if allows(grant.write, exchange) or allows(grant.read, exchange):
                assert exchange in grant.topics, (grant.user, exchange)
        assert not allows(grant.read, "amq.default") and not allows(grant.write, "amq.topic")


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
        "compute_sim": PermissionRole.COMPUTE,
        "ironic_sync": PermissionRole.IRONIC_SYNC,
        "operator": PermissionRole.OPERATOR,
    }
    settings = Settings()
    for queue in [one for row in QUEUES for one in row.queues]:
        name = re.sub(r"\{[a-z]+\}", "some-1", queue.name)
        grants = of_role(role_of[queue.consumer], settings)
        assert any(allows(one.read, name) and allows(one.configure, name) and allows(one.write, name) for one in grants)
    for message in MESSAGES:
        key = re.sub(r"\{[a-z_]+\}", "some-1", projects_key(message.key, "some-1"))
        for publisher in message.publishers:
            grants = (
                [of_project("some-1", settings)] if publisher == "client" else of_role(role_of[publisher], settings)
            )
            assert any(
                allows(one.topics[message.exchange].write, key) for one in grants if message.exchange in one.topics
            )


@pytest.mark.parametrize("name", ["", "a.b", ".*", "a b", "p\n", "ü", "#", "p" * 65, "{username}"])
def test_item_7_a_project_id_that_is_no_word_has_no_permissions(name: str) -> None:
    with pytest.raises(ValueError, match="no project id"):
        of_project(name, Settings())


def test_a_projects_patterns_take_its_own_keys_only() -> None:
    grant = of_project("p-0", Settings())
    commands_, events = grant.topics["berth"], grant.topics["berth.events"]
    assert allows(commands_.write, "build.request.1.p-0") and allows(commands_.write, "build.delete.1.p-0")
    others = ("26.p-01", "1.p-01", "p.p-0", "p-0", "2.p-0", "01.p-0", "17.p")
    for key in ("build.query", "xbuild.request.1.p-0", *(f"build.request.{other}" for other in others)):
        assert not allows(commands_.write, key)
    assert allows(events.read, "build.event.*.p-0") and allows(events.read, "build.event.active.p-0")
    for key in ("build.event.#.p-0", "build.event.*.*", "#", "build.event.*.p", "build.events", "build.event.a.b.p-0"):
        assert not allows(events.read, key)
    assert (events.write, commands_.read) == ("^$", "^$")


def test_the_command_prints_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = RUNNER.invoke(app, ["permissions", "--project", "p0", "--user", "me", "--json"])
    (one,) = json.loads(shown.stdout)
    assert (one["user"], one["vhost"], one["role"]) == ("me", "berth", "project p0")
    shown = RUNNER.invoke(app, ["permissions"])
    assert shown.stdout.count("set_permissions") == 3 + 3 + 2 + 2 + 1 + 1 + 3


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
