"""One suite for both stores of leases: one keeper at a time, and what a former one would record is refused."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import MoveKind
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Move, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.store.port import InstanceStore
from tests.unit.conductor.scenario import SPEC, selection

UP = Lease(service="a", epoch=7, interval_s=1.0, since=5.0)
SILENT = Lease(service="b", epoch=2**62, interval_s=0.5, state=LeaseState.SILENT, since=6.0, reason="no heartbeat")
LEFT = Lease(service="c", epoch=1, interval_s=1.0, state=LeaseState.STOPPED, since=4.0, reason="it was stopped")
LONG_S, OVER_S = 60.0, -1.0


async def test_one_conductor_keeps_the_leases_until_it_stops_announcing_it(instances: InstanceStore) -> None:
    leases = instances.leases
    term = await leases.keep("one", LONG_S, None)
    assert term is not None and await leases.keep("two", LONG_S, None) is None
    assert await leases.keep("one", OVER_S, term) == term, "the same keeper, the same term"
    newer = await leases.keep("two", LONG_S, None)
    assert newer is not None and newer > term
    assert await leases.keep("one", LONG_S, term) is None


async def test_a_record_of_another_term_of_the_same_name_begins_a_new_one(instances: InstanceStore) -> None:
    """Schedulers have had digests of that term, or of a later one, and would ignore those that begin at 1 again."""
    leases = instances.leases
    first = await leases.keep("one", LONG_S, None)
    assert first is not None
    restarted = await leases.keep("one", LONG_S, None)
    assert restarted is not None and restarted > first, "a former process of this name had the first"
    ahead = restarted + 3_600_000
    set_back = await leases.keep("one", LONG_S, ahead)
    assert set_back is not None and set_back > ahead, "the database was set back to before that term"
    assert await leases.keep("one", OVER_S, set_back) == set_back
    late = await leases.keep("one", LONG_S, set_back)
    assert late is not None and late > set_back, "another may have been the keeper since, and be on record no more"


async def test_what_a_former_keeper_records_is_refused(instances: InstanceStore) -> None:
    leases = instances.leases
    term = await leases.keep("one", OVER_S, None)
    assert term is not None and await leases.record(term, [SILENT, UP])
    assert await leases.leases() == [UP, SILENT]
    newer = await leases.keep("two", LONG_S, None)
    assert newer is not None and await leases.leases() == [UP, SILENT], "the next keeper starts from these"
    assert not await leases.record(term, [LEFT]) and await leases.purge(term, 100.0, 10) == []
    back = replace(UP, service="b")
    assert await leases.record(newer, [back, LEFT])
    assert await leases.leases() == [UP, back, LEFT]


async def test_only_services_that_are_down_for_long_are_purged(instances: InstanceStore) -> None:
    term = await instances.leases.keep("one", LONG_S, None)
    assert term is not None
    await instances.leases.record(term, [UP, SILENT, LEFT])
    assert await instances.leases.purge(term, 4.0, 10) == []
    assert await instances.leases.purge(term, 100.0, 1) == ["c"]
    assert await instances.leases.purge(term, 100.0, 10) == ["b"]
    assert await instances.leases.leases() == [UP]


def instance(number: int, service: str, state: State, then: State | None = None, *, position: int = 0) -> Instance:
    uuid = f"00000000-0000-4000-8000-{number:012d}"
    selections = tuple(replace(selection(n), service=service if n - 1 == position else "other") for n in (1, 2, 3))
    deadline = 9.0 if state is State.BUILDING else None
    return Instance(
        uuid=uuid,
        state=state,
        then=then,
        spec=SPEC,
        selections=selections,
        position=position,
        attempt=1,
        deadline=deadline,
    )


async def test_what_a_service_was_commanded_to_build_is_found_by_its_current_host(instances: InstanceStore) -> None:
    kept = [
        instance(1, "a", State.BUILDING),
        instance(2, "a", State.BUILDING, position=2),
        instance(3, "b", State.BUILDING),
        instance(4, "a", State.ACTIVE),
        instance(5, "a", State.DESTROYING, State.DELETED),
        instance(6, "c", State.BUILDING),
    ]
    async with instances.transaction() as transaction:
        await transaction.insert(kept)
    assert await instances.building_at(["b", "a", "nobody"]) == [
        (kept[0].uuid, "a"),
        (kept[1].uuid, "a"),
        (kept[2].uuid, "b"),
    ]
    assert await instances.building_at([]) == []


async def test_a_lease_is_deleted_though_another_is_the_keeper(instances: InstanceStore) -> None:
    term = await instances.leases.keep("one", LONG_S, None)
    assert term is not None
    await instances.leases.record(term, [UP, SILENT])
    assert await instances.leases.forget("b")
    assert not await instances.leases.forget("b")
    assert await instances.leases.leases() == [UP]


async def test_what_is_at_a_service_by_the_record_is_found_unless_its_host_is_fenced(instances: InstanceStore) -> None:
    kept = [
        instance(1, "a", State.ACTIVE),
        instance(2, "a", State.ACTIVE, position=1),
        instance(3, "b", State.ACTIVE),
        instance(4, "a", State.BUILDING),
        instance(5, "a", State.DELETED),
        instance(6, "a", State.RELEASING, State.OFFLOADED),
        instance(7, "a", State.CLAIMING, State.PREPARING),
        instance(8, "b", State.RESIZED),
        instance(9, "b", State.DEPARTED),
    ]
    source = replace(selection(9), service="a")
    move = Move(request_id=kept[7].uuid, kind=MoveKind.MIGRATE, source=source, spec=SPEC)
    kept[7:] = [replace(one, move=move) for one in kept[7:]]
    async with instances.transaction() as transaction:
        await transaction.insert(kept)
    assert await instances.at_service("a", 10) == [kept[at].uuid for at in (0, 1, 3, 7)]
    assert await instances.at_service("a", 1) == [kept[0].uuid]
    assert await instances.at_service("none", 10) == []
    for fenced in (selection(1), source):
        await instances.fences.put(Fence(host_uuid=fenced.host_uuid, host="h", version=1))
    assert await instances.at_service("a", 10) == [kept[1].uuid]
