"""The invariants of every moment: one machine runs, what runs is claimed, what is refused is unchanged, and a machine
that was evacuated from a fenced host never runs there again. At rest every claim has its owner.

Judged from what machines really do and what placement really holds, for every instance that a record has had as active.
An older attempt of its build may still come alive late, as always; it is not looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from bus.bus import API
from bus.contracts.actions import ActionEvent, ActionKind, ActionState
from cell_conductor.rules.action_events import TRANSFERRED_SINCE
from cell_conductor.state.desired_state import IN_OTHER_CELL
from cell_conductor.state.evacuation_proof import may_run_after_evacuation
from cell_conductor.state.instance import Instance, Power, State
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.store.memory import MemoryInstanceTable
from compute_sim.fleet import Fleet, SimulatedMachine
from lab.simulation.watch import Breach, is_open
from placement_worker.domain.migration import MIGRATION_TYPES
from placement_worker.store.memory_table import MemoryPlacementTable

# In these the source of a move is given up: the destination is on record as active.
GIVES_UP_SOURCE = frozenset({(State.DESTROYING, State.ACTIVE), (State.RELEASING, State.ACTIVE)})
LEAVES = (State.DESTROYING, State.OFFLOADED)
GIVES_UP_HERE = frozenset(
    {
        (State.DESTROYING, State.OFFLOADED),
        (State.RELEASING, State.OFFLOADED),
        (State.DESTROYING, State.REVERTING),
    }
)
# An evacuation has no destination, or its destination has ended what it built: the source may run again.
NOT_ELSEWHERE = frozenset({State.CLAIMING, State.PREPARING, State.REVERTING, State.RESTARTING})
# An evacuated instance is being built elsewhere, or is there.
EVACUATED = GIVES_UP_SOURCE | {(State.FINISHING, None), (State.RESIZED, None)}
AT_REST = frozenset({State.ACTIVE, State.OFFLOADED})
HAS_NOTHING = IN_OTHER_CELL | {(one, None) for one in (State.ABSENT, State.TOMBSTONE, State.DELETED, State.FAILED)}


def _counts_as_owned(instance: Instance) -> bool:
    return instance.phase not in HAS_NOTHING and not instance.blocked_reason


class MoveWatch:
    """Looks after every commit of placement and of a cell, at every new machine, and at what is published."""

    def __init__(
        self,
        placement: MemoryPlacementTable,
        cells: Mapping[str, MemoryInstanceTable],
        fleets: Mapping[str, Fleet],
        duplicates: Mapping[str, Fleet],
    ) -> None:
        """`duplicates`: machines of second services of a name: of two hosts of one uuid either may be meant."""
        self._placement = placement
        self._cells = cells
        self._fleets = fleets
        self._duplicates = duplicates
        self._first: dict[str, int] = {}  # the attempt under which each was first active
        self._seen: dict[str, Instance] = {}
        self.given_up: set[tuple[str, str, int]] = set()  # (host, instance, attempt) that a move or a shelving gave up
        self.moved: dict[str, None] = {}  # instances of which a move was ever recorded
        self._migrations: dict[str, dict[str, None]] = {}  # {instance: its requests, as consumers of placement}
        self.evacuated: set[tuple[str, str, int]] = set()  # (host, instance, attempt) of a fenced host
        self.refused: dict[str, str] = {}  # requests, with their instances
        self.fenced: set[str] = set()  # hosts that were switched off once: what was not evacuated is off there
        self.gone: set[str] = set()  # fenced hosts that have burnt down: their fence stays
        self.sent: dict[str, str] = {}  # {request: its instance} that a cell was sent
        self.ends: dict[tuple[str, str], tuple[ActionState, str]] = {}  # by bus and request
        self.brought_back: set[tuple[str, str, int]] = set()  # (host, instance, attempt) on a set-back host
        self.exempt: Mapping[str, None] = {}  # of whom a restored database knows an old truth
        self.judges_machines = False  # how many of theirs run, all the same
        self.has_untold: Callable[[str], bool] = lambda _instance: False  # see `MachineWatch`

    # --- cells

    def instances(self, instances: Mapping[str, Instance]) -> None:
        """After a commit of a conductor. Raises Breach."""
        for uuid, instance in instances.items():
            before = self._seen.get(uuid)
            if before is instance or instance.state is State.TRANSFERRED or instance.blocked_reason:
                continue
            self._owned_once(instances, instance)
            if instance.phase == LEAVES and (before is None or before.phase != LEAVES):
                self._has_an_image(instance)
            self._seen[uuid] = instance
            if instance.state is State.ACTIVE:
                self._first.setdefault(uuid, instance.attempt)
                self.evacuated.discard((instance.current.host_uuid, uuid, instance.attempt))  # it found no other host
            if uuid not in self.exempt:
                self._refusals(before, instance)
            move = instance.action
            if move is None:
                continue
            self.moved[uuid] = None
            self._migrations.setdefault(uuid, {})[move.request_id] = None
            source = move.source
            if source is None or not instance.is_in_place:
                self._given_up(instance)
            if move.kind is ActionKind.EVACUATE and source is not None and instance.phase in EVACUATED:
                self.evacuated.add((source.host_uuid, uuid, move.source_attempt))
            elif move.kind is ActionKind.EVACUATE and source is not None and instance.state in NOT_ELSEWHERE:
                self.evacuated.discard((source.host_uuid, uuid, move.source_attempt))  # seed 1795482690127

    def _owned_once(self, instances: Mapping[str, Instance], instance: Instance) -> None:
        """At most one cell has an instance. Raises Breach."""
        if not _counts_as_owned(instance) or instance.uuid in self.exempt:
            return
        for cell, table in self._cells.items():
            is_another = table.instances is not instances and is_open(table)
            other = table.instances.get(instance.uuid) if is_another else None
            if other is not None and _counts_as_owned(other):
                raise Breach("one_owner", f"{instance.uuid} is {instance.state}, and {other.state} in {cell} too")

    def _has_an_image(self, instance: Instance) -> None:
        """A cell destroys the machine of an instance that leaves for another one: its image is kept. Raises Breach."""
        is_to_leave = instance.action is not None and instance.action.to_cell is not None
        if is_to_leave and instance.uuid not in self.exempt and not instance.image:
            raise Breach("never_in_neither", f"{instance.uuid} gives up {instance.host_uuid} without an image")

    def _given_up(self, instance: Instance) -> None:
        move = instance.action
        assert move is not None
        if instance.phase in GIVES_UP_SOURCE and move.source is not None:
            self.given_up.add((move.source.host_uuid, instance.uuid, move.source_attempt))
        # A fence of the destination leads past that in one commit; without a source, here is the source.
        is_undone = instance.state is State.REVERTING and instance.source_host_uuid is not None
        if (is_undone or instance.phase in GIVES_UP_HERE) and instance.host_uuid:
            self.given_up.add((instance.host_uuid, instance.uuid, instance.attempt))

    def _refusals(self, before: Instance | None, instance: Instance) -> None:
        """A request that was refused is under way nowhere, and has changed nothing. Raises Breach."""
        known = () if before is None else before.ended
        new = [one for one in instance.ended if one not in known]
        self.refused.update({one.request_id: instance.uuid for one in new if one.state is ActionState.REFUSED})
        move = instance.action
        if move is not None and (under_way := {move.request_id, move.ending_request_id} & self.refused.keys()):
            raise Breach("refused_is_unchanged", f"{instance.uuid}: {under_way} was refused, and is {instance.state}")
        only_refused = bool(new) and all(one.state is ActionState.REFUSED for one in new)
        if before is None or not only_refused or not (before.state is instance.state and instance.state in AT_REST):
            return
        was, now = ((i.spec, i.power, i.image, i.attempt, i.host_uuid) for i in (before, instance))
        if was != now:
            raise Breach("refused_is_unchanged", f"{instance.uuid} was {was}, and is {now}")

    def forget(self, cell: str, before: Mapping[str, Instance], after: Mapping[str, Instance]) -> None:
        """A cell was set back to before these requests had ended: a late copy is carried out."""
        for uuid, instance in before.items():
            known = after[uuid].ended if uuid in after else ()
            for one in instance.ended:
                if one not in known:
                    self.refused.pop(one.request_id, None)
                    self.ends.pop((cell, one.request_id), None)

    def on_event(self, event: ActionEvent, bus: str) -> None:
        """A conductor publishes, or a scheduler to clients. Raises Breach.

        A cell has one end for a request, and so have clients. Two cells may differ: schedulers take the end of the cell
        that has the request, and a late copy may come to the one which it was sent to first.
        """
        if not event.terminal or event.sequence == 0:  # 0: of another request under this id
            return
        if bus != API and event.reason == TRANSFERRED_SINCE:
            return  # the end is not known there: an answer for schedulers that do not know it either
        end = (event.state, event.code)
        first = self.ends.setdefault((bus, event.request_id), end)
        if first != end and event.instance_uuid not in self.exempt:
            raise Breach("one_terminal_event", f"{event.request_id} on the bus {bus}: {first}, then {end}")

    # --- machines

    def put(self, host: str, machine: SimulatedMachine) -> None:
        """A machine comes to be, or is changed. Raises Breach."""
        if not machine.complete or not machine.runs or not self._counts(host, machine) or self.has_a_double(host):
            return
        uuid = machine.instance_uuid
        if (host, uuid, machine.attempt) in self.evacuated:
            raise Breach("fenced_never_runs", f"{uuid} attempt {machine.attempt} starts on {host}, and was evacuated")
        for table in self._cells.values():
            record = table.instances.get(uuid)
            if host not in table.fenced or record is None or record.blocked_reason or record.state is State.DESTROYING:
                continue  # in the last two its host may be to spare it
            if is_provably_ended(record, machine.attempt, host):
                raise Breach(
                    "fenced_never_runs", f"{uuid} attempt {machine.attempt} starts on {host}, which has lost it"
                )
        for other, one in self._running():
            if other != host and one.instance_uuid == uuid:
                raise Breach("never_two_running", f"{uuid} runs on {other} as {one.attempt}, starts on {host}")
        if uuid not in self.exempt and not self._is_claimed(uuid, host):
            raise Breach("never_running_unclaimed", f"{uuid} attempt {machine.attempt} starts on {host}, unclaimed")

    @property
    def was_active(self) -> Mapping[str, int]:
        """The instances that a record has had as active, and the attempt that it first was."""
        return self._first

    def _running(self) -> Iterator[tuple[str, SimulatedMachine]]:
        """The machines that run now, and their hosts."""
        for service, fleet in self._fleets.items():
            for host in fleet.hosts if service not in self._duplicates else ():
                for machine in (host.machines or {}).values():
                    if machine.complete and machine.runs and self._counts(host.plan.uuid, machine):
                        yield host.plan.uuid, machine

    def _counts(self, host: str, machine: SimulatedMachine) -> bool:
        uuid = machine.instance_uuid
        first = self._first.get(uuid)
        is_exempt = uuid in self.exempt and not self.judges_machines
        if first is None or machine.attempt < first or is_exempt:
            return False
        return (host, uuid, machine.attempt) not in self.brought_back

    def has_a_double(self, host: str) -> bool:
        """Whether a second service of a name has, or had, a host of this uuid too."""
        return any(self._fleets[service].host(host) is not None for service in self._duplicates)

    # --- placement

    def _is_claimed(self, uuid: str, host: str) -> bool:
        """Whether the instance, or a migration of it, holds something of this host."""
        return any(self._holds(consumer, host) for consumer in (uuid, *self._migrations.get(uuid, ())))

    def _holds(self, consumer: str, host: str) -> bool:
        kept, providers = self._placement.consumers.get(consumer), self._placement.providers
        held = kept.consumer.allocations if kept is not None else ()
        return any(provider in providers and providers[provider].root == host for provider in held)

    def placement(self) -> None:
        """After a commit of placement: what runs is claimed, and nothing is under a refused request. Raises Breach."""
        for host, machine in self._running():
            uuid = machine.instance_uuid
            if uuid not in self.exempt and not self._is_claimed(uuid, host) and not self.has_untold(uuid):
                raise Breach("never_running_unclaimed", f"{uuid} attempt {machine.attempt} runs on {host}")
        for request, uuid in self.refused.items():
            # A cell that was set back to before the refusal carries out a copy of the request that comes late.
            kept = None if uuid in self.exempt else self._placement.consumers.get(request)
            if kept is not None and kept.consumer.allocations and kept.consumer.consumer_type in MIGRATION_TYPES:
                raise Breach("refused_is_unchanged", f"the refused request {request} holds {kept.consumer.allocations}")

    # --- at rest

    def unsettled(self, lost: set[str]) -> Iterator[str]:
        """Every migration's claim has its move, every request its end, and machines are as their records have them."""
        yield from self._machines(lost)
        under_way = {
            instance.action.request_id
            for table in self._cells.values()
            for instance in table.instances.values()
            if instance.action is not None
        }
        owners = {request: uuid for uuid, requests in self._migrations.items() for request in requests}
        for uuid, kept in self._placement.consumers.items():
            is_migration = kept.consumer.consumer_type in MIGRATION_TYPES and kept.consumer.allocations
            if is_migration and uuid not in under_way and not {uuid, owners.get(uuid)} & lost:
                yield f"claims_have_owners: the migration {uuid} holds {dict(kept.consumer.allocations)}"
        for cell, table in self._cells.items():
            for host in table.fenced.keys() - self.gone:
                if any(may_run_after_evacuation(one, host) for one in table.instances.values() if one.uuid in lost):
                    continue  # its destination has died, and nothing fences that
                yield f"fences_are_lifted: {host} of {cell} has {table.fenced[host].stale_machines} to be destroyed"
        ended = {request for _, request in self.ends}
        for request, instance in self.sent.items():
            if request not in ended and instance not in lost:
                yield f"one_terminal_event: the request {request} for {instance} has had no end"

    def _machines(self, lost: set[str]) -> Iterator[str]:
        for table in self._cells.values():
            for uuid, instance in table.instances.items():
                if instance.state is not State.ACTIVE or uuid not in self.moved or uuid in lost:
                    continue
                fleet, host = self._fleets.get(instance.current.service), instance.current.host_uuid
                machine = fleet.machine(host, uuid) if fleet is not None else None
                if machine is None or host in self.fenced or self.has_a_double(host):
                    continue
                if (host, uuid, machine.attempt) in self.brought_back:
                    continue
                if machine.allocations != instance.current.allocations:
                    yield f"machine_has_its_size: {uuid} is {machine.allocations}, not {instance.current.allocations}"
                if machine.runs is not (instance.power in (Power.RUNNING, Power.RESCUED)):
                    yield f"runs_as_recorded: {uuid} is {instance.power.value}, and runs: {machine.runs}"
