"""What a recovering cell takes of the pages that schedulers send, and how it asks until it has a whole answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Handler, Outcome, Received
from bus.contracts.actions import ActionKind, Condition
from bus.contracts.base import encode
from bus.contracts.build import BuildState
from bus.contracts.catalogue import destination
from bus.contracts.operations import CellFence
from bus.contracts.recovery import MAX_ASKED, MAX_KNOWN, CellKnown, CellRecovering, KnownPlace, KnownRecord
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import Outgoing
from cell_conductor.recovery import known_reader
from cell_conductor.recovery.known_instance import contents_of
from cell_conductor.recovery.known_reader import KnownPart, KnownReader
from cell_conductor.rules.recovery_facts import NO_SERVICE, KnownInstance
from cell_conductor.state.instance import Power
from tests.kit.virtual_time import on_virtual_time
from tests.unit.cell_conductor.scenario import SPEC, selection


def uuid(n: int) -> str:
    return f"{n:08x}-0000-4000-8000-000000000000"


ASKS = CellRecovering(cell="c1", process="conductor-1", query_id=uuid(0xFFFF))


def page(query: CellRecovering, *known: int | KnownRecord, last: int | str = "", **more: Any) -> CellKnown:
    records = [one if isinstance(one, KnownRecord) else KnownRecord(instance_uuid=uuid(one)) for one in known]
    answered = {
        "cell": query.cell,
        "process": query.process,
        "query_id": query.query_id,
        "instances": tuple(records),
        "last": uuid(last) if isinstance(last, int) else last,
    }
    return CellKnown(**{**answered, **more})


def fence(n: int) -> CellFence:
    return CellFence(host_uuid=uuid(n), host=f"host-{n}", version=1)


# --- one page


@pytest.mark.parametrize(
    "other",
    [{"cell": "c2"}, {"process": "conductor-2"}, {"query_id": uuid(1)}],
    ids=lambda other: next(iter(other)),
)
def test_a_page_that_answers_another_question_is_not_taken(other: dict[str, Any]) -> None:
    assert contents_of(ASKS, page(ASKS, 1)) is not None
    assert contents_of(ASKS, replace(page(ASKS, 1), **other)) is None


@pytest.mark.parametrize(
    ("after", "last", "taken"),
    [("", "", [1, 2, 3, 4]), (1, "", [2, 3, 4]), ("", 3, [1, 2, 3]), (1, 3, [2, 3]), (9, "", [])],
)
def test_what_is_named_outside_of_the_range_is_not_taken(after: int | str, last: int | str, taken: list[int]) -> None:
    """Neither an instance nor a fence: the page proves nothing of them."""
    query = replace(ASKS, after=uuid(after) if isinstance(after, int) else "")
    found = contents_of(query, page(query, 1, 2, 3, 4, last=last, fences=tuple(map(fence, (1, 2, 3, 4)))))
    assert found is not None
    assert sorted(found.instances) == [uuid(n) for n in taken]
    assert [one.host_uuid for one in found.fences] == [uuid(n) for n in taken]


@pytest.mark.parametrize("last", [2, 5])
def test_a_page_that_does_not_go_on_is_not_taken(last: int) -> None:
    """It would be asked for without an end."""
    query = replace(ASKS, after=uuid(5))
    assert contents_of(query, page(query, last=last)) is None


def test_of_instances_that_are_asked_for_no_others_are_taken_and_none_is_missing() -> None:
    query = replace(ASKS, asked=(uuid(1), uuid(2), uuid(3)))
    whole = contents_of(query, page(query, 1, 2, 3, 7))
    assert whole is not None and sorted(whole.instances) == [uuid(1), uuid(2), uuid(3)]
    part = contents_of(query, page(query, 1, 2, last=2))
    assert part is not None and sorted(part.instances) == [uuid(1), uuid(2)]
    for wrong in (page(query, 1, 3), page(query, 2, last=2), page(query), page(query, 7, last=0)):
        assert contents_of(query, wrong) is None


@pytest.mark.parametrize("field", ["instances", "fences"])
def test_a_page_above_its_bound_is_no_page(field: str) -> None:
    made: list[Any] = [KnownRecord(instance_uuid=uuid(n)) if field == "instances" else fence(n) for n in range(501)]
    assert MAX_KNOWN == 500
    decode = msgspec.json.Decoder(CellKnown).decode
    assert decode(encode(page(ASKS, **{field: tuple(made[:-1])})))
    with pytest.raises(msgspec.ValidationError):
        decode(encode(page(ASKS, **{field: tuple(made)})))


A, S, F = BuildState.ACTIVE, BuildState.SCHEDULED, BuildState.FAILED
HERE: dict[str, Any] = {"state": A, "cell": "c1"}
EXISTS: dict[str, Any] = {"exists": True, "is_active": True, "power": Power.RUNNING}
NOWHERE: dict[str, Any] = {"exists": False, "is_active": False}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, NOWHERE),
        (HERE, EXISTS),
        ({**HERE, "condition": Condition.STOPPED}, {**EXISTS, "power": Power.STOPPED}),
        ({**HERE, "condition": Condition.OFFLOADED}, {**EXISTS, "power": Power.SHELVED}),
        ({**HERE, "condition": Condition.RESCUED}, {**EXISTS, "power": Power.RESCUED}),
        ({**HERE, "condition": Condition.MOVING}, {**EXISTS, "power": None}),
        ({**HERE, "condition": Condition.RESIZED}, {**EXISTS, "power": None}),
        ({"state": S, "cell": "c1"}, {"is_active": False}),
        ({"state": BuildState.BUILDING, "cell": "c2", "attempt": 4}, {"is_active": False, "is_in_other_cell": True}),
        ({"state": A, "cell": "c2"}, {**EXISTS, "is_in_other_cell": True}),
        ({"state": BuildState.DELETING, "cell": "c1"}, {"is_active": False, "is_deleted": True}),
        (
            {"state": BuildState.DELETED, "cell": "c2"},
            {"is_active": False, "is_deleted": True, "is_in_other_cell": True},
        ),
        ({"state": BuildState.DELETED}, {**NOWHERE, "is_deleted": True}),
        ({"state": BuildState.ACCEPTED}, NOWHERE),
        ({"state": F, "cell": "c1"}, NOWHERE),
        ({"state": BuildState.REFUSED}, NOWHERE),
    ],
)
def test_the_tops_word_as_reconcile_takes_it(record: dict[str, Any], expected: dict[str, Any]) -> None:
    found = contents_of(ASKS, page(ASKS, KnownRecord(instance_uuid=uuid(1), **record)))
    assert found is not None
    named = {"attempt": record.get("attempt", 0), "cell": record.get("cell", "")}
    assert found.instances[uuid(1)] == KnownInstance(**named, **expected)


def test_what_a_record_names_is_passed_on() -> None:
    at, source = selection(1), selection(2)
    places = (
        KnownPlace(host_uuid=at.host_uuid, host=at.host, service=at.service, allocations=at.allocations),
        KnownPlace(host_uuid=source.host_uuid, host=source.host, allocations=source.allocations, migration=uuid(9)),
    )
    more: dict[str, Any] = {"spec": SPEC, "request_id": uuid(9), "kind": ActionKind.MIGRATE, "project_id": "p"}
    record = KnownRecord(instance_uuid=uuid(1), places=places, attempt=7, sequence=12, **HERE, **more)
    found = contents_of(ASKS, page(ASKS, record))
    assert found is not None
    selections = (replace(at, spec_generations={}), replace(source, spec_generations={}, service=NO_SERVICE))
    expected = KnownInstance(**EXISTS, **more, selections=selections, attempt=7, sequence=12)
    expected = replace(expected, cell="c1", own_count=1, migrations=(uuid(9),))
    assert found.instances[uuid(1)] == expected


# --- until it is whole


class Top:
    """A scheduler that answers by a script, on a memory bus; and the conductor that asks."""

    def __init__(self, answer: Callable[[CellRecovering], CellKnown | None], seed: int = 1) -> None:
        self.asked: list[CellRecovering] = []
        self.broker = MemoryBroker(SystemClock())
        self._answer = answer
        self._seed = seed
        self._buses: list[Bus] = []

    async def bus(self, process: str) -> Bus:
        made = MemoryTransport(self.broker, process)
        bus = Bus("c1", made, process=process, clock=SystemClock(), rng=random.Random(f"{process} {self._seed}"))
        await bus.open()
        self._buses.append(bus)
        return bus

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            assert isinstance(received.message, CellRecovering)
            self.asked.append(received.message)
            if (answer := self._answer(received.message)) is not None:
                await self._buses[0].publish(answer)
        return [Done()] * len(batch)

    async def parts(
        self,
        own: Sequence[int] = (),
        between: Callable[[Bus], Awaitable[None]] | None = None,
        handler: Handler | None = None,
    ) -> list[KnownPart]:
        """The whole answer. between: called with a scheduler's bus, before it asks. handler: instead of this one."""
        scheduler, conductor = await self.bus("scheduler-1"), await self.bus("conductor-1")
        reader = KnownReader(conductor)
        consumers = [
            Consumer(scheduler, "scheduler.recoveries", handler or self, max_batch=1, concurrency=1, prefetch=1),
            Consumer(conductor, "conductor.known.{process}", reader.handle, max_batch=1, concurrency=1),
        ]
        for consumer in consumers:
            await consumer.start()
        running = [asyncio.create_task(consumer.run()) for consumer in consumers]

        async def mine(after: str, last: str, most: int) -> list[str]:
            named = sorted(map(uuid, own))
            return [one for one in named if one > after and (not last or one <= last)][:most]

        try:
            if between is not None:
                await between(scheduler)
            return [part async for part in reader.parts(mine)]
        finally:
            for consumer in consumers:
                await consumer.drain(1.0)
            await asyncio.gather(*running)
            for bus in self._buses:
                await bus.close()


def in_order(known: Sequence[int], size: int) -> Callable[[CellRecovering], CellKnown]:
    """Answers from these instances, so many a page; of those asked for each is told."""

    def answer(query: CellRecovering) -> CellKnown:
        if query.asked:
            records = [KnownRecord(instance_uuid=one) for one in sorted(query.asked)[:size]]
            rest = len(query.asked) > size
            return page(query, *records, last=records[-1].instance_uuid if rest else "")
        behind = [n for n in known if uuid(n) > query.after]
        return page(query, *behind[:size], last=behind[size - 1] if len(behind) > size else "")

    return answer


def told_of(parts: Sequence[KnownPart]) -> list[str]:
    return [one for part in parts for one in sorted(part.instances)]


@on_virtual_time
async def test_all_pages_make_one_answer_and_each_page_is_a_question_of_its_own() -> None:
    top = Top(in_order(range(1, 12), 4))
    parts = await top.parts()
    assert told_of(parts) == [uuid(n) for n in range(1, 12)]
    assert [(part.after, part.last) for part in parts] == [("", uuid(4)), (uuid(4), uuid(8)), (uuid(8), "")]
    assert [one.after for one in top.asked] == ["", uuid(4), uuid(8)]
    assert len({one.query_id for one in top.asked}) == 3
    assert {(one.cell, one.process) for one in top.asked} == {("c1", "conductor-1")}


@on_virtual_time
async def test_what_the_cell_has_and_the_page_lacks_is_asked_for_by_name() -> None:
    top = Top(in_order((2, 4, 6, 8), 2))
    parts = await top.parts(own=[*range(1, 10), 1000])
    assert told_of(parts) == [uuid(n) for n in (*range(1, 10), 1000)]
    asked = [one.asked for one in top.asked if one.asked]
    assert {name for names in asked for name in names} == {uuid(n) for n in (1, 3, 5, 7, 9, 1000)}
    assert asked[0] == (uuid(1), uuid(3))


@on_virtual_time
async def test_a_cell_of_which_the_top_knows_nothing_holds_no_more_than_a_part_at_a_time() -> None:
    parts = await Top(in_order((), 500)).parts(own=range(1, 4 * 2_000 + 10))
    assert told_of(parts) == [uuid(n) for n in range(1, 8_010)]
    assert max(len(part.instances) for part in parts) <= known_reader.MAX_OWN == 4 * MAX_ASKED


@on_virtual_time
async def test_a_lost_page_is_asked_for_again_under_the_same_question() -> None:
    """The scheduler died with it, or the page was dropped. Once it is answered, the pause begins anew."""
    lost = iter([True, True, False, True, False, False])
    whole = in_order((1, 2, 3), 1)
    top = Top(lambda query: None if next(lost) else whole(query))
    assert told_of(await top.parts()) == [uuid(1), uuid(2), uuid(3)]
    queries = [one.query_id for one in top.asked]
    assert [queries.count(one) for one in dict.fromkeys(queries)] == [3, 2, 1]


@on_virtual_time
async def test_a_page_of_a_former_recovery_is_not_taken() -> None:
    """It says less than this one asks for: what was committed in between."""
    whole, answered = in_order((1, 2, 3), 1), list[CellKnown]()

    def answer(query: CellRecovering) -> CellKnown:
        answered.append(whole(query))
        return answered[-1]

    async def repeat(bus: Bus) -> None:
        for kept in answered:
            await bus.publish(replace(kept, instances=(), last=""))

    first = await Top(answer).parts()
    again = Top(whole, seed=2)
    assert await again.parts(between=repeat) == first
    assert len(again.asked) == len(answered) == 3


@on_virtual_time
async def test_a_page_that_comes_twice_counts_once() -> None:
    whole = in_order((1, 2, 3), 1)
    top = Top(whole)

    async def twice(batch: Sequence[Received]) -> Sequence[Outcome]:
        await Top.__call__(top, batch)
        return await Top.__call__(top, batch)

    assert told_of(await top.parts(handler=twice)) == [uuid(1), uuid(2), uuid(3)]
    assert len({one.query_id for one in top.asked}) == 3 and len(top.asked) == 6


@on_virtual_time
async def test_what_nobody_can_read_stops_nothing() -> None:
    async def flood(bus: Bus) -> None:
        good = page(ASKS, 1)
        exchange, key = destination(good)
        too_many = tuple(KnownRecord(instance_uuid=uuid(n)) for n in range(MAX_KNOWN + 1))
        for body in (
            b"",
            b"{",
            encode(replace(good, instances=too_many)),
            encode(replace(good, process="conductor-2")),
        ):
            await bus.transport.publish(Outgoing(exchange=exchange, routing_key=key, body=body))

    assert told_of(await Top(in_order((1, 2), 1)).parts(between=flood)) == [uuid(1), uuid(2)]


@on_virtual_time
async def test_without_a_scheduler_it_waits_until_it_is_cancelled() -> None:
    top = Top(lambda _: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600):
            await top.parts()
    assert 20 < len(top.asked) < 40, "the pause is doubled"
