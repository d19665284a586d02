"""What a delete does that its host cannot carry out now. Pure, as the other rules are."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState

from .events import SpawnFailed
from .instance import Instance
from .rules import Step, Timeouts, announce, cut

DESTROY_CODES = "destroy."  # how the codes begin with which a host refuses to destroy


def report_undestroyed(instance: Instance, event: SpawnFailed, timeouts: Timeouts) -> Step:
    """The host cannot destroy it now: announce why, once for each reason. The delete goes on."""
    why = (event.code, cut(event.reason))
    is_refusal = event.code.startswith(DESTROY_CODES) and event.attempt == instance.attempt
    if not is_refusal or event.host_uuid != instance.here.host_uuid or why == (instance.code, instance.reason):
        return Step(instance)
    code, reason = why
    held = replace(instance, code=code, reason=reason)
    return announce(held, BuildState.DELETING, event.at, timeouts, why=why)
