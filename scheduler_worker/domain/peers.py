"""The instances that a request is placed relative to: the query to placement about them, and its answer. Pure.

The answer may be outdated by the time of the claim. For hints and soft policies that does not matter; the hard policies
are enforced by the claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.contracts.build import BuildRequest
from bus.contracts.placement import LocatePage, LocateRequest
from scheduler_worker.domain.request_spec import Peers


def has_peers(request: BuildRequest) -> bool:
    """Whether the request depends on where other instances are."""
    return bool(request.server_group or request.different_host or request.same_host)


def locate_request(request: BuildRequest) -> LocateRequest:
    """The query to placement, the same for all members of a group: they share its answer.

    An instance that holds a claim of an earlier run is counted with the others. Its next claim, or the probe where no
    host is left to it, finds that claim. One query for each such member would read the group's members that many times.
    """
    return LocateRequest(
        project_id=request.project_id,
        server_group=request.server_group.uuid if request.server_group is not None else None,
        consumers=tuple(dict.fromkeys((*request.different_host, *request.same_host))),
    )


def peers_of(request: BuildRequest, page: LocatePage) -> Peers:
    """Placement's answer, in the terms of the request."""
    return Peers(
        server_group=request.server_group,
        members=page.members,
        different_hosts=_hosts(page, request.different_host) if request.different_host else None,
        same_hosts=_hosts(page, request.same_host) if request.same_host else None,
    )


def _hosts(page: LocatePage, instances: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for one in instances for host in page.hosts.get(one, ())))
