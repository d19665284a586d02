"""Everything on the hosts of a service, in pages: what is there, what is under way, and what is kept of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ChangeKind, ChangeMachine, MachineChanged
from bus.contracts.base import encode
from bus.contracts.cell import InstanceSpec, Spawn
from bus.contracts.deploy import ConfigDrive
from bus.contracts.listing import ListedMachine, ListMachines
from compute_agent.driver import ChangeOrder, ChangeResult, Machine
from compute_agent.hosts import machine_listing as listing
from compute_agent.hosts.machine_listing import MachineLister
from compute_agent.records import records
from compute_agent.records.attempt import AttemptPhase, DestroyAction, HostAttempt, lost, on_destroy_if_incomplete
from compute_agent.records.records import Records
from tests.unit.compute_agent.test_agent import HOSTS, INSTANCES, Service, destroy, spawn, started
from tests.unit.compute_agent.test_finding import OURS, TAKEN, THEIRS, Marking


class Changing(Marking):
    """Its changes wait, too."""

    tag_only = False

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        listed = await super().list(hosts)
        return {host: [replace(one, tag_only=self.tag_only) for one in found] for host, found in listed.items()}

    async def change(self, change: ChangeOrder) -> ChangeResult:
        if self.gate is not None:
            await self.gate.wait()
        return ChangeResult(runs=True)


def lister_of(service: Service) -> MachineLister:
    return MachineLister(
        service="s",
        driver=service.driver,
        records=service.records,
        scanner=service.scanner,
        is_busy=service.destroys.is_busy,
        pending_destroys=service.destroys.pending,
    )


async def pages_of(service: Service) -> list[tuple[list[ListedMachine], tuple[str, ...]]]:
    """All of them, as a conductor reads them."""
    query, pages = ListMachines(service="s", database_id=OURS), list[tuple[list[ListedMachine], tuple[str, ...]]]()
    while True:
        page = await lister_of(service).list(query)
        pages.append((list(page.machines), page.hosts))
        if not page.more:
            return pages
        assert (page.next_host, page.next_instance) > (query.after_host, query.after_instance)
        query = replace(query, after_host=page.next_host, after_instance=page.next_instance)


async def machines_of(service: Service) -> list[ListedMachine]:
    return [one for machines, _ in await pages_of(service) for one in machines]


def ours(number: int, attempt: int = 1, host: int = 0) -> Spawn:
    return replace(spawn(number, attempt, host), database_id=OURS)


def change(kind: ChangeKind, spec: InstanceSpec) -> ChangeMachine:
    return ChangeMachine(
        spec=spec, attempt=1, host_uuid=HOSTS[0], allocations={HOSTS[0]: {"VCPU": 4}}, service="s", database_id=OURS,
        change=kind, change_number=1,
    )  # fmt: skip


async def test_a_machine_is_listed_with_what_was_commanded_of_it() -> None:
    service = await started(Marking())
    await service.carry_out(ours(0))
    (one,) = await machines_of(service)
    assert one == ListedMachine(
        instance_uuid=INSTANCES[0],
        host_uuid=HOSTS[0],
        host=HOSTS[0][-4:],
        service="s",
        attempt=1,
        project_id="p",
        spec=ours(0).spec,
        allocations=TAKEN,
    )


@pytest.mark.parametrize(
    ("command", "complete", "busy"),
    [
        (None, True, False),
        (replace(destroy(0), database_id=OURS), True, True),
        (change(ChangeKind.STOP, ours(0).spec), True, True),
        (ours(0, attempt=2), True, True),  # the older attempt is cleared away first
    ],
)
async def test_what_is_under_way_is_busy_and_a_build_is_not(command: Spawn | None, complete: bool, busy: bool) -> None:
    driver = Changing()
    service = await started(driver)
    await service.carry_out(ours(0))
    driver.gate = asyncio.Event()
    service.agent.handle([ours(1), *([command] if command else [])])
    first, building = await machines_of(service)
    assert (first.complete, first.busy, first.attempt) == (complete, busy, 1)
    assert (building.complete, building.busy, building.spec) == (False, False, ours(1).spec)
    driver.gate.set()
    await service.rest()


async def test_a_build_that_failed_is_listed_until_it_is_destroyed() -> None:
    """Its host may have something of it, and list what is complete alone."""
    driver = Changing()
    driver.bug = ZeroDivisionError("oops")
    service = await started(driver)
    await service.carry_out(ours(0))
    (one,) = await machines_of(service)
    assert (one.attempt, one.complete, one.failed, one.busy, one.foreign) == (1, False, True, False, False)
    driver.bug = None
    await service.carry_out(replace(destroy(0), database_id=OURS))
    assert not await machines_of(service)


RUNS_HERE = HostAttempt(1, AttemptPhase.RUNNING, database_id=OURS)


@pytest.mark.parametrize(
    ("entry", "built"),
    [
        (RUNS_HERE, True),
        (lost(RUNS_HERE), True),  # its host shows it again
        (replace(RUNS_HERE, attempt=2), True),
        (replace(RUNS_HERE, phase=AttemptPhase.BUILDING), False),
        (replace(RUNS_HERE, phase=AttemptPhase.FAILED, code="node.deploy_timeout"), False),
    ],
)
async def test_what_comes_up_after_its_build_has_failed_is_no_machine(entry: HostAttempt, built: bool) -> None:
    """A report of it came before the result: its client was told that it is active, and each change was refused."""
    driver = Marking()
    service = await started(driver)
    driver.machines[HOSTS[0], INSTANCES[0]] = 1
    service.records.put((HOSTS[0], INSTANCES[0]), entry)
    (reported,) = (await service.scanner.running())[HOSTS[0]]
    (one,) = await machines_of(service)
    is_failed = entry.code == "node.deploy_timeout"
    assert (reported.built, one.complete, one.failed) == (built, built, is_failed)


@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_machine_that_its_host_lists_again_is_the_one_on_record(attempt: int) -> None:
    """One list without it, and each change was refused for good, as of no machine; its late copies were not."""
    driver, key = Changing(), (HOSTS[0], INSTANCES[0])
    service = await started(driver)
    await service.carry_out(ours(0))
    service.agent.handle([change(ChangeKind.STOP, ours(0).spec)])
    await service.rest()
    del driver.machines[key]
    await service.scanner.running()
    driver.machines[key] = attempt
    await service.scanner.running()
    assert service.records.is_live(*key) is (attempt == 1)
    service.agent.handle([replace(change(ChangeKind.START, ours(0).spec), change_number=n) for n in (1, 2)])
    await service.rest()
    answers = [(one.change_number, one.done) for one in service.results if isinstance(one, MachineChanged)]
    assert answers == [(1, True), (2, attempt == 1)]
    assert [one.spec for one in await machines_of(service)] == [ours(0).spec if attempt == 1 else None]


async def test_a_machine_that_only_its_tag_names_may_run_though_it_was_taken_for_lost() -> None:
    service = await started(Changing())
    await service.carry_out(ours(0))
    key = (HOSTS[0], INSTANCES[0])
    service.records.put(key, lost(service.records.get(key)))  # type: ignore[arg-type]
    service.driver.tag_only = True
    (one,) = await machines_of(service)
    assert (one.attempt, one.complete, one.failed, one.runs) == (1, False, False, True)


async def test_another_database_s_machine_is_foreign_and_one_without_a_record_has_no_spec() -> None:
    driver = Marking()
    driver.machines[HOSTS[1], INSTANCES[0]] = 3
    service = await started(driver)
    (one,) = await machines_of(service)
    assert (one.attempt, one.foreign, one.spec, one.project_id) == (3, False, None, None)
    driver.mark = THEIRS
    (one,) = await machines_of(service)
    assert one.foreign


async def test_the_spec_outlives_the_service_follows_changes_and_goes_with_its_machine(tmp_path: Path) -> None:
    driver, path = Changing(), tmp_path / "journal"
    service = await started(driver, opened(path))
    bigger = replace(ours(0).spec, flavor="bigger")
    await service.carry_out(ours(0))
    await service.carry_out(change(ChangeKind.RESIZE, bigger))  # type: ignore[arg-type]
    for _ in range(2):
        service.records.close()
        service = await started(driver, opened(path))
        (one,) = await machines_of(service)
        assert one.spec == bigger and service.records.spec_of((HOSTS[0], INSTANCES[0]), 2) is None
        service.records._journal.rewrite(service.records._snapshot())  # type: ignore[union-attr]
    await service.carry_out(replace(destroy(0), database_id=OURS))
    assert service.records.spec_of((HOSTS[0], INSTANCES[0]), 1) is None


def opened(path: Path) -> Records:
    made = Records(path)
    made.open()
    return made


@pytest.mark.parametrize(
    ("spec", "is_kept"),
    [
        (lambda spec: spec, True),
        (lambda spec: replace(spec, config_drive=ConfigDrive(user_data="x" * records.MAX_SPEC_BYTES)), True),
        (lambda spec: replace(spec, capabilities={f"{n:03}" * 80: "x" * 255 for n in range(64)},
                              traits=tuple(f"T{n:03}" * 60 for n in range(256))), False),
    ],
)  # fmt: skip
async def test_a_spec_is_kept_within_its_bound(spec: Callable[[InstanceSpec], InstanceSpec], is_kept: bool) -> None:
    service = await started(Marking())
    await service.carry_out(replace(ours(0), spec=spec(ours(0).spec)))
    (one,) = await machines_of(service)
    assert (one.spec == ours(0).spec) is is_kept and (one.spec is None) is not is_kept


@pytest.mark.parametrize(
    ("name", "bound", "pages"),
    [
        ("MAX_LISTED_MACHINES", 2, [2, 1]),
        ("MAX_LISTED_MACHINES", 1, [1, 1, 1]),
        ("MAX_LISTED_HOSTS", 1, [2, 1]),
        ("MAX_LISTED_BYTES", 1, [1, 1, 1]),
        ("MAX_LISTED_BYTES", 900, [2, 1]),
    ],
)
async def test_pages_are_bounded_and_name_the_hosts_that_they_complete(
    name: str, bound: int, pages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await started(Marking())
    await service.carry_out(ours(0), ours(1), ours(2, host=1))
    whole = await machines_of(service)
    assert len(whole) == 3 and 450 > len(encode(whole[0])) > 300
    monkeypatch.setattr(listing, name, bound)
    read = await pages_of(service)
    assert [len(machines) for machines, _ in read] == pages
    assert [one for machines, _ in read for one in machines] == whole
    assert [host for _, hosts in read for host in hosts] == sorted(HOSTS)


async def test_a_host_that_was_not_seen_is_in_no_page() -> None:
    driver = Marking()
    service = await started(driver)
    await service.carry_out(ours(0))
    driver.unseen = {HOSTS[0]}
    ((machines, hosts),) = await pages_of(service)
    assert machines == [] and hosts == (HOSTS[1],)


# --- Whether an order to destroy that spares a complete machine ends at the record, looks at the host, or destroys


OWN, FOREIGN = "database-1", "database-2"
RUNS = HostAttempt(3, AttemptPhase.RUNNING, max_ended_attempt=0, database_id=OWN)
LOOK, BUILT = DestroyAction.VERIFY, DestroyAction.BUILT


@pytest.mark.parametrize(
    ("entry", "attempt", "database_id", "action"),
    [
        (None, 3, OWN, LOOK),
        (RUNS, 3, OWN, BUILT),
        (RUNS, 2, OWN, None),
        (RUNS, 4, OWN, LOOK),  # the record is older than the machine that is meant
        (RUNS, 4, FOREIGN, None),
        (RUNS, 3, FOREIGN, None),
        (HostAttempt(3, AttemptPhase.RUNNING, max_ended_attempt=3, database_id=OWN), 3, OWN, None),
        (lost(RUNS), 3, OWN, LOOK),
        (lost(RUNS), 3, FOREIGN, LOOK),  # what is over was nobody's: the machine itself says whose it is
        (lost(RUNS), 2, OWN, None),
        (HostAttempt(3, AttemptPhase.BUILDING, max_ended_attempt=0, database_id=OWN), 3, OWN, None),
        (HostAttempt(3, AttemptPhase.BUILDING, max_ended_attempt=0, database_id=OWN), 4, OWN, None),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=3, database_id=OWN), 4, OWN, LOOK),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=3, database_id=OWN), 4, FOREIGN, LOOK),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=5, database_id=OWN), 4, OWN, None),
    ],
)
def test_what_an_order_that_spares_a_complete_machine_does(
    entry: Any, attempt: int, database_id: str, action: DestroyAction | None
) -> None:
    assert on_destroy_if_incomplete(entry, attempt, database_id) is action
