"""Any order of late, lost and doubled events: one instance never ends doubled, leaked, or with two ends.

A small world around the pure machine: hosts with ended attempts, placement with attempts, a network that reorders and
doubles, a conductor that loses answers (a crash between placement's commit and its own).
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import Destroy, InstanceSpec, Selection, Spawn
from bus.contracts.placement import Claim, ClaimOutcome, Release
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.state.step import StepContext
from cell_conductor.transition import step

UUID = "00000000-0000-4000-8000-000000000001"
HOSTS = tuple(f"10000000-0000-4000-8000-{n:012d}" for n in range(1, 4))
PATIENCE = StepContext(cell="c1")
SETTLED = (State.ABSENT, State.ACTIVE, State.FAILED, State.DELETED)
SETTLE_ROUNDS = 60


class Host:
    """One host: what it runs, and up to which attempt it never will."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.running: int | None = None
        self.ended_attempt = 0

    def spawn(self, attempt: int, outcome: str) -> e.Event | None:
        if attempt <= self.ended_attempt or outcome == "silent":
            return None
        if outcome == "fails":
            return e.SpawnFailed(at=0.0, attempt=attempt, host_uuid=self.uuid, code="spawn.planned")
        self.running = attempt
        return e.Spawned(at=0.0, attempt=attempt, host_uuid=self.uuid, service="s")

    def destroy(self, attempt: int) -> e.Event:
        self.ended_attempt = max(self.ended_attempt, attempt)
        if self.running is not None and self.running <= attempt:
            self.running = None
        return e.Destroyed(at=0.0, attempt=attempt, host_uuid=self.uuid, service="s")


class Placement:
    """Placement for one consumer: what it holds, under which attempt, and which hosts are full."""

    def __init__(self) -> None:
        self.held: tuple[int, str] | None = None
        self.generation: int | None = None
        self.full: set[str] = set()
        self.ended_attempt = 0

    def start(self) -> None:
        self.held, self.generation, self.ended_attempt = (1, HOSTS[0]), 1, 1

    def claim(self, claim: Claim) -> tuple[ClaimOutcome, int | None]:
        """As placement does: refused by attempt, and a release_first that finds nothing to release may go on."""
        places = [next(iter(option.allocations)) for option in claim.options]
        if self.held is not None and self.held[0] == claim.attempt:
            return ClaimOutcome.CLAIMED, places.index(self.held[1])
        if claim.attempt <= self.ended_attempt or (
            self.held is not None and self.generation != claim.consumer_generation
        ):
            return ClaimOutcome.CONSUMER_CONFLICT, None
        self.held = None
        for option, place in enumerate(places):
            if place not in self.full:
                self.held, self.generation = (claim.attempt, place), (self.generation or 0) + 1
                self.ended_attempt = claim.attempt
                return ClaimOutcome.CLAIMED, option
        self.ended_attempt = claim.attempt - 1
        return ClaimOutcome.NO_CAPACITY, None

    def release(self, release: Release) -> None:
        assert release.attempt is not None
        if self.held is None or self.held[0] <= release.attempt:
            self.held = None
            self.ended_attempt = max(self.ended_attempt, release.attempt)


class World(RuleBasedStateMachine):
    """The machine among its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.instance = Instance(uuid=UUID)
        self.hosts = {uuid: Host(uuid) for uuid in HOSTS}
        self.placement = Placement()
        self.network: list[object] = []
        self.announced: list[BuildEvent] = []
        self.spawned: dict[int, Spawn] = {}
        self.queried = False
        self.deleted = False
        self.previous_request: Claim | None = None
        self.sent: list[Claim] = []

    def take(self, event: e.Event) -> None:
        stepped = step(self.instance, event, PATIENCE)
        self.instance = stepped.instance
        for command in stepped.commands:
            if isinstance(command, BuildEvent):
                if command.sequence in (earlier := {one.sequence: one for one in self.announced}):
                    known = earlier[command.sequence]  # once more, to a scheduler that may have forgotten it
                    assert (command.state, command.terminal) == (known.state, known.terminal)
                else:
                    self.announced.append(command)
                continue
            if isinstance(command, Spawn):
                assert self.placement.held == (command.attempt, command.host_uuid), (
                    "only claimed hosts are ever built on"
                )
                assert command.attempt not in self.spawned, "an attempt is commanded once"
                self.spawned[command.attempt] = command
            self.network.append(command)

    def arrive(self, message: object, outcome: str) -> None:
        if isinstance(message, Spawn):
            result = self.hosts[message.host_uuid].spawn(message.attempt, outcome)
            if result is not None:
                self.network.append(result)
        elif isinstance(message, Destroy):
            host = self.hosts[message.host_uuid]
            if message.keep_if_complete and host.running == message.attempt:
                runs = e.Spawned(at=0.0, attempt=message.attempt, host_uuid=host.uuid, service="s")
                self.network.append(runs)
            else:
                self.network.append(host.destroy(message.attempt))
        elif isinstance(message, e.Event):
            self.take(_at(message, self.now))

    def report(self, host: Host) -> None:
        rescans = (rescan_id(self.instance),)
        if host.running is not None:
            runs = e.MachineRunning(at=0.0, attempt=host.running, host_uuid=host.uuid, service="s", rescans=rescans)
            self.network.append(runs)
        elif self.instance.host_uuid == host.uuid:
            self.network.append(e.MachineMissing(at=0.0, host_uuid=host.uuid, service="s", rescans=rescans))

    def ask(self, *, lose: bool) -> None:
        query = awaited_request_of(self.instance)
        if isinstance(query, Release):
            self.placement.release(query)
            if not lose:
                self.take(e.Released(at=self.now, attempt=query.attempt or 0))
        elif isinstance(query, Claim):
            repeated, self.previous_request = self.previous_request == query, query
            self.sent.append(query)
            outcome, option = self.placement.claim(query)
            if lose:
                return
            if option is not None:
                generation = self.placement.generation
                claimed = e.Claimed(at=self.now, attempt=query.attempt, option=option, consumer_generation=generation)
                self.take(claimed)
            else:
                changed = outcome is ClaimOutcome.CONSUMER_CONFLICT and not repeated
                self.take(e.ClaimRefused(at=self.now, attempt=query.attempt, consumer_conflict=changed))

    @precondition(lambda self: not self.queried)
    @rule(alternates=st.integers(0, 2))
    def build(self, alternates: int) -> None:
        self.queried = True
        self.placement.start()
        hosts = HOSTS[: alternates + 1]
        selections = tuple(
            Selection(host_uuid=host, host=host[-1], service="s", allocations={host: {"VCPU": 1}}) for host in hosts
        )
        spec = InstanceSpec(instance_uuid=UUID, project_id="p")
        self.network.append(
            e.BuildRequested(at=0.0, spec=spec, selections=selections, consumer_generation=1, build_timeout_s=60.0)
        )

    @precondition(lambda self: self.queried)
    @rule()
    def delete(self) -> None:
        self.deleted = True
        self.network.append(e.DeleteRequested(at=0.0))

    @precondition(lambda self: self.network)
    @rule(data=st.data(), doubled=st.booleans(), outcome=st.sampled_from(["runs", "runs", "fails", "silent"]))
    def deliver(self, data: st.DataObject, doubled: bool, outcome: str) -> None:
        index = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[index] if doubled else self.network.pop(index)
        self.arrive(message, outcome)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose_result(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.network) - 1))
        if isinstance(
            self.network[index], e.Spawned | e.SpawnFailed | e.Destroyed | e.MachineRunning | e.MachineMissing
        ):
            del self.network[index]

    @precondition(lambda self: self.instance.deadline is not None)
    @rule()
    def pass_deadline(self) -> None:
        assert self.instance.deadline is not None
        self.now = max(self.now, self.instance.deadline)
        self.take(e.TimedOut(at=self.now))

    @rule(seconds=st.floats(0.1, 50.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: awaited_request_of(self.instance) is not None)
    @rule(lose=st.booleans())
    def answer(self, lose: bool) -> None:
        self.ask(lose=lose)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def late_claim(self, data: st.DataObject) -> None:
        """A copy of a claim reaches placement long after any caller waited for its answer."""
        self.placement.claim(self.sent[data.draw(st.integers(0, len(self.sent) - 1))])

    @rule(uuid=st.sampled_from(HOSTS))
    def empty(self, uuid: str) -> None:
        self.placement.full.discard(uuid)

    @rule(uuid=st.sampled_from(HOSTS))
    def see(self, uuid: str) -> None:
        self.report(self.hosts[uuid])

    @rule(uuid=st.sampled_from(HOSTS))
    def fill(self, uuid: str) -> None:
        self.placement.full.add(uuid)

    @rule(uuid=st.sampled_from(HOSTS))
    def lose_machine(self, uuid: str) -> None:
        self.hosts[uuid].running = None

    @rule(uuid=st.sampled_from(HOSTS))
    def lose_ended_attempts(self, uuid: str) -> None:
        self.hosts[uuid].ended_attempt = 0

    @invariant()
    def at_most_one_end_a_request(self) -> None:
        ends = [event.state for event in self.announced if event.terminal]
        assert len(ends) == len(set(ends)), ends
        assert BuildState.DELETED not in ends[:-1], ends
        assert not {BuildState.ACTIVE, BuildState.FAILED} <= set(ends), ends

    @invariant()
    def numbers_rise(self) -> None:
        numbers = [event.sequence for event in self.announced]
        assert numbers == list(range(10, 10 + len(numbers)))

    @invariant()
    def active_is_claimed(self) -> None:
        if self.instance.state in (State.ACTIVE, State.BUILDING, State.DESTROYING):
            assert self.placement.held == (self.instance.attempt, self.instance.host_uuid)

    def teardown(self) -> None:
        """Everything arrives in the end, and hosts report: then all three views agree (invariants 2 and 3).

        Even when every spawn ever commanded comes once more, to hosts that have forgotten their ended attempts.
        """
        for host in self.hosts.values():
            host.ended_attempt = 0
        self.network += self.spawned.values()
        for _ in range(SETTLE_ROUNDS):
            while self.network:
                self.arrive(self.network.pop(0), "runs")
            self.ask(lose=False)
            self.now += 31.0
            for host in self.hosts.values():
                self.report(host)
            if self.instance.deadline is not None and self.instance.deadline <= self.now:
                self.take(e.TimedOut(at=self.now))
        while self.network:
            self.arrive(self.network.pop(0), "runs")
        self.at_most_one_end_a_request()
        self.numbers_rise()
        self.placement.full.clear()
        for claim in self.sent:
            self.placement.claim(claim)
        assert self.instance.state in SETTLED, self.instance
        expected = (self.instance.attempt, self.instance.host_uuid) if self.instance.state is State.ACTIVE else None
        running = [(host.running, host.uuid) for host in self.hosts.values() if host.running is not None]
        assert running == ([expected] if expected else []), (running, self.instance)
        assert self.placement.held == expected, (self.placement.held, self.instance)
        if self.queried:
            assert any(event.terminal for event in self.announced), self.instance
        if self.deleted:
            assert self.instance.state is State.DELETED


def _at(event: e.Event, now: float) -> e.Event:
    return replace(event, at=now)


TestWorld: Callable[..., object] = World.TestCase
World.TestCase.settings = settings(stateful_step_count=40)
