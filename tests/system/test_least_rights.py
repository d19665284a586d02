"""A system each of whose workers has its own role in PostgreSQL and its own user of RabbitMQ, and a restore of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import asyncpg
import httpx
import msgspec
import pytest
from sqlalchemy.engine import make_url

from berth.config.settings import DatabaseSettings, Settings
from berth.database_rights import BACKUP, RESTORE, rights, statements
from berth.permissions import PermissionRole, definitions, of_role
from berth.up.servers import RealServers
from tests.kit.lent import lent_servers
from tests.kit.servers import fresh_database
from tests.kit.waiting import wait_until
from tests.system.small import PLAN
from tests.system.test_permissions import MINE, PASSWORD, Guarded

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

OF_THE_DATABASE = ("placement", "scheduler", "conductor-cell1")
ALLOWED = (
    ("berth-operator", "db", "list"),
    ("berth-operator", "db", "check"),
    ("berth-operator", "check"),
    ("berth-operator", "audit"),
    ("berth-operator", "placement", "audit", "--repair", "--yes"),
    ("berth-operator", "quarantine", "list"),
    ("berth-operator", "event", "list"),
    ("berth-operator", "breaker", "list"),
    ("berth-operator", "recovery", "list"),
    (RESTORE, "db", "upgrade"),
)
REFUSED = (
    ("berth-placement", "db", "list"),
    ("berth-placement", "quarantine", "list"),
)
NOBODY = "restorer"  # who may make schemas, and is a member of no role


class Roles(Guarded):
    """database: the URL of the superuser."""

    def __init__(self, servers: RealServers, directory: Path) -> None:
        super().__init__(servers, directory)
        self.database = servers.database_url

    def settings_of(self, user: str) -> Settings:
        url = make_url(self.database).set(username=user, password=PASSWORD).render_as_string(hide_password=False)
        return msgspec.structs.replace(super().settings_of(user), database=DatabaseSettings(url=url))

    async def grant(self) -> None:
        """What `berth permissions --database` prints, and passwords."""
        connection = await asyncpg.connect(self.database)
        await connection.execute("\n".join(statements(self.settings)))
        roles = [one.owner for one in rights(self.settings)] + ["berth-operator", "berth-web", BACKUP, RESTORE]
        for role in roles:
            await connection.execute(f"ALTER ROLE \"{role}\" PASSWORD '{PASSWORD}'")
        await connection.close()

    def not_ready(self, name: str) -> str:
        """What a worker that lives waits for."""
        worker = self.processes.workers[name]
        assert worker.process.running, worker.log.read_text()[-4000:]
        try:
            return httpx.get(f"http://127.0.0.1:{worker.port}/readyz", trust_env=False).text
        except httpx.HTTPError:
            return ""

    def logs(self) -> str:
        return "".join(worker.log.read_text() for worker in self.processes.workers.values())


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Roles]:
    with lent_servers(PLAN.cells) as servers:
        roles = Roles(servers, tmp_path)
        try:
            yield roles
        finally:
            roles.stop()


def waits(system: Roles, name: str, code: str) -> bool:
    return code in system.not_ready(name)


def boot(system: Roles) -> None:
    done = system.berth("boot", "--flavor", "m1.small", "--wait", "--project", MINE, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert [one["state"] for one in json.loads(done.stdout)["items"]] == ["active"]


def test_a_restore_by_another_user_is_waited_for_until_the_printed_rights_are_back(
    system: Roles, tmp_path: Path
) -> None:
    asyncio.run(system.grant())
    system.start()
    boot(system)
    for user, *arguments in ALLOWED:
        done = system.berth(*arguments, user=user)
        assert done.returncode == 0, (user, arguments, done.stdout, done.stderr)
    for user, *arguments in REFUSED:
        done = system.berth(*arguments, user=user, web=user)
        assert "database.forbidden" in done.stderr and "Traceback" not in done.stderr, (user, arguments, done.stderr)
    saved = tmp_path / "backup"
    done = system.berth("backup", str(saved), user=BACKUP)
    assert done.returncode == 0, done.stderr
    system.stop()
    accepts_losses(system)
    with fresh_database(system.servers.database_url) as fresh:
        system.database = fresh
        asyncio.run(_make_nobody(fresh))
        done = system.berth("restore", str(saved), user=NOBODY)
        assert done.returncode == 0, done.stderr
        done = system.berth("db", "list")
        assert "database.forbidden" in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr
        system.spawn()
        for name in OF_THE_DATABASE:
            wait_until(partial(waits, system, name, "database.forbidden"))
        asyncio.run(system.grant())
        asyncio.run(system.grant())
        asyncio.run(system.processes.ready())
        boot(system)
        assert "Traceback" not in system.logs()
        system.stop()


def accepts_losses(system: Roles) -> None:
    """Who decides about machines decides about a recovery; who makes backups does not."""
    word = ("recovery", "accept", "cell1", "--losses", "3", "--reason", "drill", "--yes")
    for user in ("berth-web", "berth-operator"):
        asyncio.run(_stop_recovery(system.database))
        assert system.berth("recovery", "show", "cell1", web=user).returncode == 1
        refused = system.berth(*word, web=BACKUP)
        assert refused.returncode and "database.forbidden" in refused.stderr, refused.stderr
        done = system.berth(*word, web=user)
        assert done.returncode == 0, (user, done.stderr)
        shown = system.berth("recovery", "list", "-o", "json", web=user)
        assert [one["state"] for one in json.loads(shown.stdout)["items"]] == ["accepted"], shown.stdout


async def _stop_recovery(url: str) -> None:
    """Of a cell that waits for an operator."""
    connection = await asyncpg.connect(url)
    await connection.execute("UPDATE cell_cell1.identity SET state = 'recovering', losses = '{\"count\":3}'")
    await connection.close()


def test_a_start_with_all_rights_warns_of_nothing(system: Roles) -> None:
    asyncio.run(system.grant())
    system.start()
    boot(system)
    system.stop()
    lines = [json.loads(line) for line in system.logs().splitlines()]
    # A connection that a busy machine loses is no matter of rights, and is entered again; nor is that a conductor hears
    # its services before it acts.
    warnings = [one for one in lines if one["level"] != "info" and one["event"] != "bus.lost"]
    assert lines and [one for one in warnings if one.get("code") != "cell.listening"] == []


async def _make_nobody(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(f"DROP ROLE IF EXISTS {NOBODY}")
    await connection.execute(f"CREATE ROLE {NOBODY} LOGIN PASSWORD '{PASSWORD}'")
    await connection.execute(f'GRANT CREATE ON DATABASE "{make_url(url).database}" TO {NOBODY}')
    await connection.close()


@pytest.mark.parametrize(
    ("taken", "code"),
    [("topic_permissions", "bus.topics_open"), ("permissions", "bus.forbidden")],
)
def test_a_worker_waits_for_permissions_of_its_bus(system: Roles, taken: str, code: str) -> None:
    asyncio.run(system.grant())
    grants = of_role(PermissionRole.PLACEMENT, system.settings)
    for one in grants:
        command = "clear_topic_permissions" if taken == "topic_permissions" else "clear_permissions"
        system.servers.broker.control(command, "-p", one.vhost, one.user)
    system.spawn()
    wait_until(partial(waits, system, "placement", code))
    system.servers.broker.define(**definitions(grants))
    asyncio.run(system.processes.ready())
    boot(system)
    assert "Traceback" not in system.logs()


CHANGED = "changed"


@contextmanager
def changed_in_database(url: str, role: str) -> Iterator[None]:
    """A new password, which is asked for: the tests' own server trusts who connects from this computer."""

    async def change(*statements: str) -> str:
        connection = await asyncpg.connect(url)
        for statement in statements:
            await connection.execute(statement)
        file: str = await connection.fetchval("SHOW hba_file")
        await connection.close()
        return file

    rules = Path(asyncio.run(change(f"ALTER ROLE \"{role}\" PASSWORD '{CHANGED}'")))
    before = rules.read_text()
    asked = "".join(f'{kind} all "{role}" {place} scram-sha-256\n' for kind, place in (("local", ""), ("host", "all")))
    rules.write_text(asked + before)
    try:
        asyncio.run(change("SELECT pg_reload_conf()"))
        yield
    finally:
        rules.write_text(before)
        asyncio.run(change("SELECT pg_reload_conf()"))


@pytest.mark.parametrize(("of", "code"), [("bus", "bus.forbidden"), ("database", "database.forbidden")])
def test_a_worker_works_on_while_its_password_is_changed_until_it_is_restarted(
    system: Roles, of: str, code: str
) -> None:
    """The order of docs/operate/passwords.md: change it, then restart the worker with the new one."""
    asyncio.run(system.grant())
    system.start()
    boot(system)
    user = "berth-scheduler"
    with changed_in_database(system.database, user) if of == "database" else nullcontext():
        if of == "bus":
            system.servers.broker.control("change_password", user, CHANGED)
        boot(system)
        old = system.processes.restart("scheduler")
        wait_until(lambda: not old.process.running)
        assert code in old.log.read_text()
        of_database = [name for name in old.settings if "DATABASE" in name]
        settings = {
            name: value.replace(f"{user}:{PASSWORD}@", f"{user}:{CHANGED}@")
            if (name in of_database) is (of == "database")
            else value
            for name, value in old.settings.items()
        }
        system.processes.start("scheduler", "scheduler", settings=settings)
        asyncio.run(system.processes.ready())
        boot(system)
