"""Deliberate defects, each switched on by a test alone: what the simulation has to find, and does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

import placement_worker.store.memory_rows as book_store
from bus.consuming.consumer import Consumer
from bus.contracts.build import BuildState
from bus.contracts.cell import Destroy
from bus.contracts.placement import Claim, ClaimOutcome, Release
from bus.persistence.memory_database import MemoryDatabase, MemoryDatabaseTransaction, MemoryRows
from bus.persistence.outbox import Sweep, by_bus
from bus.persistence.relay import Relay
from cell_conductor import awaited_request, table, transition
from cell_conductor.engine import Engine
from cell_conductor.placement_client import PlacementRequests
from cell_conductor.rules import build_end_rules
from cell_conductor.state import step as steps
from cell_conductor.state.instance import State
from compute_agent.records.attempt import AttemptPhase, HostAttempt, SpawnAction
from compute_sim.driver import SimulatedDriver
from placement_worker.domain import claims
from placement_worker.domain.report_group import ReportGroup
from placement_worker.replica.follower import Follower
from placement_worker.replica.replica import Replica
from scheduler_worker.cell_events import cell_event_batch
from tests.sim.mutants_of_cases import refused_while_another_bus_is_away, release_under_the_reverts_number
from tests.sim.mutants_of_disks import MUTANTS_OF_DISKS, UNPROVEN_OF_DISKS
from tests.sim.mutants_of_hosts import MUTANTS_OF_HOSTS
from tests.sim.mutants_of_messages import MUTANTS_OF_MESSAGES, UNPROVEN_OF_MESSAGES, releases
from tests.sim.mutants_of_peers import MUTANTS_OF_PEERS, UNPROVEN_OF_PEERS

Mutant = Callable[[], AbstractContextManager[Any]]


def ack_before_commit() -> AbstractContextManager[Any]:
    """A consumer acknowledges what it has received before its handler has committed anything."""
    received = Consumer._on_delivery

    def on_delivery(self: Consumer, delivery: Any) -> None:
        if not self._draining:
            delivery.ack()
        received(self, delivery)

    return patch.object(Consumer, "_on_delivery", on_delivery)


def outbox_skipped() -> AbstractContextManager[Any]:
    """Messages leave without having been committed: the row is never written."""

    async def send_later(self: MemoryDatabaseTransaction, outgoing: Sequence[Any]) -> list[int]:
        return [self._database.next_row() for _ in by_bus(outgoing)]

    return patch.object(MemoryDatabaseTransaction, "send_later", send_later)


def outbox_never_swept() -> AbstractContextManager[Any]:
    """A dead process's messages in its outbox stay there."""

    async def claim_stale(self: MemoryRows, sweep: Sweep) -> list[tuple[int, bytes]]:
        await self.delete(sweep.confirmed)
        return []

    return patch.object(MemoryRows, "claim_stale", claim_stale)


def forgotten_before_confirmed() -> AbstractContextManager[Any]:
    """An outbox row is deleted when its messages are handed over, not when they are confirmed."""
    sent = Relay.send

    def send(self: Relay, rows: Sequence[int], outgoing: Sequence[Any]) -> None:
        for row_id in rows:
            self._rows._session.database.outbox.pop(row_id, None)  # type: ignore[attr-defined]
        sent(self, rows, outgoing)

    return patch.object(Relay, "send", send)


def release_forgotten_after_failure() -> AbstractContextManager[Any]:
    """A build that is given up is failed at once; what it holds is not released."""

    def give_up(instance: Any, at: float, context: Any, *, code: str, reason: str) -> Any:
        over = replace(instance, code=code, reason=reason)
        stepped = build_end_rules.enter_failed(over, at, context)
        return steps.Step(stepped.instance, (steps.destroy_current(instance, context), *stepped.commands))

    return _also(patch.object(build_end_rules, "fail", give_up), _widened(State.FAILED))


def ended_attempts_ignored_by_placement() -> AbstractContextManager[Any]:
    """A claim of an older attempt is taken as if it were the newest."""

    def may_claim(known: Any, claim: Claim) -> bool:
        return known is None or not known.allocations or claim.consumer_generation == known.generation

    return patch.object(claims, "_may_claim", may_claim)


def ended_attempts_ignored_by_compute() -> AbstractContextManager[Any]:
    """A host builds an attempt that it was commanded to destroy."""

    def on_spawn(entry: HostAttempt | None, attempt: int) -> tuple[SpawnAction, HostAttempt]:
        if (
            entry is not None
            and entry.phase in (AttemptPhase.BUILDING, AttemptPhase.RUNNING)
            and entry.attempt == attempt
        ):
            return SpawnAction.UNDERWAY, entry
        return SpawnAction.START, HostAttempt(attempt, AttemptPhase.BUILDING)

    return patch("compute_agent.attempts.agent.on_spawn", on_spawn)


def stale_inventory_applied() -> AbstractContextManager[Any]:
    """An inventory report is applied whatever its version."""
    return patch.object(ReportGroup, "refuse_stale", lambda _self: None)


def alternates_claimed_twice() -> AbstractContextManager[Any]:
    """The claim of an alternate is not the same when it is repeated: each asking takes another attempt."""
    requested = awaited_request.awaited_request_of

    def wanted(instance: Any) -> Any:
        message = requested(instance)
        if isinstance(message, Claim):
            return replace(message, attempt=message.attempt + int(instance.deadline or 0) % 2)
        return message

    return patch("cell_conductor.engine.awaited_request_of", wanted)


def duplicate_event_applied() -> AbstractContextManager[Any]:
    """An announcement is folded in as often as it comes."""
    applied = cell_event_batch.apply_build_event

    def apply(build: Any, event: Any) -> Any:
        return applied(replace(build, sequence=0, terminal=False), replace(event, sequence=build.sequence + 1))

    return patch.object(cell_event_batch, "apply_build_event", apply)


def replica_gap_ignored() -> AbstractContextManager[Any]:
    """A replica that misses changes goes on with the next ones."""

    def apply(self: Replica, changes: Sequence[Any]) -> None:
        for change in changes:
            if change.sequence > self.sequence:
                self._fold(change)
                self.sequence = change.sequence
        self._sweep()

    return patch.object(Replica, "apply", apply)


def capacity_off_by_one() -> AbstractContextManager[Any]:
    """One unit more than there is may be claimed; the store's own guard is all that is left."""
    claimed = book_store.claimed_provider

    def with_one_more(provider: Any) -> Any:
        found = claimed(provider)
        inventories = {
            name: inventory.__class__(
                inventory.capacity + 1, inventory.min_unit, inventory.max_unit, inventory.step_size, inventory.used
            )
            for name, inventory in found.inventories.items()
        }
        return replace(found, inventories=inventories)

    return patch.object(book_store, "claimed_provider", with_one_more)


def group_locks_in_any_order() -> AbstractContextManager[Any]:
    """A group of claims locks its consumers in the order in which they came."""
    locked = MemoryDatabaseTransaction.lock
    turn = itertools.count()  # of two at once, one goes the other way

    async def lock(self: MemoryDatabaseTransaction, keys: Any) -> None:
        listed = list(keys)
        if len(listed) > 1 and listed[0][0] in ("consumer", "provider") and next(turn) % 2:
            listed.reverse()
        for key in listed:
            await locked(self, [key])
            await asyncio.sleep(0.001)

    return patch.object(MemoryDatabaseTransaction, "lock", lock)


def assumption_never_dropped() -> AbstractContextManager[Any]:
    """A scheduler goes on to assume what it could not claim."""
    return patch.object(Replica, "drop_assumed", lambda self, key: None)


def deadline_forgotten() -> AbstractContextManager[Any]:
    """A conductor never looks for builds that take too long."""

    async def sweep(self: Engine) -> int:
        return 0

    return patch.object(Engine, "sweep", sweep)


def delete_keeps_the_claim() -> AbstractContextManager[Any]:
    """A build that is deleted while it is scheduled is written off, and its claim is not released."""

    return releases(lambda build, sent: [] if build.state is BuildState.DELETED else sent)


def handled_twice() -> AbstractContextManager[Any]:
    """A step of an instance starts from what was there when it was last read, not from what is locked now."""

    async def acquire(self: MemoryDatabase, transaction: Any, key: Any) -> None:
        return None

    return patch.object(MemoryDatabase, "acquire", acquire)


def destroyed_is_only_reported() -> AbstractContextManager[Any]:
    """A host reports `destroyed` and lets the machine run."""

    async def destroy(
        self: SimulatedDriver, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None
    ) -> None:
        return None

    return patch.object(SimulatedDriver, "destroy", destroy)


def late_success_accepted() -> AbstractContextManager[Any]:
    """A conductor takes any host's word for the success of its instance, whichever attempt it was."""
    return patch.object(steps, "is_current", lambda instance, attempt, host_uuid: True)


def old_attempt_not_destroyed() -> AbstractContextManager[Any]:
    """The machine of a failed or late attempt stays on its host."""
    stepped = transition.step

    def step(instance: Any, event: Any, context: Any) -> Any:
        done = stepped(instance, event, context)
        if done.instance.phase == (State.DESTROYING, State.DELETED):
            return done
        return steps.Step(done.instance, tuple(c for c in done.commands if not isinstance(c, Destroy)))

    return patch("cell_conductor.engine.step", step)


def feed_published_out_of_order() -> AbstractContextManager[Any]:
    """A change's number is drawn before its transaction is the last to lock the counter."""

    async def append(self: Any, changes: Sequence[Any]) -> int:
        if not changes:
            return 0
        table_, transaction = self._table, self._rows
        numbered = [replace(change, sequence=table_.head + at) for at, change in enumerate(changes, 1)]
        await transaction.statement()

        def write() -> None:
            table_.changes += numbered
            table_.head = numbered[-1].sequence

        transaction.will(write)
        return int(numbered[-1].sequence)

    return patch.object(book_store.MemoryPlacementTransaction, "append", append)


def silence_not_noticed() -> AbstractContextManager[Any]:
    """A replica neither compares itself with the feed's head nor notices silence or a reconnection."""

    def want(self: Follower, why: str) -> None:
        if why in ("start", "asked", "gap"):
            self._wanted.set()

    return patch.object(Follower, "_request_catch_up", want)


def delete_releases_any_attempt() -> AbstractContextManager[Any]:
    """A release frees what its consumer holds, also when a newer attempt holds it."""
    released = claims._release

    def release(ledger: Any, message: Release) -> Any:
        return released(ledger, replace(message, attempt=None))

    return patch.object(claims, "_release", release)


def no_answer_is_no() -> AbstractContextManager[Any]:
    """A conductor takes placement's silence for a refusal."""
    from cell_conductor.state.events import ClaimRefused  # noqa: PLC0415  (only this one needs it)

    original = PlacementRequests._claim_event

    def claim_event(self: PlacementRequests, question: Any, claim: Claim, answer: Any) -> Any:
        event = original(self, question, claim, answer)
        return event or ClaimRefused(
            at=self._clock.time(),
            attempt=claim.attempt,
            consumer_conflict=True,
            outcomes=(ClaimOutcome.PROVIDER_REMOVED,),
        )

    return patch.object(PlacementRequests, "_claim_event", claim_event)


@contextmanager
def _also(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with patches[0]:
        if len(patches) == 1:
            yield
        else:
            with _also(*patches[1:]):
                yield


def _widened(state: State) -> AbstractContextManager[Any]:
    """The table's rules may lead to this state too, so that only the simulation can notice."""

    def widened(entry: table.Entry) -> table.Entry:
        if isinstance(entry, table.ByNextState):
            rules_of = {then: table.Rule(rule.apply, (*rule.to, state)) for then, rule in entry.rules.items()}
            otherwise = entry.otherwise and table.Rule(entry.otherwise.apply, (*entry.otherwise.to, state))
            return table.ByNextState(rules_of, otherwise)
        return entry and table.Rule(entry.apply, (*entry.to, state))

    wide = {before: {event: widened(entry) for event, entry in row.items()} for before, row in table.TABLE.items()}
    return patch.object(transition, "TABLE", wide)


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        ack_before_commit,
        outbox_skipped,
        outbox_never_swept,
        forgotten_before_confirmed,
        release_forgotten_after_failure,
        ended_attempts_ignored_by_placement,
        ended_attempts_ignored_by_compute,
        stale_inventory_applied,
        alternates_claimed_twice,
        duplicate_event_applied,
        replica_gap_ignored,
        capacity_off_by_one,
        group_locks_in_any_order,
        assumption_never_dropped,
        deadline_forgotten,
        delete_keeps_the_claim,
        handled_twice,
        destroyed_is_only_reported,
        old_attempt_not_destroyed,
        feed_published_out_of_order,
        silence_not_noticed,
        delete_releases_any_attempt,
        no_answer_is_no,
        *MUTANTS_OF_HOSTS,
        *MUTANTS_OF_DISKS,
        *MUTANTS_OF_MESSAGES,
        *MUTANTS_OF_PEERS,
    )
}
# Not judged by the tests: `python -m tests.sim.seeds_to_find NAME` looks for one.
UNPROVEN: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        late_success_accepted,
        refused_while_another_bus_is_away,  # of the kind buses-apart
        release_under_the_reverts_number,  # found by tests/unit/cell_conductor/test_move_requests.py
        *UNPROVEN_OF_DISKS,
        *UNPROVEN_OF_MESSAGES,
        *UNPROVEN_OF_PEERS,
    )
}
