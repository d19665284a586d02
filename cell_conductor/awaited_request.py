"""The request to placement or to compute services that an instance awaits. It follows from the record alone. Pure."""

from __future__ import annotations

from typing import TypeAlias

from bus.contracts.placement import Claim, ClaimOption, Migration, Release, Revert
from cell_conductor.rules import rollback_rules
from cell_conductor.state.desired_state import PlacementCall, desired_state_of
from cell_conductor.state.events import Answer, SourceAnswered, SourceQuery
from cell_conductor.state.instance import ActionInProgress, Instance

AwaitedRequest: TypeAlias = Claim | Release | Revert | SourceQuery


def awaited_request_of(instance: Instance) -> AwaitedRequest | None:
    """The request to placement, or to compute services, while the instance is in this state. It follows from the record
    alone, so a crash at any moment leads to the very same request.
    """
    if instance.blocked_reason:
        return None
    if (query := rollback_rules.source_query_of(instance)) is not None:
        return query
    call, action = desired_state_of(instance).placement_call, instance.action
    if call is PlacementCall.CLAIM:
        return _claim(instance)
    if call is PlacementCall.REVERT:
        assert action is not None
        return Revert(
            consumer=instance.uuid,
            migration=_migration(action),
            source_attempt=action.allocation_attempt,
            attempt=instance.next_attempt,
        )
    is_instance_over = action is not None and action.instance_released
    if call is PlacementCall.RELEASE_MIGRATION or (call is PlacementCall.RELEASE and is_instance_over):
        assert action is not None and instance.spec is not None
        return Release(consumer=action.request_id, project_id=instance.spec.project_id, of_migration=True)
    if call is PlacementCall.RELEASE:
        # One attempt further than the last: a claim that was requested and never answered may still be on its way (a
        # placement worker that waits for its database), and must be refused as an ended attempt.
        return Release(consumer=instance.uuid, attempt=instance.next_attempt)
    return None


def is_answered_by(instance: Instance, answer: Answer | SourceAnswered) -> bool:
    """Whether it answers what is asked now. Another conductor may have asked before it was paused."""
    if isinstance(answer, SourceAnswered):
        asked = rollback_rules.source_query_of(instance)
        return asked is not None and answer.query == asked
    request, names = awaited_request_of(instance), (answer.consumer or instance.uuid, answer.attempt)
    return isinstance(request, Claim | Release | Revert) and names == (request.consumer, request.attempt or 0)


def _claim(instance: Instance) -> Claim:
    assert instance.spec is not None
    action = instance.action
    return Claim(
        consumer=instance.uuid,
        attempt=instance.next_attempt,
        consumer_generation=instance.consumer_generation,
        release_first=action is None or instance.selection_index > 0,
        options=tuple(
            ClaimOption(
                allocations=s.allocations,
                spec_generations=s.spec_generations,
                host=s.host_uuid if instance.server_group else None,
            )
            for s in instance.alternates
        ),
        server_group=instance.server_group,
        fenced_hosts=() if action is None else action.fenced_hosts,
        limits=instance.limits,
        project_id=instance.spec.project_id,
        user_id=instance.spec.user_id,
        migration=None if action is None or action.source is None else _migration(action),
    )


def _migration(action: ActionInProgress) -> Migration:
    assert action.source is not None
    return Migration(uuid=action.request_id, source=action.source.allocations)
