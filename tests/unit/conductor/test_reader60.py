"""What a reader has found: a decision of which the second place knows less, and the second case."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received, Retry
from bus.contracts.base import Message, Meta
from bus.contracts.cell import (
    ComputeHosts,
    Destroy,
    FoundMachine,
    HostReport,
    InstanceSpec,
    MachinesFound,
    RescanHosts,
    Running,
    ServiceGone,
    ServicesDigest,
)
from bus.contracts.moves import MachineChanged, MoveEvent, MoveKind
from bus.contracts.operations import EvacuationPolicy
from bus.contracts.placement import Release
from bus.port import BusUnavailable
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.breaker import Finding, Listings, assess
from cell_conductor.domain.events import MachineQuery
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.move_steps import STILL_RUNNING, why_not_evacuated
from cell_conductor.domain.report import Unexplained, UnexplainedKind, rescan_id
from cell_conductor.domain.set_back import SetBack
from cell_conductor.domain.table import FenceSteps, question_of, step
from cell_conductor.domain.way_back import SourceQuery, answer_about
from cell_conductor.fences import FenceKeeper
from cell_conductor.lease_keeper import LeaseKeeper, pages_of
from cell_conductor.store.safety import DESTROY, KEEP, DecidedMachine
from compute_sim.domain.attempts import Entry, Phase
from tests.unit.compute.test_agent import HOSTS, INSTANCES, Service
from tests.unit.compute.test_finding import OURS, Marking, ask
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, claimed, ended, request, to_resized
from tests.unit.conductor.records import BY_REVERT, ON_1, ON_2, ON_3, changing, fenced, in_place, moving, record
from tests.unit.conductor.scenario import (
    DEPLOYMENT,
    PATIENCE,
    RELEASED,
    SPEC,
    UUID,
    host,
    missed,
    selection,
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


# --- 4. Has the scan come as a whole? The listings keep the pages, and the breaker counts them.


class _FailsOnce(Quiet):
    """The first rescan that is requested meets an outage."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    async def publish(self, message: object, **_: Any) -> None:
        if self.left:
            self.left -= 1
            raise BusUnavailable("it restarts")
        self.published.append(message)


async def test_a_page_that_comes_again_after_an_outage_is_not_another_page_of_its_scan() -> None:
    """Four machines of each page were missing: eight at once open the breaker of five, and none of them is lost."""

    def active(number: int, n: int) -> Instance:
        uuid = f"aaaaaaaa-0000-4000-8000-{number:012d}"
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        return Instance(uuid=uuid, state=State.ACTIVE, spec=spec, selections=(selection(n),), attempt=1, since=50.0)

    first, second = [active(k, 1) for k in range(4)], [active(k, 2) for k in range(4, 8)]
    store, clock, config, bus = await opened_store(), SystemClock(), ConductorConfig(), _FailsOnce()
    await insert(store, *first, *second, active(9, 1))
    engine = engine_of(store=store, bus=cast(Bus, bus), relay=cast(Any, Relay()), clock=clock, config=config, cell="c1")
    hosts = hosts_of(engine, store, clock, config, cast(Bus, bus))
    rescans = tuple(rescan_id(one) for one in (*first, *second))
    page_1, page_2 = (
        Received(
            ComputeHosts(
                service="s1",
                cell="c1",
                epoch=1,
                sequence=n,
                hosts=(HostReport(uuid=host(n), name=f"host-{n}", running=()),),
                complete=n == 2,
                first_sequence=1,
                pages=2,
                scan=7,
                rescans=rescans,
            ),
            Meta(id=str(n)),
            "c1",
            "conductor.hosts",
        )
        for n in (1, 2)
    )
    with pytest.raises(BusUnavailable):
        await hosts.hosts([page_1])
    await hosts.hosts([page_1])
    await hosts.hosts([page_2])
    lost = [one.uuid for one in store._table.instances.values() if one.state is not State.ACTIVE]
    assert not lost, "the scan as a whole exceeds the limit"
    assert [one.lost for one in await store.safety.breakers()] == [8]


# --- 5. Who ends a request? A machine that is lost in place while a revert waits for it.


def test_a_revert_that_waits_ends_with_the_machine_that_is_lost() -> None:
    made = Scenario(in_place(State.RESIZED, move={**BY_REVERT, "answered": True}, queried=False))
    made.apply(missed(made.instance))
    assert made.instance.phase == (State.RELEASING, State.FAILED)
    made.apply(RELEASED)
    made.apply(e.Released(at=131.0, consumer=MOVE))
    assert made.instance.state is State.FAILED
    ends = [one.request_id for one in made.commands if isinstance(one, MoveEvent) and one.terminal]
    assert ends == [OTHER]


# --- 6. Is the service gone for good? By the clock of the conductor that forgot it, and that of the keeper.


async def test_a_forgotten_service_is_not_taken_up_again_from_a_digest_that_was_under_way() -> None:
    """The keeper's clock is ahead of that of the conductor which took the order: it is awaited by this one for ever."""
    keeper = LeaseKeeper(
        cast(Any, None), cast(Any, None), clock=SystemClock(), config=ConductorConfig(), cell="c1", process="p"
    )

    async def receive(message: Message) -> None:
        await keeper.handle([Received(message, Meta(id="m"), "c1", "conductor.leases")])

    silent = Lease(service="s3", epoch=5, state=LeaseState.SILENT, since=203.0, reason="why")
    (page,) = pages_of({"s3": silent})
    await receive(ServicesDigest(cell="c1", term=1, number=1, down=page))
    await receive(ServiceGone(cell="c1", service="s3", at=200.0))
    await receive(ServicesDigest(cell="c1", term=1, number=2, down=page))
    assert keeper.down() == {} and set(keeper.forgotten()) == {"s3"}


# --- 8. Is it a loss? A build that was renumbered leaves a fenced host: with an alternate it is, without one it is not.


@pytest.mark.parametrize("alternates", [1, 0])
def test_the_machine_of_a_renumbered_build_on_a_fenced_host_is_a_loss(alternates: int) -> None:
    building = record(State.BUILDING, selections=(ON_1, ON_2, ON_3)[: 2 + alternates], reused_from=1, queried=False)
    context, steps = fenced(2), FenceSteps()
    event = e.HostFenced(at=300.0, host_uuid=host(2))
    steps.follow(building, step(building, event, context), event, context)
    assert [(one.host_uuid, one.attempt) for one in steps.losses] == [(host(2), 2)]


# --- 9. Input of compute services: the number of an attempt is a column of four bytes.


@pytest.mark.parametrize("attempt", [-1, 2**31])
def test_an_attempt_that_no_record_can_have_is_refused_where_it_is_parsed(attempt: int) -> None:
    running: Any = {"instance_uuid": UUID, "attempt": attempt, "deployment": DEPLOYMENT}
    found: Any = {**running, "host_uuid": host(1), "host": "h", "service": "s1"}
    for kind, value in ((Running, running), (FoundMachine, found)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)


def test_what_follows_from_a_machine_that_a_service_has_found_is_what_placement_reads() -> None:
    """A delete of an instance that the database has forgotten asked for a release which was refused each time."""
    machine = FoundMachine(instance_uuid=UUID, host_uuid=host(1), host="h", service="s1", attempt=1_000_000)
    context = replace(PATIENCE, set_back=SetBack(at=1000.0))
    era = context.set_back.first_number
    event = e.DeleteRequested(at=1100.0, project_id="p", begun=True, found=(machine,), era=era)
    made = Scenario(Instance(uuid=UUID), context)
    made.apply(event, e.Destroyed(at=1101.0, attempt=1_000_000, host_uuid=host(1), service="s1"))
    assert made.instance.phase == (State.RELEASING, State.DELETED)
    msgspec.json.decode(msgspec.json.encode(question_of(made.instance)), type=Release)


def test_the_name_of_an_image_is_bounded_where_it_is_parsed() -> None:
    """One of 256 characters was kept; the check of a host in another cell that names it is read by nobody."""
    long = {"instance_uuid": UUID, "host_uuid": host(1), "service": "s1", "attempt": 1, "order": 1, "done": True}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**long, "change": "snapshot", "image": "i" * 256}, MachineChanged)


# --- May it be destroyed? An answer without an image is no answer that the image is kept.


@pytest.mark.parametrize("is_leaving", [True, False])
def test_a_machine_whose_image_has_no_name_is_not_given_up(*, is_leaving: bool) -> None:
    if is_leaving:
        made = Scenario(moving(State.HANDING_OVER, move={"to_cell": "c2", "handed_over": True, "order": 5}, order=5))
        made.apply(ended(made.instance, 1, 1, image=""))
        if made.instance.state is State.PREPARING:
            made.apply(ended(made.instance, 2, 2))
    else:
        made = Scenario(replace(changing(MoveKind.SHELVE, offload=True, order=5), power=Power.RUNNING, image=""))
        made.apply(ended(made.instance, 2, 2, image=""))
    assert not made.destroys and made.instance.state is not State.DESTROYING


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


# --- 11. May so many be lost? What a breaker was reset for passes at any time after, also when it was there since.


def test_what_a_false_alarm_has_named_is_counted_when_it_is_missing_again() -> None:
    """Ironic was wrong for an hour, nothing was lost, and the breaker was reset. It is wrong once more after a year."""
    alarm = [Finding(f"i{n}", e.HostMissing(at=1.0, host_uuid=host(1), service="s1")) for n in range(100)]
    tripped = assess("s1", alarm, (), None, limit=5, now=1.0).tripped
    assert tripped is not None
    reset = replace(tripped, reset_at=3_600.0, reset_by="ann")
    verdict = assess("s1", alarm, (), reset, limit=5, now=31_536_000.0)
    assert verdict.tripped is not None and not verdict.go


# --- 12. A wait without a bound: no scan ends the demand for one.


async def test_a_scan_that_shows_a_kept_machine_being_destroyed_is_not_demanded_again() -> None:
    """It was ordered destroyed, which its node's protection prevents, and then an operator kept it: each report is
    answered with a demand, and each demand with a report.
    """
    store, clock, config, bus = await opened_store(), SystemClock(), ConductorConfig(), Quiet()
    await store.safety.record("s1", [Unexplained(UUID, 3, host(3), UnexplainedKind.QUARANTINED, "newer")], 1.0)
    await store.safety.decide([DecidedMachine(UUID)], KEEP, "ann", 2.0)
    engine = engine_of(store=store, bus=cast(Bus, bus), relay=cast(Any, Relay()), clock=clock, config=config, cell="c1")
    hosts = hosts_of(engine, store, clock, config, cast(Bus, bus))
    there = Running(instance_uuid=UUID, attempt=3, deployment=store.deployment, destroying=True)
    report = listing("s1", 3, runs=(there,))
    await hosts.hosts([Received(report, Meta(id="1"), "c1", "conductor.hosts")])
    demanded = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert len(demanded) == 1
    later = replace(report, sequence=2, rescans=demanded[0])
    await hosts.hosts([Received(later, Meta(id="2"), "c1", "conductor.hosts")])
    assert [one.rescans for one in bus.published if isinstance(one, RescanHosts)] == demanded


# --- 13. Is it there? A report names what a host lists, by its mark; the search leaves out what the journal has ended.


@pytest.mark.parametrize(
    "entry",
    [
        Entry(1, Phase.GONE, fence=1, reported=True, deployment=OURS),  # of a journal that is older than the machine
        Entry(3, Phase.FAILED, reported=True, code="instance.lost", deployment=OURS),  # its disk was away for a moment
    ],
)
async def test_a_machine_that_its_host_lists_is_found_whatever_the_journal_has(entry: Entry) -> None:
    """A build was begun once more beside a machine that each report lists."""
    driver = Marking()
    driver.machines[HOSTS[0], INSTANCES[0]] = 3
    service = Service(driver)
    service.records.put((HOSTS[0], INSTANCES[0]), entry)
    await service.agent.resume()
    listed = (await service.survey.running())[HOSTS[0]]
    assert [(one.attempt, one.destroying) for one in listed] == [(3, False)]
    assert [(one.host_uuid, one.attempt) for one in await ask(service)] == [(HOSTS[0], 3)]
