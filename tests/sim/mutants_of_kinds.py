"""Deliberate defects that one kind of world finds. ..._FOUND_BY: the seed that finds each, in that kind alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.bus import API
from bus.cell_links import CellLinks
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.objects import CellBus
from bus.contracts.placement import ClaimAll, ClaimAllResult, ReleaseByOwner
from bus.contracts.placement_queries import ConsumerRecord
from bus.persistence.outbox import OutboxMessage
from cell_conductor.rules import cell_transfer_rules as departure_rules
from cell_conductor.rules import move_rules
from cell_conductor.state.events import ChangeEnded
from cell_conductor.state.instance import State
from cell_conductor.state.step import Step
from cell_conductor.table import TABLE, Rule
from placement_worker.cell_follower import CellFollower
from placement_worker.domain import claims
from scheduler_worker.build import build_engine as scheduler_engine
from scheduler_worker.build import decision as decisions
from scheduler_worker.build import gang as gangs
from scheduler_worker.build import placer as placing
from scheduler_worker.build.decision import NO_HOST
from scheduler_worker.build.delete_rules import DeletePlan, PendingDelete, plan_deletes
from scheduler_worker.build.host_search import ClaimUnlocatable, HostSearch, HostSearchRefused
from scheduler_worker.build.placer import Placer
from scheduler_worker.cell_events import cell_event_batch
from scheduler_worker.fleet import cell_connections
from scheduler_worker.records.build_record import (
    FIRST_ATTEMPT,
    Actor,
    BuildUpdate,
    ProjectsBuild,
    RecordedBuild,
    effects,
)
from scheduler_worker.selection.explain import NoValidHost


def placement_stays_with_its_settings() -> AbstractContextManager[Any]:
    """Placement connects to no cell that its settings do not name."""

    async def look(self: CellFollower) -> bool:
        return True

    return patch.object(CellFollower, "_look", look)


def removed_cell_is_not_taken_back() -> AbstractContextManager[Any]:
    """A worker that has left a cell does not connect to it again."""
    original = CellLinks.set_cells

    def want(self: Any, cells: Mapping[str, CellBus | None]) -> None:
        left = {name for name, slot in self._slots.items() if not slot.wanted}
        original(self, {name: where for name, where in cells.items() if name not in left})

    return patch.object(CellLinks, "set_cells", want)


def added_cell_is_not_taken_into_use() -> AbstractContextManager[Any]:
    """Schedulers go by their settings alone."""

    def in_use(settings: Any, _decisions: Any, _occupied: Any = ()) -> dict[str, CellBus | None]:
        return dict.fromkeys(settings)

    return patch.object(cell_connections, "cells_in_use", in_use)


MUTANTS_OF_CELLS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    placement_stays_with_its_settings,
    removed_cell_is_not_taken_back,
    added_cell_is_not_taken_into_use,
)
CELLS_FOUND_BY: dict[str, int] = {
    "placement_stays_with_its_settings": 1,
    "removed_cell_is_not_taken_back": 4,
    "added_cell_is_not_taken_into_use": 1,
}


# --- deliberate defects of gangs. FOUND_BY: the seed, with the kind `gangs` alone, that finds each


REFUSED = HostSearchRefused("", "", was_deleted=True)


def gang_claimed_one_by_one() -> AbstractContextManager[Any]:
    """Placement takes of a gang what fits."""

    def claim_all(ledger: Any, item: ClaimAll) -> ClaimAllResult:
        return ClaimAllResult(results=tuple(claims._claim(ledger, claim) for claim in item.claims))

    return patch.object(claims, "_claim_all", claim_all)


def refused_gang_written_all_the_same() -> AbstractContextManager[Any]:
    """The trial of a gang is kept although one of its claims did not hold."""
    trial = claims.ClaimLedger.trial

    def tried(self: Any, gang: Any) -> Any:
        copy = trial(self, gang)
        self.joined, self.changed_consumers, self.used = copy.joined, copy.changed_consumers, copy.used
        self.generations, self._changes = copy.generations, copy._changes
        return copy

    return patch.object(claims.ClaimLedger, "trial", tried)


def too_few_go_on() -> AbstractContextManager[Any]:
    """The members of a gang that have a host are claimed, however few they are."""
    original = gangs.apply_gang_results

    def too_soon(states: Any) -> Any:
        lenient = [
            one if one.gang is None else placing.replace(one, gang=placing.replace(one.gang, min_count=1))
            for one in states
        ]
        return [
            placing.replace(after, gang=before.gang) for before, after in zip(states, original(lenient), strict=True)
        ]

    return patch.object(placing, "apply_gang_results", too_soon)


def members_without_a_host_are_withdrawn() -> AbstractContextManager[Any]:
    """A gang waits for no member that has no host, as if a delete had fenced each."""
    needed = gangs.needed

    def any_refusal(gang: Any, results: Any) -> int:
        return needed(gang, [REFUSED if isinstance(one, HostSearchRefused | NoValidHost) else one for one in results])

    stack = ExitStack()
    stack.enter_context(patch.object(gangs, "needed", any_refusal))
    stack.enter_context(patch.object(decisions, "needed", any_refusal))
    return stack


MUTANTS_OF_GANGS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    gang_claimed_one_by_one,
    refused_gang_written_all_the_same,
    too_few_go_on,
    members_without_a_host_are_withdrawn,
)
GANGS_FOUND_BY: dict[str, int] = {
    "gang_claimed_one_by_one": 27,
    "refused_gang_written_all_the_same": 27,
    "too_few_go_on": 11,
    "members_without_a_host_are_withdrawn": 11,
}


# --- deliberate defects of what schedulers do about instances whose requests they have forgotten. FOUND_BY: the seed
# of


@contextmanager
def claims_are_released_without_a_name() -> Iterator[None]:
    """What no host can take fails without a look at what its instance holds, and releases whatever that is (red:
    scheduler 1).
    """

    def nameless(before: BuildState | None, after: RecordedBuild, *more: Any) -> list[OutboxMessage]:
        sent = effects(before, after, *more)
        if after.state is not BuildState.FAILED:
            return sent
        release = ReleaseByOwner(consumer=after.instance_uuid, attempt=FIRST_ATTEMPT, project_id=after.project_id)
        return [*sent, OutboxMessage(API, release, after.instance_uuid)]

    with full_clouds_are_not_looked_up(), patch.object(decisions, "effects", nameless):
        yield


def full_clouds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A request that no host can take fails, whatever its instance holds."""

    async def unchanged(self: Placer, states: list[HostSearch]) -> list[HostSearch]:
        return states

    return patch.object(Placer, "_recover", unchanged)


def kept_instances_are_called_deleted() -> AbstractContextManager[Any]:
    """A delete that comes before the decision ends the build, though its instance runs."""

    def plan(
        requested: Sequence[PendingDelete],
        builds: Mapping[str, RecordedBuild],
        actor: Actor,
        held: Mapping[ProjectsBuild, ConsumerRecord] | None = None,
    ) -> DeletePlan:
        if held is not None:
            accepted = {uuid for uuid, build in builds.items() if build.state is BuildState.ACCEPTED}
            held = {key: one for key, one in held.items() if key[0] not in accepted}
        return plan_deletes(requested, builds, actor, held)

    return patch.object(scheduler_engine, "plan_deletes", plan)


def stranded_builds_fail() -> AbstractContextManager[Any]:
    """A build that is not placed where its claim is held fails, and its claim is released: its cell is not queried."""

    def fails(request: BuildRequest, held: ClaimUnlocatable, actor: Actor) -> BuildUpdate:
        failed = decisions._failed(request, NO_HOST, held.reason, actor)
        return replace(failed, build=replace(failed.build, attempt=held.attempt))

    return patch.object(decisions, "_unlocatable", fails)


MUTANTS_OF_FORGOTTEN_REQUESTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    claims_are_released_without_a_name,
    full_clouds_are_not_looked_up,
    stranded_builds_fail,
    kept_instances_are_called_deleted,
)
REQUESTS_FOUND_BY: dict[str, int] = {
    "claims_are_released_without_a_name": 18,
    "full_clouds_are_not_looked_up": 18,
    "stranded_builds_fail": 18,
    "kept_instances_are_called_deleted": 18,
}
REQUESTS_BREAK: dict[str, str] = {
    "claims_are_released_without_a_name": "never_running_unclaimed",
    "full_clouds_are_not_looked_up": "effects_have_a_cause",
    "stranded_builds_fail": "never_running_unclaimed",
    "kept_instances_are_called_deleted": "effects_have_a_cause",
}


# --- deliberate defects of instances that leave their cell. FOUND_BY: the seed of `transfers` that finds each


def former_cell_keeps_it() -> AbstractContextManager[Any]:
    """A cell announces that an instance has left, and has it still."""
    original = departure_rules.complete_transfer

    def have_left(instance: Any, at: float, context: Any) -> Step:
        stepped = original(instance, at, context)
        return Step(replace(instance, sequence=instance.sequence + 1), stepped.commands)

    return patch.object(departure_rules, "complete_transfer", have_left)


def map_names_the_former_cell() -> AbstractContextManager[Any]:
    """The map of instances to cells is not changed when one leaves."""
    original = cell_event_batch.transferred

    def transferred(move: Any, build: Any, *more: Any) -> Any:
        after, there, commands = original(move, build, *more)
        return after, replace(there, cell=build.cell), commands

    return patch.object(cell_event_batch, "transferred", transferred)


def leaves_with_its_machine() -> AbstractContextManager[Any]:
    """An instance departs as soon as its image is kept, and its host is not commanded to destroy."""
    original = move_rules.offload

    def offload(instance: Any, at: float, context: Any) -> Step:
        leaves = instance.action.to_cell is not None
        return departure_rules.complete_transfer(instance, at, context) if leaves else original(instance, at, context)

    patches = ExitStack()
    patches.enter_context(patch.object(move_rules, "offload", offload))
    patches.enter_context(in_table(State.CHANGING, ChangeEnded, move_rules.on_changed, State.TRANSFERRED))
    return patches


def leaves_without_an_image() -> AbstractContextManager[Any]:
    """The answer of its host that its image is kept is not waited for."""

    def begin(instance: Any, state: State, at: float, context: Any) -> Step:
        return move_rules.offload(instance, at, context)

    return patch.object(departure_rules, "change", begin)


def in_table(state: State, event: type[Any], rule: Callable[..., Step], *to: State) -> AbstractContextManager[Any]:
    """The table with another rule at one place."""
    row = TABLE[state]
    before = row[event]
    assert before is not None
    return patch.dict(row, {event: Rule(rule, (*before.to, *to))})  # type: ignore[arg-type]


MUTANTS_OF_TRANSFERS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    former_cell_keeps_it,
    map_names_the_former_cell,
    leaves_with_its_machine,
    leaves_without_an_image,
)
TRANSFERS_FOUND_BY: dict[str, int] = {
    "former_cell_keeps_it": 1,
    "map_names_the_former_cell": 1,
    "leaves_with_its_machine": 1,
    "leaves_without_an_image": 1,
}
