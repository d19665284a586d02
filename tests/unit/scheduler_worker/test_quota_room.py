"""The room in a project's quota is one number, for a claim of a build and of a move alike."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ActionKind, ActionRequest, CellAction, Condition
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.placement import INSTANCES, LocatePage, LocateRequest
from bus.faults import Fault
from scheduler_worker.action.action_engine import ActionEngine
from scheduler_worker.action.destination import DestinationChooser
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build.quota import rooms_of
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.records.build_record import NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.requests.request_delivery import LAST
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.claims import PlacementClaims
from tests.kit.sent import Sent
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_moves import Follower, reload

VM, OTHER, REQUEST = (f"{n}0000000-0000-4000-8000-000000000001" for n in "abd")
QUOTA = {"VCPU": 10, INSTANCES: 5}
FLAVORS = {"small": Flavor(vcpus=1), "large": Flavor(vcpus=8)}
CONFIG = SchedulerConfig(flavors=FLAVORS, quotas={"p": QUOTA}, allow_resize_to_same_host=False)
AS_BUILT = SinceBuild()


class Located(PlacementClaims):
    """The instance is on the first host."""

    host = ""

    async def locate(self, requests: list[LocateRequest]) -> list[LocatePage | Fault]:  # type: ignore[override]
        return [LocatePage(hosts={VM: (self.host,)}) for _ in requests]


def built(uuid: str, host: str | None, flavor: str, instance: SinceBuild) -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor=flavor, project_id="p")
    more = {"project_id": "p", "terminal": True, "cell": "c1", "host": host, "instance": instance}
    return NewBuild(
        request=request, build=RecordedBuild(instance_uuid=uuid, state=BuildState.ACTIVE, sequence=9, **more)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "host", "room"),
    [
        (AS_BUILT, "h1", QUOTA),
        (SinceBuild(condition=Condition.OFFLOADED), None, {"VCPU": 10, INSTANCES: 4}),
        (SinceBuild(condition=Condition.MOVING), None, {"VCPU": 2, INSTANCES: 4}),
        (SinceBuild(condition=Condition.MOVING), "h1", QUOTA),
        (SinceBuild(condition=Condition.MOVING, flavor="small"), None, {"VCPU": 9, INSTANCES: 4}),
    ],
)
@pytest.mark.parametrize("kind", [ActionKind.RESIZE, ActionKind.UNSHELVE, ActionKind.MIGRATE])
async def test_a_move_is_held_to_the_room_that_a_build_is_held_to(
    other: SinceBuild, host: str | None, room: dict[str, int], kind: ActionKind
) -> None:
    """What is between two hosts claims without limits: a resize that took its room led past the quota."""
    hosts, clock, sent = Hosts([PLENTY] * 2, config=CONFIG), SystemClock(), Sent()
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    store.publish_through(sent)
    offloaded = SinceBuild(condition=Condition.OFFLOADED)
    is_offloaded = kind is ActionKind.UNSHELVE
    mine = built(VM, None if is_offloaded else "h0", "small", offloaded if is_offloaded else AS_BUILT)
    async with store.unit() as unit:
        await unit.insert([mine, built(OTHER, host, "large", other)], 1.0)
    of_builds = {**room, INSTANCES: room[INSTANCES] - is_offloaded}
    assert await rooms_of(store, hosts.selector, {"p", "q"}) == {"p": of_builds, "q": {}}

    claims = Located()
    claims.host = hosts.uuids[0]

    rng = random.Random(5)
    destinations = DestinationChooser(claims, hosts.selector, Follower(), clock=clock, rng=rng, reload=reload)
    engine = ActionEngine(store, hosts.selector, destinations, clock=clock)
    request = ActionRequest(request_id=REQUEST, instance_uuid=VM, project_id="p", kind=kind)
    if kind is ActionKind.RESIZE:
        request = replace(request, flavor="large")
    await engine.process([PendingAction(batch_index=0, request=request, taken_at=1.0, delivery=LAST)])
    (command,) = [row.message for _, rows in sent.rows for row in rows if isinstance(row.message, CellAction)]
    assert command.selections
    held_to = {} if kind is ActionKind.MIGRATE else {"VCPU": room["VCPU"]}
    assert command.limits == held_to, "a move makes no instances more"
