"""One build request as the decision sees it: the query for the replica, what filters and weighers read, the instances
that it is placed relative to, and how many members of a gang a host may take. Pure.

The answer about other instances may be outdated by the time of the claim. For hints and soft policies that does not
matter; the hard policies are enforced by the claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import LocatePage, LocateRequest
from placement_worker.replica.request import Query, total_resources
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.domain.hosts import Rows
from scheduler_worker.domain.view import HostsView


class Peers(Struct, frozen=True, kw_only=True):
    """The instances that a request is placed relative to, and the hosts (uuids) that they are on.

    server_group: the group of the request. members: {host: other members of the group there}. different_hosts,
    same_hosts: the hosts of the instances that the hints `different_host` and `same_host` name; None: no such hint.
    """

    server_group: ServerGroup | None = None
    members: Mapping[str, int] = {}
    different_hosts: tuple[str, ...] | None = None
    same_hosts: tuple[str, ...] | None = None


class RequestSpec(Struct, frozen=True, kw_only=True):
    """A request with its flavor and the pre-filters applied. Requests with an equal `key` share one ranking.

    preferred_traits, preferred_classes: what the flavor prefers and does not require; a weigher reads them.
    peers: where the instances are that the request names, if it names any. image_properties: as the image has them.
    forced: no filter is run; pre-filters and the claim are. cell: only hosts of this one, where an instance moves.
    """

    query: Query
    flavor: str
    project_id: str
    extra_specs: Mapping[str, str] = {}
    availability_zone: str | None = None
    preferred_traits: tuple[str, ...] = ()
    preferred_classes: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    peers: Peers | None = None
    image_properties: Mapping[str, str] = {}
    forced: bool = False
    cell: str | None = None

    def has_policy(self, policy: GroupPolicy) -> bool:
        """Whether the request belongs to a server group with this policy."""
        group = self.peers.server_group if self.peers is not None else None
        return group is not None and group.policy is policy

    def with_peers(self, peers: Peers, instance_uuid: str) -> RequestSpec:
        """The same with these peers. The key becomes the request's own: its ranking is shared with no other."""
        return replace(self, peers=peers, key=(*self.key, instance_uuid))

    def without_peers(self) -> RequestSpec:
        """The same before `with_peers`: its ranking is shared with requests that have other peers, or none."""
        return self if self.peers is None else replace(self, peers=None, key=self.key[:-1])

    def with_members(self, members: Mapping[str, int]) -> RequestSpec:
        """The same, after newer counts of the server group's members on some hosts."""
        if self.peers is None:
            return self
        return replace(self, peers=replace(self.peers, members={**self.peers.members, **members}))


class Unsatisfiable(Struct, frozen=True):
    """No host can take the request under the present configuration; `code` is stable, `reason` for a person."""

    code: str
    reason: str
    step: str


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


def room_for(members: Sequence[Query], view: HostsView) -> Rows:
    """Per host, the most members that its tree has enough of each class for, if the smallest are taken.

    A host may take fewer, because a member takes each class from one provider. A class that other trees share with
    hosts bounds nothing.
    """
    room = np.full(len(view), len(members), dtype=np.intp)
    needed = [total_resources(query) for query in members]
    shared = {name for row in sharing_of(view.book).givers.tolist() for name in view.book.inventory_of(row)}
    for name in sorted({name for one in needed for name in one} - shared):
        sums = np.cumsum(sorted(one.get(name, 0) for one in needed))
        room = np.minimum(room, np.searchsorted(sums, view.book.free(name, view.rows), side="right"))
    return room
