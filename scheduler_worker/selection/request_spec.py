"""What the selection reads of a request, and its searches in the replica: hosts, and the options on one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import MAX_NAMED, ClaimOption, GroupPolicy, LocatePage, LocateRequest, ServerGroup
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import Found, Query, total_resources
from placement_worker.replica.search import matching_option, options, search
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.hosts.host_table import Rows
from scheduler_worker.selection.host_view import HostsView


class RelatedInstances(Struct, frozen=True, kw_only=True):
    """The instances that a request is placed relative to, and the hosts (uuids) that they are on."""

    # It may be outdated by the claim, which enforces the hard policies; for hints and soft ones that does not matter.

    server_group: ServerGroup | None = None  # the group of the request
    members: Mapping[str, int] = {}  # {host: other members of the group there}
    # different_hosts, same_hosts: the hosts of the instances that the hints `different_host` and `same_host` name;
    # None: no such hint
    different_hosts: tuple[str, ...] | None = None
    same_hosts: tuple[str, ...] | None = None
    # another control plane's group, whose members may be on several hosts despite its affinity
    is_foreign: bool = False


class RequestSpec(Struct, frozen=True, kw_only=True):
    """A request with its flavor and the pre-filters applied. Requests with an equal `key` share one ranking."""

    query: Query
    flavor: str
    project_id: str
    extra_specs: Mapping[str, str] = {}
    availability_zone: str | None = None
    # preferred_traits, preferred_classes: what the flavor prefers and does not require; a weigher reads them
    preferred_traits: tuple[str, ...] = ()
    preferred_classes: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    related: RelatedInstances | None = None  # where the instances are that the request names
    image_properties: Mapping[str, str] = {}  # as the image has them
    image: str = ""  # its id, where a filter reads that
    forced: bool = False  # no filter is run; pre-filters and the claim are
    cell: str | None = None  # only hosts of this cell, where an instance moves
    leaves: str | None = None  # no hosts of this cell, which is drained
    otherwise: Query | None = None  # the query for hosts that do not satisfy `query`
    devices: tuple[object, ...] = ()  # requests for devices of their hosts' control plane, whose own filters read them

    @property
    def queries(self) -> tuple[Query, ...]:
        """What is asked of a host, the first that it satisfies before the others."""
        return (self.query,) if self.otherwise is None else (self.query, self.otherwise)

    def only_on(self, hosts: tuple[str, ...]) -> RequestSpec:
        """The same on no other hosts (uuids)."""
        query, *others = (replace(one, only_roots=hosts) for one in self.queries)
        return replace(self, query=query, otherwise=next(iter(others), None))

    def has_policy(self, policy: GroupPolicy) -> bool:
        """Whether the request belongs to a server group with this policy."""
        group = self.related.server_group if self.related is not None else None
        return group is not None and group.policy is policy

    def with_related(self, related: RelatedInstances, instance_uuid: str) -> RequestSpec:
        """The same with these peers. The key becomes the request's own: its ranking is shared with no other."""
        return replace(self, related=related, key=(*self.key, instance_uuid))

    def without_related(self) -> RequestSpec:
        """The same before `with_related`: its ranking is shared with requests related to others, or to none."""
        return self if self.related is None else replace(self, related=None, key=self.key[:-1])

    def with_members(self, members: Mapping[str, int]) -> RequestSpec:
        """The same, after newer counts of the server group's members on some hosts."""
        if self.related is None:
            return self
        return replace(self, related=replace(self.related, members={**self.related.members, **members}))


class Unsatisfiable(Struct, frozen=True):
    """No host can take the request under the present configuration; `code` is stable, `reason` for a person."""

    code: str
    reason: str
    step: str


class SchedulableRequest(Protocol):
    """What placing reads of a request itself, beside its spec; a `BuildRequest` is one. As there."""

    @property
    def instance_uuid(self) -> str:
        """The instance to be placed."""

    @property
    def project_id(self) -> str:
        """Its project."""

    @property
    def user_id(self) -> str:
        """Its user."""

    @property
    def server_group(self) -> ServerGroup | None:
        """Its server group."""

    @property
    def different_host(self) -> tuple[str, ...]:
        """Not where any of these instances is."""

    @property
    def same_host(self) -> tuple[str, ...]:
        """Only where one of these instances is."""

    @property
    def ignore_hosts(self) -> tuple[str, ...]:
        """Hosts, by name or uuid, that it never gets."""

    @property
    def max_attempts(self) -> int | None:
        """The most hosts to name, the chosen one included; None: the setting."""


def has_related(request: SchedulableRequest) -> bool:
    """Whether the request depends on where other instances are."""
    return bool(request.server_group or request.different_host or request.same_host)


def locate_requests(request: SchedulableRequest, members: Sequence[str] = ()) -> tuple[LocateRequest, ...]:
    """The queries to placement, the same for all members of a group, which share the answer. members: instances of its
    server group that placement may not know as such. Several where those named are more than one query may name.
    """
    # An instance with a claim of an earlier claim owner is counted with the others; its next claim, or the probe where
    # no host is left, finds that claim. One query for each such member would read the group's members that many times.
    named = tuple(dict.fromkeys((*request.different_host, *request.same_host, *members)))
    group = request.server_group.uuid if request.server_group is not None else None
    first = LocateRequest(project_id=request.project_id, server_group=group, consumers=named[:MAX_NAMED])
    further = range(MAX_NAMED, len(named), MAX_NAMED)
    return (
        first,
        *(replace(first, server_group=None, consumers=named[start : start + MAX_NAMED]) for start in further),
    )


def joined(pages: Sequence[LocatePage]) -> LocatePage:
    """The answers to one request's queries as one. The first has the members of its group."""
    return replace(pages[0], hosts={uuid: hosts for page in pages for uuid, hosts in page.hosts.items()})


def related_of(request: SchedulableRequest, page: LocatePage, members: Sequence[str] | None = None) -> RelatedInstances:
    """Placement's answer, in the terms of the request. members: as in its query; None: the group is berth's own."""
    there = Counter(host for one in members or () if one != request.instance_uuid for host in page.hosts.get(one, ()))
    return RelatedInstances(
        server_group=request.server_group,
        # Placement knows some of the named members itself.
        members=page.members | {host: max(count, page.members.get(host, 0)) for host, count in there.items()},
        different_hosts=_hosts(page, request.different_host) if request.different_host else None,
        same_hosts=_hosts(page, request.same_host) if request.same_host else None,
        is_foreign=members is not None,
    )


def _hosts(page: LocatePage, instances: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for one in instances for host in page.hosts.get(one, ())))


def search_hosts(replica: Replica, spec: RequestSpec, *, explain: bool = False) -> Found:
    """The roots that can take the request now; where none can, why by its own query. Raises QueryTooWide."""
    found = search(replica, spec.query, explain=explain)
    if spec.otherwise is None:
        return found
    other = search(replica, spec.otherwise, explain=explain)
    most = other if len(other.roots) > len(found.roots) else found
    return replace(most, roots=np.union1d(found.roots, other.roots))


def options_on(replica: Replica, spec: RequestSpec, row: int, *, limit: int) -> list[ClaimOption]:
    """The possible allocations on one root, best first. Raises QueryTooWide."""
    found = options(replica, spec.query, row, limit=limit)
    return found if found or spec.otherwise is None else options(replica, spec.otherwise, row, limit=limit)


def find_matching_option(
    replica: Replica, spec: RequestSpec, row: int, allocations: Mapping[str, Mapping[str, int]], *, key: str
) -> ClaimOption | None:
    """The way in which what a consumer holds satisfies the request (`matching_option`). Raises QueryTooWide."""
    found = matching_option(replica, spec.query, row, allocations, key=key)
    return (
        found
        if found or spec.otherwise is None
        else matching_option(replica, spec.otherwise, row, allocations, key=key)
    )


def member_capacity(members: Sequence[Query], view: HostsView) -> Rows:
    """Per host, the most members for which its tree has enough of each class, if the smallest are taken: an upper
    bound, because a member takes each class from one provider. A class that other trees share with hosts bounds
    nothing.
    """
    room = np.full(len(view), len(members), dtype=np.intp)
    needed = [total_resources(query) for query in members]
    shared = {name for row in sharing_of(view.replica).donors.tolist() for name in view.replica.inventory_of(row)}
    for name in sorted({name for one in needed for name in one} - shared):
        sums = np.cumsum(sorted(one.get(name, 0) for one in needed))
        room = np.minimum(room, np.searchsorted(sums, view.replica.free(name, view.rows), side="right"))
    return room
