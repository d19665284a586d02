"""The invariants that are looked at after every step that can change them, cheaply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from bus.contracts.base import tag_of
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import MESSAGES
from bus.contracts.cell import ComputeOutcome, ComputeResult
from bus.contracts.placement import Restate
from bus.contracts.queues import DEAD, EVENTS, Where
from cell_conductor.metrics import STEPS_FAILED
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.memory import MemoryInstanceTable
from compute_sim.fleet import Fleet, Host, SimulatedMachine
from lab.simulation.loop import PROCESS, Process
from lab.simulation.plan import MAX_FAULT_S
from placement_worker.domain.values import Provider
from placement_worker.store.memory_table import MemoryPlacementTable

# The message types that belong to the API bus alone.
ABOVE = frozenset(tag_of(row.message) for row in MESSAGES if row.where is Where.API)

# A command whose confirmation was lost with its broker is sent again when that is back.
SENT_AGAIN_S = MAX_FAULT_S + 5.0


class Breach(Exception):
    """An invariant does not hold."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


class PlacementWatch:
    """Looks at placement after each of its commits: only at what the commit touched."""

    def __init__(self, table: MemoryPlacementTable) -> None:
        self._table = table
        # Another client's DELETE /allocations leaves the generation, as Placement's does, and so does a new name
        # or parent.
        self.rest_frees = False
        self._seen: dict[str, Provider] = {}
        self._versions: dict[tuple[str, str], int] = {}
        self._head = 0
        self._restated = Counter[tuple[str, str]]()  # provider and class

    def restate(self, message: Restate) -> None:
        """A machine runs there, whatever the capacity is by now."""
        self._restated.update((uuid, name) for uuid, held in (message.allocations or {}).items() for name in held)

    def begin_anew(self) -> None:
        """Placement is what it was at an earlier moment: from here on everything rises again."""
        table = self._table
        self._seen = dict(table.providers)
        self._versions = {key: source.version for key, source in table.reporters.items()}
        self._head = table.head

    def __call__(self) -> None:
        """Raises Breach."""
        table = self._table
        for uuid, provider in table.providers.items():
            before = self._seen.get(uuid)
            if provider is before:
                continue
            self._usage(uuid, provider, before)
            stays = (
                self.rest_frees
                and before is not None
                and (_is_freed(provider, before) or _is_placed_anew(provider, before))
            )
            if before is not None and provider.generation <= before.generation and not stays:
                raise Breach("generations_rise", f"{uuid}: {provider.generation} after {before.generation}")
            self._seen[uuid] = provider
        for uuid in [uuid for uuid in self._seen if uuid not in table.providers]:
            del self._seen[uuid]
        for key, source in table.reporters.items():
            if source.version < self._versions.get(key, 0):
                raise Breach("stale_never_applied", f"{key}: {source.version} after {self._versions[key]}")
            self._versions[key] = source.version
        if table.head < self._head:
            raise Breach("feed_has_no_hole", f"the head went from {self._head} to {table.head}")
        new = [change.sequence for change in table.changes if change.sequence > self._head]
        if new != list(range(self._head + 1, table.head + 1)):
            raise Breach("feed_has_no_hole", f"numbers {new[:5]}... after {self._head}, head {table.head}")
        self._head = table.head

    def _usage(self, uuid: str, provider: Provider, before: Provider | None) -> None:
        for name, used in provider.used.items():
            inventory = provider.inventories.get(name)
            capacity = 0 if inventory is None else inventory.capacity
            risen = before is None or used > before.used.get(name, 0)
            if used >= 0 and not (used > capacity and risen):
                continue
            self._restated[uuid, name] -= 1
            if inventory is None or used < 0 or self._restated[uuid, name] < 0:
                raise Breach("capacity", f"{provider.name} {name}: {used} of {capacity}")


def _is_freed(provider: Provider, before: Provider) -> bool:
    """Whether nothing but usage has changed, and none has risen."""
    has_risen = any(amount > before.used.get(name, 0) for name, amount in provider.used.items())
    return not has_risen and replace(provider, used=before.used) == before


def _is_placed_anew(provider: Provider, before: Provider) -> bool:
    """Whether nothing has changed but its name, the name of a class of which it has an inventory, or its parent."""
    has_the_same = sorted(map(repr, provider.inventories.values())) == sorted(map(repr, before.inventories.values()))
    of_place = {
        name: getattr(before, name) for name in ("name", "parent", "root", "spec_generation", "inventories", "used")
    }
    return (
        has_the_same and provider.spec_generation >= before.spec_generation and replace(provider, **of_place) == before
    )


def failed_steps() -> int:
    """How many steps of conductors a defect has prevented in this process: no worker ends because of them."""
    return int(
        sum(one.value for metric in STEPS_FAILED.collect() for one in metric.samples if one.name.endswith("total"))
    )


def is_open(table: MemoryInstanceTable) -> bool:
    """Whether what a cell has on record counts: since it was set back, that is once it has recovered."""
    return table.origin == table.place and not table.recovers


class MachineWatch:
    """Looks at the machines as they come to be, and at what conductors and hosts report of them."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self._now = now
        self._failed_before = failed_steps()  # in other runs
        self._recorded: dict[tuple[str, str, int], float] = {}  # when a record first had this attempt as active
        self._built: set[tuple[str, str, int]] = set()  # every machine there ever was: (host, instance, attempt)
        self._destroyed: dict[tuple[str, str], int] = {}  # the highest attempt that a host reported as gone for good
        self._destroyers: dict[tuple[str, str], Process | None] = {}  # and the process that did
        self._begun: dict[tuple[str, str, int], Process | None] = {}  # who left it half-built
        # {instance: {cell: its newest record there that was active or lost}}. A second cell builds an instance that was
        # lost in a first one when schedulers have lost its record and its request comes again.
        self._active: dict[str, dict[str, Instance]] = {}
        self._last: dict[tuple[str, str], Instance] = {}  # by cell and instance, as last committed
        self._blocked: dict[
            tuple[str, str], tuple[str | None, int]
        ] = {}  # host and attempt of what is, or was, blocked
        self.runs: Callable[[str, str], int | None] = lambda _host, _instance: None  # the attempt that runs there now
        self._deployed: set[tuple[str, str]] = set()  # (node, instance): Ironic knows no attempts
        # Of two hosts of one uuid either may have reported that it destroyed an attempt.
        self.has_forgotten: Callable[[], bool] = lambda: False  # whether a cell's database has lost commits
        self.has_a_double: Callable[[str], bool] = lambda _host: False
        self._builders: dict[
            tuple[str, str, int], tuple[WatchedFleet, Process | None]
        ] = {}  # who built it last, and in what
        self._untold: set[tuple[str, str, int]] = set()

    def failed_steps(self) -> int:
        """How many of this run."""
        return failed_steps() - self._failed_before

    def deployed(self, node: str, instance: str) -> None:
        """A machine of metal comes to be."""
        self._deployed.add((node, instance))

    def put(self, host: str, machine: SimulatedMachine) -> None:
        """A machine comes to be."""
        key = (host, machine.instance_uuid)
        if machine.attempt <= self._destroyed.get(key, 0):
            if _share_a_name(self._destroyers.get(key), PROCESS.get()):
                # The other process of the name has answered, while this one was in the middle of the build.
                self._untold.add((*key, machine.attempt))
            elif not self.has_a_double(host):
                raise Breach(
                    "destroyed_for_good", f"{machine.instance_uuid} attempt {machine.attempt} on {host}, was destroyed"
                )
        self._begun[*key, machine.attempt] = None if machine.complete else PROCESS.get()
        if machine.complete:
            self._built.add((host, machine.instance_uuid, machine.attempt))

    def built_in(self, fleet: WatchedFleet, host: str, machine: SimulatedMachine) -> None:
        """A complete machine comes to be in this fleet: one of two, where two services share a name."""
        key, builder = (host, machine.instance_uuid, machine.attempt), PROCESS.get()
        former_fleet, former = self._builders.get(key, (fleet, None))
        self._builders[key] = (fleet, builder)
        is_new = self._now() - self._recorded.get(key, 0.0) <= SENT_AGAIN_S
        is_known = self._is_on_record(key) and not is_new and not self.has_forgotten()
        if former_fleet is fleet or former is None or is_known:
            return
        if former.dead or not fleet.has_name(former):
            self._untold.add(key)

    def _is_on_record(self, key: tuple[str, str, int]) -> bool:
        host, instance, attempt = key
        records = self._active.get(instance, {}).values()
        return any((one.host_uuid, one.attempt) == (host, attempt) for one in records)

    def is_untold(self, host: str, instance: str, attempt: int) -> bool:
        """Whether an attempt ran in two fleets of one name, and no worker could know of both.

        A name belongs to one process at a time (docs/operate/deploy.md). One that dies, or loses the name with its
        connection, before any conductor has recorded what it built keeps that knowledge to itself: the same command,
        sent again, is a first one to the next, and a command to destroy it finds nothing there. An outbox sends a
        command again after its record as well, when its database has lost the deletion of the row (seed 92123), or its
        broker the confirmation (seed 1795406924).
        """
        return (host, instance, attempt) in self._untold

    def has_untold(self, instance: str) -> bool:
        """Whether one of its attempts did: of two machines a worker may give it the one that was answered for."""
        return any(one == instance for _, one, _ in self._untold)

    def set_back(self, host: str) -> None:
        """A host is what it was at an earlier moment: what was destroyed since may run again."""
        self._destroyed = {key: attempt for key, attempt in self._destroyed.items() if key[0] != host}

    def result(self, result: ComputeResult) -> None:
        """A host reports about an attempt."""
        if result.outcome is ComputeOutcome.DESTROYED:
            key = (result.host_uuid, result.instance_uuid)
            self._destroyed[key] = max(result.attempt, self._destroyed.get(key, 0))
            self._destroyers[key] = PROCESS.get()
            built = (*key, result.attempt)
            fleet, builder = self._builders.get(built, (None, None))
            # Answered by the next process of the name, of machines that this attempt is not among. The one that built
            # it has died, or has lost the name with its connection (seed 1795425616).
            is_cut_off = fleet is not None and builder is not None and (builder.dead or not fleet.has_name(builder))
            is_unknown = is_cut_off and builder is not PROCESS.get() and not self._is_on_record(built)
            if is_unknown or _share_a_name(self._begun.get(built), PROCESS.get()):
                self._untold.add(built)

    def instances(self, cell: str, instances: Mapping[str, Instance]) -> None:
        """A conductor of a cell has committed: what is active was built, there and by that attempt."""
        for uuid, instance in instances.items():
            last = self._last.get((cell, uuid))
            if instance.blocked_reason:  # it is not known what is true
                self._blocked[cell, uuid] = instance.host_uuid, instance.attempt
            if last is instance or instance.blocked_reason:
                continue
            self._last[cell, uuid] = instance
            before = self._active.get(uuid, {}).get(cell)
            if before is not None and instance.code == "instance.lost" and before.code != "instance.lost":
                if last is None or last.code != "instance.lost" or before.attempt != instance.attempt:
                    self._lost(before)
                    self._lost(instance)
                self._active[uuid][cell] = instance
            elif before is not None and _lost_its_attempt(before, instance):
                self._lost(instance)
                self._active[uuid][cell] = instance
            if instance.state is not State.ACTIVE:
                continue
            self._active.setdefault(uuid, {})[cell] = instance
            attempt = (instance.host_uuid or "", uuid, instance.attempt)
            self._recorded.setdefault(attempt, self._now())
            if self._blocked.pop((cell, uuid), None) == (instance.host_uuid, instance.attempt):
                continue  # as it was: its host's reports show now whether it is lost
            if attempt not in self._built and (instance.host_uuid, uuid) not in self._deployed:
                raise Breach("active_was_built", f"{uuid} is active as attempt {instance.attempt}, never built there")

    def _lost(self, instance: Instance) -> None:
        """No machine is reported lost that runs."""
        runs = self.runs(instance.host_uuid or "", instance.uuid)
        if runs == instance.attempt:
            raise Breach("lost_was_lost", f"{instance.uuid} attempt {runs} is taken for lost, and runs")


def _lost_its_attempt(before: Instance, instance: Instance) -> bool:
    """Whether a build goes on after its host has reported that it lost the current attempt: only its history has it."""
    last = instance.history[-1] if instance.history else None
    is_new = last is not None and last.code == "instance.lost" and last not in before.history
    return is_new and last is not None and last.attempt == instance.attempt


def _share_a_name(one: Process | None, other: Process | None) -> bool:
    """Whether these are two processes of one service, as compute-s00 and twin-s00 are."""
    if one is None or other is None or one.name == other.name:
        return False
    return one.name.partition("-")[2] == other.name.partition("-")[2]


class WatchedFleet(Fleet):
    """A fleet whose machines are watched as they come to be."""

    watch: MachineWatch
    fail: Callable[[Breach], None]
    destroyed: Callable[[str, SimulatedMachine], None] = staticmethod(lambda _host, _guest: None)
    moves: Callable[[str, SimulatedMachine], None] = staticmethod(lambda _host, _guest: None)
    has_name: Callable[[Process], bool] = staticmethod(lambda _process: True)  # whether it has the service's name now

    def remove(self, host: str, instance: str) -> None:
        """A driver takes a machine away."""
        machine = self.machine(host, instance)
        if machine is not None:
            try:
                self.destroyed(host, machine)
            except Breach as breach:
                self.fail(breach)
        super().remove(host, instance)

    def drop(self, host: str) -> Host:
        """A host is taken out of the fleet: its service does not know it any more."""
        found = self._hosts.pop(host)
        for callback in list(self._listeners):
            callback((host,))
        return found

    def adopt(self, host: Host) -> None:
        """A host comes into the fleet."""
        self._hosts[host.plan.uuid] = host
        for callback in list(self._listeners):
            callback((host.plan.uuid,))

    def put(self, host: str, machine: SimulatedMachine) -> None:
        """A machine is on this host from now on; or it is another, or switched off, from now on."""
        here = self.machine(host, machine.instance_uuid)
        try:
            # One that is switched off does not come to be. Its host may have been another service's, which answered
            # that it destroyed the machine (seed 1795417062).
            if here is None or machine != replace(here, runs=False):
                self.watch.put(host, machine)
                if machine.complete:
                    self.watch.built_in(self, host, machine)
            self.moves(host, machine)
        except Breach as breach:
            self.fail(breach)
        super().put(host, machine)


class SecondFleet(Fleet):
    """Hosts whose uuids are another service's, which is up: placement, the cell and the schedulers have them as its."""

    fail: Callable[[Breach], None]

    def put(self, host: str, machine: SimulatedMachine) -> None:
        """A machine is on this host from now on: it was built by the wrong service."""
        self.fail(Breach("host_has_one_service", f"{machine.instance_uuid} was built on the second {host}"))
        super().put(host, machine)


class Listener:
    """Receives every message, as a client that misses none: terminal events, and who publishes what on which bus."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], BuildEvent] = {}
        self.terminals: dict[str, dict[int, BuildState]] = {}
        self.accepted: dict[str, None] = {}
        self.upward: list[str] = []
        self.dead: list[str] = []
        self.exempt: set[str] = set()  # builds of which a restored database knows an old state, and publishes it

    def event(self, event: BuildEvent) -> None:
        """One event on the API bus."""
        self.events.setdefault((event.instance_uuid, event.sequence), event)
        if event.sequence:  # any but the terminal event may be missing; only what is on record has a number
            self.accepted[event.instance_uuid] = None
        if not event.terminal or event.state is BuildState.DELETED:
            return
        if event.instance_uuid in self.exempt:
            return
        states = self.terminals.setdefault(event.instance_uuid, {})
        known = states.get(event.sequence)
        if known is not None and known is not event.state:
            raise Breach("one_terminal_state", f"{event.instance_uuid}: number {event.sequence} twice, differently")
        states[event.sequence] = event.state
        if len(states) > 1:
            raise Breach("one_terminal_state", f"{event.instance_uuid}: terminal events {sorted(states.items())}")

    def message(self, bus: str, exchange: str, key: str, tag: str) -> None:
        """Any message: one that belongs above must not be published on a cell's bus."""
        if exchange == DEAD:
            self.dead.append(f"{bus} {key} {tag}")
        elif bus != "api" and tag in ABOVE and exchange != EVENTS:
            self.upward.append(f"{tag} on the bus of {bus}")
