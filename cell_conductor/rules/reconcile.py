"""What is true of one instance once its cell's database was restored: from its record, from what compute services list
of it, and from the schedulers' record. Pure, and idempotent: with its own result it comes to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from bus.contracts.actions import CHOOSES_HOSTS, ActionKind, ActionState, Condition
from bus.contracts.base import MAX_ATTEMPT
from bus.contracts.listing import ListedMachine
from cell_conductor.rules.action_events import ACTION_LOST
from cell_conductor.rules.build_end_rules import LOST
from cell_conductor.rules.cell_transfer_rules import transferred_to
from cell_conductor.rules.instance_facts import DESTROYING_DELETED, InstanceFacts, place_of
from cell_conductor.rules.recovery_facts import (
    NO_SERVICE,
    KnownInstance,
    OperatorDecision,
    Reconciled,
    RecoveryCommand,
    RecoveryCommandKind,
    Verb,
)
from cell_conductor.state.desired_state import (
    AT_REST,
    DELETE_REQUESTED,
    IN_OTHER_CELL,
    MAY_HAVE_MACHINE,
    NOT_THERE,
    PlacementCall,
    Work,
    desired_state_of,
    phases_matching,
)
from cell_conductor.state.instance import MAX_ENDED, BlockedReason, EndedAction, Instance, Phase, Power, State

BUILD_LOST = "build.lost"
ATTEMPTS_PER_INCARNATION = 1000

(RELEASING_FAILED,) = phases_matching(
    lambda row: row.placement_call is PlacementCall.RELEASE and row.condition is Condition.FAILED
)
(RELEASING_DELETED,) = phases_matching(
    lambda row: row.placement_call is PlacementCall.RELEASE and row.condition is Condition.DELETED
)


def newest_of(machines: Sequence[ListedMachine], base: Instance) -> ListedMachine | None:
    """The one with the highest attempt. Of several with that, the one on record; None: none of them is."""
    latest = [one for one in machines if one.attempt == machines[-1].attempt]
    return latest[0] if len(latest) == 1 else next((one for one in latest if one.host_uuid == base.host_uuid), None)


def should_run(power: Power) -> bool:
    """Whether an instance of this power runs."""
    return power in (Power.RUNNING, Power.RESCUED)


# --- the rules, in their order: the first that holds


def adopt_decided(facts: InstanceFacts) -> Reconciled | None:
    """1: an operator has given it this machine. A delete is not revoked by that."""
    decision, base = facts.decision, facts.base
    if decision is None or decision.verb is not Verb.ADOPT or base is None or base.phase in DELETE_REQUESTED:
        return None
    chosen = next((one for one in facts.complete if one.host_uuid == decision.host_uuid and not one.busy), None)
    return None if chosen is None else _active(facts, base, chosen)


def wait_until_quiet(facts: InstanceFacts) -> Reconciled | None:
    """2."""
    return facts.blocked(BlockedReason.BUSY) if any(one.busy for one in facts.own) else None


def follow_transfer(facts: InstanceFacts) -> Reconciled | None:
    """3: another cell has it by a later attempt. The request by which it left ends there."""
    known, base = facts.known, facts.base
    if known is None or not known.is_in_other_cell or known.attempt <= (0 if base is None else base.last_attempt):
        return None
    if facts.complete:
        return facts.blocked(BlockedReason.CONFLICT)
    if base is None or base.phase in IN_OTHER_CELL | DELETE_REQUESTED or not base.selections:
        return Reconciled(base, facts.commands())
    return Reconciled(_transferred(base, known), facts.commands())


def await_command(facts: InstanceFacts) -> Reconciled | None:
    """Of 3: they have given it to this cell, which has nothing of it yet: the command waits, or is queried."""
    known, record = facts.known, facts.record
    if known is None or not known.is_in_this_cell or facts.own or facts.may_be_absent:
        return None
    if record is None:
        is_first = not known.is_active and known.attempt <= 1
        return Reconciled(None, facts.commands()) if known.is_transferred_in or is_first else None
    is_started = record.action is not None and record.action.request_id == known.request_id
    if (
        not known.is_transferred_in
        or is_started
        or known.attempt <= record.last_attempt
        or record.phase in DELETE_REQUESTED
    ):
        return None
    return Reconciled(record if record.phase in IN_OTHER_CELL or not record.selections else _transferred(record, known))


def delete(facts: InstanceFacts) -> Reconciled | None:
    """4: its client has requested that, by one of the two, and the other has nothing later. It is none of another
    project's machine.
    """
    known, base = facts.known, facts.base
    is_by_record = base is not None and (
        base.phase in DELETE_REQUESTED or (base.action is not None and base.action.delete)
    )
    is_by_top = facts.is_deleted_above
    if not (is_by_record or is_by_top):
        return None
    numbers, others = [0], [one.attempt for one in facts.complete]
    if base is not None:
        (numbers if is_by_record else others).append(base.last_attempt if is_by_record else base.attempt)
    if known is not None and known.exists:
        (numbers if is_by_top else others).append(known.attempt)
    if max(others, default=0) > max(numbers) or not all(map(facts.may_be_of_its_project, facts.own)):
        return facts.blocked(BlockedReason.CONFLICT)
    own = facts.own
    commands = tuple(RecoveryCommand(RecoveryCommandKind.DESTROY, one) for one in (*own, *facts.failed))
    if base is None or base.spec is None:  # of a tombstone, no end could be told
        return Reconciled(base, commands)
    ended, may_be_absent = _ends_of(facts), bool(facts.unseen & facts.places)
    if may_be_absent and base.service in ("", NO_SERVICE):
        return facts.blocked(BlockedReason.HOST_ABSENT, commands)  # nobody could be commanded
    if base.phase not in AT_REST or own or not is_by_record:
        is_gone = not own and not may_be_absent
        base = _in(base, RELEASING_DELETED if is_gone else DESTROYING_DELETED)
    if may_be_absent:  # its places, the source's among them, are waited for; its requests have their ends now
        going = base.action and replace(base.action, delete=True, answered=True, ending_kind=None, ending_request_id="")
        base = replace(base, action=going)
    else:
        base = replace(base, action=None, **(place_of(own[-1], base) | {"code": ""} if own else {}))
    return _ended(Reconciled(base, commands, ended))


def keep(facts: InstanceFacts) -> Reconciled | None:
    """5: it is at rest, or resized, and as recorded."""
    base, known = facts.base, facts.known
    if base is None:
        return None
    row = facts.desired_state
    if not (row.ends or row.in_other_cell or row.condition in (Condition.FAILED, Condition.RESIZED)):
        return None
    newest = max((one.attempt for one in facts.own if not one.complete or one in facts.proved), default=0)
    if newest > base.last_attempt or (
        known is not None and known.is_in_this_cell and known.attempt > base.last_attempt
    ):
        return None
    again = tuple(one for one in base.ended if known is not None and one.request_id == known.request_id)
    if row.current not in MAY_HAVE_MACHINE:
        if facts.may_be_absent:
            return None
        if known is None and row.condition is Condition.OFFLOADED:  # another cell may have it
            return facts.blocked(BlockedReason.SCHEDULERS_SILENT)
        return Reconciled(base, facts.commands(), again)
    found = [one for one in facts.complete if (one.host_uuid, one.attempt) == (base.host_uuid, base.attempt)]
    if any(one.spec is not None and base.spec is not None and one.spec.flavor != base.spec.flavor for one in found):
        return None  # it was resized since
    if (found[0].runs != should_run(base.power)) if found else not facts.is_off_as_recorded:
        return None
    source = (base.source_host_uuid, base.source_attempt)
    sources = [one for one in facts.complete if (one.host_uuid, one.attempt) == source]
    if any(one.runs for one in sources):
        return None
    found += sources
    return Reconciled(base, facts.commands(*found), again)


def wait_for_hosts(facts: InstanceFacts) -> Reconciled | None:
    """6."""
    if facts.base is None or not facts.may_be_absent:
        return None
    return facts.blocked(BlockedReason.HOST_ABSENT)


def activate(facts: InstanceFacts) -> Reconciled | None:
    """7: it has a complete machine that is proved; the newest is its own."""
    if facts.base is None or not facts.proved:
        return None
    chosen = newest_of(facts.proved, facts.base)
    if chosen is None:
        return facts.blocked(BlockedReason.CONFLICT)
    return _active(facts, facts.base, chosen)


def build_on(facts: InstanceFacts) -> Reconciled | None:
    """8: a build goes on where its newest machine is. Of anything else, what is incomplete is destroyed first: it
    may have become complete by then.
    """
    base, incomplete = facts.base, [one for one in facts.own if not one.complete]
    if base is None or not incomplete:
        return None
    if facts.desired_state.work is not Work.BUILD:
        return facts.blocked(BlockedReason.INCOMPLETE, facts.commands())
    newest = incomplete[-1]
    building = replace(base, state=State.BUILDING, next_state=None, attempt=newest.attempt, **place_of(newest, base))
    return Reconciled(building, facts.commands(newest))


def end_without_machine(facts: InstanceFacts) -> Reconciled | None:
    """9, 10, 11: no machine is left of it. By a request under way it may have an image under a name that is
    lost.
    """
    base, known = facts.base, facts.known
    if base is None:
        return None
    is_build = facts.desired_state.work is Work.BUILD
    image = base.image or (base.action.image if base.action is not None else "") or (known.snapshot if known else "")
    ended, commands = _ends_of(facts), facts.commands()
    if not is_build and (image or (known is not None and known.is_offloaded)):
        offloaded = replace(base, state=State.OFFLOADED, next_state=None, power=Power.SHELVED, image=image, action=None)
        return _ended(Reconciled(offloaded, commands, ended))
    if not is_build and any(kind in LEAVES_AN_IMAGE for _, kind in _requests(facts)):
        return facts.blocked(BlockedReason.SCHEDULERS_SILENT if known is None else BlockedReason.CONFLICT, commands)
    if any(one.complete for one in facts.protected):  # it may have been given to it since, and that decision is lost
        return facts.blocked(BlockedReason.CONFLICT, commands)
    has_failed = facts.desired_state.condition is Condition.FAILED
    code = base.code if has_failed else BUILD_LOST if is_build else LOST
    lost = replace(_in(base, RELEASING_FAILED), code=code, action=None)
    return _ended(Reconciled(lost, commands, ended))


def take_up_unrecorded(facts: InstanceFacts) -> Reconciled:
    """12: neither record nor map has it. Its spec and the project of its allocations prove it."""
    project = "" if facts.known is None else facts.known.project_id
    if facts.known is None or not facts.complete or (facts.known.exists and not facts.known.is_in_this_cell):
        return Reconciled(None, facts.commands() if facts.known is not None else _quarantine(facts.complete))
    newest = facts.complete[-1]
    is_proved = newest.attempt > 0 and newest.spec is not None and newest.spec.project_id == project
    is_unique = sum(one.attempt == newest.attempt for one in facts.complete) == 1
    if not is_proved or not is_unique or newest.allocations is None or facts.unseen & facts.places:
        return Reconciled(None, facts.commands())
    return _active(facts, Instance(uuid=newest.instance_uuid, spec=newest.spec), newest)


Rule = Callable[[InstanceFacts], Reconciled | None]
RULES: tuple[Rule, ...] = (
    adopt_decided, wait_until_quiet, follow_transfer, await_command, delete, keep, wait_for_hosts, activate, build_on,
    end_without_machine, take_up_unrecorded,
)  # fmt: skip


def reconcile(
    record: Instance | None,
    machines: Sequence[ListedMachine],
    known: KnownInstance | None,
    absent: Collection[str],
    decision: OperatorDecision | None,
    *,
    incarnation: int,
    protected: Collection[str] = (),
    off: Collection[str] = (),
) -> Reconciled:
    """Decide. machines: all that are listed of it. absent: hosts that have not listed and are not fenced. protected:
    where an operator keeps a machine, which is then none of the instance's. off: fenced hosts that have not listed.
    """
    facts = InstanceFacts(record, machines, known, absent, decision, protected=protected, off=off)
    result = next(found for rule in RULES if (found := rule(facts)) is not None)
    if facts.known is None and _ends(facts, result):  # rule 0
        result = facts.blocked(BlockedReason.SCHEDULERS_SILENT)
    decided = tuple(RecoveryCommand(RecoveryCommandKind.DESTROY, one) for one in facts.decided)
    numbered = result.record if result.blocked_reason else _numbered(facts, result.record, incarnation)
    return replace(result, record=numbered, commands=(*decided, *result.commands))


def _ends(facts: InstanceFacts, result: Reconciled) -> bool:
    """Whether the result releases anything, or ends a request that had not ended."""
    base, record = facts.base, result.record
    if base is None or record is None:
        return False
    is_released = record.phase != base.phase and desired_state_of(record).current in NOT_THERE
    return is_released or any(one not in base.ended for one in result.ended)


def _numbered(facts: InstanceFacts, record: Instance | None, incarnation: int) -> Instance | None:
    """Above all numbers that were seen, and the floor of the incarnation. Of one that waits, or has left or is deleted,
    the numbers stay comparable with the schedulers'.
    """
    if record is None or record.phase in IN_OTHER_CELL:
        return record
    seen = [record.last_attempt, *(one.attempt for one in (*facts.own, *facts.failed))]
    if facts.known is not None and not facts.known.is_in_other_cell:
        seen.append(facts.known.attempt)
    if record.phase not in DELETE_REQUESTED:
        seen.append(incarnation * ATTEMPTS_PER_INCARNATION)
    newest = min(max(seen), MAX_ATTEMPT)
    return record if newest == record.last_attempt else replace(record, highest_attempt=newest)


def _transferred(record: Instance, known: KnownInstance) -> Instance:
    kind, request_id = known.kind or ActionKind.UNSHELVE, known.request_id or record.uuid
    return transferred_to(record, known.cell, known.attempt - 1, kind=kind, request_id=request_id, at=record.since)


def _active(facts: InstanceFacts, base: Instance, chosen: ListedMachine) -> Reconciled:
    """On this machine. What is incomplete and newer comes first: it may be complete by the time of the command to
    destroy it.
    """
    known = facts.known
    others = facts.commands(chosen)
    if any(not one.complete and one.attempt > chosen.attempt for one in facts.own):
        return facts.blocked(
            BlockedReason.INCOMPLETE, tuple(o for o in others if o.kind is not RecoveryCommandKind.QUARANTINE)
        )
    is_stopping = any(kind in STOPPING for _, kind in _requests(facts))
    wanted = known.power if known is not None and not is_stopping else None
    starts = not chosen.runs and wanted is not None and should_run(wanted)
    if starts and any(one.runs for one in facts.complete if one != chosen):  # it would run twice
        return facts.blocked(BlockedReason.CONFLICT)
    runs = chosen.runs or starts
    image = base.image or ("" if known is None else known.snapshot)
    power = next((one for one in (wanted, base.power) if one is not None and should_run(one) is runs), None)
    power = power or (Power.RUNNING if runs else Power.STOPPED)
    image = image if power is Power.SHELVED else ""
    record = replace(
        base,
        state=State.ACTIVE,
        next_state=None,
        attempt=chosen.attempt,
        spec=chosen.spec or base.spec,
        action=None,
        code="",
        power=power,
        image=image,
        **place_of(chosen, base),
    )
    started = (RecoveryCommand(RecoveryCommandKind.START, chosen),) if starts else ()
    return _ended(Reconciled(record, (*started, *others), _ends_of(facts, chosen)))


STOPPING = frozenset({ActionKind.STOP, ActionKind.SHELVE, ActionKind.OFFLOAD})
LEAVES_AN_IMAGE = frozenset({ActionKind.SHELVE, ActionKind.OFFLOAD, ActionKind.MIGRATE, ActionKind.RESIZE})


def _has_arrived(kind: ActionKind, base: Instance, chosen: ListedMachine) -> bool:
    if kind in STOPPING:
        return not chosen.runs
    if kind in (ActionKind.START, ActionKind.UNSHELVE):
        return chosen.runs
    before = base.attempt if base.action is None else base.action.source_attempt
    return kind in CHOOSES_HOSTS and chosen.attempt > before


def _requests(facts: InstanceFacts) -> tuple[tuple[str, ActionKind], ...]:
    """Those under way, by the record and by the schedulers': the record may be from before."""
    found: dict[str, ActionKind] = {}
    if facts.base is not None and facts.base.action is not None:
        found[facts.base.action.request_id] = facts.base.action.kind
    if facts.known is not None and facts.known.request_id and facts.known.kind is not None:
        found[facts.known.request_id] = facts.known.kind
    return tuple(found.items())


def _ends_of(facts: InstanceFacts, chosen: ListedMachine | None = None) -> tuple[EndedAction, ...]:
    """As they are on record; else they have arrived with this machine, or failed."""
    base = facts.base
    if base is None:
        return ()
    before = {one.request_id: one for one in base.ended}
    return tuple(
        before.get(request_id)
        or (
            EndedAction(request_id, kind, ActionState.DONE)
            if chosen is not None and _has_arrived(kind, base, chosen)
            else EndedAction(request_id, kind, ActionState.FAILED, ACTION_LOST)
        )
        for request_id, kind in _requests(facts)
    )


def _ended(result: Reconciled) -> Reconciled:
    """With the ends on record, so that a copy of a request is answered the same."""
    assert result.record is not None
    new = tuple(one for one in result.ended if one not in result.record.ended)
    ended = (*result.record.ended, *new)[-MAX_ENDED:]
    return replace(result, record=replace(result.record, ended=ended)) if new else result


def _in(record: Instance, phase: Phase) -> Instance:
    return replace(record, state=phase[0], next_state=phase[1])


def _quarantine(machines: Sequence[ListedMachine]) -> tuple[RecoveryCommand, ...]:
    return tuple(RecoveryCommand(RecoveryCommandKind.QUARANTINE, one) for one in machines)
