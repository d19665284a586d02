"""What is known of one instance once its cell's database was restored; `reconcile` decides by it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from msgspec.structs import replace

from bus.contracts.actions import Condition
from bus.contracts.cell import Selection
from bus.contracts.listing import ListedMachine
from cell_conductor.rules.recovery_facts import (
    KnownInstance,
    OperatorDecision,
    Reconciled,
    RecoveryCommand,
    RecoveryCommandKind,
    Verb,
)
from cell_conductor.state.desired_state import (
    DELETE_REQUESTED,
    NOT_THERE,
    DesiredState,
    MachineTarget,
    desired_state_of,
    phases_matching,
)
from cell_conductor.state.instance import BlockedReason, Instance, Power, State

(DESTROYING_DELETED,) = phases_matching(
    lambda row: row.current is MachineTarget.DESTROYED and row.condition is Condition.DELETED
)


class InstanceFacts:
    """All that is known of an instance. record: on record. known: the schedulers' record. base: the
    newer of both. own: the machines with the cell's tag about which no operator has decided, newest last. failed: what
    failed builds may have left, which is no machine of it.
    """

    def __init__(
        self,
        record: Instance | None,
        machines: Sequence[ListedMachine],
        known: KnownInstance | None,
        absent: Collection[str],
        decision: OperatorDecision | None,
        *,
        protected: Collection[str],
        off: Collection[str],
    ) -> None:
        self.known = known
        destroyed = decision.host_uuid if decision is not None and decision.verb is Verb.DESTROY else None
        self.record = None if record is None or record.state is State.ABSENT else record
        # Up to this number neither a machine nor what placement has is the instance's: its build was refused because
        # of them.
        is_refused = self.record is not None and desired_state_of(self.record).current is MachineTarget.UNKNOWN
        self.met = self.record.next_attempt if self.record is not None and is_refused else -1
        own = sorted(
            (one for one in machines if not one.foreign and one.attempt > self.met),
            key=lambda one: (one.attempt, one.host_uuid),
        )
        self.protected = [one for one in own if one.host_uuid in protected]
        self.decided = [one for one in own if one.host_uuid == destroyed and one not in self.protected]
        undecided = [one for one in own if one not in self.protected and one not in self.decided]
        self.own, self.failed = ([one for one in undecided if one.failed is failed] for failed in (False, True))
        self.decision, self.off = decision, off
        # A machine without this database's tag is not proved to be another's: the instance's may have lost its tag.
        self.unseen = {*absent, *(one.host_uuid for one in machines if one.foreign)}
        self.base = _base(self.record, known)
        if (self.base is None or self.base.spec is None) and self.is_deleted_above:
            assert self.known is not None
            self.base = _to_destroy(self.known, self.own, self.unseen) or self.base

    @property
    def is_deleted_above(self) -> bool:
        """Whether its client has deleted it by the map. What another cell has, that cell destroys and releases."""
        return self.known is not None and self.known.is_deleted and not self.known.is_in_other_cell

    @cached_property
    def desired_state(self) -> DesiredState:
        """Of the base."""
        assert self.base is not None
        return desired_state_of(self.base)

    @cached_property
    def complete(self) -> list[ListedMachine]:
        """The newest last."""
        return [one for one in self.own if one.complete]

    @cached_property
    def proved(self) -> list[ListedMachine]:
        """The complete ones that are this instance's: of its project, or of an attempt that it has had."""
        base = self.base
        if base is None or base.spec is None:
            return []
        return [
            one
            for one in self.complete
            if self.may_be_of_its_project(one) and (one.project_id is not None or one.attempt <= base.attempt)
        ]

    def may_be_of_its_project(self, machine: ListedMachine) -> bool:
        """Whether the service of this machine does not have it as another project's."""
        spec = None if self.base is None else self.base.spec
        return spec is None or machine.project_id in (None, spec.project_id)

    @property
    def is_off_as_recorded(self) -> bool:
        """Whether its host is off, and the schedulers have it there, or nothing of it: by a fence alone none ends."""
        places = None if self.known is None or not self.known.exists else self.known.hosts_in_this_cell
        at = None if self.base is None else self.base.host_uuid
        return at in self.off and (places is None or at in places)

    @property
    def may_be_absent(self) -> bool:
        """Whether a host that has not listed may have a machine of it: its places; any, if schedulers told nothing."""
        return bool(self.unseen if self.known is None else self.unseen & self.places)

    @cached_property
    def places(self) -> set[str]:
        """The hosts that may have a machine of it, by its record and its allocations."""
        is_own = self.known is not None and self.known.attempt > self.met
        found = {one.host_uuid for one in self.known.selections} if self.known is not None and is_own else set[str]()
        if self.base is None:
            return found
        row = self.desired_state
        if self.base.selections and row.current not in NOT_THERE:
            found.add(self.base.current.host_uuid)
        if (
            self.base.action is not None
            and self.base.action.source is not None
            and row.source is not MachineTarget.ABSENT_AFTER_DESTROY
        ):
            found.add(self.base.action.source.host_uuid)
        return found

    def commands(self, *wanted: ListedMachine) -> tuple[RecoveryCommand, ...]:
        """About the machines that are not wanted: no complete one is destroyed."""
        return tuple(
            RecoveryCommand(
                RecoveryCommandKind.QUARANTINE if one.complete else RecoveryCommandKind.DESTROY_IF_INCOMPLETE, one
            )
            for one in (*self.own, *self.failed)
            if one not in wanted
        )

    def blocked(self, reason: BlockedReason, commands: tuple[RecoveryCommand, ...] = ()) -> Reconciled:
        """Nothing changes. A tombstone waits for nothing: what a host has of it is reported."""
        is_tombstone = self.base is not None and self.base.spec is None
        return Reconciled(self.base, commands, blocked_reason=None if is_tombstone else reason)


def _base(record: Instance | None, known: KnownInstance | None) -> Instance | None:
    """The record. Where it has no machine, and the map has one under a later attempt, what the map has."""
    if known is None or not known.is_in_this_cell or known.spec is None or not known.selections:
        return record
    if record is not None:
        is_over = (
            desired_state_of(record).current in (MachineTarget.ABSENT, MachineTarget.UNKNOWN)
            and record.action is None
            and record.phase not in DELETE_REQUESTED
        )
        if not is_over or known.attempt <= record.last_attempt:
            return record
    of_map = record or Instance(uuid=known.spec.instance_uuid, power=known.power or Power.RUNNING)
    state = State.BUILDING
    if known.is_active:
        state = State.ACTIVE
    return replace(
        of_map, state=state, next_state=None, spec=known.spec, selections=known.selections[:1], selection_index=0,
        attempt=known.attempt, code="", transfer=None,
    )  # fmt: skip


def _to_destroy(known: KnownInstance, own: Sequence[ListedMachine], unseen: Collection[str]) -> Instance | None:
    """What no record has, and its client has deleted: as long as there is a machine, or may be one on a host that has
    not listed, its delete is not over. None: there is nothing, or no spec to tell of its end by.
    """
    absent = tuple(one for one in known.selections if one.host_uuid in unseen)
    spec = known.spec or (own[-1].spec if own else None)
    if spec is None or not (own or known.selections):  # it may hold those under a later attempt than its delete names
        return None
    state, next_state = DESTROYING_DELETED
    made = Instance(uuid=spec.instance_uuid, state=state, next_state=next_state, spec=spec, attempt=known.attempt)
    places = absent or known.selections
    return replace(made, **place_of(own[-1], made)) if own and not absent else replace(made, selections=places[:1])


def place_of(machine: ListedMachine, base: Instance) -> dict[str, object]:
    """The fields of a record whose machine is this one."""
    return {"selections": (_selection(machine, base),), "selection_index": 0}


def _selection(machine: ListedMachine, base: Instance) -> Selection:
    """Where it is; what it takes, by its host, else by the record of that host."""
    known = next((one for one in base.selections if one.host_uuid == machine.host_uuid), None)
    taken = machine.allocations or (known and known.allocations) or {}
    if known is not None and taken == known.allocations and known.service == machine.service:
        return known
    return Selection(
        host_uuid=machine.host_uuid, host=machine.host, service=machine.service, allocations=taken,
        zone=known.zone if known is not None else "",
    )  # fmt: skip
