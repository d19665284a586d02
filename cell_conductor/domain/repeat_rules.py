"""The answer to a build that comes to its cell again: the end that the first one had."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState

from .adopt_rules import start_or_adopt
from .events import BuildRequested, DeleteRequested
from .instance import Instance
from .steps import Step, StepContext, announce


def restart_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """The build has failed, and the scheduler had forgotten it before it came here: a newer request of it is built, a
    copy is not. Nor is one whose claim was this build's own, which is released by now; a machine of it that is found is
    claimed anew.
    """
    is_released = 1 < event.attempt <= instance.last_attempt
    if event.requested_at <= instance.requested_at or (is_released and not event.found):
        was_active = any(record.outcome == "active" for record in instance.history)
        return _announce_again(instance, BuildState.FAILED, context, terminal=not was_active)
    newest = instance.last_attempt if is_released else 0
    return start_or_adopt(Instance(uuid=instance.uuid, sequence=instance.sequence, newest=newest), event, context)


def announce_active_again(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A second build of an active instance: its schedulers may have forgotten the first (a restore), and wait."""
    return _announce_again(instance, BuildState.ACTIVE, context)


def announce_adopted_again(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """As `announce_active_again`, of what was active before its claim is requested again; else its end will come."""
    return _announce_again(instance, BuildState.ACTIVE, context) if instance.claims_refused else Step(instance)


def announce_deleted_again(instance: Instance, event: BuildRequested | DeleteRequested, context: StepContext) -> Step:
    """A build or a delete of a deleted instance, as `announce_active_again`. Its claim is left to the audit."""
    return _announce_again(instance, BuildState.DELETED, context) if instance.spec is not None else Step(instance)


def _announce_again(instance: Instance, state: BuildState, context: StepContext, *, terminal: bool = True) -> Step:
    """Publish the last announcement of the build once more, under its number: it changes nothing where it is on record.

    Under a later one, which the end of a move may have taken since, clients would get a second terminal event.
    """
    last = replace(instance, sequence=instance.build_sequence or instance.sequence - 1, stamps=None)
    return Step(instance, announce(last, state, instance.since, context, terminal=terminal).commands)
