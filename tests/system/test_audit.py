"""Orphans planted by hand in placement, in a cell's record and on a host are found by an audit that watches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from berth.audit import facts as gathering
from berth.audit.facts import gather, rest
from berth.audit.findings import REPAIRABLE, AuditFinding, Confirmed
from berth.audit.invariants import check_invariants
from berth.audit.passes import watch
from berth.audit.repair import chosen, release_ended
from berth.bus_client import BuildClient
from berth.bus_client.actions import ActionClient
from berth.cli.claims.placement_audit import audited
from berth.config.settings import (
    AuditSettings,
    BusSettings,
    CellSettings,
    ComputeSettings,
    DatabaseSettings,
    Settings,
    UpSettings,
)
from berth.config.site import Site, process_name
from berth.up.in_one_process import LocalSystem, site
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionRequest
from bus.contracts.build import BuildQuery, BuildRequest
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectLogPage, ObjectLogQuery, ObjectsChange, ObjectsChanged
from bus.contracts.placement import (
    AggregateMembers,
    AggregateMembersSet,
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
    ReleaseResult,
)
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.tables import INSERT, columns, with_parameters
from compute_sim.config import SimulatedConfig
from compute_sim.fleet import SimulatedMachine
from scheduler_worker.config import SchedulerConfig
from tests.kit.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.asyncio(loop_scope="module")]

WAIT_S = 120.0
CELL = "cell1"
# The look under way when it was planted, and two that find it: 5 s at 1.6 s a look, the longest on a busy machine.
MOST_LOOKS = 3
RNG = random.Random(3)


class Watched:
    """A system of one process, and what an audit has found in it."""

    def __init__(self, place: Site, system: LocalSystem, client: BuildClient) -> None:
        self.place = place
        self.system = system
        self.client = client
        self.found: dict[tuple[str, str], AuditFinding] = {}
        self.confirmed = Confirmed()
        self.looks = 0

    async def run(self) -> None:
        async with aclosing(watch(self.place, every_s=0.2)) as stream:
            async for seen in stream:
                self.found, self.confirmed = dict(seen.confirmed.found), seen.confirmed
                self.looks += 1

    async def until(self, *keys: tuple[str, str], gone: bool = False) -> tuple[int, float]:
        """Wait until these are found, or gone. How many looks ended meanwhile, and how many seconds that took."""
        began_s, looks = self.place.clock.monotonic(), self.looks
        await until(lambda: all((key in self.found) is not gone for key in keys), WAIT_S)
        return self.looks - looks, self.place.clock.monotonic() - began_s

    async def two_looks(self) -> None:
        last = self.looks + 2
        await until(lambda: self.looks >= last, WAIT_S)

    @property
    def hosts(self) -> list[str]:
        """Of the only compute service."""
        (fleet,) = self.system.fleets.values()
        return [host.plan.uuid for host in fleet.hosts]


@asynccontextmanager
async def one_process(query_s: float = 0.5) -> AsyncIterator[tuple[Site, LocalSystem, BuildClient]]:
    """A system of one process, up, with a client. query_s: `action_query_s`; as often as a message is retried, then a
    build on a host of no known cell ends.
    """
    settings = Settings(
        bus=BusSettings(),
        cells={CELL: CellSettings()},
        database=DatabaseSettings(),
        up=UpSettings(nodes=0, computes_per_cell=1, schedulers=1, rest=False, web=False),
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=3)),
        scheduler=SchedulerConfig(action_query_s=query_s),
    )
    async with site(settings, directory=None) as place:
        system = LocalSystem(place)
        client = BuildClient(place.bus(process_name("test")), clock=place.clock, process=process_name("test"))
        try:
            await system.start()
            await client.open()
            yield place, system, client
        finally:
            await client.close()
            await system.in_process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched() -> AsyncIterator[Watched]:
    """One system for all tests but the last: each leaves nothing that an audit finds, but the one that plants it."""
    async with one_process() as (place, system, client):
        made = Watched(place, system, client)
        task = asyncio.create_task(made.run())
        yield made
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def claimed(watched: Watched, host: str) -> str:
    """A request that no host can take, of an instance that has a claim on this one. Once it has ended."""
    uuid = new_uuid(RNG)
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    claim = Claim(consumer=uuid, options=(option,), project_id="p")
    answer = await watched.client.bus.request(claim, ClaimResult, timeout_s=WAIT_S)
    assert answer.outcome is ClaimOutcome.CLAIMED
    await watched.client.boot([BuildRequest(instance_uuid=uuid, flavor="m1.tiny", project_id="p", host="no.such")])
    assert await watched.client.wait(WAIT_S)
    return uuid


async def test_a_claim_in_doubt_is_named_and_not_released(watched: Watched) -> None:
    """Its host is of no cell that is known, so no one can be asked whether a machine of it runs there."""
    bus, home = watched.client.bus, new_uuid(RNG)
    provider = ProviderReport(uuid=home, name="not_reported", inventories={"VCPU": Inventory(total=4, max_unit=4)})
    report = InventoryUpdate(reporter="not_reported", version=1, root_uuid=home, providers=(provider,))
    assert (await bus.request(report, InventoryResult, timeout_s=WAIT_S)).outcome == "applied"
    uuid = await claimed(watched, home)
    await watched.until(("in_doubt", uuid))
    found = watched.found["in_doubt", uuid]
    assert found.reason.startswith("claim.in_doubt: ") and "berth delete" in found.repair and not found.proof
    done = await audited(watched.place, repair=True, grace_s=0.0)
    assert (done["orphaned"], done["repaired"]) == ([], [])
    await bus.request(Release(consumer=uuid), ReleaseResult, timeout_s=WAIT_S)
    await watched.until(("in_doubt", uuid), gone=True)
    assert ("orphaned", uuid) not in watched.found
    gone = InventoryUpdate(reporter="not_reported", version=2, root_uuid=home)
    assert (await bus.request(gone, InventoryResult, timeout_s=WAIT_S)).outcome == "applied"


async def test_an_allocation_of_a_deleted_instance_is_released_by_itself_and_no_other(watched: Watched) -> None:
    """A consumer that no record knows has no proof: it is proposed. The log of changes has the repair and its proof."""
    build = BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p")
    await watched.client.boot([build])
    assert await watched.client.wait(WAIT_S)
    query = BuildQuery(instance_uuid=build.instance_uuid)
    await watched.client.delete((await watched.client.query(query, timeout_s=WAIT_S)).builds)
    assert await watched.client.wait(WAIT_S)
    home, ended, unknown = watched.hosts[0], build.instance_uuid, new_uuid(RNG)
    assert await rest(watched.place, timeout_s=WAIT_S)
    for consumer in (ended, unknown):
        option = ClaimOption(allocations={home: {"VCPU": 1}}, host=home)
        claim = Claim(consumer=consumer, attempt=7, options=(option,), project_id="p")
        answer = await watched.client.bus.request(claim, ClaimResult, timeout_s=WAIT_S)
        assert answer.outcome is ClaimOutcome.CLAIMED
    await watched.until(("orphaned", ended), ("orphaned", unknown))
    await watched.two_looks()
    proven = chosen(AuditSettings(orphaned="repair"), watched.confirmed.proven)
    assert [one.subject for one in proven] == [ended] and chosen(AuditSettings(), proven) == []
    done = await release_ended(watched.place, list(watched.confirmed.found.values()), actor="audit of ann")
    proof = f"deleted by the schedulers' record and in {CELL}, and no host runs it"
    assert done == [f"{ended}: released ({proof})"]
    await watched.until(("orphaned", ended), gone=True)
    assert ("orphaned", unknown) in watched.found
    query_log = ObjectLogQuery(kind=ObjectKind.REPAIR)
    log = await watched.client.bus.request(query_log, ObjectLogPage, timeout_s=WAIT_S)
    (entry,) = log.entries
    assert (entry.name, entry.actor, entry.reason) == (ended, "audit of ann", "audit.orphaned = repair")
    assert entry.before is not None and entry.before["proof"] == proof
    assert entry.before["held"] == {home: {"VCPU": 1}}
    assert await release_ended(watched.place, proven, actor="audit of ann") == [], "the proof is read again each time"
    # A decision afterwards is under the next revision: the repair has taken one.
    change = ObjectChange(kind=ObjectKind.QUOTA, name="q", body={"limits": {"VCPU": 1}})
    made = await watched.client.bus.request(
        ObjectsChange(changes=(change,), actor="ann"), ObjectsChanged, timeout_s=WAIT_S
    )
    assert made.revision == entry.revision + 1
    await watched.client.bus.request(Release(consumer=unknown), ReleaseResult, timeout_s=WAIT_S)
    await watched.until(("orphaned", unknown), gone=True)


async def test_what_is_under_way_is_not_judged_until_its_time_has_passed(watched: Watched) -> None:
    """A build of an hour, which began half an hour ago, and one of the default five minutes."""
    place, now = watched.place, watched.place.clock.time()
    long, stuck, begun = (
        Instance(uuid=new_uuid(RNG), state=State.BUILDING, attempt=1, since=since, build_timeout_s=timeout_s)
        for since, timeout_s in ((now - 1_800, 3_600.0), (now - 1_800, 300.0), (now, 300.0))
    )
    database = place.environment("test").database(f"cell_{CELL}", pool_size=1)
    async with database.raw() as connection:
        await connection.execute(with_parameters(INSERT), *columns([long, stuck, begun]))
    facts = await gather(place)
    (agreement,) = [one for one in check_invariants(facts) if one.name == "hosts_instances_allocations_agree"]
    async with database.raw() as connection:
        await connection.execute("DELETE FROM instances WHERE state = 'building'")
    await database.close()
    assert facts.under_way == {long.uuid, begun.uuid}
    assert agreement.examples == (f"{stuck.uuid}: not at rest",)


async def test_a_move_that_is_confirmed_while_the_facts_are_read_breaks_nothing(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records were read before the time to confirm ended, and the allocations after it."""
    place = watched.place
    build = BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p")
    await watched.client.boot([build])
    assert await watched.client.wait(WAIT_S)
    actions = ActionClient(watched.client.bus, clock=place.clock, process=process_name("mover"))
    await actions.open()

    async def move(kind: ActionKind) -> None:
        request = ActionRequest(request_id=new_uuid(RNG), instance_uuid=build.instance_uuid, project_id="p", kind=kind)
        await actions.ask(request, timeout_s=WAIT_S)
        assert await actions.wait(WAIT_S)
        assert await rest(place, timeout_s=WAIT_S)

    reads, running, judging = 0, gathering._running, asyncio.current_task()

    async def meanwhile(*arguments: Any) -> Any:
        nonlocal reads
        if asyncio.current_task() is judging:  # and not the audit that runs beside
            reads += 1
            if reads == 1:
                await move(ActionKind.CONFIRM)
        return await running(*arguments)

    try:
        await move(ActionKind.MIGRATE)
        monkeypatch.setattr(gathering, "_running", meanwhile)
        assert [one for one in check_invariants(await gather(place)) if not one.holds] == []
        assert reads == 2
    finally:
        await actions.close()


async def test_a_host_that_left_the_zone_of_a_request_by_placements_own_members_is_found(watched: Watched) -> None:
    """No scheduler can refuse that: placement's aggregates are changed through Placement's API (Nova bug 1907775)."""
    home = watched.hosts[0]
    here, bus = new_uuid(RNG), watched.client.bus
    body = {"uuid": here, "name": "west", "metadata": {"availability_zone": "west"}}
    change = ObjectChange(kind=ObjectKind.AGGREGATE, name="west", body=body)
    await bus.request(ObjectsChange(changes=(change,), actor="ann"), ObjectsChanged, timeout_s=WAIT_S)
    await bus.request(AggregateMembers(aggregate=here, joins=(home,)), AggregateMembersSet, timeout_s=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        while not any(host.zone for host in (await watched.client.hosts(limit=10, timeout_s=WAIT_S)).hosts):  # noqa: ASYNC110  (the replica)
            await asyncio.sleep(0.05)
    request = BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p", availability_zone="west")
    await watched.client.boot([request], retry_for_s=WAIT_S)
    assert await watched.client.wait(WAIT_S)
    await watched.two_looks()
    assert watched.found == {}
    await bus.request(AggregateMembers(aggregate=here, leaves=(home,)), AggregateMembersSet, timeout_s=WAIT_S)
    await watched.until(("outside_zone", request.instance_uuid))
    assert "requested in zone west" in watched.found["outside_zone", request.instance_uuid].reason
    await bus.request(AggregateMembers(aggregate=here, joins=(home,)), AggregateMembersSet, timeout_s=WAIT_S)
    await watched.until(("outside_zone", request.instance_uuid), gone=True)


async def test_what_is_planted_in_book_record_and_on_a_host_is_found_and_nothing_else(watched: Watched) -> None:
    """While builds come and go; and the repair of placement takes what it can put right."""
    builds = [BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p") for _ in range(12)]
    await watched.client.boot(builds)
    assert await watched.client.wait(WAIT_S)
    await watched.two_looks()
    assert watched.found == {}
    in_placement, on_record, on_host = (new_uuid(RNG) for _ in range(3))
    home, place = watched.hosts[0], watched.place
    claim = Claim(
        consumer=in_placement,
        attempt=1,
        options=(ClaimOption(allocations={home: {"VCPU": 1}}, host=home),),
        project_id="p",
    )
    answer = await watched.client.bus.request(claim, ClaimResult, timeout_s=WAIT_S)
    assert answer.outcome is ClaimOutcome.CLAIMED
    took = {"book": await watched.until(("orphaned", in_placement))}
    selection = Selection(host_uuid=home, host="h", service=watched.system.computes[0], allocations={home: {"VCPU": 1}})
    record = Instance(
        uuid=on_record,
        state=State.ACTIVE,
        spec=InstanceSpec(instance_uuid=on_record, project_id="p"),
        selections=(selection,),
        attempt=1,
        since=place.clock.time(),
    )
    database = place.environment("test").database(f"cell_{CELL}", pool_size=1)
    async with database.raw() as connection:
        await connection.execute(with_parameters(INSERT), *columns([record]))
    took["record"] = await watched.until(
        ("instance_without_machine", on_record), ("missing", on_record), ("unrequested", on_record)
    )
    (fleet,) = watched.system.fleets.values()
    fleet.put(home, SimulatedMachine(on_host, 1, {home: {"VCPU": 1}}))
    took["host"] = await watched.until(("machine_without_instance", on_host))
    print({where: (looks, round(seconds, 1)) for where, (looks, seconds) in took.items()})  # noqa: T201  (a figure of the run)
    assert max(looks for looks, _ in took.values()) <= MOST_LOOKS, took
    assert "not of this database" in watched.found["machine_without_instance", on_host].repair
    assert {subject for _, subject in watched.found} == {in_placement, on_record, on_host}
    assert watched.confirmed.lasting(REPAIRABLE, 0.0, place.clock.monotonic())
    done = await audited(place, repair=True, grace_s=0.0)
    assert f"{in_placement}: released" in done["repaired"] and f"{on_record}: claimed again" in done["repaired"]
    fleet.remove(home, on_host)
    async with database.raw() as connection:
        await connection.execute("DELETE FROM instances WHERE uuid = $1", on_record)
    await database.close()
    await watched.until(
        ("orphaned", in_placement), ("missing", on_record), ("machine_without_instance", on_host), gone=True
    )


async def test_item_28_a_service_that_died_with_its_conductor_is_named() -> None:
    """Its lease is still on record as up: the conductor that would have ended it is dead."""
    async with one_process(query_s=60.0) as (place, system, client):
        await client.boot([BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p")])
        assert await client.wait(WAIT_S)
        await system.in_process.kill(f"conductor-{CELL}")
        await system.kill_compute(f"{CELL}-c1")
        (down,) = (await gather(place)).down
    assert (down.cell, down.service, down.reason) == (CELL, f"{CELL}-c1", "it did not answer within 8 s")
