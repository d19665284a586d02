"""The shadow beside a stock scheduler that answers as it is told: the difference, and that nothing is claimed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from bus.contracts.cell import Selection
from bus.faults import DatabaseUnavailable
from nova_scheduler.decide.placer_requests import PlacerRequests
from nova_scheduler.decide.select_destinations import Destinations
from nova_scheduler.decide.selection import primitive
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.stock.comparison import MAX_IN_FLIGHT, AnswerComparison
from nova_scheduler.stock.forwarder import ForwardFailed
from nova_scheduler.stock.shadow import GrantedClaims, ShadowingForwarder, UpstreamDecides
from nova_scheduler.wire.envelope import (
    Call,
    RemoteFault,
    encode_failure,
    encode_result,
    no_valid_host,
    unsupported_version,
)
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.placer import Placer
from tests.kit.waiting import until
from tests.unit.nova_scheduler.world import CELLS, PLENTY, Cloud, group, request_spec

VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(40)]
ROOM, NONE = {"VCPU": 1, "MEMORY_MB": 65536, "DISK_GB": 1000}, no_valid_host("stock has none")


class Stock:
    """Takes calls, and answers once it is told."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def forward(self, call: Call) -> None:
        self.taken.append(call.method)

    def abandon(self) -> None: ...

    async def call(self, call: Call, reason: str, acknowledge_first: Callable[[], Awaitable[None]]) -> bytes:
        await acknowledge_first()
        self.taken.append(reason)
        return await self.answer


class World:
    """A cloud, a stock scheduler, and the shadow between them."""

    def __init__(self, here: Cloud) -> None:
        self.cloud, self.stock = here, Stock()
        claims = GrantedClaims(here.claims)
        placer = Placer(
            claims, ClaimOwnership(claims, here.table.last_cell_of, here.no_runs), here.selector, here,
            clock=here.clock, rng=random.Random(5), config=here.config,
        )  # fmt: skip
        self.destinations = Destinations(
            placer,
            here.selector,
            here.facts,
            here,
            here,
            requests=PlacerRequests(here.selector, here.facts, here.nova),
            configure=lambda: None,
            notifier=here,
            clock=here.clock,
            in_shadow=True,
        )
        self.made = 0
        self.comparison = AnswerComparison(self, here.replica, here.clock)
        self.relay = ShadowingForwarder(self.comparison, self.stock, here.clock)

    # --- what decides

    async def call(self, call: Call) -> object:
        try:
            return await self.destinations.call(call)
        finally:
            self.made += 1

    async def broken_rule(self, call: Call, hosts: Sequence[tuple[str, str]]) -> str:
        return await self.destinations.broken_rule(call, hosts)

    # --- what the test does

    def answered(self, *hosts: int | RemoteFault) -> bytes:
        """What the stock scheduler answers: a host of each instance."""
        (first, *_) = hosts
        if isinstance(first, RemoteFault):
            return encode_failure("m", "u", first)
        nodes = [self.cloud.facts.nodes[self.cloud.uuids[at]] for at in hosts if isinstance(at, int)]
        chosen = [Selection(host_uuid=one.uuid, host=one.nodename, service=one.host, allocations={}) for one in nodes]
        return encode_result("m", "u", [[primitive(one, cell=CELLS[0], zone="nova")] for one in chosen])

    async def told(self, body: bytes, *instances: str, **spec: Any) -> dict[str, int]:
        """Send one call, have it answered; what is counted."""
        settled: list[bool] = []

        async def acknowledge_first() -> None:
            settled.append(True)

        asking = asyncio.create_task(self.relay.call(call(*instances, **spec), "shadow", acknowledge_first))
        await self.decided(self.made + 1)
        self.stock.answer.set_result(body)
        assert await asking == body and settled == [True], "as it came"
        await self.idle()
        self.stock.answer = asyncio.get_running_loop().create_future()
        return dict(self.comparison.counts())

    async def decided(self, count: int) -> None:
        """Once so many decisions are made."""
        await until(lambda: self.made >= count)

    async def idle(self) -> None:
        await until(lambda: self.comparison.in_flight == 0)


async def acknowledge_first() -> None: ...


def call(*instances: str, **spec: Any) -> Call:
    arguments = {
        "spec_obj": request_spec(**spec), "instance_uuids": list(instances),
        "return_objects": True, "return_alternates": True,
    }  # fmt: skip
    return Call(
        method="select_destinations", arguments=arguments, version="4.5", unique_id="u", message_id="m",
        reply_queue="reply_1", context={"user_id": "u"},
    )  # fmt: skip


async def world(hosts: int = 1, *, each: dict[str, int] = ROOM) -> World:
    return World(await Cloud([each] * hosts).open())


@pytest.mark.parametrize(
    ("room", "stock", "difference"),
    [
        (1, 0, "same"),
        (0, 0, "would fail"),
        (1, NONE, "would fit"),
        (0, NONE, "same"),
        (1, unsupported_version("x", "1", "2"), "stock failed"),
    ],
)
async def test_one_host(room: int, stock: int | RemoteFault, difference: str) -> None:
    here = await world()
    if not room:
        await here.cloud.hold(VMS[1], 0)
    assert await here.told(here.answered(stock), VMS[0]) == {difference: 1}
    assert await here.cloud.held(VMS[0]) == [] and here.cloud.claims.submitted == []


async def test_alike_instances_of_a_call_are_interchangeable() -> None:
    here = await world(2)
    assert await here.told(here.answered(1, 0), *VMS[:2]) == {"same": 1}
    assert await here.told(here.answered(0, 1), *VMS[:2]) == {"same": 2}


async def test_a_second_member_beside_the_first_breaks_its_groups_rule() -> None:
    here = await world(2, each=PLENTY)
    await here.cloud.hold(VMS[1], 0)
    spec = {"instance_group": group("anti-affinity", VMS[:2])}
    assert await here.told(here.answered(0), VMS[0], **spec) == {"rule broken": 1}
    assert await here.told(here.answered(1), VMS[0], **spec) == {"rule broken": 1, "same": 1}


async def test_the_room_that_the_stock_scheduler_has_taken_breaks_no_rule() -> None:
    here = await world(2)
    await here.cloud.hold(VMS[1], 0)
    spec = {"instance_group": group("anti-affinity", [VMS[0]])}
    asking = asyncio.create_task(here.relay.call(call(VMS[0], **spec), "shadow", acknowledge_first))
    await here.decided(1)
    await here.cloud.hold(VMS[0], 1)
    here.stock.answer.set_result(here.answered(1))
    await asking
    await here.idle()
    assert here.comparison.counts() == {"same": 1}


async def test_a_call_that_nobody_waits_for_is_compared_all_the_same() -> None:
    """The stock scheduler may have answered it before berth decides."""
    here = await world(1)
    here.cloud.waiting = set()
    again = msgspec.structs.replace(call(VMS[0]), redelivered=True)
    asking = asyncio.create_task(here.relay.call(again, "shadow", acknowledge_first))
    await here.decided(1)
    here.stock.answer.set_result(here.answered(0))
    await asking
    await here.idle()
    assert here.comparison.counts() == {"same": 1}


async def test_its_choice_counts_until_the_stock_scheduler_has_answered() -> None:
    here = await world()
    first = asyncio.create_task(here.relay.call(call(VMS[0]), "shadow", acknowledge_first))
    await here.decided(1)
    second = asyncio.create_task(here.relay.call(call(VMS[1]), "shadow", acknowledge_first))
    await here.decided(2)
    here.stock.answer.set_result(here.answered(NONE))
    await asyncio.gather(first, second)
    await here.idle()
    assert here.comparison.counts() == {"would fit": 1, "same": 1}
    here.stock.answer = asyncio.get_running_loop().create_future()
    assert await here.told(here.answered(0), VMS[2]) == {"would fit": 1, "same": 2}, "it was forgotten"


async def test_what_berth_leaves_to_the_fallback_is_undecided() -> None:
    here = await world()
    assert await here.told(here.answered(0), VMS[0], instance_group=group("odd", [])) == {"undecided": 1}


async def test_a_decision_that_fails_harms_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    here = await world()

    async def broken(_: Call) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(here.destinations, "call", broken)
    with capture_logs() as logged:
        assert await here.told(here.answered(0), VMS[0]) == {"failed": 1}
    assert [one["code"] for one in logged if one["event"] == "nova.shadow_failed"] == ["ZeroDivisionError"]
    here = await world()

    async def away(_: Call) -> object:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(here.destinations, "call", away)
    with capture_logs() as logged:
        assert await here.told(here.answered(0), VMS[0]) == {"failed": 1}
    assert [one["code"] for one in logged if one["event"] == "nova.shadow_failed"] == [DatabaseUnavailable.code]
    here = await world()
    assert await here.told(msgspec.json.encode({"oslo.version": "2.0", "oslo.message": "no"}), VMS[0]) == {"failed": 1}


async def test_an_answer_waits_for_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    here = await world()

    async def endless(_: Call) -> object:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(here.destinations, "call", endless)
    here.stock.answer.set_result(here.answered(0))
    for _ in range(MAX_IN_FLIGHT + 1):
        assert await here.relay.call(call(VMS[0]), "shadow", acknowledge_first) == here.answered(0)
    assert (here.comparison.in_flight, here.comparison.counts()) == (MAX_IN_FLIGHT, {"skipped": 1})
    await here.relay.close()
    assert here.comparison.in_flight == 0


async def test_a_stock_scheduler_that_does_not_answer_leaves_nothing_behind() -> None:
    here = await world()
    asking = asyncio.create_task(here.relay.call(call(VMS[0]), "shadow", acknowledge_first))
    await here.decided(1)
    here.stock.answer.set_exception(ForwardFailed("silent"))
    with pytest.raises(ForwardFailed):
        await asking
    await here.idle()
    here.stock.answer = asyncio.get_running_loop().create_future()
    assert await here.told(here.answered(0), VMS[1]) == {"same": 1}


async def test_calls_are_left_to_stock_and_casts_are_taken() -> None:
    here = await world()
    dispatcher = UpstreamDecides(here.destinations)
    with pytest.raises(NotDecided):
        await dispatcher.call(call(VMS[0]))
    await dispatcher.call(Call(method="sync_instance_info", arguments={"host_name": "h0", "instance_uuids": []}))
    assert here.cloud.casts == ["sync_instance_info"]
