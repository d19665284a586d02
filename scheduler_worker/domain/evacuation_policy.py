"""The policy for an instance whose host is fenced: of its request, else its flavor, else the settings. Pure."""

from __future__ import annotations

from bus.contracts.fences import EvacuationPolicy
from bus.contracts.objects import Flavor

SPEC = "berth:on_host_failure"  # the extra spec of a flavor


def policy_of(requested: EvacuationPolicy | None, flavor: Flavor | None, default: EvacuationPolicy) -> EvacuationPolicy:
    """The policy in force. flavor: the one that the instance has (None: it is not configured any more)."""
    if requested is not None:
        return requested
    spec = None if flavor is None else flavor.extra_specs.get(SPEC)
    return default if spec is None else EvacuationPolicy(spec)


def for_cell(policy: EvacuationPolicy) -> EvacuationPolicy | None:
    """The policy in the message to a cell, where None means wait."""
    return None if policy is EvacuationPolicy.WAIT else policy
