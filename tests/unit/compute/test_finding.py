"""A compute service's answer to the query which of its hosts have a machine of an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from bus.contracts.cell import FindMachines, FoundMachine
from compute_sim import finding
from compute_sim.domain.attempts import Entry, Phase
from compute_sim.driver import DriverUnavailable, Machine
from compute_sim.finding import Finder
from tests.unit.compute.test_agent import HOSTS, INSTANCES, Scripted, Service, destroy, spawn

OURS = "dddddddd-0000-4000-8000-000000000001"
THEIRS = "dddddddd-0000-4000-8000-000000000002"
TAKEN = {HOSTS[0]: {"VCPU": 2}}


class Marking(Scripted):
    """Its machines carry marks, and it knows what they take."""

    mark = OURS

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        listed = await super().list(hosts)
        return {
            host: [replace(one, deployment=self.mark, allocations=TAKEN) for one in machines]
            for host, machines in listed.items()
            if hosts is None or host in hosts
        }


def finder_of(service: Service) -> Finder:
    return Finder(service="s", driver=service.driver, records=service.records, survey=service.survey)


async def ask(service: Service, instance: int = 0) -> tuple[FoundMachine, ...]:
    question = FindMachines(service="s", deployment=OURS, instance_uuids=(INSTANCES[instance],))
    return (await finder_of(service).find(question)).machines


async def built() -> Service:
    service = Service(Marking())
    await service.agent.resume()
    service.agent.take([replace(spawn(0), deployment=OURS)])
    await service.rest()
    return service


async def test_a_machine_on_record_is_found_with_its_project_and_what_it_takes() -> None:
    service = await built()
    (one,) = await ask(service)
    assert one == FoundMachine(
        instance_uuid=INSTANCES[0],
        host_uuid=HOSTS[0],
        host=HOSTS[0][-4:],
        service="s",
        attempt=1,
        built=True,
        project_id=spawn(0).spec.project_id,
        allocations=TAKEN,
    )
    assert await ask(service, instance=1) == ()


async def test_one_that_is_being_built_is_found_and_one_that_is_ended_is_not() -> None:
    driver = Marking()
    driver.gate = asyncio.Event()
    service = Service(driver)
    await service.agent.resume()
    service.agent.take([replace(spawn(0), deployment=OURS)])
    (one,) = await ask(service)
    assert not one.built and one.attempt == 1
    service.agent.take([replace(destroy(0), deployment=OURS)])
    assert await ask(service) == ()
    driver.gate.set()
    await service.rest()
    assert await ask(service) == ()


async def test_one_that_is_not_on_record_is_found_by_its_mark() -> None:
    """Its journal is lost: then it is not known whose it is."""
    driver = Marking()
    driver.machines[HOSTS[1], INSTANCES[0]] = 3
    service = Service(driver)
    await service.agent.resume()
    (one,) = await ask(service)
    assert (one.host_uuid, one.attempt, one.project_id) == (HOSTS[1], 3, None)
    del driver.machines[HOSTS[1], INSTANCES[0]]
    await service.survey.running()
    assert await ask(service) == ()


@pytest.mark.parametrize("recorded", [True, False])
async def test_another_deployments_machine_is_left_out(recorded: bool) -> None:
    driver = Marking()
    driver.mark = THEIRS
    driver.machines[HOSTS[0], INSTANCES[0]] = 1
    service = Service(driver)
    if recorded:
        service.records.put((HOSTS[0], INSTANCES[0]), Entry(1, Phase.RUNNING, deployment=THEIRS))
    await service.agent.resume()
    assert await ask(service) == ()


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_thorough_query_finds_it_and_its_answer_names_the_hosts_that_were_looked_at(recorded: bool) -> None:
    driver = Marking()
    driver.mark = THEIRS
    driver.machines[HOSTS[0], INSTANCES[0]] = 1
    service = Service(driver)
    if recorded:
        service.records.put((HOSTS[0], INSTANCES[0]), Entry(1, Phase.RUNNING, deployment=THEIRS))
    question = FindMachines(service="s", deployment=OURS, instance_uuids=(INSTANCES[0],), thorough=True)
    assert (await finder_of(service).find(question)).hosts == ()
    await service.agent.resume()
    answer = await finder_of(service).find(question)
    assert [(one.host_uuid, one.foreign) for one in answer.machines] == [(HOSTS[0], True)]
    assert answer.hosts is not None and sorted(answer.hosts) == sorted(HOSTS) and not answer.more
    ours = await finder_of(service).find(replace(question, deployment=THEIRS))
    assert [one.foreign for one in ours.machines] == [False]
    assert (await finder_of(service).find(replace(question, thorough=False))).hosts is None


async def look(service: Service, *hosts: str, deployment: str = OURS) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """The machines that these hosts list, and the hosts that were looked at."""
    question = FindMachines(
        service="s", deployment=deployment, instance_uuids=(INSTANCES[0],), on_hosts=hosts or (HOSTS[0],)
    )
    answer = await finder_of(service).find(question)
    assert answer.hosts is not None
    return [(one.host_uuid, one.attempt) for one in answer.machines], answer.hosts


async def test_a_query_that_names_hosts_is_answered_by_what_they_list_and_not_by_the_record() -> None:
    service = await built()
    assert await look(service) == ([(HOSTS[0], 1)], (HOSTS[0],))
    assert await look(service, HOSTS[1]) == ([], (HOSTS[1],))
    assert await look(service, deployment=THEIRS) == ([], (HOSTS[0],))
    lost = service.driver.machines.pop((HOSTS[0], INSTANCES[0]))
    assert len(await ask(service)) == 1, "by its record it is there"
    assert await look(service) == ([], (HOSTS[0],))
    service.driver.machines[HOSTS[0], INSTANCES[0]] = lost + 1
    assert await look(service) == ([], (HOSTS[0],)), "another attempt than the one on record"


async def test_a_query_that_names_a_host_which_the_service_no_longer_has_does_not_count_it_as_looked_at() -> None:
    service = await built()
    gone = "20000000-0000-4000-8000-000000000001"
    service.records.put((gone, INSTANCES[0]), Entry(1, Phase.RUNNING, deployment=OURS))
    assert await look(service, gone) == ([], ())
    assert await look(service, gone, HOSTS[0]) == ([(HOSTS[0], 1)], (HOSTS[0],))


async def test_a_query_that_names_hosts_does_not_count_what_an_order_has_ended_or_what_is_not_complete() -> None:
    driver = Marking()
    driver.machines[HOSTS[0], INSTANCES[0]] = 1
    service = Service(driver)
    await service.agent.resume()
    assert await look(service) == ([(HOSTS[0], 1)], (HOSTS[0],)), "without a record its mark counts"
    for entry in (
        Entry(1, Phase.BUILDING, deployment=OURS),
        Entry(1, Phase.DESTROYING, fence=1, deployment=OURS),
        Entry(1, Phase.FAILED, code="instance.lost", deployment=OURS),
    ):
        service.records.put((HOSTS[0], INSTANCES[0]), entry)
        assert await look(service) == ([], (HOSTS[0],)), entry


async def test_item_16_the_hosts_that_were_looked_at_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 in one list took 48 ms of the conductor's loop to read, and 26 of this one to sort. A conductor of a
    version before gets them all, and each page has the machines of all hosts.
    """
    monkeypatch.setattr(finding, "MAX_LOOKED_AT_ONCE", 2)
    service = await built()
    more = [f"20000000-0000-4000-8000-{n:012d}" for n in range(5 - len(HOSTS))]
    service.survey.note_listed(dict.fromkeys(more, ()))
    question = FindMachines(service="s", deployment=OURS, instance_uuids=(INSTANCES[0],), thorough=True)
    assert len((await finder_of(service).find(question)).hosts or ()) == 5
    pages = [await finder_of(service).find(replace(question, hosts_after=after)) for after in (0, 2, 4, 6)]
    assert [(len(page.hosts or ()), page.more) for page in pages] == [(2, True), (2, True), (1, False), (0, False)]
    assert {one for page in pages for one in page.hosts or ()} == {*HOSTS, *more}
    assert all([one.host_uuid for one in page.machines] == [HOSTS[0]] for page in pages)


async def test_without_its_driver_a_service_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    service = await built()

    async def unavailable(hosts: object = None) -> None:
        raise DriverUnavailable("unavailable")

    monkeypatch.setattr(service.driver, "list", unavailable)
    with pytest.raises(DriverUnavailable):
        await ask(service)
