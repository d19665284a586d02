"""The search for machines of doubted builds, and what it holds up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received, Retry
from bus.contracts.base import Message, Meta
from bus.contracts.cell import (
    CellBuildQuery,
    CellDelete,
    ComputeOutcome,
    ComputeResult,
    Destroy,
    FindMachines,
    FoundMachine,
    Running,
    ServicesDigest,
    Spawn,
)
from bus.contracts.moves import CellMove, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import ReleaseResult
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from bus.port import PublishRefused
from cell_conductor import engine
from cell_conductor.app import search_forever
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.breaker import Listings
from cell_conductor.domain.desires import in_text
from cell_conductor.domain.doubt import is_in_doubt
from cell_conductor.domain.events import Awaited, Claimed, InstanceEvent, MachineQuery
from cell_conductor.domain.instance import Instance, Phase, Power, State
from cell_conductor.domain.leases import LISTEN_BEATS, Keeper, Lease, LeaseState, LeaseTable
from cell_conductor.domain.report import is_over as is_proved_over
from cell_conductor.domain.rules import OUTCOME_UNKNOWN
from cell_conductor.handlers import RETRIES
from cell_conductor.lease_keeper import LeaseKeeper, pages_of
from cell_conductor.store.memory import MemoryInstances
from cell_conductor.store.safety import ADOPT, DESTROY, KEEP, DecidedMachine
from tests.unit.conductor.move_scenario import MOVE, OTHER
from tests.unit.conductor.records import moving
from tests.unit.conductor.scenario import SPEC, UUID, host, selection
from tests.unit.conductor.world import (
    BUILD,
    Conductor,
    Quiet,
    Services,
    beat,
    down,
    hosts_of,
    insert,
    listing,
    opened,
    opened_store,
    put,
    search_of,
)

# --- The cell's compute services are queried before a doubted build is begun; without their answers nothing is
# begun.


def machine() -> FoundMachine:
    return FoundMachine(
        instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s2", attempt=1, project_id=SPEC.project_id
    )


async def test_every_service_that_is_up_is_queried_and_the_machine_of_one_is_adopted() -> None:
    services = Services(s1=(), s2=(machine(),), s3=())
    conductor = Conductor(services, ("s3", "s1", "s2"))
    assert isinstance(await conductor.take(), Done)
    assert [(one.service, one.instance_uuids) for one in services.queried] == [(s, (UUID,)) for s in ("s1", "s2", "s3")]
    assert {one.deployment for one in services.queried} == {conductor.store.deployment}
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE) and not conductor.relay.sent


@pytest.mark.parametrize("up", [("s1", "s2"), None], ids=["one does not answer", "who is up is not known yet"])
async def test_nothing_is_begun_while_a_service_that_is_up_has_not_answered(up: Collection[str] | None) -> None:
    services = Services(s1=(), s2=(machine(),))
    services.silent = {"s2"}
    conductor = Conductor(services, up)
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    assert await conductor.recorded() is None and not conductor.relay.sent
    assert isinstance(await conductor.take(attempt=RETRIES), Done), "that wait is bounded"
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING and recorded.doubted


COPY = replace(machine(), service="s1")
LATER = replace(machine(), host_uuid=host(4), host="host-4", attempt=2, built=True, allocations={host(4): {"VCPU": 1}})


async def test_no_machine_is_adopted_while_a_service_has_not_answered_that_may_have_a_later_one() -> None:
    """What a first attempt had left was adopted, and the machine of the client, of a silent service, was not wanted."""
    services = Services(s1=(COPY,), s2=(LATER,))
    services.silent = {"s2"}
    conductor = Conductor(services, ("s1", "s2"))
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    assert await conductor.recorded() is None and not conductor.relay.sent
    services.silent = set()
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 2)


async def test_a_build_of_which_a_part_is_found_stays_in_doubt_after_its_last_delivery() -> None:
    """Its doubt has the limit of every other; nothing is released or claimed before."""
    services = Services(s1=(COPY,), s2=(LATER,))
    services.silent = {"s2"}
    conductor = Conductor(services, ("s1", "s2"))
    assert isinstance(await conductor.take(attempt=RETRIES), Done)
    await conductor.engine.search()
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.doubted and recorded.phase == (State.RELEASING, State.FAILED)
    assert not conductor.relay.sent and not services.of_placement
    services.silent = set()
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([replace(recorded, deadline=1.0)])
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 2)


@pytest.mark.parametrize("silent", [True, False])
async def test_a_query_of_a_build_adopts_nothing_while_a_service_has_not_answered(*, silent: bool) -> None:
    services = Services(s1=(COPY,), s2=(LATER,))
    services.silent = {"s2"} if silent else set()
    conductor = Conductor(services, ("s1", "s2"))
    assert isinstance(await conductor.take(CellBuildQuery(spec=SPEC, sequence=1)), Done)
    recorded = await conductor.recorded()
    assert (None if recorded is None else recorded.attempt) == (None if silent else 2)


async def test_a_delete_takes_what_is_found_with_its_last_delivery() -> None:
    """What it destroyed first was released with the claim of the machine that was still to be found."""
    services = Services(s1=(COPY,), s2=(LATER,))
    services.silent = {"s2"}
    conductor = Conductor(services, ("s1", "s2"))
    assert isinstance(await conductor.take(DELETE), Retry) and not conductor.relay.sent
    assert isinstance(await conductor.request(DELETE, attempt=RETRIES), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.state, recorded.host_uuid) == (State.DESTROYING, host(3))


async def test_it_is_begun_when_all_have_answered_that_they_have_nothing() -> None:
    conductor = Conductor(Services(s1=()), ("s1",))
    assert isinstance(await conductor.take(), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING
    assert (recorded.doubted, recorded.reused_from) == (False, 1)


UNSHELVE = CellMove(
    request_id=OTHER, instance_uuid=UUID, project_id=SPEC.project_id, kind=MoveKind.UNSHELVE, selections=(selection(2),)
)


def offloaded(since: float = 1.0) -> Instance:
    return Instance(
        uuid=UUID,
        state=State.OFFLOADED,
        spec=SPEC,
        selections=(selection(1),),
        newest=2,
        power=Power.SHELVED,
        since=since,
    )


async def set_back_with(services: Services, known: Instance, *up: str) -> Conductor:
    """A conductor whose database was set back to this record."""
    conductor = await opened(services, up)
    await insert(conductor.store, known)
    conductor.table.place += 1
    await conductor.engine.sweep()
    return conductor


async def test_an_instance_that_was_unshelved_since_the_backup_is_searched_for_before_another_machine_is_built() -> (
    None
):
    services = Services(s1=(), s2=(replace(machine(), attempt=3, built=True),))
    services.silent = {"s2"}
    conductor = await set_back_with(services, offloaded(), "s1", "s2")
    outcome = await conductor.request(UNSHELVE)
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered" and not conductor.relay.sent
    assert isinstance(await conductor.request(UNSHELVE, attempt=RETRIES), Done), "that wait is bounded"
    (refused,) = [one.message for one in conductor.relay.sent if isinstance(one, OutboxMessage)]
    assert isinstance(refused, MoveEvent) and (refused.state, refused.code) == (MoveState.REFUSED, "move.in_doubt")
    assert "s2" in refused.reason and "s1" not in refused.reason, "the operator is told which to bring back"
    services.silent = set()
    assert isinstance(await conductor.request(replace(UNSHELVE, request_id=MOVE), message_id="n"), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 3)


async def test_an_instance_that_no_service_has_is_unshelved_and_one_at_rest_since_is_not_searched_for() -> None:
    services = Services(s1=())
    for known, queried in ((offloaded(), 1), (offloaded(since=SystemClock().time() + 3600.0), 1)):
        conductor = await set_back_with(services, known, "s1")
        assert isinstance(await conductor.request(UNSHELVE), Done)
        recorded = await conductor.recorded()
        assert recorded is not None and recorded.phase == (State.CLAIMING, State.PREPARING)
        assert len(services.queried) == queried
    unknown = Conductor(services, ("s1",))
    await unknown.take(UNSHELVE)
    assert len(services.queried) == 1, "there is nothing that could be begun"


def at_rest() -> Instance:
    return replace(offloaded(), state=State.ACTIVE, power=Power.RUNNING, attempt=1)


STOP = CellMove(request_id=MOVE, instance_uuid=UUID, project_id=SPEC.project_id, kind=MoveKind.STOP)
OWN = replace(machine(), host_uuid=host(1), host="host-1", service="s1", built=True)


@pytest.mark.parametrize("up", [("s1", "s2"), ("s1",)], ids=["is up", "is down"])
async def test_its_own_machine_and_a_service_that_does_not_answer_show_that_there_is_a_later_one_or_none(
    up: tuple[str, ...],
) -> None:
    """The machine on record was changed while the later one, of a silent service, was the one that its client had."""
    services = Services(s1=(OWN,), s2=(replace(machine(), attempt=3, built=True),))
    services.silent = {"s2"}
    conductor = await set_back_with(services, at_rest(), *up)
    conductor.down = {"s2"} - set(up)
    outcome = await conductor.request(STOP)
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered" and not conductor.relay.sent
    services.silent, conductor.up, conductor.down = set(), ("s1", "s2"), ()
    assert isinstance(await conductor.request(STOP), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 3)


async def test_a_doubted_instance_is_searched_for_whether_the_database_was_set_back_or_not() -> None:
    """Its request waited for ever, and with it all that had come in the same batch."""
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    await insert(conductor.store, replace(at_rest(), doubted=True))
    assert isinstance(await conductor.request(STOP), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.CHANGING


async def test_a_request_goes_on_though_it_is_cached_as_doubted_and_another_conductor_found_it_certain() -> None:
    """The record decided that nothing was to be searched for, the cache refused it unsearched, and its batch waited
    without end. One record decides, the one that the request is taken by.
    """
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    doubted = replace(at_rest(), doubted=True)
    async with conductor.store.optimistic({UUID}) as cached:
        await cached.insert([doubted])
    another = MemoryInstances(conductor.table.session())
    await another.open()
    async with another.transaction() as transaction:
        await transaction.update([replace(doubted, doubted=False)])
    assert isinstance(await conductor.request(STOP), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.CHANGING


@pytest.mark.parametrize("why", ["forgotten", "fenced"])
async def test_a_service_that_is_down_need_not_answer_where_its_machines_are_known_to_be_off(why: str) -> None:
    services = Services(s1=(OWN,), s2=())
    services.silent = {"s2"}
    conductor = await set_back_with(services, at_rest(), "s1")
    conductor.down = {"s2"}
    if why == "forgotten":
        conductor.forgotten = {"s2"}
    else:
        conductor.fenced = {host(2)}
        await put(conductor.store, down("s2", 2, incarnation=conductor.store.set_back.incarnation))
    assert isinstance(await conductor.request(STOP), Done)


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param(down("s2", 2), id="recorded before the set-back: it may have had another host later"),
        pytest.param(down("s2", incarnation=1), id="no hosts on record"),
        pytest.param(down("s2", 2, 3, incarnation=1), id="one host is not fenced"),
        pytest.param(down("s2", 2, incarnation=1, epoch=0), id="of the process before"),
        pytest.param(down("s2", 2, incarnation=1, state=LeaseState.UP), id="up by then"),
    ],
)
async def test_a_service_that_is_down_is_waited_for_where_a_host_of_it_may_not_be_fenced(lease: Lease) -> None:
    services = Services(s1=(OWN,), s2=())
    conductor = await set_back_with(services, at_rest(), "s1")
    conductor.down, conductor.fenced = {"s2"}, {host(2)}
    incarnation = conductor.store.set_back.incarnation if lease.incarnation else 0
    await put(conductor.store, replace(lease, incarnation=incarnation))
    assert isinstance(await conductor.request(STOP), Retry)


async def test_a_lease_from_before_a_set_back_does_not_count_before_the_sweep_that_recognises_it() -> None:
    """A second restore, to when the service had listed one host: it had another since, whose machine was not asked for,
    and a second one was started.
    """
    services = Services(s1=(OWN,), s2=())
    conductor = await set_back_with(services, at_rest(), "s1")
    conductor.table.set_back_at -= 60.0
    await conductor.store.open()
    conductor.down, conductor.fenced = {"s2"}, {host(2)}
    await put(conductor.store, down("s2", 2, incarnation=conductor.store.set_back.incarnation))
    conductor.table.place += 1
    with pytest.raises(Transient, match="recognised"):
        await conductor.request(STOP)
    await conductor.engine.sweep()
    assert isinstance(await conductor.request(STOP), Retry)


@pytest.mark.parametrize("keeps", [True, False], ids=["it was the keeper", "another one was"])
async def test_a_conductor_that_is_restarted_does_not_wait_for_a_service_whose_only_host_is_fenced(
    *, keeps: bool
) -> None:
    """No report comes from a dead service, so that its hosts were known to no conductor that started later: what was
    in doubt waited for an operator's `berth services forget`.
    """
    services = Services(s1=(OWN,), s2=())
    first = await set_back_with(services, at_rest(), "s1")
    nothing: Any = None
    listings = Listings()
    listings.note(listing("s2", 2, pages=1, first_sequence=1))
    process = {"clock": SystemClock(), "config": ConductorConfig(), "cell": "c1", "process": "p"}
    keeper = LeaseKeeper(first.store, nothing, hosts_of=listings.all_of, **process)
    (page,) = pages_of({"s2": down("s2")})
    digest = ServicesDigest(cell="c1", term=1, number=1, down=page)
    await keeper.handle([Received(digest, Meta(id="m"), "c1", "conductor.leases")])
    await keeper._keep()
    if keeps:  # as it takes the office up again it has no listing, and what is on record stays
        first.table.lease_keeper = Keeper()
        again = LeaseKeeper(first.store, nothing, **process)
        await again.handle([Received(digest, Meta(id="m"), "c1", "conductor.leases")])
        await again._keep()
        assert again.is_keeper
    later = await opened(services, ("s1",), first.table)
    later.down, later.fenced, later.listed = {"s2"}, {host(2)}, set()
    assert isinstance(await later.request(STOP), Done)


async def test_no_service_is_queried_about_a_build_that_is_not_doubted() -> None:
    services = Services(s1=(machine(),))
    conductor = Conductor(services, ("s1",))
    assert isinstance(await conductor.take(set_back=False), Done)
    assert not services.queried
    later = Conductor(services, ("s1",))
    await later.take(replace(BUILD, requested_at=SystemClock().time() + 3600.0))
    assert not services.queried


@pytest.mark.parametrize("by_another", [False, True], ids=["before every sweep", "after another conductor's sweep"])
@pytest.mark.parametrize(
    ("message", "phase"),
    [
        (BUILD, (State.CLAIMING, State.ACTIVE)),
        (CellDelete(instance_uuid=UUID, project_id=SPEC.project_id), (State.DESTROYING, State.DELETED)),
    ],
    ids=["a build", "a delete"],
)
async def test_a_request_between_a_set_back_and_the_next_sweep_is_begun_only_after_a_search(
    message: Message, phase: Phase, *, by_another: bool
) -> None:
    """It was begun as a new one: a second machine, or a delete without an answer (builds-forgotten, seed 7)."""
    services = Services(s2=(machine(),))
    conductor = await opened(services, ("s2",))
    conductor.table.place += 1
    if by_another:
        other = MemoryInstances(conductor.table.session())
        await other.open()
        async with other.transaction() as transaction:
            await transaction.recognise()
    assert isinstance(await conductor.request(message), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == phase and services.queried


async def test_a_build_that_was_given_up_in_doubt_is_searched_for_when_it_is_requested_anew() -> None:
    """It was built a second time, and its machine, which its silent host had, destroyed."""
    services = Services(s2=(machine(),))
    conductor = await opened(services, ("s2",))
    known = {"spec": SPEC, "selections": (selection(3),), "attempt": 1, "code": "build.outcome_unknown"}
    await insert(conductor.store, Instance(uuid=UUID, state=State.FAILED, doubted=True, requested_at=0.5, **known))  # type: ignore[arg-type]
    build = replace(BUILD, requested_at=SystemClock().time() + 3600.0)
    assert isinstance(await conductor.take(build, set_back=False), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.host_uuid) == ((State.CLAIMING, State.ACTIVE), host(3))


async def test_a_request_that_is_taken_again_unsearched_holds_its_batch_and_records_nothing() -> None:
    """Its second search comes with the next delivery."""
    conductor = Conductor(Services(s2=(machine(),)), ("s2",))

    async def lost(incoming: Any, *_: Any) -> Any:
        return incoming, set()

    searched, conductor.requests._searched = conductor.requests._searched, lost  # type: ignore[method-assign]
    with pytest.raises(Transient) as raised:
        await conductor.take()
    assert raised.value.code == "cell.database_set_back"
    assert await conductor.recorded() is None and not conductor.relay.sent
    conductor.requests._searched = searched  # type: ignore[method-assign]
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE)


async def test_a_build_that_is_begun_beside_a_machine_in_quarantine_proves_nothing_about_it() -> None:
    """A later attempt of it, on the same host, proved the machine to be over."""
    services = Services(s1=(), s2=(machine(),))
    services.silent = {"s2"}
    conductor = await opened(services, ("s1", "s2"))
    await conductor.keep(3)
    build = replace(BUILD, requested_at=SystemClock().time() + 3600.0)
    assert isinstance(await conductor.take(build, set_back=False, attempt=RETRIES), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING
    assert recorded.doubted and recorded.reused_from == 1


async def test_a_request_whose_instance_has_a_machine_in_quarantine_is_doubted_whenever_it_was_sent() -> None:
    """A client that requests its build again, after a restore, has sent it since."""
    services = Services(s1=(replace(machine(), service="s1"),))
    conductor = await opened(services, ("s1",))
    await conductor.keep(3)
    await conductor.take(replace(BUILD, requested_at=SystemClock().time() + 3600.0), set_back=False)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE)


@pytest.mark.parametrize(
    "listed",
    [(), (replace(OWN, attempt=1),), (replace(machine(), host_uuid=host(4), service="s1"),)],
    ids=["nothing", "its own", "an earlier one"],
)
@pytest.mark.parametrize("phase", [(State.CLAIMING, State.BUILDING), (State.RELEASING, State.FAILED)], ids=in_text)
async def test_a_doubted_record_fails_over_or_ends_only_when_all_have_answered(
    phase: Phase, listed: tuple[FoundMachine, ...]
) -> None:
    """A record that was set back claimed an alternate, while the forgotten attempt 2 ran on a third host."""
    services = Services(s1=listed, s2=(replace(machine(), attempt=2),))
    conductor = await opened(services, ("s1", "s2"))
    over = replace(claims_again(SystemClock().time()), state=phase[0], then=phase[1])
    await insert(conductor.store, over)
    services.silent = {"s2"} if listed else {"s1", "s2"}
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    assert (await conductor.recorded() or over).phase == phase and services.of_placement == []
    services.silent = set()
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([over])
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 2)


def claims_again(since: float) -> Instance:
    """In doubt since then, and another host is to be claimed for it."""
    return Instance(
        uuid=UUID,
        state=State.CLAIMING,
        then=State.BUILDING,
        spec=SPEC,
        selections=BUILD.selections,
        attempt=1,
        consumer_generation=7,
        doubted=True,
        deadline=1.0,
        since=since,
    )


@pytest.mark.parametrize("state", [State.BUILDING, State.CLAIMING])
@pytest.mark.parametrize("silent", ["s1", "s2", "s3"], ids=["its own", "another", "one that is down"])
@pytest.mark.parametrize(("age_s", "is_over"), [(7200.0, True), (60.0, False)])
async def test_a_build_waits_for_no_service_beyond_the_limit_of_its_doubt(
    silent: str, age_s: float, *, is_over: bool, state: State
) -> None:
    """A host that answered late had an alternate claimed, while a service that was up had its machine; and one whose
    driver was unavailable for good was waited for without a limit.
    """
    services = Services(s1=(), s2=(), s3=())
    services.silent = {silent}
    conductor = Conductor(services, ("s1", "s2"))
    conductor.down = {"s3"}
    await conductor.store.open()
    before = claims_again(SystemClock().time() - age_s)
    before = replace(before, state=state, then=State.BUILDING if state is State.CLAIMING else None)
    await insert(conductor.store, before)
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    known = await conductor.recorded()
    assert known is not None and known.phase == ((State.RELEASING, State.FAILED) if is_over else before.phase)
    assert known.doubted and not services.of_placement


@pytest.mark.parametrize("unseen", [9, 2], ids=["another host", "its destination"])
@pytest.mark.parametrize(("age_s", "is_over"), [(7200.0, True), (60.0, False)])
async def test_a_move_waits_beyond_the_limit_of_its_doubt_for_its_own_hosts(
    age_s: float, unseen: int, *, is_over: bool
) -> None:
    """A host was dead when its compute service was restarted, and held every move in doubt of that service."""
    services = Services(s1=(OWN, replace(OWN, attempt=2, host_uuid=host(2))))
    services.hosts = tuple(one for one in services.hosts if one != host(unseen))
    conductor = await opened(services, ("s1",))
    conductor.listed.add(host(unseen))
    conductor.listed.update(services.hosts)
    before = moving(State.FINISHING, doubted=True, deadline=1.0, since=SystemClock().time() - age_s)
    await insert(conductor.store, before)
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    known = await conductor.recorded()
    assert known is not None and is_in_doubt(known) is not (is_over and unseen == 9)


@pytest.mark.parametrize("is_off", [False, True], ids=["one of its service's hosts", "its service's only host"])
@pytest.mark.parametrize(("age_s", "is_over"), [(7200.0, True), (60.0, False)])
async def test_a_fence_does_not_answer_for_a_build_in_doubt(age_s: float, *, is_over: bool, is_off: bool) -> None:
    """The build was over before the set-back, and its client's machine on a host that was fenced since: it was a loss,
    and built anew from its image.
    """
    services = Services(s1=(), s2=())
    services.hosts = tuple(one for one in services.hosts if one != host(1))
    conductor = await opened(services, ("s2",) if is_off else ("s1", "s2"))
    conductor.fenced = {host(1)}
    if is_off:
        conductor.down = {"s1"}
        await put(conductor.store, down("s1", 1, incarnation=conductor.store.set_back.incarnation))
    before = replace(claims_again(SystemClock().time() - age_s), state=State.BUILDING, then=None)
    await insert(conductor.store, before)
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    known = await conductor.recorded()
    assert known is not None and known.doubted
    assert known.phase == ((State.RELEASING, State.FAILED) if is_over else before.phase)
    assert not is_over or not is_proved_over(known, 1, host(1))


@pytest.mark.parametrize(
    ("code", "silent", "is_released"), [("x", "s2", False), ("x", "s3", True), (OUTCOME_UNKNOWN, "s2", True)]
)
async def test_beyond_that_limit_a_claim_is_released_by_what_waits_for_it(
    code: str, silent: str, *, is_released: bool
) -> None:
    """A client waits for the end of its build. An instance that was lost is one that a service which is up may have."""
    services = Services(s1=(), s2=(), s3=())
    services.silent = {silent}
    conductor = Conductor(services, ("s1", "s2"))
    conductor.down = {"s3"} if silent == "s3" else ()
    await conductor.store.open()
    over = replace(claims_again(SystemClock().time() - 7200.0), state=State.RELEASING, then=State.FAILED, code=code)
    await insert(conductor.store, over)
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    assert bool(services.of_placement) is is_released


async def test_another_set_back_begins_the_wait_for_services_that_are_down_anew() -> None:
    services = Services(s1=(), s3=())
    services.silent = {"s3"}
    conductor = Conductor(services, ("s1",))
    conductor.down = {"s3"}
    await conductor.store.open()
    await insert(conductor.store, claims_again(1.0))
    conductor.table.place += 1
    assert await conductor.engine.sweep() == 0, "it is recognised first"
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    assert services.of_placement == []


async def test_a_build_that_may_be_forgotten_waits_for_a_service_that_is_down() -> None:
    """Its machine was there, and a second one was built."""
    services = Services(s1=(), s3=(machine(),))
    services.silent = {"s3"}
    conductor = Conductor(services, ("s1",))
    conductor.down = {"s3"}
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    conductor.forgotten = {"s3"}
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING


DELETE = CellDelete(instance_uuid=UUID, project_id=SPEC.project_id)


@pytest.mark.parametrize("found", [(), (OWN,)], ids=["nothing is found", "another one is found"])
async def test_a_delete_releases_nothing_while_an_unexplained_machine_is_there(found: tuple[FoundMachine, ...]) -> None:
    """Its service was down: after a set-back the claim was released while the machine ran on."""
    services = Services(s1=found)
    conductor = Conductor(services, ("s1",))
    conductor.forgotten = {"s9"}
    await conductor.store.open()
    await conductor.keep(9)
    outcome = await conductor.take(DELETE)
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    assert isinstance(await conductor.request(DELETE, attempt=RETRIES), Done)
    assert await conductor.recorded() is None and not conductor.relay.sent and not services.of_placement
    await conductor.store.safety.delete(await conductor.store.safety.records())
    assert isinstance(await conductor.request(DELETE, message_id="n"), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is (State.DESTROYING if found else State.RELEASING)


async def test_an_unexplained_machine_that_its_host_has_is_deleted() -> None:
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    await conductor.keep(1)
    assert isinstance(await conductor.take(DELETE), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.DESTROYING, State.DELETED)


@pytest.mark.parametrize("found", [(), (OWN,)], ids=["its service does not answer", "it is found"])
async def test_a_delete_neither_waits_for_nor_destroys_a_machine_that_an_operator_keeps(
    found: tuple[FoundMachine, ...],
) -> None:
    """It held its instance's delete up for ever, or was destroyed with it."""
    conductor = await opened(Services(s1=found), ("s1",))
    await conductor.keep(1, KEEP)
    assert isinstance(await conductor.take(replace(DELETE, begun=True), set_back=False), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.RELEASING, State.DELETED)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_build_of_a_deleted_instance_is_a_delete_to_the_machines_that_are_found(is_kept: bool) -> None:
    """It destroyed the machine that an operator keeps, which the delete before it had left."""
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    assert isinstance(await conductor.take(DELETE, set_back=False), Done)
    await conductor.keep(1, KEEP if is_kept else "")
    assert isinstance(await conductor.request(BUILD, message_id="n"), Done)
    recorded = await conductor.recorded()
    assert recorded is not None
    assert recorded.phase == (State.RELEASING if is_kept else State.DESTROYING, State.DELETED)


async def test_a_build_of_a_deleted_instance_releases_nothing_while_an_unexplained_machine_is_there() -> None:
    conductor = await opened(Services(s1=()), ("s1",))
    assert isinstance(await conductor.take(DELETE, set_back=False), Done)
    await conductor.keep(1)
    outcome = await conductor.request(BUILD, message_id="n")
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.TOMBSTONE


async def test_a_service_that_is_down_is_missed_without_a_query() -> None:
    """Each delivery of a doubted build waited for the time of an answer, and its batch with it."""
    services = Services(s1=(), s3=())
    conductor = Conductor(services, ("s1",))
    conductor.down = {"s3"}
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    assert [one.service for one in services.queried] == ["s1"]


async def test_a_machine_that_an_operator_keeps_stays_when_its_instance_is_deleted() -> None:
    """The next report listed it, and its record, which was deleted by then, proved it to be over."""
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    await conductor.keep(1, KEEP)
    assert isinstance(await conductor.take(replace(DELETE, begun=True), set_back=False), Done)
    own = Running(instance_uuid=UUID, attempt=1, deployment=conductor.store.deployment)
    bus: Any = Quiet()
    hosts = hosts_of(conductor.engine, conductor.store, SystemClock(), ConductorConfig(), bus)
    conductor.relay.sent.clear()
    await hosts.hosts([Received(listing("s1", 1, runs=(own,)), Meta(id="r"), "c1", "conductor.hosts.p")])
    assert not conductor.relay.sent
    (record,) = await conductor.store.safety.records()
    assert (record.place, record.verdict) == ((host(1), UUID), KEEP)
    await conductor.store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 3.0)
    await hosts.hosts([Received(listing("s1", 1, runs=(own,), sequence=2), Meta(id="s"), "c1", "conductor.hosts.p")])
    assert [type(one.message) for one in conductor.relay.sent if isinstance(one, OutboxMessage)] == [Destroy]


@pytest.mark.parametrize("outcome", [ComputeOutcome.ACTIVE, ComputeOutcome.FAILED])
async def test_a_machine_that_an_operator_keeps_stays_when_its_host_answers_late(outcome: ComputeOutcome) -> None:
    """It was not complete yet: the result of its build was the proof, and no report was asked."""
    conductor = await opened(Services(s1=(replace(OWN, built=False),)), ("s1",))
    await conductor.keep(1, KEEP)
    assert isinstance(await conductor.take(replace(DELETE, begun=True), set_back=False), Done)
    conductor.relay.sent.clear()
    late = ComputeResult(instance_uuid=UUID, attempt=1, host_uuid=host(1), service="s1", outcome=outcome)
    await conductor.requests.results([Received(late, Meta(id="r"), "c1", "conductor.results")])
    assert not conductor.relay.sent
    await conductor.store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 3.0)
    await conductor.requests.results([Received(late, Meta(id="s"), "c1", "conductor.results")])
    assert [type(one.message) for one in conductor.relay.sent if isinstance(one, OutboxMessage)] == [Destroy]


@pytest.mark.parametrize("n", [1, 2], ids=["its first host", "its alternate"])
async def test_no_build_leads_to_a_host_that_has_a_machine_which_an_operator_keeps(n: int) -> None:
    services = Services()
    conductor = await opened(services, ())
    await conductor.keep(n, KEEP)
    build = replace(BUILD, attempt=2)
    assert isinstance(await conductor.take(build, set_back=False, attempt=RETRIES), Done)
    if n == 2:
        failed = ComputeResult(
            instance_uuid=UUID, attempt=2, host_uuid=host(1), service="s1", outcome=ComputeOutcome.FAILED
        )
        await conductor.requests.results([Received(failed, Meta(id="r"), "c1", "conductor.results")])
        granted = Claimed(at=2.0, attempt=3, option=0, consumer_generation=9)
        await conductor.engine.take([InstanceEvent(UUID, granted)], source="placement")
    recorded = await conductor.recorded()
    assert recorded is not None
    expected = ((State.CLAIMING, State.BUILDING), ["host-2"]) if n == 1 else ((State.RELEASING, State.FAILED), [])
    assert (recorded.phase, [one.host for one in recorded.alternates]) == expected
    codes = [one.code for one in recorded.history if one.host == f"host-{n}"]
    assert codes == ["host.machine_kept"]
    started = [one.message for one in conductor.relay.sent if isinstance(one, OutboxMessage)]
    assert host(n) not in {one.host_uuid for one in started if isinstance(one, Spawn)}


async def test_the_build_of_a_machine_that_an_operator_keeps_is_repeated_on_its_host() -> None:
    """Its host has that attempt, and only answers."""
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    await conductor.keep(1, KEEP)
    assert isinstance(await conductor.take(set_back=False), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.state, recorded.attempt) == (State.BUILDING, 1)


@pytest.mark.parametrize("word", [ADOPT, KEEP])
async def test_a_machine_is_given_to_its_instance_by_the_word_that_stands_when_it_is_searched_for(word: str) -> None:
    """The word that its last report was read with was carried out, though it was another by then."""
    conductor = await opened(Services(s1=(), s2=(machine(),)), ("s1", "s2"))
    await conductor.keep(3, ADOPT)
    up = Instance(uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=2, reused_from=1)
    await insert(conductor.store, up)
    own = Running(instance_uuid=UUID, attempt=1, deployment=conductor.store.deployment)
    bus: Any = Quiet()
    hosts = hosts_of(conductor.engine, conductor.store, SystemClock(), ConductorConfig(), bus)
    await hosts.hosts([Received(listing("s2", 3, runs=(own,)), Meta(id="r"), "c1", "conductor.hosts.p")])
    await conductor.store.safety.decide([DecidedMachine(UUID)], word, "ann", 3.0)
    await conductor.engine.search()
    recorded = await conductor.recorded()
    expected = (State.CLAIMING, State.ACTIVE) if word == ADOPT else (State.ACTIVE, None)
    assert recorded is not None and recorded.phase == expected


async def test_a_report_of_a_machine_whose_delete_is_under_way_begins_no_transaction() -> None:
    """Each page of a drain paid for one, to ask whether an operator keeps the machine."""
    conductor = await opened(Services(), ())
    leaving = Instance(
        uuid=UUID, state=State.DESTROYING, then=State.DELETED, spec=SPEC, selections=(selection(1),), attempt=1
    )
    await insert(conductor.store, leaving)
    begun, begin = list[None](), conductor.store.transaction

    def counted() -> Any:
        begun.append(None)
        return begin()

    conductor.store.transaction = counted  # type: ignore[method-assign]
    own = Running(instance_uuid=UUID, attempt=1, deployment=conductor.store.deployment)
    bus: Any = Quiet()
    hosts = hosts_of(conductor.engine, conductor.store, SystemClock(), ConductorConfig(), bus)
    await hosts.hosts([Received(listing("s1", 1, runs=(own,)), Meta(id="r"), "c1", "conductor.hosts.p")])
    assert not begun


async def test_a_report_to_a_conductor_that_was_cut_off_destroys_nothing_that_an_operator_keeps() -> None:
    """It had not seen the machine come into quarantine, and by its deleted record it was over."""
    conductor = await opened(Services(s1=(OWN,)), ("s1",))
    other = await opened(Services(s1=()), ("s1",), table=conductor.table)
    bus: Any = Quiet()
    hosts = hosts_of(other.engine, other.store, SystemClock(), ConductorConfig(), bus)
    await hosts.hosts([Received(listing("s1", 1), Meta(id="r"), "c1", "conductor.hosts.p")])
    await conductor.keep(1, KEEP)
    assert isinstance(await conductor.take(replace(DELETE, begun=True), set_back=False), Done)
    own = Running(instance_uuid=UUID, attempt=1, deployment=conductor.store.deployment)
    for sequence in (2, 3):
        report = listing("s1", 1, runs=(own,), sequence=sequence)
        await hosts.hosts([Received(report, Meta(id=str(sequence)), "c1", "conductor.hosts.p")])
        assert not other.relay.sent
        (record,) = await conductor.store.safety.records()
        assert (record.place, record.verdict) == ((host(1), UUID), KEEP)


def test_who_is_up_is_not_known_before_a_heartbeat_of_each_was_due() -> None:
    table = LeaseTable(missed_heartbeats=5)
    table.adopt_record([])
    table.advance_clock(0.0)
    assert table.up is None
    table.renew(beat("s1", 1, 1, interval_s=1.0), at=0.0)
    assert table.up is None
    table.advance_clock(LISTEN_BEATS * 1.0)
    table.renew(beat("s2", 1, 1, interval_s=1.0), at=0.0)
    table.renew(beat("s3", 1, 1, interval_s=1.0, stopping=True), at=0.0)
    assert set(table.up or ()) == {"s1", "s2"}


async def test_item_16_the_hosts_that_were_looked_at_are_read_in_pages() -> None:
    """Of each service on their own; a machine that every page names is one."""
    services = Services(s1=(machine(),), s2=())
    services.page = 4
    conductor = await opened(services, ("s1", "s2"))
    searched = await conductor.search.find((UUID,), {"s1", "s2"}, thorough=True)
    assert [(one.service, one.hosts_after) for one in services.queried] == [
        (service, after) for after in (0, 4, 8) for service in ("s1", "s2")
    ]
    assert searched.hosts == set(services.hosts or ()) and not searched.missing
    assert searched.of(UUID) == (machine(),)


async def test_a_service_without_all_of_its_pages_has_not_answered() -> None:
    services = Services(s1=())
    services.page = 0
    conductor = await opened(services, ("s1",))
    assert (await conductor.search.find((UUID,), {"s1"}, thorough=True)).missing == ("s1",)
    assert len(services.queried) == 1


# --- The search for machines that a database which was set back may have forgotten holds up nothing else.


# It fails in doubt, once all services have answered.
ENDS = Instance(
    uuid=UUID,
    state=State.RELEASING,
    then=State.FAILED,
    spec=SPEC,
    selections=BUILD.selections,
    attempt=1,
    doubted=True,
    since=1.0,
)


async def conductor_of(services: Services, *instances: Instance) -> Conductor:
    conductor = await opened(services, ("s1",))
    await insert(conductor.store, *[replace(one, deadline=1.0) for one in instances])
    return conductor


class Silent(Services):
    """A service that is up takes no queries; placement answers at once."""

    def __init__(self) -> None:
        super().__init__(s1=())
        self.under_way = 0
        self.most = 0
        self.released: list[str] = []
        self.has_begun, self.answers, self.all_released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        if not all(isinstance(one, FindMachines) for one in messages):
            self.released += [one.consumer for one in messages]
            if len(self.released) == 3:
                self.all_released.set()
            return [ReleaseResult(outcome="released") for _ in messages]
        self.under_way += 1
        self.has_begun.set()
        self.most = max(self.most, self.under_way)
        await self.answers.wait()
        self.under_way -= 1
        return await super().request_all(messages)


async def test_a_service_that_does_not_answer_holds_up_no_other_instance() -> None:
    """Each sweep with such a move waited for it, 10 of each 15 s."""
    first, second = (replace(ENDS, uuid=f"{UUID[:-1]}{n}") for n in (7, 8))
    conductor = await conductor_of(services := Silent(), first, replace(first, uuid=OTHER, doubted=False))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        searching = group.create_task(search_forever(conductor.engine, SystemClock()))
        await conductor.engine.sweep()
        assert services.released == [OTHER]
        await services.has_begun.wait()
        await insert(conductor.store, replace(second, deadline=1.0))
        await conductor.engine.sweep()
        for _ in range(100):
            await asyncio.sleep(0)
        assert (services.most, services.released) == (1, [OTHER])
        services.answers.set()
        await services.all_released.wait()
        searching.cancel()
    assert services.most == 1


async def test_what_has_changed_during_the_search_is_not_requested_any_more() -> None:
    conductor = await conductor_of(services := Silent(), ENDS)
    await conductor.engine.sweep()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(conductor.engine.search())
        await services.has_begun.wait()
        async with conductor.store.transaction() as transaction:
            (now,) = (await transaction.lock([UUID])).values()
            await transaction.update([replace(now, newest=now.newest + 5)])
        services.answers.set()
    assert services.released == []


async def test_a_bounded_number_of_instances_waits_for_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_UNSEARCHED", 2)
    three = [replace(ENDS, uuid=f"{UUID[:-1]}{n}") for n in range(3)]
    conductor = await conductor_of(services := Silent(), *three)
    await conductor.engine.sweep()
    services.answers.set()
    await conductor.engine.search()
    assert [len(one.instance_uuids) for one in services.queried] == [2] and len(services.released) == 2


# --- What is asked of placement by way of the schedulers, of instances that leave for another cell.


class Full(Services):
    """The queue of the schedulers is full; placement releases at once."""

    def __init__(self) -> None:
        super().__init__()
        self.published = 0

    async def publish_all(self, messages: Sequence[Any], *_: Any) -> None:
        self.published += len(messages)
        raise PublishRefused("the queue is full")

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        return [ReleaseResult(outcome="released") for _ in messages]


# --- Have all answered that have to? One that was not asked is not one that has answered.


class _Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = SystemClock().time()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


async def _started(store: Any) -> LeaseKeeper:
    """It has heard s1 for long enough, and no digest: the former keeper's term lasts still, and it is gone."""
    clock = _Clock()
    keeper = LeaseKeeper(
        store, cast(Bus, Quiet()), clock=cast(Any, clock), config=ConductorConfig(), cell="c1", process="started"
    )
    for number in range(1, 5):
        clock.now += 1.0
        message = beat("s1", 1, number, interval_s=1.0)
        await keeper.handle([Received(message, Meta(id=str(number)), "c1", "conductor.leases")])
    await keeper._keep()
    assert not keeper.is_keeper
    return keeper


async def test_no_machine_is_searched_for_before_it_is_known_which_services_are_down() -> None:
    """Within the term of a keeper that has ended, a conductor that has just started searched without the service that
    was down, and began the build once more.
    """
    there = FoundMachine(instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s3", attempt=1, project_id="p")
    services = Services(s1=(), s3=(there,))
    services.silent = {"s3"}
    conductor = Conductor(services, None)
    await conductor.store.open()
    await put(conductor.store, down("s3"))
    keeper = await _started(conductor.store)
    conductor.up, conductor.down = keeper.up(), keeper.down()
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and not conductor.relay.sent
    assert await conductor.recorded() is None


async def test_a_service_that_the_record_names_and_that_was_not_asked_has_not_answered() -> None:
    """The source of a move in doubt has to answer, without a limit."""
    store, services, listings = await opened_store(), Services(s1=()), Listings()
    listings.note(listing("s1", 1, pages=1, first_sequence=1))
    search = search_of(
        store,
        services,
        clock=SystemClock(),
        config=ConductorConfig(),
        up=lambda: ("s1",),
        listings=listings,
        forgotten=frozenset,
    )
    query = MachineQuery(SystemClock().time(), Awaited.OF_PLACES, (("s1", host(1)), ("s3", host(30))))
    assert not await search.find_doubted({UUID: query})
