"""The states of moving instances that the simulation calls a breach, and those that it does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Selection
from bus.contracts.moves import MoveKind, MoveState
from bus.contracts.placement import Inventory
from cell_conductor.domain.instance import EndedMove, Instance, Move, Power, State
from compute_sim.fleet import Fleet, Guest
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.harm_watch import LATE_REPORT_S
from lab.simulation.move_watch import MoveWatch
from lab.simulation.plan import Action, Order
from lab.simulation.run import run
from lab.simulation.shrink import _without_metal
from lab.simulation.watch import Breach
from lab.simulation.widening import Widening
from lab.simulation.world import World
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.domain.values import ConsumerState, stored_inventory
from placement_worker.store.memory_table import ConsumerRow
from tests.sim.stage import INSTANCE, SPEC, breach, chosen, instance, provider

REQUEST, OTHER = (f"00000000-0000-4000-a000-00000000000{n}" for n in range(2))


class Deployment:
    """A world's watch, two of its hosts, and the instance on the first of them, which it holds."""

    def __init__(self) -> None:
        self.world = world = World(replace(plan_of(2), metal=None), EventLog())
        self.places = [(fleet, host.plan.uuid) for fleet in world.fleets.values() for host in fleet.hosts][:2]
        assert len(self.places) == 2
        for _, host in self.places:
            inventories = {"VCPU": stored_inventory(Inventory(total=4))}
            world.book.providers[host] = provider(host, inventories=inventories)
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
        self.world.book.consumers[consumer] = ConsumerRow(state, None, 0.0, 0.0)

    def run(self, at: int, attempt: int = 1, *, runs: bool = True) -> Guest:
        """A machine that is there already."""
        guest = Guest(INSTANCE, attempt, {}, True, None, runs)
        Fleet.put(self.places[at][0], self.places[at][1], guest)
        return guest

    def start(self, at: int, attempt: int) -> None:
        """A driver starts it. Raises Breach."""
        self.watch.put(self.places[at][1], Guest(INSTANCE, attempt, {}, True))

    def moving(self, state: State, kind: MoveKind = MoveKind.MIGRATE, then: State | None = None) -> Instance:
        move = Move(request_id=REQUEST, kind=kind, source=self.selection(0), source_attempt=1, spec=SPEC)
        chosen = (self.selection(0), self.selection(1))
        return replace(self.active, state=state, then=then, selections=chosen, position=1, attempt=2, move=move)


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
    deployment.watch.book()
    deployment.hold(INSTANCE, 1)  # the source is claimed by none
    with breach("never_running_unclaimed"):
        deployment.watch.book()
    deployment.watch.instances({INSTANCE: deployment.moving(State.PREPARING)})
    deployment.hold(REQUEST, 0, MIGRATION_TYPE)
    deployment.watch.book()


async def test_of_two_machines_either_may_be_claimed_where_a_second_process_answered_for_one(
    deployment: Deployment,
) -> None:
    """Seed 4800485: the second process of a name answered that it destroyed the attempt to which the instance had
    moved, and the first one came back with it.
    """
    deployment.hold(INSTANCE, 1)
    deployment.watch.has_untold = lambda uuid: uuid != INSTANCE
    with breach("never_running_unclaimed"):
        deployment.watch.book()
    deployment.watch.has_untold = lambda uuid: uuid == INSTANCE
    deployment.watch.book()


@pytest.mark.parametrize("undone", ["", "active", "reverting"])
async def test_what_was_evacuated_from_a_fenced_host_never_runs_there_again(
    deployment: Deployment, *, undone: str
) -> None:
    deployment.run(0, runs=False)
    deployment.watch.instances({INSTANCE: deployment.moving(State.FINISHING, MoveKind.EVACUATE)})
    if undone:  # no other host could: it stays where it is, and a client may start it
        back = replace(deployment.active, power=Power.STOPPED)
        if undone == "reverting":  # its fence is lifted, and its host starts it (seed 1795482690127)
            back = deployment.moving(State.REVERTING, MoveKind.EVACUATE)
            deployment.hold(REQUEST, 0, MIGRATION_TYPE)
        deployment.watch.instances({INSTANCE: back})
        deployment.start(0, 1)
        return
    with breach("fenced_never_runs"):
        deployment.start(0, 1)


async def test_what_is_refused_is_unchanged(deployment: Deployment) -> None:
    ended = EndedMove(REQUEST, MoveKind.STOP, MoveState.REFUSED, "instance.busy")
    refused = replace(deployment.active, ended=(ended,))
    deployment.watch.instances({INSTANCE: refused})
    with breach("refused_is_unchanged"):  # it is begun after all
        deployment.watch.instances({INSTANCE: deployment.moving(State.CLAIMING, then=State.PREPARING)})
    deployment.hold(REQUEST, 1, MIGRATION_TYPE)
    with breach("refused_is_unchanged"):
        deployment.watch.book()
    deployment.watch.exempt = {INSTANCE: None}  # seed 1795424381: its cell was set back to before the refusal
    deployment.watch.book()
    deployment.watch.exempt = {}
    stopped = replace(refused, power=Power.STOPPED, ended=(ended, replace(ended, request_id=OTHER)))
    deployment.watch.instances({INSTANCE: refused})
    with breach("refused_is_unchanged"):
        deployment.watch.instances({INSTANCE: stopped})


async def test_on_a_host_that_was_set_back_what_runs_again_is_no_breach(deployment: Deployment) -> None:
    deployment.hold(INSTANCE, 1)
    with pytest.raises(Breach):
        deployment.watch.book()
    deployment.watch.brought_back.add((deployment.places[0][1], INSTANCE, 1))
    deployment.watch.book()


async def test_of_two_hosts_of_one_uuid_either_may_be_meant(deployment: Deployment) -> None:
    deployment.hold(INSTANCE, 1)
    service = next(name for name, fleet in deployment.world.fleets.items() if fleet is deployment.places[0][0])
    deployment.world.duplicates[service] = deployment.world.fleets[service]
    deployment.watch.book()
    deployment.start(0, 1)


def test_a_host_that_is_drained_hands_over_what_it_runs() -> None:
    plan = _without_metal(plan_of(4).without_faults())  # with room elsewhere
    service, _ = plan.cells[0].services[0]
    builds = tuple(order for order in plan.orders if order.action is Action.BUILD and order.at < 30.0)
    drain = Order(at=40.0, action=Action.MOVE, verb="drain", service=service, uuid=REQUEST, seconds=10.0)
    event_log = EventLog(keep=True)
    result = run(replace(plan, orders=(*builds, drain), widenings=(Widening.DRAINS,)), event_log=event_log)
    assert result.breach == "", result.detail
    lines = [str(line) for line in event_log.lines]
    migrated = [line.split()[-1] for line in lines if "order" in line and " live-migrate " in line]
    assert any("instance.event.done" in line and uuid in line for line in lines for uuid in migrated)


async def test_a_migration_whose_move_is_over_owns_nothing(deployment: Deployment) -> None:
    deployment.watch.instances({INSTANCE: deployment.moving(State.RELEASING, then=State.ACTIVE)})
    deployment.hold(REQUEST, 0, MIGRATION_TYPE)
    assert any("claims_have_owners" in words for words in deployment.watch.unsettled(set()))


@pytest.mark.parametrize("case", ["down", "up", "just died", "nothing there", "deleted", "set back"])
async def test_what_runs_is_not_given_up_for_a_source_whose_service_is_down(deployment: Deployment, case: str) -> None:
    """A revert began to destroy the only machine though the service of its source had died long ago."""
    now, harm = 1_000.0, deployment.world.harm
    harm._now = lambda: now
    resized = deployment.moving(State.RESIZED)
    if case != "nothing there":
        Fleet.put(deployment.places[1][0], deployment.places[1][1], Guest(INSTANCE, 2, {}, True))
    if case != "up":
        harm.down_since["s"] = now - (1.0 if case == "just died" else LATE_REPORT_S + 1.0)
    if case == "deleted":
        harm.delete(INSTANCE)
    if case == "set back":
        deployment.world.taken_back[INSTANCE] = None
    harm.record({INSTANCE: resized})
    with breach("destroyed_with_reason", when=case == "down"):
        harm.record({INSTANCE: replace(resized, state=State.DESTROYING, then=State.REVERTING)})
