"""Answers of compute services about a record that has changed meanwhile, or of a database that was set back since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete, FindMachines, FoundMachine, MachinesFound
from bus.contracts.moves import CellMove, MoveKind
from cell_conductor.domain import events as e
from cell_conductor.domain.doubt import is_in_doubt, machine_query_of
from cell_conductor.domain.events import InstanceSearched, MachineQuery, SourceQuery
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.rules import LOST
from cell_conductor.domain.table import question_of, step
from cell_conductor.domain.way_back import answer_about
from cell_conductor.engine import Unsearched
from cell_conductor.handlers import RETRIES
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, claimed, request, to_resized
from tests.unit.conductor.records import IN_DOUBT, fenced, record
from tests.unit.conductor.scenario import PATIENCE, UUID, host, spawned
from tests.unit.conductor.test_doubts_table import OTHERS_SILENT, SOURCE, doubted, leaving, unsure
from tests.unit.conductor.test_search import claims_again, machine
from tests.unit.conductor.world import BUILD, Conductor, Services, insert, opened

S = State
THIRD = "d0000000-0000-4000-8000-000000000003"


def test_an_answer_to_another_query_resolves_nothing() -> None:
    """It was asked for a record from before its departure, beyond the limit of its doubt. An arrival replaced it, whose
    query waits for all services: the silent one had the machine, and its claim was released.
    """
    arrived, left = unsure(S.FINISHING), leaving(S.CHANGING, since=1.0)
    answered = replace(OTHERS_SILENT, query=machine_query_of(left))
    assert step(arrived, answered, IN_DOUBT).instance is arrived
    assert not is_in_doubt(step(arrived, replace(answered, query=machine_query_of(arrived)), IN_DOUBT).instance)
    assert step(arrived, replace(OTHERS_SILENT, incarnation=9), IN_DOUBT).instance is arrived


class Later(SystemClock):
    """A second later: a set-back is known by its time in ms."""

    def time(self) -> float:
        return super().time() + 1.0


async def set_back_again(conductor: Conductor, *, is_recognised: bool) -> None:
    """It is recognised by the sweep, or by the transaction that would apply the answer."""
    conductor.table.place += 1
    conductor.table.clock = Later()
    if is_recognised:
        await conductor.engine.sweep()


class Meanwhile(Services):
    """Something happens while the services are asked for the first time."""

    happens: Callable[[], Awaitable[None]] | None = None

    async def request_all(self, messages: Sequence[Any], *args: Any, **named: Any) -> Any:
        if self.happens is not None and any(isinstance(one, FindMachines) for one in messages):
            happens, self.happens = self.happens, None
            await happens()
        return await super().request_all(messages, *args, **named)


async def searched_meanwhile(services: Meanwhile, before: Instance, happens: Callable[[Conductor], Any]) -> Instance:
    conductor = await opened(services, ("s1",))
    conductor.down = ("s2",)
    await insert(conductor.store, replace(before, deadline=1.0))
    await conductor.engine.sweep()

    async def happen() -> None:
        await happens(conductor)

    services.happens = happen
    await conductor.engine.search()
    assert services.happens is None, "it was asked"
    known = await conductor.recorded()
    assert known is not None
    return known


async def test_a_record_is_replaced_by_an_arrival_while_the_services_are_asked() -> None:
    arrived = unsure(S.FINISHING)

    async def arrives(conductor: Conductor) -> None:
        async with conductor.store.transaction() as transaction:
            await transaction.lock([UUID])
            await transaction.update([arrived])

    left = leaving(S.CHANGING, since=1.0)
    assert is_in_doubt(await searched_meanwhile(Meanwhile(s1=()), left, arrives))


@pytest.mark.parametrize("is_recognised", [True, False])
async def test_an_answer_from_before_another_set_back_resolves_nothing(*, is_recognised: bool) -> None:
    happens = partial(set_back_again, is_recognised=is_recognised)
    before = doubted(S.FINISHING, since=1.0)
    assert is_in_doubt(await searched_meanwhile(Meanwhile(s1=(SOURCE,)), before, happens))


@pytest.mark.parametrize(
    "message",
    [
        BUILD,
        CellDelete(instance_uuid=UUID, project_id="p", begun=True),
        CellMove(request_id=MOVE, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP),
    ],
    ids=["build", "delete", "move"],
)
@pytest.mark.parametrize("is_recognised", [True, False])
async def test_a_request_is_not_taken_with_an_answer_from_before_another_set_back(
    message: Message, *, is_recognised: bool
) -> None:
    """It is searched for once more with its next delivery."""
    services = Meanwhile(s1=())
    conductor = await opened(services, ("s1",))
    if isinstance(message, CellMove):
        await insert(conductor.store, record(S.ACTIVE, since=1.0))
    conductor.table.place += 1
    await conductor.engine.sweep()
    before = await conductor.recorded()

    services.happens = partial(set_back_again, conductor, is_recognised=is_recognised)
    with pytest.raises(Unsearched):
        await conductor.request(message)
    assert await conductor.recorded() == before
    await conductor.request(message)
    assert await conductor.recorded() != before


async def test_a_build_that_was_begun_a_moment_ago_is_not_ended() -> None:
    """With its last delivery, as one service was silent. That answered a moment later, before the host had taken the
    command: the next one was to end what had just begun.
    """
    services = Services(s1=(), s2=())
    services.silent = {"s2"}
    conductor = Conductor(services, ("s1", "s2"))
    await conductor.take(attempt=RETRIES)
    services.silent = set()
    known = await conductor.recorded()
    assert known is not None and (known.state, is_in_doubt(known)) == (S.BUILDING, True)
    assert not conductor.engine._search_due.is_set()
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([replace(known, deadline=1.0)])
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    known = await conductor.recorded()
    assert known is not None and not is_in_doubt(known)


async def test_a_claim_is_not_released_by_a_search_of_before_a_set_back() -> None:
    services = Services(s1=(), s2=(replace(machine(), attempt=2),))
    conductor = await opened(services, ("s1", "s2"))
    await insert(
        conductor.store, replace(claims_again(SystemClock().time()), state=S.RELEASING, then=S.FAILED, code=LOST)
    )
    find = conductor.search.find_doubted

    async def late(queries: Mapping[str, MachineQuery]) -> dict[str, InstanceSearched]:
        found = await find(queries)
        assert found[UUID].machines
        conductor.table.place += 1
        assert await conductor.engine.sweep() == 0
        return found

    conductor.search.find_doubted = late  # type: ignore[method-assign]
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    assert services.of_placement == []


# --- Of the services that were asked about the source of a move.


def _fence(made: Scenario, n: int) -> SourceQuery:
    made.context = fenced(n)
    made.apply(e.HostFenced(at=220.0, host_uuid=host(n)))
    query = question_of(made.instance)
    assert isinstance(query, SourceQuery)
    return query


def _seen(query: SourceQuery) -> e.SourceAnswered:
    machine = FoundMachine(
        instance_uuid=UUID, host_uuid=query.host_uuid, host="h", service=query.service, attempt=query.attempt
    )
    answer = MachinesFound(machines=(machine,), hosts=(query.host_uuid,))
    return answer_about(UUID, query, [(query.service, answer)], 230.0, incarnation=0)


def test_the_answer_about_an_earlier_moves_source_undoes_no_later_move() -> None:
    """A conductor is paused with the answer; meanwhile the move is confirmed, and the next one's destination fenced."""
    made = to_resized()
    late = _seen(asked := _fence(made, 2))
    made.context = PATIENCE
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    made.apply(e.Destroyed(at=240.0, attempt=1, host_uuid=host(1), service="s1"))
    made.apply(e.Released(at=241.0, consumer=MOVE))
    assert made.instance.phase == (State.ACTIVE, None) and made.instance.move is None
    made.apply(request(MoveKind.MIGRATE, 3, request_id=THIRD))
    made.apply(claimed(attempt=(number := made.instance.next_attempt)))
    made.end(3, number)
    made.end(2, 2)
    made.apply(replace(spawned(attempt=number, n=3), at=250.0))
    assert _fence(made, 3) != asked
    made.apply(late)
    assert made.instance.phase == (State.RESIZED, None), "nobody has seen the source of this move"


def test_an_answer_from_before_the_destination_was_used_again_undoes_nothing() -> None:
    """The same move: fenced, the answer is held back, the fence lifted, the source's host reinstalled, fenced again."""
    made = to_resized(auto_confirm_s=1000.0)
    late = _seen(_fence(made, 2))
    made.context = PATIENCE
    made.apply(e.TimedOut(at=260.0))  # it is used again, and waits for nothing
    assert made.instance.move is not None and not made.instance.move.lost_code
    _fence(made, 2)
    made.apply(late)
    assert made.instance.state is State.RESIZED, "that its source is there was answered to another question"


def test_an_answer_that_takes_as_long_as_it_may_is_to_the_question_that_is_asked_then() -> None:
    """Each question was numbered anew before the services had answered it: the move waited for its source for ever."""
    made = to_resized()
    made.context = replace(fenced(2), answer_timeout_s=60.0)
    made.apply(e.HostFenced(at=220.0, host_uuid=host(2)))
    for at in (400.0, 600.0):
        made.apply(e.TimedOut(at=at))
        assert made.instance.deadline is not None and made.instance.deadline > at + 60.0
