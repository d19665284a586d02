"""Which silent hosts may be switched off without a person. Pure.

A host counts when its compute service is silent (not stopped on purpose) and manages this host alone, when instances
use it, and when no operator has taken it out of service. One that is seen silent is a suspect; it is switched off only
when each look for `after_s` has found it silent. With more than `max_hosts` suspects, or no service of the same cell
up, the cause is rather what lies between: then none is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from berth.settings import FencingSettings
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState, ServiceRecord
from cell_conductor.domain.leases import SILENT

TOO_MANY = "fencing.too_many"
CELL_SILENT = "fencing.cell_silent"


class FencingPlan(Struct, frozen=True, kw_only=True):
    """The actions that one look leads to. suspects: {host uuid: when it was first seen silent, by the monotonic clock}.
    due: to be switched off now. held: {host name: code of why it is not, though it has been silent for long enough}.
    """

    suspects: Mapping[str, float]
    due: tuple[HostRecord, ...] = ()
    held: Mapping[str, str] = {}


def plan(
    hosts: Iterable[HostRecord],
    services: Iterable[ServiceRecord],
    suspects: Mapping[str, float],
    settings: FencingSettings,
    now_s: float,
) -> FencingPlan:
    """The plan after one look at all hosts and services. suspects: of the look before."""
    listed = list(services)
    silent = {(one.cell, one.name) for one in listed if not one.up and one.code == SILENT and one.hosts == 1}
    alive = {one.cell for one in listed if one.up}
    found = [host for host in hosts if (host.cell, host.service) in silent and _may_be_fenced(host)]
    first_seen = {host.uuid: suspects.get(host.uuid, now_s) for host in found}
    ripe = [host for host in found if now_s - first_seen[host.uuid] >= settings.after_s]
    if len(found) > settings.max_hosts:
        return FencingPlan(suspects=first_seen, held={host.name: TOO_MANY for host in ripe})
    return FencingPlan(
        suspects=first_seen,
        due=tuple(host for host in ripe if host.cell in alive),
        held={host.name: CELL_SILENT for host in ripe if host.cell not in alive},
    )


def _may_be_fenced(host: HostRecord) -> bool:
    """Whether there are instances to evacuate, and no operator is handling them."""
    is_used = any(used > 0 for used, _ in host.resources.values())
    in_hand = host.admin is not None and host.admin.state in (AdminState.MAINTENANCE, AdminState.FENCED)
    return is_used and not in_hand and not host.up
