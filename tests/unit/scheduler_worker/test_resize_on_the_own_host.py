"""What an instance holds is free for its own next size: of its host, of a child, and of a pool that is shared."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ActionKind, ActionRequest, ResizePolicy
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.placement import LocatePage, ProviderState
from bus.contracts.placement_queries import ConsumerRecord
from scheduler_worker.action.destination import Chosen, DestinationChooser
from scheduler_worker.action.destination_request import Located
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.records.build_record import RecordedBuild
from tests.kit.claims import PlacementClaims
from tests.unit.scheduler_worker.hosts import Hosts
from tests.unit.scheduler_worker.test_moves import Follower, reload

VM, REQUEST, CHILD, POOL, RACK = (f"{n}0000000-0000-4000-8000-000000000001" for n in "adcfe")


def flavor(vcpus: int, vgpus: int, disk_gb: int) -> Flavor:
    return Flavor(vcpus=vcpus, memory_mb=0, disk_gb=disk_gb, extra_specs={"resources_G:VGPU": str(vgpus)})


FLAVORS = {"two": flavor(2, 1, 10), "four": flavor(4, 1, 10), "six": flavor(6, 1, 10)}
FLAVORS |= {"pair": flavor(2, 2, 10), "wide": flavor(2, 1, 30), "huge": flavor(9, 1, 10)}


def full_tree(hosts: Hosts, held: dict[str, dict[str, int]]) -> None:
    """The host has 8 VCPU, its child 2 VGPU, a pool 30 GB; this instance holds all that is used of them."""
    (root,) = hosts.states
    amounts = {root.uuid: {"VCPU": 8}, CHILD: {"VGPU": 2}, POOL: {"DISK_GB": 30}}

    def state(uuid: str, parent: str | None = None, **more: object) -> ProviderState:
        inventories = {name: (total, 1, total, 1, total, 0, 1.0) for name, total in amounts[uuid].items()}
        own = replace(root, uuid=uuid, name=uuid, root_uuid=parent or uuid, parent_uuid=parent, used=held[uuid])
        return replace(own, inventories=inventories, **more)

    hosts.states = [
        replace(state(root.uuid, aggregates=(RACK,)), name="h0"),
        state(CHILD, root.uuid),
        state(POOL, aggregates=(RACK,), traits=("MISC_SHARES_VIA_AGGREGATE",)),
    ]
    hosts.replica.load(hosts.states, 0)


@pytest.mark.parametrize(
    ("now", "then", "fits"),
    [
        ("four", "six", True),
        ("six", "four", True),
        ("pair", "two", True),
        ("two", "pair", True),
        ("wide", "two", True),
        ("two", "wide", True),
        ("four", "huge", False),
    ],
)
async def test_both_sizes_count_once(now: str, then: str, fits: bool) -> None:
    config = SchedulerConfig(flavors=FLAVORS, allow_resize_to_same_host=True)
    hosts, clock = Hosts([{"VCPU": 8}], config=config), SystemClock()
    (root,), size = hosts.uuids, FLAVORS[now]
    vgpus = int(size.extra_specs["resources_G:VGPU"])
    holding = {root: {"VCPU": size.vcpus}, CHILD: {"VGPU": vgpus}, POOL: {"DISK_GB": size.disk_gb}}
    full_tree(hosts, holding)
    claims = PlacementClaims()
    rng = random.Random(5)
    destinations = DestinationChooser(claims, hosts.selector, Follower(), clock=clock, rng=rng, reload=reload)
    claims.held[VM] = ConsumerRecord(
        consumer=VM, project_id="p", consumer_generation=1, allocations=holding, hosts=(root,)
    )
    request = ActionRequest(
        request_id=REQUEST,
        instance_uuid=VM,
        project_id="p",
        kind=ActionKind.RESIZE,
        flavor=then,
        policy=ResizePolicy.SAME_HOST,
    )
    build = RecordedBuild(instance_uuid=VM, project_id="p", state=BuildState.ACTIVE, sequence=9, cell="c1", host="h0")
    known = ActionContext(build=build, build_request=BuildRequest(instance_uuid=VM, flavor=now, project_id="p"))
    pending = PendingAction(batch_index=0, request=request, taken_at=clock.time())
    (located,) = await destinations.locate([pending], {pending.key: known})
    assert isinstance(located, Located) and located.allocations == holding
    located = replace(located, page=LocatePage(hosts={VM: (root,)}))
    chosen = await destinations.choose(pending, known, located)
    assert isinstance(chosen, Chosen)
    assert [one.host for one in chosen.selections] == (["h0"] if fits else []), chosen
    row = hosts.replica.row_of(root)
    assert row is not None
    (_, used, free) = hosts.replica.inventory_of(row)["VCPU"]
    added = max(0, FLAVORS[then].vcpus - size.vcpus) if fits else 0
    assert (used, free) == (size.vcpus, 8 - size.vcpus - added), "until the claim, what the new size adds is held"
