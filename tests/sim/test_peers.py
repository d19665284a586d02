"""The states of server groups, hints and quotas that the simulation calls a breach, and those that it does not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuild, InstanceSpec, Selection
from bus.contracts.placement import GroupPolicy, Inventory, ServerGroup
from lab.simulation.draw import plan_of
from lab.simulation.peer_watch import OVERLAP_S, PeerWatch
from lab.simulation.plan import Action, Order
from lab.simulation.watch import Breach
from placement_worker.domain.values import ConsumerState, Provider, stored_inventory
from placement_worker.store.memory_table import ConsumerRow, MemoryBookTable

HOSTS = [f"{n}0000000-0000-4000-8000-000000000000" for n in range(3)]
VMS = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(3)]
APART = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)
PAIRS = replace(APART, max_per_host=2)
TOGETHER = replace(APART, policy=GroupPolicy.AFFINITY)
WISH = replace(APART, policy=GroupPolicy.SOFT_ANTI_AFFINITY)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    monotonic = time

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class PeerWorld:
    """A book of three hosts, and what is asked and held there."""

    def __init__(self, quota: dict[str, int] | None = None) -> None:
        self.clock = Clock()
        self.book = MemoryBookTable(self.clock)
        inventories = {"VCPU": stored_inventory(Inventory(total=100))}
        self.book.providers = {uuid: Provider(uuid, uuid, None, uuid, 1, 1, inventories, {}, (), ()) for uuid in HOSTS}
        self.watch = PeerWatch(replace(plan_of(3), quota=quota or {}), self.book, {}, self.clock.time)

    def ask(self, vm: int, **fields: object) -> None:
        self.clock.now += 1.0
        order = Order(at=0.0, action=Action.BUILD, uuid=VMS[vm], flavor="m1.tiny", project="red", **fields)  # type: ignore[arg-type]
        self.watch.requested(order)

    def hold(self, vm: int, host: int | None, vcpus: int = 1, *, after_s: float = 1.0) -> None:
        self.clock.now += after_s
        holding = {} if host is None else {HOSTS[host]: {"VCPU": vcpus}}
        self.book.consumers[VMS[vm]] = ConsumerRow(ConsumerState(1, 1, "red", "u", "INSTANCE", holding), None, 0.0, 0.0)
        self.watch()

    def migrate(self, consumer_type: str, vcpus: int) -> None:
        """A migration holds its source on the first host, with the next commit."""
        migration = ConsumerState(1, 2, "red", "u", consumer_type, {HOSTS[0]: {"VCPU": vcpus}})
        self.book.consumers["migration"] = ConsumerRow(migration, None, 0.0, 0.0)

    def send(self, vm: int, *hosts: int) -> None:
        selections = tuple(
            Selection(host_uuid=HOSTS[n], host="h", service="s", allocations={HOSTS[n]: {"VCPU": 1}}) for n in hosts
        )
        spec = InstanceSpec(instance_uuid=VMS[vm], project_id="red")
        self.watch.sent(CellBuild(spec=spec, selections=selections, consumer_generation=1))

    def refuse(self, vm: int) -> None:
        failed = BuildEvent(
            instance_uuid=VMS[vm], project_id="red", state=BuildState.FAILED, sequence=9, code="quota.exceeded"
        )
        self.watch.event(failed)


@pytest.mark.parametrize(
    ("group", "hosts", "breaks"),
    [
        pytest.param(APART, (0, 1, 2), "", id="apart"),
        pytest.param(APART, (0, 1, 0), "apart", id="two on one host"),
        pytest.param(PAIRS, (0, 1, 0), "", id="pairs"),
        pytest.param(PAIRS, (0, 0, 0), "apart", id="three on one host"),
        pytest.param(TOGETHER, (1, 1, 1), "", id="together"),
        pytest.param(TOGETHER, (1, 1, 2), "together", id="one elsewhere"),
        pytest.param(WISH, (1, 1, 1), "", id="a wish"),
    ],
)
def test_rules_of_server_groups(group: ServerGroup, hosts: tuple[int, ...], breaks: str) -> None:
    peers = PeerWorld()
    for vm in range(3):
        peers.ask(vm, group=group)
    peers.hold(0, hosts[0])
    peers.hold(1, hosts[1])
    if not breaks:
        peers.hold(2, hosts[2])
        return
    with pytest.raises(Breach, match=breaks):
        peers.hold(2, hosts[2])


def test_who_holds_nothing_any_more_is_in_nobodys_way() -> None:
    peers = PeerWorld({"INSTANCES": 1})
    for vm in range(2):
        peers.ask(vm, group=APART)
    peers.hold(0, 0)
    peers.hold(0, None)
    peers.hold(1, 0)
    with pytest.raises(Breach, match="quota: red holds 2 INSTANCES of 1"):
        peers.hold(0, 1)


@pytest.mark.parametrize(("consumer_type", "breaks"), [("MIGRATION", False), ("MIGRATION_COUNTED", True)])
def test_a_migration_counts_in_place_of_an_instance_that_holds_nothing(consumer_type: str, *, breaks: bool) -> None:
    """Seed 1795416199: the claim for the next destination had released the last one, and found no room."""
    peers = PeerWorld({"INSTANCES": 1})
    for vm in range(2):
        peers.ask(vm)
    peers.hold(0, 1)  # at the destination
    peers.migrate(consumer_type, 1)
    peers.hold(0, None)
    with pytest.raises(Breach, match="quota: red holds 2 INSTANCES of 1") if breaks else nullcontext():
        peers.hold(1, 1)


@pytest.mark.parametrize("reverted", [True, False])
def test_the_source_of_a_resize_exceeds_a_quota_by_its_own_size_alone(*, reverted: bool) -> None:
    """Seed 1795401028: a resize to a smaller size, whose claim for the next destination found no room."""
    peers = PeerWorld({"VCPU": 3})
    for vm in range(2):
        peers.ask(vm)
    peers.migrate("MIGRATION", 2)
    peers.hold(0, 1)
    peers.hold(1, 1, 2)
    peers.migrate("MIGRATION_COUNTED", 2)
    peers.hold(0, None)
    del peers.book.consumers["migration"]
    with nullcontext() if reverted else pytest.raises(Breach, match="quota: red holds 5 VCPU of 3"):
        peers.hold(0, 0, 2 if reverted else 3)


def test_hints_are_about_where_others_have_been_all_the_time() -> None:
    peers = PeerWorld()
    peers.ask(0)
    peers.hold(0, 0)
    peers.ask(1, apart_from=(VMS[0],))
    peers.ask(2, together_with=(VMS[0],))
    peers.send(1, 1, 2)
    peers.send(2, 0)
    with pytest.raises(Breach, match="hints"):
        peers.send(1, 1, 0)
    with pytest.raises(Breach, match="hints"):
        peers.send(2, 1)
    peers.hold(0, 1)  # it has moved since they were asked for: either host may have been the one that was seen
    peers.send(1, 1, 0)
    peers.send(2, 1)
    peers.send(2, 0)


@pytest.mark.parametrize(("after_s", "refused"), [(OVERLAP_S / 2, True), (OVERLAP_S * 2, False)])
def test_a_claim_may_count_a_release_that_was_committed_just_before_it(after_s: float, *, refused: bool) -> None:
    """Seed 155 of drains and moves: of two claims in one transaction the second was refused, and a release that these
    had not seen was committed first.
    """
    peers = PeerWorld({"INSTANCES": 2})
    peers.ask(0)
    peers.hold(0, 0)
    peers.clock.now += 1.0
    peers.ask(2)
    peers.ask(1)
    peers.hold(0, None)
    peers.hold(1, 0, after_s=after_s)
    with nullcontext() if refused else pytest.raises(Breach, match="quota_refused"):
        peers.refuse(2)


def test_who_is_refused_for_a_quota_would_have_passed_it_and_holds_nothing() -> None:
    peers = PeerWorld({"INSTANCES": 1})
    peers.ask(0)
    peers.hold(0, 0)
    peers.ask(1)
    peers.hold(0, None)
    peers.refuse(1)  # there was a member, if not for long
    peers.ask(2)
    with pytest.raises(Breach, match="quota_refused"):
        peers.refuse(2)
    peers.hold(1, 0)
    assert list(peers.watch.unsettled()) == [f"quota_refused: {VMS[1]} was refused and holds something"]
    peers.watch.exempt = [VMS[1]]  # seed 1795423980: its scheduler's database was set back to before the refusal
    assert list(peers.watch.unsettled()) == []


def test_seeds_without_peers_and_with_them() -> None:
    plans = [plan_of(seed) for seed in range(1, 31)]
    assert 5 < sum(plan.with_peers for plan in plans) < 25
    repeats = [
        (order, build)
        for plan in plans
        for order in plan.orders
        if order.action is Action.REPEAT
        for build in plan.orders
        if build.action is Action.BUILD and build.uuid == order.uuid
    ]
    assert any(build.group for _, build in repeats)
    assert all(replace(order, action=Action.BUILD, at=build.at) == build for order, build in repeats)
