"""The cells that a move's destination may be in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ActionKind
from bus.contracts.deploy import NetworkRequest
from bus.contracts.objects import Flavor
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import GroupPolicy, LocatePage, ServerGroup
from scheduler_worker.action.action_checks import CELL_DRAIN_USER
from scheduler_worker.action.destination import Chosen
from scheduler_worker.action.destination_request import Located
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.requests.request_delivery import LAST
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_moves import BUILD, BUILT, KNOWN, OTHER, UUID, choosing, requested

ACROSS = SchedulerConfig(actions_across_cells=True)
NETWORKS = (NetworkRequest(network=OTHER),)


@pytest.mark.parametrize("actions_across_cells", [True, False], ids=["on", "switched off since"])
async def test_a_move_of_a_cells_drain_stays_out_of_that_cell(actions_across_cells: bool) -> None:
    hosts = Hosts(
        [PLENTY] * 3, cells=["c", "c", "d"], config=SchedulerConfig(actions_across_cells=actions_across_cells)
    )
    request = requested(ActionKind.MIGRATE, user_id=CELL_DRAIN_USER)
    known = replace(KNOWN, build_request=replace(BUILT, image=None, image_properties={}))
    located = Located(UUID, LocatePage(hosts={UUID: (hosts.uuids[0],)}), {})
    pending = PendingAction(batch_index=0, request=request, taken_at=1.0, delivery=LAST)
    chosen = await choosing(hosts).choose(pending, known, located)
    assert isinstance(chosen, Chosen)
    assert [one.host for one in chosen.selections] == (["h2"] if actions_across_cells else [])


@pytest.mark.parametrize(
    ("is_tied", "cells", "code"),
    [
        (True, ("c1", "c2"), "action.across_cells"),
        (True, ("c1", "c1"), None),
        (True, ("c1",), "no_valid_host"),  # no other cell has a host for it, either
        (False, ("c1", "c2"), None),
        (False, ("c1",), "no_valid_host"),
    ],
)
async def test_what_has_things_of_its_cell_finds_a_host_there_or_is_told_why(
    is_tied: bool, cells: Sequence[str], code: str | None
) -> None:
    hosts = Hosts([PLENTY] * len(cells), cells=cells, config=ACROSS)
    networks = NETWORKS if is_tied else ()
    build = replace(BUILD, cell="c1", host="h0")
    known = ActionContext(build=build, build_request=replace(BUILT, host=None, image=None, networks=networks))
    pending = PendingAction(batch_index=0, request=requested(ActionKind.MIGRATE), taken_at=1.0, delivery=LAST)
    source = Located(UUID, LocatePage(hosts={UUID: (hosts.uuids[0],)}), {})
    chosen = await choosing(hosts).choose(pending, known, source)
    assert isinstance(chosen, Chosen)
    assert (chosen.failure and chosen.failure.code, len(chosen.selections)) == (code, int(code is None))


# --- members of a group with affinity, evacuated from one host


GROUP = ServerGroup(uuid=OTHER, policy=GroupPolicy.AFFINITY)


class Behind:
    """The replica is behind until it is asked for the newest state, which all wait for together."""

    async def refresh(self, *, timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return True


@pytest.mark.parametrize("group", [GROUP, None], ids=["of a group with affinity", "of no group"])
@pytest.mark.parametrize("is_full", [False, True], ids=["room at once", "room on the newest state only"])
async def test_evacuated_instances_choose_beside_those_that_wait_with_them(
    is_full: bool, group: ServerGroup | None
) -> None:
    """Members of a group follow the first choice: each had read where the group gathers before it waited for the newest
    state. Others choose a host each where one fits on each: each had forgotten the choices before.
    """
    vcpus = 1 if group else PLENTY["VCPU"]
    config = SchedulerConfig(flavors={"m1.small": Flavor(vcpus=vcpus)})
    hosts = Hosts([PLENTY] * 6, cells=["c"] * 6, config=config)
    dead = hosts.uuids[0]
    hosts.table.apply_decisions({dead: HostAdminState(host_uuid=dead, host="h0", state=AdminState.FENCED)})
    if is_full:
        amounts = {uuid: dict(PLENTY) for uuid in hosts.uuids}
        hosts.selector.assumed.add("other moves", amounts, SystemClock().monotonic() + 60.0)
    chooser = choosing(hosts, Behind())
    members = LocatePage(members={dead: 2})

    async def choose(number: int, user_id: str | None = None, networks: Sequence[NetworkRequest] = ()) -> Chosen:
        uuid = f"{number}{UUID[1:]}"
        build = replace(BUILD, instance_uuid=uuid, host="h0", host_uuid=dead)
        request = replace(
            BUILT, instance_uuid=uuid, host=None, image=None, server_group=group, networks=tuple(networks)
        )
        request_id = f"{number}{OTHER[1:]}"
        evacuation = requested(ActionKind.EVACUATE, instance_uuid=uuid, request_id=request_id, user_id=user_id)
        located = Located(uuid, replace(members, hosts={uuid: (dead,)}), {})
        pending = PendingAction(batch_index=0, request=evacuation, taken_at=1.0, delivery=LAST)
        chosen = await chooser.choose(pending, ActionContext(build=build, build_request=request), located)
        assert isinstance(chosen, Chosen)
        return chosen

    chosen = await asyncio.gather(*map(choose, range(1, 5)))
    assert len({one.selections[0].host for one in chosen}) == (1 if group else len(chosen))
    assert {one.fenced_hosts for one in chosen} == {(dead,) if group else ()}
    as_a_drain = await choose(5, CELL_DRAIN_USER, NETWORKS)  # a client's: it raised IndexError
    assert as_a_drain.failure is not None and as_a_drain.failure.code == "action.across_cells"


# --- a rebuild, and a plan


@pytest.mark.parametrize(("newest", "code"), [(("CUSTOM_A",), None), ((), "image.unsuitable")])
async def test_a_rebuild_is_refused_on_the_newest_state_only_and_leaves_the_holds_of_moves(
    newest: tuple[str, ...], code: str | None
) -> None:
    hosts = Hosts([PLENTY], cells=["c"])

    class Older:
        async def refresh(self, *, timeout_s: float) -> bool:
            hosts.replica.load([replace(hosts.states[0], generation=2, traits=newest)], 1)
            return True

    hosts.selector.assumed.add("another move", {hosts.uuids[0]: {"VCPU": 1}}, SystemClock().monotonic() + 60.0)
    request = requested(ActionKind.REBUILD, image="new", image_properties={"trait:CUSTOM_A": "required"})
    located = Located(UUID, LocatePage(hosts={UUID: (hosts.uuids[0],)}), {})
    pending = PendingAction(batch_index=0, request=request, taken_at=1.0, delivery=LAST)
    chosen = await choosing(hosts, Older()).choose(pending, KNOWN, located)
    assert isinstance(chosen, Chosen) and (chosen.failure and chosen.failure.code) == code
    assert hosts.selector.assumed.next_until is not None


async def test_a_plan_without_a_host_leaves_the_holds_of_moves() -> None:
    hosts = Hosts([PLENTY] * 2, cells=["c"] * 2)
    hosts.selector.assumed.add("another move", {hosts.uuids[0]: {"VCPU": 1}}, SystemClock().monotonic() + 60.0)
    known = replace(KNOWN, build_request=replace(BUILT, host=None, image=None, image_properties={}))
    located = Located(UUID, LocatePage(hosts={UUID: (hosts.uuids[0],)}), {})
    pending = PendingAction(batch_index=0, request=requested(ActionKind.MIGRATE), taken_at=1.0, delivery=LAST)
    planned = {hosts.uuids[1]: "host.drained"}
    chosen = await choosing(hosts).choose(pending, known, located, planned=planned)
    assert isinstance(chosen, Chosen) and chosen.failure is not None and chosen.failure.code == "no_valid_host"
    assert hosts.selector.assumed.next_until is not None
