"""The hosts as filters and weighers see them (columns of the replica and the host table, side by side), and one request
as the decision sees it. What is known of other instances may be outdated by the claim, which enforces the hard
policies; for hints and soft ones that does not matter. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.operations import AdminState
from bus.contracts.placement import MAX_NAMED, ClaimOption, GroupPolicy, LocatePage, LocateRequest, ServerGroup
from placement_worker.replica.book import Replica
from placement_worker.replica.request import Found, Query, total_resources
from placement_worker.replica.search import matching_option, options, search
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.config import Aggregate
from scheduler_worker.domain.fleet import HostMetricsTable
from scheduler_worker.domain.hosts import ADMIN_STATES, OPEN, Floats, HostTable, Mask, Rows


class Membership:
    """Which roots are in which configured aggregate, by row of the replica."""

    def __init__(self, aggregates: Sequence[Aggregate], named: Mapping[str, Collection[str]] | None = None) -> None:
        self.aggregates = tuple(aggregates)
        self.named = named or {}  # {aggregate: uuids of its hosts} where these will soon differ from the replica
        self._keys = tuple(sorted({key for aggregate in aggregates for key in aggregate.metadata}))

    def with_key(self, key: str) -> list[Aggregate]:
        """The aggregates whose metadata has this key, in configured order."""
        return [aggregate for aggregate in self.aggregates if key in aggregate.metadata]

    def with_prefix(self, prefix: str) -> list[Aggregate]:
        """The aggregates with a metadata key that begins like this, in configured order."""
        return [a for a in self.aggregates if any(key.startswith(prefix) for key in a.metadata)]

    def has_key(self, key: str) -> bool:
        """Whether any aggregate has this metadata key: most keys are unused, and then nothing is computed."""
        return key in self._keys


class HostView(Struct, frozen=True):
    """One host, for a filter that looks at one at a time."""

    uuid: str
    name: str
    cell: str
    enabled: bool
    up: bool
    failed_builds: int
    attributes: Mapping[str, str]
    aggregates: tuple[Aggregate, ...]
    view: HostsView
    position: int

    def free(self, resource_class: str) -> float:
        """The free amount of a class over the host's whole tree."""
        return float(self.view.subset(np.array([self.position])).free(resource_class)[0])


class HostsView(Struct, eq=False):
    """Some hosts at one moment. `rows` are rows of the replica, `index` the same hosts' indexes in the host table.

    `down`: per service, whether it is down at this moment (see HostTable.down). `metrics`: of the hosts of the table.
    """

    replica: Replica
    table: HostTable
    membership: Membership
    rows: Rows
    index: Rows
    down: Mask
    metrics: HostMetricsTable

    def __len__(self) -> int:
        return int(self.rows.size)

    def subset(self, chosen: Mask | Rows) -> HostsView:
        """Some of these hosts at the same moment."""
        return replace(self, rows=self.rows[chosen], index=self.index[chosen])

    @property
    def known(self) -> Mask:
        """Whether a compute service has reported the host, so that its cell is known."""
        return self.index >= 0

    @property
    def enabled(self) -> Mask:
        """Whether the host takes new builds: both its compute service and the operator allow it."""
        return np.asarray(self.table.enabled[self.index] & (self.table.admin[self.index] == 0), dtype=np.bool_)

    def open_to(self, project: str) -> Mask:
        """Whether each host takes builds of this project: those that belong to another one do not."""
        column = self.table.project[self.index]
        return np.asarray((column == OPEN) | (column == self.table.projects.get(project, OPEN)), dtype=np.bool_)

    def in_cells(self, names: Collection[str]) -> Mask:
        """Whether each host is in one of these cells; unknown names match no host."""
        places = [at for at, name in enumerate(self.table.cells) if name in names]
        return np.asarray(np.isin(self.cell, places), dtype=np.bool_)

    def is_in(self, *states: AdminState) -> Mask:
        """Whether an operator has put each host into one of these states."""
        places = [ADMIN_STATES.index(state) for state in states]
        return np.asarray(np.isin(self.table.admin[self.index], places), dtype=np.bool_)

    @property
    def up(self) -> Mask:
        """Whether the host's service is up. A host without a service is not up."""
        # NO_SERVICE (-1) indexes the last entry of `down`, which is always True.
        return ~self.down[self.table.service[self.index]]

    @property
    def cell(self) -> Rows:
        """Index of the host's cell in `cells` of the table."""
        return self.table.cell[self.index].astype(np.intp)

    @property
    def service(self) -> Rows:
        """Index of the host's compute service in `services` of the table, or NO_SERVICE."""
        return self.table.service[self.index].astype(np.intp)

    @property
    def failed_builds(self) -> Floats:
        """Consecutive failed builds, as the host's service counts them."""
        return np.asarray(self.table.failed_builds[self.index], dtype=np.float64)

    @property
    def warning(self) -> Mask:
        """Whether the host's service reports that something is wrong with it (attribute `health` = `warning`)."""
        return np.asarray(self.table.warning[self.index], dtype=np.bool_)

    def free(self, resource_class: str) -> Floats:
        """The free amount of a class, summed over each host's tree; assumed claims count as used."""
        return np.asarray(self.replica.free(resource_class, self.rows), dtype=np.float64)

    def metric(self, name: str) -> Floats:
        """The newest number of one metric per host (bus.contracts.host_metrics); NaN: unknown, or too old."""
        return self.metrics.values(name, self.index)

    def attribute(self, key: str) -> list[str | None]:
        """The value of one reported attribute per host."""
        attributes = self.table.attributes
        return [attributes[at].get(key) for at in self.index.tolist()]

    def member_of(self, uuid: str) -> Mask:
        """Whether each host is in an aggregate."""
        if uuid in self.membership.named:
            return self.among(sorted(self.membership.named[uuid]))
        return self.replica.in_aggregate(uuid, self.rows)

    def among(self, hosts: Sequence[str]) -> Mask:
        """Whether each host is one of these, by uuid; unknown uuids match no host."""
        known = [row for uuid in hosts if (row := self.replica.row_of(uuid)) is not None]
        return np.isin(self.rows, np.array(known, dtype=np.intp))

    def counted(self, by_host: Mapping[str, int]) -> Floats:
        """A count per host, by uuid; 0 for hosts that are not named."""
        counts = np.zeros(len(self.replica.root), dtype=np.float64)
        for uuid, count in by_host.items():
            if (row := self.replica.row_of(uuid)) is not None:
                counts[row] = count
        return counts[self.rows]

    def has_trait(self, trait: str) -> Mask:
        """Whether any provider of each host's tree has a trait."""
        rows, owners = self.replica.members(self.rows)
        has = np.zeros(len(self), dtype=np.bool_)
        has[owners[self.replica.with_trait(trait, rows)]] = True
        return has

    def host(self, position: int) -> HostView:
        """One host of a view of reported hosts."""
        at = int(self.index[position])
        row = int(self.rows[position])
        mine = set(self.replica.aggregates_of(row))
        return HostView(
            uuid=self.replica.uuid_of(row),
            name=self.table.names[at],
            cell=self.table.cells[int(self.table.cell[at])],
            enabled=bool(self.table.enabled[at] and not self.table.admin[at]),
            up=not bool(self.down[self.table.service[at]]),
            failed_builds=int(self.table.failed_builds[at]),
            attributes=self.table.attributes[at],
            aggregates=tuple(a for a in self.membership.aggregates if a.uuid in mine),
            view=self,
            position=position,
        )


def in_use(replica: Replica, rows: Rows) -> Mask:
    """Of which of these hosts something is in use."""
    used = np.zeros(len(rows), dtype=np.bool_)
    for name in replica.resource_classes():
        used |= replica.usage(name, rows) != 0
    return used


class RelatedInstances(Struct, frozen=True, kw_only=True):
    """The instances that a request is placed relative to, and the hosts (uuids) that they are on."""

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
    forced: bool = False  # no filter is run; pre-filters and the claim are
    cell: str | None = None  # only hosts of this cell, where an instance moves
    leaves: str | None = None  # no hosts of this cell, which is drained
    otherwise: Query | None = None  # the query for hosts that do not satisfy `query`

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
        """The same before `with_peers`: its ranking is shared with requests that have other peers, or none."""
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
