"""All that waits for a person: ranked, each with its next command; what cannot be read is a row, and holds up none."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import typer

from berth.audit.findings import AuditFinding, FindingKind
from berth.audit.recoveries import Recovery
from berth.bus_client.baremetal import NodeRecord
from berth.cli.main import app
from berth.cli.site.status import EXIT
from berth.client.status import Severity, StatusKind, StatusRow, SystemState
from berth.config.settings import Settings
from berth.status import rows
from berth.status.reader import PART_TIMEOUT_S, Server, StatusReader
from berth.status.rows import status_of
from berth.text import age
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.build import BuildPage, BuildRecord, BuildState, HostRecord
from bus.contracts.drains import DrainFailure, DrainProgress, DrainTarget
from bus.contracts.operations import AdminState, HostAdminState, Losses, ServiceRecord
from bus.contracts.workers import WorkerHeartbeat, WorkerRecord, WorkersPage
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import PROTECT, UnknownMachineRecord
from tests.kit.virtual_time import on_virtual_time

UUIDS = tuple(f"11111111-2222-4333-8444-{n:012d}" for n in range(9))
NOW = 10_000.0
BREAKER = Breaker(service="c1", tripped_at=9_000.0, lost=5)
RECORD = UnknownMachineRecord(
    machine=UnknownMachine(UUIDS[0], 1, UUIDS[1], UnknownMachineKind.QUARANTINED, "no record"),
    service="c1",
    first_seen=8_000.0,
    last_seen=9_000.0,
)
NODE = NodeRecord(
    uuid=UUIDS[2],
    name="n1",
    resource_class="gold",
    state="available",
    power="off",
    instance="",
    own=False,
    serves=(),
    problems=("it is retired",),
    ironic_reason="",
)


def service(name: str, *, up: bool, code: str = "service.silent") -> ServiceRecord:
    return ServiceRecord(name=name, cell="cell1", up=up, code="" if up else code, since=7_000.0, hosts=2)


def worker(role: str, bus: str, *, silent: bool = False, not_ready: tuple[str, ...] = ()) -> WorkerRecord:
    heartbeat = WorkerHeartbeat(
        role=role, worker=f"{role}-1", host="h", pid=1, version="1", started_at=1.0, phase="ready", not_ready=not_ready
    )
    return WorkerRecord(heartbeat=heartbeat, bus=bus, last_seen_s=60.0, silent=silent)


def fenced(fence: int, acknowledged: int) -> HostRecord:
    admin = HostAdminState(
        host_uuid=UUIDS[3], host="h1", state=AdminState.FENCED, at=6_000.0, fence=fence, acknowledged=acknowledged
    )
    return HostRecord(uuid=UUIDS[3], name="h1", cell="cell1", admin=admin)


def drain(uuid: str) -> DrainProgress:
    return DrainProgress(
        id=uuid,
        host="h1",
        target=DrainTarget.HOST,
        kind="live-migrate",  # type: ignore[arg-type]
        by="me",
        planned=1,
        counts={},
        started_at=5_000.0,
        failed=(DrainFailure(instance_uuid=UUIDS[4], code="no_valid_host", reason=""),),
    )


LOST = BuildRecord(
    instance_uuid=UUIDS[5],
    project_id="p",
    flavor="f",
    state=BuildState.FAILED,
    code="instance.lost",
    updated_at=4_000.0,
)
EVERY = [
    *rows.of_breakers("cell1", [BREAKER]),
    *rows.of_quarantine("cell1", [RECORD]),
    *rows.of_recovery(Recovery("cell1", "recovering", 2, Losses(instances=(UUIDS[0],), count=1))),
    *rows.of_recovery(Recovery("cell2", "recovering", 2, Losses(), {"c9": False})),
    *rows.of_services([service("c1", up=False), service("c2", up=True)]),
    *rows.of_workers(
        WorkersPage(workers=(worker("scheduler", API), worker("compute", "cell1", silent=True)), since_s=60.0),
        ["cell1"],
        NOW,
    ),
    *rows.of_workers(WorkersPage(workers=(worker("conductor", "cell1", not_ready=("the bus",)),)), ["cell1"], NOW),
    *rows.of_hosts([fenced(2, 1), HostRecord(uuid=UUIDS[4], name="h2", cell="cell1", not_in_placement="name taken")]),
    *rows.of_hosts([HostRecord(uuid=UUIDS[4], name="h2", reported=False)]),
    *rows.of_hosts([]),
    *rows.of_held({"h1": "fencing.too_many"}, [fenced(1, 1)]),
    *rows.of_drains([drain(UUIDS[6])], lambda _: True),
    *rows.of_losses(BuildPage(builds=(LOST,))),
    *rows.of_dead_letters("cell1", 3, ("conductor.builds", "message.malformed", 3_000.0)),
    *rows.of_findings([AuditFinding(FindingKind.ORPHANED, UUIDS[0], "an allocation of no instance", "release it")]),
    *rows.of_nodes([NODE]),
    rows.row(StatusKind.DATABASE_AWAY, "away", severity=Severity.CRITICAL),
    rows.row(StatusKind.BUS_AWAY, "away", subject=API, severity=Severity.CRITICAL),
    rows.row(StatusKind.SCHEDULER_AWAY, "away", severity=Severity.CRITICAL),
    rows.not_read("drains", "timeout", "", following="berth drain list"),
]


def test_every_kind_of_row_is_made_by_the_figures_that_show_it() -> None:
    assert {one.kind for one in EVERY} == set(StatusKind)


def test_each_next_command_is_one_that_there_is_with_its_options() -> None:
    whole: Any = typer.main.get_command(app)
    for one in EVERY:
        program, *left = shlex.split(one.next)
        assert program == "berth", one
        command, context = whole, typer.Context(whole)
        while hasattr(command, "get_command") and left and not left[0].startswith("-"):
            found = command.get_command(context, left[0])
            if found is None:
                break
            command, left = found, left[1:]
            context = typer.Context(command, parent=context)
        assert command is not whole, one.next
        command.make_parser(context).parse_args(left)  # raises for an option that there is not


def test_ages_are_those_of_the_oldest() -> None:
    younger = Breaker(service="c2", tripped_at=9_500.0)
    (found,) = rows.of_breakers("cell1", [younger, BREAKER])
    assert (found.since, found.severity, found.subject) == (9_000.0, Severity.CRITICAL, "cell1")
    assert [age(seconds) for seconds in (-5, 12, 125, 7_300, 200_000)] == ["0 s", "12 s", "2 min", "2 h", "2 d"]


def test_the_worst_is_first_and_what_others_follow_from_before_them() -> None:
    found = status_of(reversed(EVERY), NOW)
    severities = [one.severity for one in found.rows]
    assert severities == sorted(severities, key=list(Severity).index)
    critical = [one.kind for one in found.rows if one.severity is Severity.CRITICAL]
    assert critical == sorted(critical, key=list(StatusKind).index)
    assert found == status_of(EVERY, NOW)


@pytest.mark.parametrize(
    ("severities", "state", "status"),
    [
        ([], SystemState.FINE, 0),
        ([Severity.WARNING], SystemState.WARNING, 1),
        ([Severity.WARNING, Severity.NOT_KNOWN], SystemState.NOT_KNOWN, 3),
        ([Severity.NOT_KNOWN, Severity.CRITICAL, Severity.WARNING], SystemState.CRITICAL, 2),
    ],
)
def test_the_state_is_that_of_the_worst_row(severities: list[Severity], state: SystemState, status: int) -> None:
    made = [StatusRow(severity=one, kind=StatusKind.NOT_READ, what="w") for one in severities]
    assert status_of(made, NOW).state is state
    assert EXIT[state] == status


@pytest.mark.parametrize(
    "nothing",
    [
        rows.of_breakers("cell1", [Breaker(service="c1", tripped_at=1.0, reset_at=2.0)]),
        rows.of_quarantine("cell1", [UnknownMachineRecord(
            machine=RECORD.machine, service="c1", first_seen=1.0, last_seen=1.0, decision=PROTECT
        )]),
        rows.of_recovery(Recovery("cell1", "open", 1, Losses())),
        rows.of_recovery(Recovery("cell1", "accepted", 1, Losses(count=3))),
        rows.of_services([service("c1", up=True), service("c2", up=False, code=rows.SERVICE_STOPPED)]),
        rows.of_hosts([fenced(2, 2)]),
        rows.of_dead_letters(API, 0, None),
        rows.of_findings([]),
        rows.of_losses(BuildPage()),
        # A scheduler that has just begun to listen has heard of none.
        rows.of_workers(WorkersPage(workers=(), since_s=1.0), ["cell1"], NOW),
    ],
)  # fmt: skip
def test_what_waits_for_nobody_is_no_row(nothing: list[StatusRow]) -> None:
    assert nothing == []


def test_a_cell_without_any_service_at_work_is_critical() -> None:
    (found,) = rows.of_services([service("c1", up=False), service("c2", up=False)])
    assert (found.severity, found.since) == (Severity.CRITICAL, 7_000.0)


# --- the reader


class Silent(Environment):
    """A database and a broker that take connections and never answer."""

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    async def transact(self, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...

    def database(self, *_: Any, **__: Any) -> Any:
        return self


async def no_nodes() -> list[NodeRecord]:
    await asyncio.Event().wait()
    return []


async def reader_of(env: Environment) -> StatusReader:
    bus = env.bus(API)
    return StatusReader(env, Settings(), bus, nodes=no_nodes, opens=True)


@on_virtual_time
async def test_nothing_that_is_silent_holds_up_the_others_and_all_of_it_is_named() -> None:
    broker = MemoryBroker(SystemClock())
    env = Silent("p", transports=lambda name: MemoryTransport(broker, name), cells=("cell1",))
    reader = await reader_of(env)
    began = asyncio.get_running_loop().time()
    found = await reader.read()
    assert asyncio.get_running_loop().time() - began <= PART_TIMEOUT_S + 0.1
    kinds = [(one.severity, one.kind) for one in found.rows]
    assert kinds[:2] == [
        (Severity.CRITICAL, StatusKind.DATABASE_AWAY),
        (Severity.CRITICAL, StatusKind.SCHEDULER_AWAY),
    ]
    assert set(kinds[2:]) == {(Severity.NOT_KNOWN, StatusKind.NOT_READ)}
    named = ", ".join(one.subject for one in found.rows)
    for part in (
        *("workers", "compute services", "fences and hosts", "drains", "lost instances", "audit", "bare metal"),
        *("breakers, quarantine and recovery of cell1", "cells added at run time"),
    ):
        assert part in named
    await reader.close()


@on_virtual_time
async def test_a_broker_that_never_answers_is_a_row_of_its_own() -> None:
    class Deaf(MemoryTransport):
        async def open(self) -> None:
            await asyncio.Event().wait()

    broker = MemoryBroker(SystemClock())
    env = Silent(
        "p",
        transports=lambda name: (Deaf if name == "cell1" else MemoryTransport)(broker, name),
        cells=("cell1",),
    )
    reader = await reader_of(env)
    found = await reader.read()
    away = [one for one in found.rows if one.kind is StatusKind.BUS_AWAY]
    assert [(one.subject, one.severity) for one in away] == [("cell1", Severity.CRITICAL)]
    assert any("dead letters of cell1" in one.subject for one in found.rows if one.kind is StatusKind.NOT_READ)
    await reader.close()


@on_virtual_time
async def test_without_its_bus_no_scheduler_is_said_to_be_away() -> None:
    """Nobody has asked one."""

    class Deaf(MemoryTransport):
        connected = False  # type: ignore[assignment]

        async def open(self) -> None:
            await asyncio.Event().wait()

    broker = MemoryBroker(SystemClock())
    env = Silent("p", transports=lambda name: Deaf(broker, name))
    reader = await reader_of(env)
    found = await reader.read()
    kinds = [one.kind for one in found.rows if one.severity is Severity.CRITICAL]
    assert kinds == [StatusKind.DATABASE_AWAY, StatusKind.BUS_AWAY]
    await reader.close()


@on_virtual_time
async def test_a_reader_that_stays_reads_each_part_once_in_a_while_and_dates_what_has_no_time() -> None:
    reads: list[float] = []
    env = Silent("p", transports=lambda name: MemoryTransport(MemoryBroker(SystemClock()), name))
    bus: Bus = env.bus(API)
    await bus.open()

    async def nodes() -> list[NodeRecord]:
        reads.append(env.clock.monotonic())
        return [NODE]

    reader = StatusReader(env, Settings(), bus, nodes=nodes)
    first, _ = await asyncio.gather(reader.read(), reader.read())
    assert len(reads) == 1
    assert [one.since for one in first.rows if one.kind is StatusKind.NODE_PROBLEMS] == [None]
    await asyncio.sleep(30.0)
    later = await reader.read()
    assert len(reads) == 2
    await reader.read(anew=Server.SCHEDULER)
    assert len(reads) == 2
    await reader.read(anew=Server.IRONIC)
    assert len(reads) == 3
    assert [one.since for one in later.rows if one.kind is StatusKind.NODE_PROBLEMS] == [pytest.approx(first.at, abs=1)]
    await reader.close()
    await bus.close()
