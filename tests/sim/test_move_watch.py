"""The states of moving instances, server groups, hints and quotas that the simulation calls a breach."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ActionState
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuild, InstanceSpec, Selection
from bus.contracts.placement import GroupPolicy, Inventory, Restate, ServerGroup
from cell_conductor.state.instance import ActionInProgress, EndedAction, Instance, Power, State
from compute_sim.fleet import Fleet, SimulatedMachine
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.harm_watch import LATE_REPORT_S
from lab.simulation.move_watch import MoveWatch
from lab.simulation.peer_watch import OVERLAP_S, PeerWatch
from lab.simulation.plan import Action, Order
from lab.simulation.watch import Breach
from lab.simulation.world import World
from placement_worker.domain.migration import MIGRATION_TYPE
from placement_worker.domain.values import ConsumerState, Provider, stored_inventory
from placement_worker.store.memory_table import ConsumerRow, MemoryPlacementTable
from tests.sim.stage import INSTANCE, SPEC, breach, chosen, instance, provider

# --- The states of moving instances that the simulation calls a breach, and those that it does not.


REQUEST, OTHER = (f"00000000-0000-4000-a000-00000000000{n}" for n in range(2))


class Deployment:
    """A world's watch, two of its hosts, and the instance on the first of them, which it holds."""

    def __init__(self) -> None:
        self.world = world = World(replace(plan_of(2), metal=None), EventLog())
        self.places = [(fleet, host.plan.uuid) for fleet in world.fleets.values() for host in fleet.hosts][:2]
        assert len(self.places) == 2
        for _, host in self.places:
            inventories = {"VCPU": stored_inventory(Inventory(total=4))}
            world.placement.providers[host] = provider(host, inventories=inventories)
        self.active = instance(on=self.selection(0), spec=SPEC)
        self.watch.instances({INSTANCE: self.active})
        self.hold(INSTANCE, 0)
        self.run(0)

    @property
    def watch(self) -> MoveWatch:
        return self.world.move_watch

    def selection(self, at: int) -> Selection:
        return chosen(self.places[at][1])

    def hold(self, consumer: str, at: int, kind: str = "INSTANCE") -> None:
        state = ConsumerState(1, 1, "red", "u", kind, {self.places[at][1]: {"VCPU": 1}})
        self.world.placement.consumers[consumer] = ConsumerRow(state, None, 0.0, 0.0)

    def run(self, at: int, attempt: int = 1, *, runs: bool = True) -> SimulatedMachine:
        """A machine that is there already."""
        machine = SimulatedMachine(INSTANCE, attempt, {}, True, None, runs)
        Fleet.put(self.places[at][0], self.places[at][1], machine)
        return machine

    def start(self, at: int, attempt: int) -> None:
        """A driver starts it. Raises Breach."""
        self.watch.put(self.places[at][1], SimulatedMachine(INSTANCE, attempt, {}, True))

    def moving(self, state: State, kind: ActionKind = ActionKind.MIGRATE, next_state: State | None = None) -> Instance:
        move = ActionInProgress(request_id=REQUEST, kind=kind, source=self.selection(0), source_attempt=1, spec=SPEC)
        chosen = (self.selection(0), self.selection(1))
        return replace(
            self.active,
            state=state,
            next_state=next_state,
            selections=chosen,
            selection_index=1,
            attempt=2,
            action=move,
        )


@pytest.fixture
async def deployment() -> Deployment:
    return Deployment()


async def test_the_destination_starts_when_the_source_has_stopped(deployment: Deployment) -> None:
    deployment.watch.instances({INSTANCE: deployment.moving(State.FINISHING)})
    deployment.hold(INSTANCE, 1)
    deployment.hold(REQUEST, 0, MIGRATION_TYPE)
    with breach("never_two_running"):
        deployment.start(1, 2)
    deployment.run(0, runs=False)
    deployment.start(1, 2)


async def test_what_runs_is_claimed(deployment: Deployment) -> None:
    deployment.watch.placement()
    deployment.hold(INSTANCE, 1)  # the source is claimed by none
    with breach("never_running_unclaimed"):
        deployment.watch.placement()
    deployment.watch.instances({INSTANCE: deployment.moving(State.PREPARING)})
    deployment.hold(REQUEST, 0, MIGRATION_TYPE)
    deployment.watch.placement()


@pytest.mark.parametrize("undone", ["", "active", "reverting"])
async def test_what_was_evacuated_from_a_fenced_host_never_runs_there_again(
    deployment: Deployment, *, undone: str
) -> None:
    deployment.run(0, runs=False)
    deployment.watch.instances({INSTANCE: deployment.moving(State.FINISHING, ActionKind.EVACUATE)})
    if undone:  # no other host could: it stays where it is, and a client may start it
        back = replace(deployment.active, power=Power.STOPPED)
        if undone == "reverting":  # its fence is lifted, and its host starts it (seed 1795482690127)
            back = deployment.moving(State.REVERTING, ActionKind.EVACUATE)
            deployment.hold(REQUEST, 0, MIGRATION_TYPE)
        deployment.watch.instances({INSTANCE: back})
        deployment.start(0, 1)
        return
    with breach("fenced_never_runs"):
        deployment.start(0, 1)


async def test_what_is_refused_is_unchanged(deployment: Deployment) -> None:
    ended = EndedAction(REQUEST, ActionKind.STOP, ActionState.REFUSED, "instance.busy")
    refused = replace(deployment.active, ended=(ended,))
    deployment.watch.instances({INSTANCE: refused})
    with breach("refused_is_unchanged"):  # it is begun after all
        deployment.watch.instances({INSTANCE: deployment.moving(State.CLAIMING, next_state=State.PREPARING)})
    deployment.hold(REQUEST, 1, MIGRATION_TYPE)
    with breach("refused_is_unchanged"):
        deployment.watch.placement()
    deployment.watch.exempt = {INSTANCE: None}  # seed 1795424381: its cell was set back to before the refusal
    deployment.watch.placement()
    deployment.watch.exempt = {}
    stopped = replace(refused, power=Power.STOPPED, ended=(ended, replace(ended, request_id=OTHER)))
    deployment.watch.instances({INSTANCE: refused})
    with breach("refused_is_unchanged"):
        deployment.watch.instances({INSTANCE: stopped})


async def test_a_migration_whose_move_is_over_owns_nothing(deployment: Deployment) -> None:
    deployment.watch.instances({INSTANCE: deployment.moving(State.RELEASING, next_state=State.ACTIVE)})
    deployment.hold(REQUEST, 0, MIGRATION_TYPE)
    assert any("claims_have_owners" in words for words in deployment.watch.unsettled(set()))


@pytest.mark.parametrize("case", ["down", "up", "just died", "nothing there", "deleted", "set back"])
async def test_what_runs_is_not_given_up_for_a_source_whose_service_is_down(deployment: Deployment, case: str) -> None:
    """A revert began to destroy the only machine though the service of its source had died long ago."""
    now, harm = 1_000.0, deployment.world.harm
    harm._now = lambda: now
    resized = deployment.moving(State.RESIZED)
    if case != "nothing there":
        Fleet.put(deployment.places[1][0], deployment.places[1][1], SimulatedMachine(INSTANCE, 2, {}, True))
    if case != "up":
        harm.down_since["s"] = now - (1.0 if case == "just died" else LATE_REPORT_S + 1.0)
    if case == "deleted":
        harm.delete(INSTANCE)
    if case == "set back":
        deployment.world.taken_back[INSTANCE] = None
    harm.record({INSTANCE: resized})
    with breach("destroyed_with_reason", when=case == "down"):
        harm.record({INSTANCE: replace(resized, state=State.DESTROYING, next_state=State.REVERTING)})


# --- The states of server groups, hints and quotas that the simulation calls a breach, and those that it does not.


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
        self.book = MemoryPlacementTable(self.clock)
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
def test_the_source_of_a_resize_is_held_already_and_no_more_of_it_is(*, reverted: bool) -> None:
    """Seed 1795401028: a resize to a smaller size, whose claim for the next destination found no room."""
    peers = PeerWorld({"VCPU": 4})
    for vm in range(2):
        peers.ask(vm)
    peers.migrate("MIGRATION", 2)
    peers.hold(0, 1)
    peers.hold(1, 1, 1)
    peers.migrate("MIGRATION_COUNTED", 2)
    peers.hold(0, None)
    del peers.book.consumers["migration"]
    with nullcontext() if reverted else pytest.raises(Breach, match="quota: red holds 5 VCPU of 4"):
        peers.hold(0, 0, 2 if reverted else 4)


def test_what_a_move_keeps_counts_for_others_and_not_for_itself() -> None:
    peers = PeerWorld({"VCPU": 4})
    for vm in range(2):
        peers.ask(vm)
    peers.hold(0, 0, 4)
    peers.migrate("MIGRATION", 4)
    peers.hold(0, 1, 1)
    with pytest.raises(Breach, match="quota: red holds 6 VCPU of 4"):
        peers.hold(1, 1, 1)


def test_a_recovery_is_held_to_no_quota_and_no_group_and_others_are() -> None:
    peers = PeerWorld({"VCPU": 4})
    for vm in range(3):
        peers.ask(vm, group=APART)
    peers.hold(0, 0, 3)
    peers.watch.restate(Restate(consumer=VMS[1], attempt=1, project_id="red"))
    peers.hold(1, 0, 2)
    with pytest.raises(Breach, match="quota: red holds 6 VCPU of 4"):
        peers.hold(0, 0, 4)
    peers.hold(1, 1, 1)
    peers.hold(0, 0, 1)
    with pytest.raises(Breach, match="apart"):
        peers.hold(2, 0, 1)


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
