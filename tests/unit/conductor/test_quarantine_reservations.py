"""Which machines of a report are to be kept out of their host's inventory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.cell import (
    MAX_RESERVED_AT_ONCE,
    MAX_RESERVED_MACHINES,
    ComputeHosts,
    HostReport,
    InstanceSpec,
    ReserveMachines,
    Running,
    Selection,
)
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.quarantine_reservations import misreserved, pages, reserved_on
from cell_conductor.domain.report import NO_MARK, NO_RECORD, Unexplained, UnexplainedKind
from cell_conductor.guard import QuarantineReservations
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable

HOST = "10000000-0000-4000-8000-000000000001"
OTHER = "10000000-0000-4000-8000-000000000002"
A = "00000000-0000-4000-8000-00000000000a"
B = "00000000-0000-4000-8000-00000000000b"
OURS = Running(instance_uuid=A, attempt=1, deployment="dddddddd-0000-4000-8000-000000000001")
RESERVED = replace(OURS, reserved=True)
QUARANTINED = Unexplained(A, 1, HOST, UnexplainedKind.QUARANTINED, NO_RECORD)
FOREIGN = Unexplained(A, 1, HOST, UnexplainedKind.FOREIGN, NO_MARK)


def report(*running: Running) -> ComputeHosts:
    hosts = (HostReport(uuid=HOST, name="h", running=running), HostReport(uuid=OTHER, name="o", running=()))
    return ComputeHosts(service="s", cell="c", epoch=1, sequence=1, hosts=hosts)


@pytest.mark.parametrize(
    ("running", "unexplained", "wanted"),
    [
        (OURS, [], None),
        (OURS, [QUARANTINED], [A]),
        (RESERVED, [QUARANTINED], None),
        (RESERVED, [], []),
        (replace(RESERVED, destroying=True), [], None),
        (replace(OURS, destroying=True), [], None),
        (OURS, [FOREIGN], None),
        (RESERVED, [FOREIGN], None),
        (replace(OURS), [replace(QUARANTINED, host_uuid=OTHER)], None),
    ],
    ids=[
        "explained", "quarantined", "reserved already", "explained again", "reserved until it is destroyed",
        "being destroyed", "foreign", "its mark was taken away", "in quarantine elsewhere",
    ],
)  # fmt: skip
def test_of_a_host_whose_report_disagrees_all_are_named(
    running: Running, unexplained: list[Unexplained], wanted: list[str] | None
) -> None:
    found = misreserved(report(running), unexplained)
    assert {host: [one.instance_uuid for one in machines] for host, machines in found.items()} == (
        {} if wanted is None else {HOST: wanted}
    )


def test_with_one_more_the_others_are_named_again() -> None:
    both = [QUARANTINED, replace(QUARANTINED, uuid=B)]
    found = misreserved(report(RESERVED, replace(OURS, instance_uuid=B)), both)
    assert [one.instance_uuid for one in found[HOST]] == [A, B]


def test_what_its_record_had_chosen_there_is_what_it_takes() -> None:
    here, there = (
        Selection(host_uuid=uuid, host="h", service="s", allocations={uuid: {"VCPU": n}})
        for n, uuid in enumerate((HOST, OTHER), 1)
    )
    record = Instance(
        uuid=A,
        state=State.FAILED,
        spec=InstanceSpec(instance_uuid=A, project_id="p"),
        selections=(here, there),
        position=1,
    )
    (named,) = reserved_on(HOST, [OURS], {A: record}).machines
    assert named.allocations == {HOST: {"VCPU": 1}}
    (named,) = reserved_on(HOST, [OURS], {A: replace(record, selections=(there,))}).machines
    assert named.allocations is None


def test_one_host_is_named_no_more_machines_than_a_message_holds() -> None:
    many = [replace(OURS, instance_uuid=f"{A[:-5]}{n:05d}") for n in range(MAX_RESERVED_MACHINES + 1)]
    assert len(reserved_on(HOST, many, {}).machines) == MAX_RESERVED_MACHINES


def test_item_16_the_machines_of_one_page_of_a_report_are_named_in_several_messages() -> None:
    """5,000 machines with the resources of three providers each took the service 24 ms to decode."""
    wrong = {f"{HOST[:-4]}{n:04d}": [OURS] * 30 for n in range(100)}
    named = pages({**wrong, "full": [OURS] * (MAX_RESERVED_AT_ONCE + 1), "empty": []})
    assert [host for page in named for host in page] == [*wrong, "full", "empty"]
    assert [len(page) for page in named] == [33, 33, 33, 1, 1, 1]
    assert pages({}) == []


async def test_item_16_a_service_is_sent_them_in_several_messages_about_one_page_of_its_report() -> None:
    sent: list[ReserveMachines] = []

    class Published:
        async def publish(self, order: ReserveMachines, *, cause: str) -> None:
            sent.append(order)

    uuids = [f"{A[:-5]}{n:05d}" for n in range(1_800)]
    hosts = tuple(
        HostReport(uuid=host, name=host, running=tuple(replace(OURS, instance_uuid=one) for one in uuids[at::3]))
        for at, host in enumerate((HOST, OTHER, B))
    )
    found = [replace(QUARANTINED, host_uuid=hosts[at % 3].uuid, uuid=one) for at, one in enumerate(uuids)]
    store = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    reservations = QuarantineReservations(store, Published())  # type: ignore[arg-type]
    await reservations.reserve(ComputeHosts(service="s", cell="c", epoch=4, sequence=7, hosts=hosts), found)
    assert [[(one.host_uuid, len(one.machines)) for one in order.hosts] for order in sent] == [
        [(HOST, 600)],
        [(OTHER, 600)],
        [(B, 600)],
    ]
    assert {(order.service, order.epoch, order.sequence) for order in sent} == {("s", 4, 7)}
