"""Deliberate defects of the recovery of a cell whose database was set back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.base import DatabaseMark
from bus.contracts.listing import ListedMachine
from bus.contracts.operations import CellFence
from bus.contracts.placement import Restate
from cell_conductor import transition
from cell_conductor.recovery import record_reconciler
from cell_conductor.recovery.cell_recovery import CellRecovery
from cell_conductor.recovery.known_reader import OwnInstances
from cell_conductor.recovery.machine_listing import MachineListing
from cell_conductor.recovery.record_reconciler import RecordReconciler
from cell_conductor.rules import reconcile
from cell_conductor.rules.instance_facts import InstanceFacts
from cell_conductor.rules.recovery_facts import KnownInstance, OperatorDecision, Reconciled
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.events import Event
from cell_conductor.state.instance import Instance
from cell_conductor.state.step import Step, StepContext

Mutant = Callable[[], AbstractContextManager[Any]]


def barrier_opens_one_service_early() -> AbstractContextManager[Any]:
    """A service that has not listed counts as one that has nothing."""

    def absent(self: RecordReconciler, *_: object) -> set[str]:
        return set()

    return patch.object(RecordReconciler, "_absent", absent)


def older_machine_chosen() -> AbstractContextManager[Any]:
    """Of several machines of an instance the one with the lowest attempt is its own."""

    def oldest_of(machines: Sequence[ListedMachine], base: Instance) -> ListedMachine | None:
        return machines[0]

    return patch.object(reconcile, "newest_of", oldest_of)


def busy_ignored() -> AbstractContextManager[Any]:
    """A machine that is being changed is judged as it is now."""
    return patch.object(
        reconcile, "RULES", tuple(one for one in reconcile.RULES if one is not reconcile.wait_until_quiet)
    )


def incarnation_not_raised() -> AbstractContextManager[Any]:
    """A cell recovers under the number that the orders of its lost history have."""

    highest = Stated.highest

    def unraised(self: Stated, *known: DatabaseMark) -> int:
        return highest(self, *known) - 1

    return patch.object(Stated, "highest", unraised)


def blocked_taken() -> AbstractContextManager[Any]:
    """Requests, reports and deadlines are judged by a record of which it is not known what is true."""
    stepped = transition._stepped

    def step(instance: Instance, event: Event, context: StepContext) -> Step:
        return stepped(replace(instance, blocked_reason=""), event, context)

    return patch.object(transition, "_stepped", step)


def blocked_for_good() -> AbstractContextManager[Any]:
    """What a recovery could not find out is never looked at again."""

    def note(self: CellRecovery, instances: Collection[str]) -> None:
        return None

    return patch.object(CellRecovery, "note_blocked", note)


def absent_hosts_have_nothing() -> AbstractContextManager[Any]:
    """No machine is awaited of a host that has not listed."""
    return patch.object(
        reconcile, "RULES", tuple(one for one in reconcile.RULES if one is not reconcile.wait_for_hosts)
    )


def numbers_not_raised() -> AbstractContextManager[Any]:
    """A record goes on under the numbers that it has."""

    def numbered(facts: InstanceFacts, record: Instance | None, incarnation: int) -> Instance | None:
        return record

    return patch.object(reconcile, "_numbered", numbered)


def requests_not_ended() -> AbstractContextManager[Any]:
    """A request that was under way has no end."""

    def ends_of(facts: InstanceFacts, chosen: ListedMachine | None = None) -> tuple[()]:
        return ()

    return patch.object(reconcile, "_ends_of", ends_of)


def allocations_not_restated() -> AbstractContextManager[Any]:
    """Placement keeps what it has of an instance and of its moves."""

    def nothing(result: Reconciled, known: KnownInstance | None) -> Restate | None:
        return None

    return patch.object(record_reconciler, "restatement", nothing)


def fences_not_told() -> AbstractContextManager[Any]:
    """A cell that has forgotten fences is not told of them."""

    async def put(self: CellRecovery, decisions: Collection[CellFence]) -> None:
        return None

    return patch.object(CellRecovery, "_put_fences", put)


def losses_need_no_word() -> AbstractContextManager[Any]:
    """However many instances a recovery would lose, they are lost."""

    async def goes_on(self: CellRecovery, incarnation: int, listing: MachineListing, own: OwnInstances) -> bool:
        return False

    return patch.object(CellRecovery, "_waits_for_word", goes_on)


def the_top_is_not_heard() -> AbstractContextManager[Any]:
    """What schedulers and placement have of an instance that its record has as well does not count."""
    decide = InstanceFacts.__init__

    def facts(  # noqa: PLR0917  (as the real one)
        self: InstanceFacts,
        record: Instance | None,
        machines: Sequence[ListedMachine],
        known: KnownInstance | None,
        absent: Collection[str],
        decision: OperatorDecision | None,
        **more: Any,
    ) -> None:
        if record is not None and known is not None:
            known = replace(known, is_deleted=False, request_id="", kind=None, attempt=0)
        decide(self, record, machines, known, absent, decision, **more)

    return patch.object(InstanceFacts, "__init__", facts)


MUTANTS_OF_RECOVERIES: tuple[Mutant, ...] = (
    barrier_opens_one_service_early,
    older_machine_chosen,
    busy_ignored,
    incarnation_not_raised,
    blocked_taken,
    blocked_for_good,
    absent_hosts_have_nothing,
    numbers_not_raised,
    requests_not_ended,
    allocations_not_restated,
    fences_not_told,
    losses_need_no_word,
    the_top_is_not_heard,
)
