"""The largest messages of berth's own workers: what decoding them costs is bounded by their values.

Each message is decoded by one call in C, during which nothing else runs on the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bus import wire
from bus.contracts.base import Message, encode
from bus.contracts.catalogue import REPLIES, routing_key, taken_by
from bus.contracts.cell import (
    MAX_FOUND_AT_ONCE,
    MAX_LOOKED_AT_ONCE,
    MAX_RESERVED_AT_ONCE,
    FoundMachine,
    MachinesFound,
    ReservedMachine,
    ReservedOnHost,
    ReserveMachines,
)
from bus.contracts.placement import (
    MAX_GANG_PROVIDERS,
    MAX_MEMBERS,
    Claim,
    ClaimAll,
    ClaimOption,
    Inventory,
    InventoryUpdate,
    ProviderReport,
)
from bus.publishing import BusLimits
from tests.unit.bus.test_wire import arrived

AMOUNTS = {"VCPU": 1, "MEMORY_MB": 1, "DISK_GB": 1}


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def gang(options: int, providers: int) -> ClaimAll:
    option = ClaimOption(
        allocations={uuid(n): AMOUNTS for n in range(providers)}, shapes={uuid(n): 1 for n in range(providers)}
    )
    return ClaimAll(
        claims=tuple(Claim(consumer=uuid(n), options=(option,) * options, project_id="p") for n in range(MAX_MEMBERS))
    )


def report(providers: int, traits: int) -> InventoryUpdate:
    names = tuple(f"CUSTOM_{n}" for n in range(traits))
    inventories = {name: Inventory(total=10) for name in AMOUNTS}
    tree = tuple(
        ProviderReport(
            uuid=uuid(n), name=uuid(n), parent_uuid=uuid(0) if n else None, inventories=inventories, traits=names
        )
        for n in range(providers)
    )
    return InventoryUpdate(source="s", version=1, root_uuid=uuid(0), providers=tree)


def reserve(machines: int, providers: int) -> ReserveMachines:
    taken = {uuid(n): AMOUNTS for n in range(providers)}
    one = ReservedMachine(instance_uuid=uuid(0), attempt=1, allocations=taken)
    hosts = tuple(ReservedOnHost(host_uuid=uuid(n), machines=(one,) * 100) for n in range(machines // 100))
    return ReserveMachines(service="s", cell="c", epoch=1, sequence=1, hosts=hosts)


def found(machines: int, hosts: int) -> MachinesFound:
    taken = {uuid(n): AMOUNTS for n in range(3)}
    one = FoundMachine(
        instance_uuid=uuid(0), host_uuid=uuid(0), host="h", service="s", attempt=1, project_id="p", allocations=taken
    )
    return MachinesFound(service="s", machines=(one,) * machines, hosts=tuple(uuid(n) for n in range(hosts)))


def read(queue: str, message: Message) -> wire.Read | wire.Malformed:
    """As a process of ours reads it from this queue; "": from its reply queue."""
    kinds = [row.message for row in taken_by(queue)] if queue else REPLIES
    key = routing_key(message) if queue else ""
    delivery = arrived(encode(message), type=wire.tag(type(message)), routing_key=key)
    (got,) = wire.Codec(kinds, queue=queue).read(delivery, "new")
    return got


REQUESTS, INVENTORY, CONTROL = "placement.requests", "placement.inventory", "compute.control.{service}"


@pytest.mark.parametrize(
    ("queue", "make"),
    [
        (REQUESTS, lambda: gang(16, 64)),
        (INVENTORY, lambda: report(1024, 100)),
        (CONTROL, lambda: reserve(100_000, 1)),
        (CONTROL, lambda: reserve(5_000, 3)),
        ("", lambda: found(machines=0, hosts=100_000)),
    ],
    ids=["a gang", "a report", "reservations", "reservations of a page of the first release", "hosts looked at"],
)  # fmt: skip
def test_item_16_a_message_of_very_many_values_is_not_read(queue: str, make: Callable[[], Message]) -> None:
    """Each is legal by the bounds of its fields, and took 130, 30, 380, 27 and 48 ms."""
    got = read(queue, make())
    assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE, got


@pytest.mark.parametrize(
    ("queue", "make"),
    [
        (REQUESTS, lambda: gang(1, 64)),
        (REQUESTS, lambda: gang(4, MAX_GANG_PROVIDERS // MAX_MEMBERS // 4)),
        (REQUESTS, lambda: gang(16, 5)),
        (INVENTORY, lambda: report(64, 300)),
        (INVENTORY, lambda: report(512, 40)),
        (CONTROL, lambda: reserve(5_000, 1)),
        (CONTROL, lambda: reserve(MAX_RESERVED_AT_ONCE, 8)),
        ("", lambda: found(machines=2 * MAX_FOUND_AT_ONCE, hosts=MAX_LOOKED_AT_ONCE)),
        ("", lambda: found(machines=0, hosts=40_000)),
    ],
    ids=[
        "a gang, one option", "a gang of nested hosts", "a gang, most options", "many traits", "many providers",
        "reservations of the first release for a whole page of a report", "reservations", "a page of a thorough answer",
        "a thorough answer of the first release",
    ],
)  # fmt: skip
def test_what_berths_workers_send_is_read(queue: str, make: Callable[[], Message]) -> None:
    got = read(queue, make())
    assert isinstance(got, wire.Read), got.reason


def test_a_link_gathers_no_more_than_a_batch_may_have() -> None:
    """With the longest metadata of each message."""
    limits = BusLimits()
    assert limits.batch_bytes + limits.batch_items * 6 * wire.MAX_ID <= wire.MAX_BATCH_BYTES
