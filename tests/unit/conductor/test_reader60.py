"""What a reader has found: a decision of which the second place knows less, and the second case."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received, Retry
from bus.contracts.base import Meta
from bus.contracts.cell import (
    Destroy,
    FoundMachine,
    MachinesFound,
    Running,
)
from bus.contracts.moves import MoveKind
from bus.contracts.operations import EvacuationPolicy
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.breaker import Listings
from cell_conductor.domain.events import MachineQuery
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.move_steps import STILL_RUNNING, why_not_evacuated
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.domain.set_back import SetBack
from cell_conductor.domain.table import FenceSteps, question_of, step
from cell_conductor.domain.way_back import SourceQuery, answer_about
from cell_conductor.fences import FenceKeeper
from cell_conductor.lease_keeper import LeaseKeeper
from cell_conductor.store.safety import DESTROY, DecidedMachine
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, claimed, request, to_resized
from tests.unit.conductor.records import ON_1, ON_2, ON_3, fenced, moving, record
from tests.unit.conductor.scenario import (
    PATIENCE,
    SPEC,
    UUID,
    host,
    spawned,
)
from tests.unit.conductor.world import (
    Conductor,
    Queried,
    Quiet,
    Relay,
    Services,
    beat,
    down,
    engine_of,
    hosts_of,
    insert,
    listing,
    opened_store,
    put,
    search_of,
)

THIRD = "d0000000-0000-4000-8000-000000000003"


# --- 1. Is this the answer to what is asked now? Placement's and all services' are compared with the question; that
# about a move's source is compared with the request alone, and after a fence there is none.


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
    return answer_about(UUID, query, [(query.service, answer)], 230.0)


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


# --- 2. A restart: what is not known yet counts as "up", and as "not fenced".


class _Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = SystemClock().time()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def _resized() -> Instance:
    """An automatic confirm is due; the destination is s2's."""
    there = replace(ON_2, service="s2")
    move = {"auto_confirm_s": 5.0, "answered": True}
    return moving(State.RESIZED, move=move, selections=(ON_1, there, ON_3), queried=False)


async def test_a_conductor_that_has_just_started_gives_up_no_source_for_a_service_that_is_silent() -> None:
    """Its sweep begins before it has a digest, or has read the leases."""
    store = await opened_store()
    await put(store, down("s2"))  # on record, by the former process, whose term lasts
    await insert(store, _resized())
    clock, bus, config = SystemClock(), cast(Bus, Queried()), ConductorConfig()
    keeper = LeaseKeeper(store, bus, clock=clock, config=config, cell="c1", process="started")
    engine = engine_of(
        store=store, bus=bus, relay=cast(Any, Relay()), clock=clock, config=config, cell="c1", down=keeper.down
    )
    assert keeper.up() is None, "it is not known yet which are"
    assert await engine.sweep() == 1
    assert store._table.instances[UUID].state is State.RESIZED


async def test_a_conductor_that_has_not_read_its_fences_gives_up_no_source_for_a_fenced_host() -> None:
    """The side tasks run beside the preparations; and all fences are dropped where one was lifted meanwhile."""
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=host(2), host="host-2", version=1, at=1.0))
    await insert(store, _resized())
    clock, bus, config = SystemClock(), cast(Bus, Queried()), ConductorConfig()
    fences = FenceKeeper(store, bus, clock=clock, config=config, cell="c1")
    engine = engine_of(
        store=store, bus=bus, relay=cast(Any, Relay()), clock=clock, config=config, cell="c1", fences=fences
    )
    await engine.sweep()
    assert store._table.instances[UUID].state is State.RESIZED


async def test_a_conductor_that_has_just_started_evacuates_nothing_that_its_host_has_reported_to_run() -> None:
    """What a fenced host was found to run is in the memory of the conductor that was told of it."""
    store, clock, bus = await opened_store(), SystemClock(), cast(Bus, Quiet())
    fence = Fence(host_uuid=host(2), host="host-2", version=1, at=1.0)
    await store.fences.put(fence)
    running = Running(instance_uuid=UUID, attempt=2, deployment=store.deployment)
    report = listing("s1", 2, runs=(running,), rescans=(fence.rescan,))
    active = record(State.ACTIVE, queried=False)
    refused: list[str] = []
    for is_told in (True, False):  # the second one after a restart
        fences = FenceKeeper(store, bus, clock=clock, config=ConductorConfig(), cell="c1")
        await fences.load()
        if is_told:
            await fences.without_losses(report, store.deployment)
        context = replace(PATIENCE, fences=fences.known, still_running=fences.still_running)
        unproved = why_not_evacuated(active, context, fenced=False, force=False)
        refused.append("" if unproved is None else unproved.code)
    assert refused == [STILL_RUNNING, STILL_RUNNING]


# --- 3. Have all answered that have to? Those that were asked and are missing are compared with those that have to; one
# that was not asked is not missing.


async def _started(store: Any) -> LeaseKeeper:
    """It has heard s1 for long enough, and no digest: the former keeper's term lasts still, and it is gone."""
    clock = _Clock()
    keeper = LeaseKeeper(
        store, cast(Bus, Quiet()), clock=cast(Any, clock), config=ConductorConfig(), cell="c1", process="started"
    )
    for number in range(1, 5):
        clock.now += 1.0
        message = beat("s1", 1, number, interval_s=1.0)
        await keeper.handle([Received(message, Meta(id=str(number)), "c1", "conductor.leases")])
    await keeper._keep()
    assert not keeper.is_keeper
    return keeper


async def test_no_machine_is_searched_for_before_it_is_known_which_services_are_down() -> None:
    """Within the term of a keeper that has ended, a conductor that has just started searched without the service that
    was down, and began the build once more.
    """
    there = FoundMachine(instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s3", attempt=1, project_id="p")
    services = Services(s1=(), s3=(there,))
    services.silent = {"s3"}
    conductor = Conductor(services, None)
    await conductor.store.open()
    await put(conductor.store, down("s3"))
    keeper = await _started(conductor.store)
    conductor.up, conductor.down = keeper.up(), keeper.down()
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and not conductor.relay.sent
    assert await conductor.recorded() is None


async def test_a_service_that_the_record_names_and_that_was_not_asked_has_not_answered() -> None:
    """The source of a move in doubt has to answer, without a limit."""
    store, services, listings = await opened_store(), Services(s1=()), Listings()
    listings.note(listing("s1", 1, pages=1, first_sequence=1))
    search = search_of(
        store,
        services,
        clock=SystemClock(),
        config=ConductorConfig(),
        up=lambda: ("s1",),
        listings=listings,
        forgotten=frozenset,
    )
    query = MachineQuery(since=SystemClock().time(), services=("s1", "s3"))
    assert not await search.find_doubted({UUID: query})


# --- 10. A set-back: a fence, and an operator's word, from before it.


def test_a_fence_from_before_a_set_back_does_not_end_a_machine_that_its_service_has_just_listed() -> None:
    """It was lifted since, and that is lost: the machine was found on the host, whose service is up, and adopted."""
    spec = replace(SPEC, on_host_failure=EvacuationPolicy.FAIL)
    adopting = record(State.CLAIMING, State.ACTIVE, spec=spec, found_built=True, newest=0, queried=False, code="")
    context = replace(fenced(2), set_back=SetBack(at=1000.0))
    assert context.fences[host(2)].at < context.set_back.at
    event = e.Claimed(at=1100.0, attempt=3, option=0, consumer_generation=9)
    steps = FenceSteps()
    stepped = steps.follow(adopting, step(adopting, event, context), event, context)
    assert (stepped.instance.state, steps.losses) == (State.ACTIVE, [])


async def test_an_operators_word_from_before_a_set_back_destroys_nothing() -> None:
    """The machine was given to its instance since (`adopt`), and the restored record has the earlier word."""
    store, clock, config, bus = await opened_store(), SystemClock(), ConductorConfig(), Quiet()
    machine = Unexplained(UUID, 3, host(3), UnexplainedKind.QUARANTINED, "newer than its record")
    await store.safety.record("s1", [machine], 1.0)
    await store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 2.0)
    await insert(store, record(State.ACTIVE, queried=False, newest=0))
    store._table.place += 1
    async with store.transaction() as transaction:
        assert await transaction.recognise() is not None
    engine = engine_of(store=store, bus=cast(Bus, bus), relay=cast(Any, Relay()), clock=clock, config=config, cell="c1")
    hosts = hosts_of(engine, store, clock, config, cast(Bus, bus))
    there = Running(instance_uuid=UUID, attempt=3, deployment=store.deployment)
    await hosts.hosts([Received(listing("s1", 3, runs=(there,)), Meta(id="m"), "c1", "conductor.hosts")])
    assert not [one for one in bus.published if isinstance(one, Destroy)]
