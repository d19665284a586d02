"""Requests that are given up, and requests without news: each has one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from bus.bus import API
from bus.consuming.dead_letters import list_dead
from bus.contracts.actions import ActionKind, ActionPage, ActionQuery, ActionState, CellActionQuery, Condition
from bus.contracts.base import Message, encode
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState, DeleteRequest
from bus.contracts.catalogue import routing_key
from bus.contracts.queues import COMMANDS
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import Transport
from scheduler_worker.build.placer import Placer
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler_worker.steps import one_active
from tests.integration.scheduler_worker.world import World
from tests.kit.raw_amqp import raw_publisher
from tests.kit.waiting import PATIENCE_S, until

# --- Given up by the broker or by a scheduler, a request ends with one terminal event, and is not carried out.


pytestmark = pytest.mark.postgres
AT_ONCE = b"0"  # expires unless a consumer takes it at once


class Brokered(World):
    """A world whose API bus is a RabbitMQ."""

    amqp_url = ""
    prefix = ""

    def transport(self, bus: str) -> Transport:
        return RabbitTransport(self.amqp_url, name=API, prefix=self.prefix) if bus == API else super().transport(bus)

    async def expired(self, message: Message, *, key: str = "", headers: bytes = b"") -> None:
        """Publish what no scheduler takes before it expires."""
        async with raw_publisher(self.amqp_url) as raw:
            properties = {"expiration": AT_ONCE, **({"headers": headers} if headers else {})}
            await raw.publish(self.prefix + COMMANDS, key or routing_key(message), encode(message), **properties)

    def ends(self, uuid: str) -> list[BuildEvent]:
        return [event for event in self.events if event.instance_uuid == uuid and event.terminal]

    async def letters(self) -> list[str]:
        found = await list_dead(self.buses[API].transport)
        return [letter.code for letter in found]


@pytest.fixture
async def brokered(postgres_url: str, amqp: tuple[str, str]) -> AsyncIterator[Brokered]:
    """A scheduler that has declared its queues and is gone."""
    made = Brokered(postgres_url)
    made.amqp_url, made.prefix = amqp
    await made.open()
    try:
        await made.placement()
        await made.scheduler("before")
        await made.add_hosts("c1", 1)
        yield made
    finally:
        await made.close()


@pytest.mark.rabbitmq
async def test_a_request_that_expired_in_the_broker_ends_with_one_event(brokered: Brokered) -> None:
    await brokered.stop("before")
    request = brokered.request()
    await brokered.expired(request)
    await brokered.scheduler("after")
    failed = await brokered.ended(request.instance_uuid, BuildState.FAILED)
    assert (failed.code, failed.terminal) == ("broker.expired", True)
    other = brokered.request()
    await brokered.ask(other, request)  # sent again, it is the same request
    await brokered.ended(other.instance_uuid, BuildState.SCHEDULED)
    assert len(brokered.ends(request.instance_uuid)) == 1
    assert [build.spec.instance_uuid for _, build in brokered.builds] == [other.instance_uuid]
    assert await brokered.letters() == ["broker.expired"], "the letter stays, and there is one"


@pytest.mark.rabbitmq
async def test_a_delete_that_expired_in_the_broker_is_refused_and_deletes_nothing(brokered: Brokered) -> None:
    request = await brokered.scheduled()
    await brokered.stop("before")
    await brokered.expired(DeleteRequest(instance_uuid=request.instance_uuid, project_id="demo"))
    await brokered.scheduler("after")
    refused = await brokered.ended(request.instance_uuid, BuildState.REFUSED)
    assert (refused.code, refused.terminal, refused.sequence) == ("broker.expired", True, 0)
    await brokered.delete(request)  # asked again it is carried out
    await until(lambda: brokered.deletes)
    assert await brokered.letters() == ["broker.expired"]


async def test_a_request_that_a_scheduler_gave_up_ends_with_one_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.scheduler_and_hosts(1)
    bad, good = world.request(), world.request()
    place = Placer.place

    async def crashes(placer: Placer, asking: Sequence[object]) -> object:
        if any(getattr(one, "request", bad).instance_uuid == bad.instance_uuid for one in asking):
            raise RuntimeError("planted")
        return await place(placer, asking)  # type: ignore[arg-type]

    monkeypatch.setattr(Placer, "place", crashes)
    await world.ask(bad, good)
    failed = await world.ended(bad.instance_uuid, BuildState.FAILED)
    assert (failed.code, failed.terminal) == ("delivery.dead_lettered", True)
    assert "handler.crashed" in failed.reason
    await world.ended(good.instance_uuid, BuildState.SCHEDULED)
    assert [event.instance_uuid for event in world.events if event.terminal] == [bad.instance_uuid]


async def expires_with_deadline(world: World, message: Message) -> None:
    """A request of a client that waits for 10 s expires at the broker."""
    await world.expires(message, patience_s=10.0)


async def test_a_request_that_expired_with_its_deadline_has_no_event_and_its_repeat_is_built(world: World) -> None:
    """Its client knows that it may be carried out, and requests it again: it had failed by then."""
    await world.scheduler_and_hosts(1)
    request: BuildRequest = world.request()
    await expires_with_deadline(world, request)
    await world.until_expired_are_handled()
    assert await world.show(request.instance_uuid) is None
    await world.answer(request, BuildAccepted)
    await world.ended(request.instance_uuid, BuildState.SCHEDULED)


# --- Requests without news: their cell is queried; its answer ends them, or they are marked as silent.


QUERIES_SOON = SchedulerConfig(hosts_warmup_s=0.001, action_query_s=0.2)
SOON_S = 8.0


async def soon(condition) -> bool:  # type: ignore[no-untyped-def]
    try:
        await until(condition, SOON_S)
    except TimeoutError:
        return False
    return True


def queries_of(world: World, request: str) -> list[tuple[str, CellActionQuery]]:
    return [
        (cell, one) for cell, one in world.queries if isinstance(one, CellActionQuery) and one.request_id == request
    ]


async def test_a_cell_is_queried_and_its_answer_ends_the_request(world: World) -> None:
    built = await one_active(world, config=QUERIES_SOON)
    action = world.action(built, ActionKind.MIGRATE)
    await world.commanded(action)
    # A cell that was restored counts from lower numbers again than those that it has reported before.
    await world.action_announced("c1", action, ActionState.CLAIMING, 40, condition=Condition.MOVING)
    queried = await until(lambda: queries_of(world, action.request_id))
    cell, query = queried[0]
    assert (cell, query.instance_uuid, query.kind) == ("c1", built.instance_uuid, ActionKind.MIGRATE)
    await world.action_announced(
        "c1", action, ActionState.FAILED, 12, terminal=True, code="action.lost", condition=Condition.ACTIVE
    )
    end = await world.moved(action)
    assert (end.state, end.code) == (ActionState.FAILED, "action.lost")
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.under_way, record.condition) == (None, "active")


async def test_of_a_cell_that_does_not_answer_the_record_states_it(world: World) -> None:
    built = await one_active(world, config=QUERIES_SOON)
    action = world.action(built, ActionKind.STOP)
    await world.commanded(action)

    async def state() -> tuple[bool, str]:
        page = await world.answer(ActionQuery(request_id=action.request_id), ActionPage)
        return page.actions[0].terminal, page.actions[0].code

    async with asyncio.timeout(PATIENCE_S):
        while (await state())[1] == "":
            pass  # each turn waits for an answer
    assert await state() == (False, "cell.silent")
    record = await world.show(built.instance_uuid)
    assert record is not None and any(line.what == "stop waits" for line in record.timeline)
    await world.action_announced("c1", action, ActionState.DONE, 12, terminal=True, condition=Condition.STOPPED)
    assert (await world.moved(action)).state is ActionState.DONE
    assert await state() == (True, "")


@pytest.mark.parametrize("is_lost", [False, True], ids=["its machine runs", "its machine is gone"])
@pytest.mark.parametrize("repeats", [0, 1])
async def test_a_delete_that_its_cell_has_lost_is_carried_out(world: World, repeats: int, *, is_lost: bool) -> None:
    """The scripted cell has acknowledged it and reports nothing: its record is `active` again."""
    await world.scheduler_and_hosts(1, QUERIES_SOON)
    request = world.request()
    host = await world.active(request)
    await world.delete(request)
    await until(lambda: world.deletes)
    assert (await world.show(request.instance_uuid)).state is BuildState.DELETING  # type: ignore[union-attr]
    world.deletes.clear()
    for _ in range(repeats):
        await world.delete(request)
    # The report of a cell whose record of the instance was restored, under a higher number.
    state, more = (BuildState.FAILED, {"code": "instance.lost"}) if is_lost else (BuildState.ACTIVE, {})
    await world.announced("c1", request, state, 1_000_011, host=host, attempt=1, **more)
    reached = await soon(lambda: world.deletes or BuildState.DELETED in world.states(request.instance_uuid))
    record = await world.show(request.instance_uuid)
    assert record is not None
    assert reached, (
        f"{repeats} repeats: no delete has reached the cell in {SOON_S} s; on record: {record.state.value},"
        f" events: {world.states(request.instance_uuid)}"
    )


@pytest.mark.parametrize("state", [BuildState.SCHEDULED, BuildState.BUILDING])
@pytest.mark.parametrize("repeats", [0, 1])
async def test_a_build_that_its_cell_has_lost_has_an_end(world: World, state: BuildState, repeats: int) -> None:
    (host,) = await world.scheduler_and_hosts(1, QUERIES_SOON)
    request = await world.requested()
    await until(lambda: world.builds)
    if state is BuildState.BUILDING:
        await world.announced("c1", request, BuildState.BUILDING, 10, host="c1-0", attempt=1)
    await world.ended(request.instance_uuid, state)
    world.builds.clear()
    for _ in range(repeats):
        answer = await world.answer(request, BuildAccepted)
        assert answer.instance_uuid == request.instance_uuid

    def cares() -> object:
        """The cell has the build again or is queried about it, or it has an end."""
        return world.builds or world.queries or any(event.terminal for event in world.events)

    found = await soon(cares)
    record = await world.show(request.instance_uuid)
    assert record is not None
    assert found, (
        f"{repeats} repeats: nothing in {SOON_S} s; on record: {record.state.value}, host {host} holds"
        f" {(await world.used()).get(host)}; events: {world.states(request.instance_uuid)}"
    )
