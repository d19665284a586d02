"""The hosts as filters and weighers see them: columns of the replica and the host table, side by side. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.operations import AdminState
from placement_worker.replica.replica import Replica
from scheduler_worker.config import Aggregate
from scheduler_worker.hosts.host_metrics import HostMetricsTable
from scheduler_worker.hosts.host_table import ADMIN_STATES, OPEN, Floats, HostTable, Mask, Rows

VERSION = "hypervisor_version"  # the attribute: a number with three digits a part (8002000: 8.2.0)


class Membership:
    """Which roots are in which configured aggregate, by row of the replica."""

    def __init__(self, aggregates: Sequence[Aggregate], named: Mapping[str, Collection[str]] | None = None) -> None:
        self.aggregates = tuple(aggregates)
        self.named = named or {}  # {aggregate: uuids of its hosts}, instead of its members in the replica
        self._keys = tuple(sorted({key for aggregate in aggregates for key in aggregate.metadata}))

    def with_key(self, key: str) -> list[Aggregate]:
        """The aggregates whose metadata has this key, in configured order."""
        return [aggregate for aggregate in self.aggregates if key in aggregate.metadata]

    def with_prefix(self, prefix: str) -> list[Aggregate]:
        """The aggregates with a metadata key that begins like this, in configured order."""
        return [a for a in self.aggregates if any(key.startswith(prefix) for key in a.metadata)]

    def has(self, aggregate: Aggregate, host: str, in_replica: Collection[str]) -> bool:
        """Whether a host is a member. in_replica: the aggregates that the replica has it in."""
        uuid = aggregate.uuid
        return host in self.named[uuid] if uuid in self.named else uuid in in_replica

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

    `down`: per service, whether it is down at this moment (`ServiceDirectory.down`). `metrics`: of the table's hosts.
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
        cells = [index for index, name in enumerate(self.table.cells) if name in names]
        return np.asarray(np.isin(self.cell, cells), dtype=np.bool_)

    def is_in(self, *states: AdminState) -> Mask:
        """Whether an operator has put each host into one of these states."""
        chosen = [ADMIN_STATES.index(state) for state in states]
        return np.asarray(np.isin(self.table.admin[self.index], chosen), dtype=np.bool_)

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
        return [attributes[index].get(key) for index in self.index.tolist()]

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
        index = int(self.index[position])
        row = int(self.rows[position])
        uuid, in_replica = self.replica.uuid_of(row), self.replica.aggregates_of(row)
        return HostView(
            uuid=uuid,
            name=self.table.names[index],
            cell=self.table.cells[int(self.table.cell[index])],
            enabled=bool(self.table.enabled[index] and not self.table.admin[index]),
            up=not bool(self.down[self.table.service[index]]),
            failed_builds=int(self.table.failed_builds[index]),
            attributes=self.table.attributes[index],
            aggregates=tuple(a for a in self.membership.aggregates if self.membership.has(a, uuid, in_replica)),
            view=self,
            position=position,
        )


def in_use(replica: Replica, rows: Rows) -> Mask:
    """Of which of these hosts something is in use."""
    used = np.zeros(len(rows), dtype=np.bool_)
    for name in replica.resource_classes():
        used |= replica.usage(name, rows) != 0
    return used
