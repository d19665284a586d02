"""`berth status` before a whole system of processes on real servers, in states prepared one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
from msgspec.structs import replace

from berth.client.status import Severity, StatusKind, StatusRow, SystemState, SystemStatus
from berth.config.settings import Settings
from berth.config.site import Site, process_name
from berth.status.reader import StatusReader
from bus.bus import API
from bus.contracts.build import HostsPage, HostsQuery
from bus.contracts.operations import AdminState, AdminStateSet, SetAdminState
from bus.contracts.queues import DEAD
from bus.transport import Outgoing
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.unknown_machines import Safety
from tests.kit.forks import run_berth
from tests.kit.waiting import until, wait_until
from tests.system.small import Small, small_processes

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

HOST = "b0000000-0000-4000-8000-000000000000"  # no compute service reports it
LOST = "11111111-2222-4333-8444-000000000001"
CONDUCTOR, SCHEDULER, COMPUTE = "conductor-cell1-1", "scheduler1", "compute-cell1-c1"
TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 2.0
PART_S = 20.0  # a part that is away costs a test that long, and a busy machine none
T = TypeVar("T")


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with small_processes() as made:
        seen(made, lambda found: found.state is SystemState.FINE)
        yield made


def look(settings: Settings, part_s: float = PART_S) -> SystemStatus:
    return asyncio.run(read_status(settings, part_s))


def seen(small: Small, there: Callable[[SystemStatus], bool]) -> SystemStatus:
    """The first status that is so."""

    last: list[SystemStatus] = []

    async def found() -> bool:
        last[:] = [await read_status(small.settings, PART_S)]
        return there(last[0])

    async def wait() -> None:
        try:
            await until(found)
        except TimeoutError as over:
            raise AssertionError(last) from over

    asyncio.run(wait())
    return last[0]


def row_of(status: SystemStatus, kind: StatusKind) -> StatusRow:
    (found,) = (row for row in status.rows if row.kind is kind)
    return found


def has(kind: StatusKind) -> Callable[[SystemStatus], bool]:
    return lambda status: any(row.kind is kind for row in status.rows)


def fine(small: Small) -> None:
    """Wait until the prepared state is over, so that the next test begins with none."""
    seen(small, lambda found: found.state is SystemState.FINE)


def in_schema(small: Small, schema: str, *statements: str) -> None:
    async def run() -> None:
        database = small.site.environment("test").database(schema, pool_size=1)
        try:
            async with database.raw() as connection:
                for statement in statements:
                    await connection.execute(statement)
        finally:
            await database.close()

    asyncio.run(run())


def on_record(small: Small, work: Callable[[Safety], Awaitable[T]]) -> T:
    async def run() -> T:
        database = small.site.environment("test").database("cell_cell1", pool_size=1)
        try:
            return await work(Safety(PostgresKeyed(database)))
        finally:
            await database.close()

    return asyncio.run(run())


async def read_status(settings: Settings, timeout_s: float) -> SystemStatus:
    """One look at everything, over connections of its own. timeout_s: for each part."""
    site = Site(settings)
    env = site.environment(process_name("test"))
    bus = env.bus(API)
    reader = StatusReader(env, settings, bus, nodes=None, opens=True, timeout_s=timeout_s)
    try:
        return await reader.read()
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await reader.close()
                await bus.close()
        await site.close()


def berth(small: Small, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    return run_berth(*arguments, env={**kept, **small.variables}, timeout_s=TIMEOUT_S)


def ran(small: Small, status: int, *arguments: str) -> str:
    """What the command prints once it ends so: the web server has a second for each part, and the machine is busy."""
    done: list[subprocess.CompletedProcess[str]] = []

    def ends_so() -> bool:
        done[:] = [berth(small, "status", *arguments)]
        return done[0].returncode == status

    wait_until(ends_so)
    return done[0].stdout


def test_of_a_healthy_system_nothing_waits(small: Small) -> None:
    assert ran(small, 0) == "nothing waits for a person\n"
    assert json.loads(ran(small, 0, "-o", "json"))["state"] == "fine"


def test_an_open_breaker(small: Small) -> None:
    on_record(small, lambda safety: safety.trip(Breaker(service="gone", tripped_at=1.0, lost=7)))
    found = row_of(look(small.settings), StatusKind.BREAKER_OPEN)
    assert (found.severity, found.subject, found.since) == (Severity.CRITICAL, "cell1", 1.0)
    assert found.next == "berth breaker list --cell cell1"
    assert json.loads(ran(small, 2, "-o", "json"))["rows"][0]["kind"] == "breaker.open"
    on_record(small, lambda safety: safety.reset("gone", "me", 2.0))
    fine(small)


def test_a_machine_in_quarantine(small: Small) -> None:
    machine = UnknownMachine(LOST, 1, HOST, UnknownMachineKind.QUARANTINED, "no record")
    (record,) = on_record(small, lambda safety: safety.record("gone", [machine], 1.0))
    found = row_of(look(small.settings), StatusKind.QUARANTINE)
    assert (found.severity, found.subject, found.since) == (Severity.WARNING, "cell1", 1.0)
    ran(small, 1)
    on_record(small, lambda safety: safety.delete([replace(record, is_new=False)]))
    fine(small)


def test_dead_letters(small: Small) -> None:
    async def park() -> None:
        transport = small.site.transport(API, process="test")
        await transport.open()
        headers: dict[str, str | int | float] = {"berth-code": "test.given_up", "berth-reason": "for the test"}
        letter = Outgoing(
            exchange=DEAD, routing_key="placement.inventory", body=b"{}", content_type="application/json",
            message_id="letter-1", type="inventory.update.v1", headers=headers, mandatory=True,
        )  # fmt: skip
        await transport.publish(letter)
        await transport.close()

    asyncio.run(park())
    found = row_of(seen(small, has(StatusKind.DEAD_LETTERS)), StatusKind.DEAD_LETTERS)
    assert (found.severity, found.subject) == (Severity.WARNING, API)
    assert found.next == "berth dead-letter list --bus api"
    assert berth(small, "dead-letter", "delete", "placement.inventory", "--yes").returncode == 0
    fine(small)


def test_a_lost_instance(small: Small) -> None:
    boot = ("boot", "--flavor", "m1.tiny", "--project", "p", "--wait", "-o", "json")
    assert berth(small, *boot).returncode == 0
    in_schema(small, "scheduler", "UPDATE build_requests SET state = 'failed', code = 'instance.lost'")
    found = row_of(look(small.settings), StatusKind.INSTANCES_LOST)
    assert (found.severity, found.next) == (Severity.CRITICAL, "berth list --state failed --code instance.lost")
    in_schema(small, "scheduler", "UPDATE build_requests SET state = 'active', code = ''")
    fine(small)


def test_a_finding_of_the_audit_that_two_passes_have(small: Small) -> None:
    one = "WHERE (provider_id, class_id) = (SELECT provider_id, class_id FROM inventories ORDER BY 1, 2 LIMIT 1)"
    in_schema(small, "placement", f"UPDATE inventories SET used = used + 1 {one}")
    found = row_of(look(small.settings), StatusKind.AUDIT_FINDINGS)
    assert (found.severity, found.next) == (Severity.WARNING, "berth audit")
    assert "miscounted" in found.detail
    in_schema(small, "placement", f"UPDATE inventories SET used = used - 1 {one}")
    fine(small)


def test_a_cell_whose_recovery_waits_for_a_decision(small: Small) -> None:
    losses = f'{{"instances": ["{LOST}"], "count": 1, "builds": 0}}'
    in_schema(small, "cell_cell1", f"UPDATE identity SET state = 'recovering', losses = '{losses}'")
    found = row_of(look(small.settings), StatusKind.RECOVERY_WAITS)
    in_schema(small, "cell_cell1", "UPDATE identity SET state = 'open', losses = '{}'")
    assert (found.severity, found.subject) == (Severity.CRITICAL, "cell1")
    fine(small)


def test_a_silent_compute_service(small: Small) -> None:
    small.processes.kill(COMPUTE)
    found = row_of(seen(small, has(StatusKind.SERVICES_SILENT)), StatusKind.SERVICES_SILENT)
    assert (found.severity, found.subject) == (Severity.CRITICAL, "cell1"), "the only one of its cell"
    assert found.next == "berth service list --cell cell1 --down"
    assert found.since
    small.processes.start(COMPUTE, "compute", "--cell", "cell1", "--service", "cell1-c1")
    fine(small)


def test_a_fence_that_its_cell_has_not_acknowledged_and_a_conductor_that_is_away(small: Small) -> None:
    small.processes.kill(CONDUCTOR)

    async def decide(state: AdminState) -> None:
        bus = small.site.bus("test")
        await bus.open()
        (host, *_) = (await bus.request(HostsQuery(limit=1), HostsPage, timeout_s=TIMEOUT_S)).hosts
        command = SetAdminState(host=host.uuid, state=state, by="me", reason="test", force=True)
        await bus.request(command, AdminStateSet, timeout_s=TIMEOUT_S)
        await bus.close()

    asyncio.run(decide(AdminState.FENCED))
    both = seen(small, lambda found: all(has(kind)(found) for kind in (
        StatusKind.FENCE_UNACKNOWLEDGED, StatusKind.CONDUCTOR_AWAY, StatusKind.WORKERS_SILENT
    )))  # fmt: skip
    assert both.state is SystemState.CRITICAL
    assert both.rows[0].kind is StatusKind.CONDUCTOR_AWAY, "what the fence waits for is first"
    assert row_of(both, StatusKind.CONDUCTOR_AWAY).next == "berth run conductor --cell cell1"
    asyncio.run(decide(AdminState.ENABLED))
    small.processes.start(CONDUCTOR, "conductor", "--cell", "cell1")
    seen(small, lambda found: not has(StatusKind.CONDUCTOR_AWAY)(found))


def test_without_a_scheduler_its_parts_are_not_known_and_the_others_are(small: Small) -> None:
    on_record(small, lambda safety: safety.trip(Breaker(service="gone2", tripped_at=1.0, lost=7)))
    small.processes.kill(SCHEDULER)
    found = look(small.settings, 5.0)
    assert [(row.severity, row.kind) for row in found.rows] == [
        (Severity.CRITICAL, StatusKind.SCHEDULER_AWAY),
        (Severity.CRITICAL, StatusKind.BREAKER_OPEN),
        (Severity.NOT_KNOWN, StatusKind.NOT_READ),
    ]
    unknown = found.rows[-1].subject
    assert all(part in unknown for part in ("workers", "compute services", "fences", "drains", "lost instances"))
    ran(small, 2)
    small.processes.start(SCHEDULER, "scheduler")
    on_record(small, lambda safety: safety.reset("gone2", "me", 2.0))


def test_a_database_or_a_broker_that_is_out_of_reach_is_named_first(small: Small) -> None:
    nowhere = "postgresql://nobody:secret@127.0.0.1:9/berth"
    found = look(replace(small.settings, database=replace(small.settings.database, url=nowhere)), 5.0)
    assert (found.rows[0].kind, found.rows[0].severity) == (StatusKind.DATABASE_AWAY, Severity.CRITICAL)
    assert "secret" not in str(found)
    away = "amqp://nobody:secret@127.0.0.1:9/%2F"
    found = look(replace(small.settings, bus=replace(small.settings.bus, url=away)), 5.0)
    assert (found.rows[0].kind, found.rows[0].subject) == (StatusKind.BUS_AWAY, API)
    assert "secret" not in str(found)
