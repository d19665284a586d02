"""An operator has decided that a machine in quarantine is its instance's: the conductor queries the hosts first."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.cell import FoundMachine, Selection
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind
from cell_conductor.store.safety import ADOPT, UnexplainedRecord
from tests.unit.conductor.scenario import SPEC, UUID, host, selection
from tests.unit.conductor.world import Conductor, Services

KEPT = UnexplainedRecord(
    machine=Unexplained(UUID, 2, host(3), UnexplainedKind.QUARANTINED, NEWER),
    service="s2",
    first_seen=1.0,
    last_seen=1.0,
    verdict=ADOPT,
    decided_by="ann",
)
ACTIVE = Instance(
    uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, consumer_generation=7
)


def machine(n: int = 3, attempt: int = 2, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


async def decided(
    services: Services,
    *,
    record: Instance | None = ACTIVE,
    up: Collection[str] | None = ("s1", "s2"),
    fenced: Collection[str] = (),
) -> tuple[dict[str, FoundMachine], str]:
    """(what is adopted, why nothing is)"""
    search = Conductor(services, up).search
    await search._store.open()
    known = {} if record is None else {UUID: record}
    with capture_logs() as logs:
        found = await search.find_decided({UUID: KEPT}, known, fenced)
    (line,) = [one for one in logs if one["event"].startswith("quarantine.")]
    assert line["event"] == ("quarantine.adopted" if found else "quarantine.not_adopted")
    assert (line["by"], line["host"]) == ("ann", host(3))
    return found, line["reason"]


async def test_the_only_machine_of_the_instance_is_adopted() -> None:
    services = Services(s1=(), s2=(machine(),))
    assert await decided(services) == ({UUID: machine()}, "")
    assert all(one.thorough for one in services.queried), "another deployment's machines count, too"


@pytest.mark.parametrize(
    ("services", "why"),
    [
        (Services(s1=(), s2=()), "does not report it"),
        (Services(s1=(), s2=(machine(attempt=3),)), "does not report it"),
        (Services(s1=(), s2=(machine(foreign=True),)), "does not report it"),
        (Services(s1=(machine(1, 1),), s2=(machine(),)), "another machine of it on host-1"),
        (Services(s1=(machine(4, 2, foreign=True),), s2=(machine(),)), "another machine of it on host-4"),
        (Services(s1=(), s2=(machine(project_id="theirs"),)), "another project"),
    ],
)
async def test_what_the_hosts_do_not_confirm_is_left_in_quarantine(services: Services, why: str) -> None:
    found, reason = await decided(services)
    assert not found and why in reason


@pytest.mark.parametrize("up", [("s1", "s2"), ("s2",), None], ids=["silent", "down", "not known yet"])
async def test_the_host_that_the_record_names_has_to_be_looked_at(up: Collection[str] | None) -> None:
    """Its machine may run there."""
    services = Services(s1=(), s2=(machine(),))
    services.silent = {"s1"}
    found, reason = await decided(services, up=up)
    assert not found and "answered" in reason
    services.silent, services.hosts = set(), (host(3),)
    found, reason = await decided(services)
    assert not found and "host-1" in reason


async def test_a_fenced_host_need_not_answer() -> None:
    services = Services(s2=(machine(),))
    found, _ = await decided(services, up=("s2",), fenced=(host(1),))
    assert found


@pytest.mark.parametrize(
    "record",
    [None, replace(ACTIVE, state=State.DESTROYING, then=State.DELETED), replace(ACTIVE, state=State.RESIZED)],
    ids=str,
)
async def test_only_an_active_or_a_failed_record_takes_one_over(record: Instance | None) -> None:
    services = Services(s1=(), s2=(machine(),))
    found, reason = await decided(services, record=record)
    assert not found and reason and not services.queried


OTHER = UUID[:-1] + ("2" if UUID[-1] == "1" else "1")


async def both(services: Services, place: Selection, fenced: Collection[str] = ()) -> dict[str, FoundMachine]:
    """The instances of two decisions that are adopted; the record of OTHER has this place."""
    search = Conductor(services, ("s1", "s2")).search
    await search._store.open()
    decisions = {UUID: KEPT, OTHER: replace(KEPT, machine=replace(KEPT.machine, uuid=OTHER))}
    record = replace(ACTIVE, uuid=OTHER, selections=(place,))
    return await search.find_decided(decisions, {UUID: ACTIVE, OTHER: record}, fenced)


async def test_a_dead_host_of_another_decision_delays_none() -> None:
    """Until its service was forgotten, nothing in the cell was adopted."""
    services = Services(s1=(), s2=(machine(), machine(instance_uuid=OTHER)), s9=())
    services.silent = {"s9"}
    assert set(await both(services, replace(selection(5), service="s9"))) == {UUID}


async def test_a_fenced_host_need_not_be_looked_at_though_its_service_answers() -> None:
    services = Services(s1=(), s2=(machine(), machine(instance_uuid=OTHER)))
    services.hosts = (host(1), host(3))
    assert set(await both(services, selection(5), fenced=(host(5),))) == {UUID, OTHER}
