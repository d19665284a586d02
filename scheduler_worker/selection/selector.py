"""From the replica, the host table and a request to ranked hosts, or to the funnel that explains why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
from msgspec.structs import replace

from bus.contracts.build import BuildRequest, FunnelStep
from bus.contracts.cell import Selection
from bus.contracts.objects import ZONE_KEY
from bus.contracts.operations import AdminState
from bus.contracts.placement import ClaimOption
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import RejectedRoots, rejected_roots
from scheduler_worker.config import Aggregate
from scheduler_worker.hosts.host_metrics import HostMetricsTable
from scheduler_worker.hosts.host_table import HostTable, Mask, Rows
from scheduler_worker.hosts.service_directory import NO_SERVICE
from scheduler_worker.selection.assumed_usage import AssumedUsage
from scheduler_worker.selection.choice import CellBatching, RankedHost
from scheduler_worker.selection.explain import NoValidHost, funnel_step
from scheduler_worker.selection.flavor_query import IMAGE_TRAITS, traits_of_image
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Filter, InFlight, OptionFilter, applies_to, options_of, runs_on_rebuild
from scheduler_worker.selection.ranking import Ranking
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable, options_on, search_hosts
from scheduler_worker.selection.selector_config import SelectorConfig

NOT_REPORTED = "host.not_reported"
CELL_DISABLED = "cell.disabled"
UNSUITED = "host.options_unsuited"
MAX_EXPLAINED = 256  # hosts whose options are looked at to explain why none suits


class Selector:
    """The inputs of all decisions: replica, host table, and the configuration in force."""

    def __init__(self, replica: Replica, table: HostTable, config: SelectorConfig) -> None:
        self.replica = replica
        self.assumed = AssumedUsage(replica)
        self.table = table
        self.config = config  # in force; another one takes its place
        self.in_flight: InFlight | None = None  # what placement does not count; None: nothing is kept
        metrics = config.settings.metrics
        self.metrics = HostMetricsTable(table, max_age_s=metrics.max_age_s, reserved=tuple(metrics.weights))
        self._roots: Rows | None = None
        self._known: int | None = None  # hosts of the table
        self._index = np.empty(0, dtype=np.intp)

    def request_spec(self, request: BuildRequest) -> RequestSpec | Unsatisfiable:
        """The request's spec under the present configuration."""
        hosts = None if request.host is None else tuple(self.uuids_of(request.host))
        return self.config.request_spec(request, hosts)

    def members_named(self, aggregates: Sequence[Aggregate]) -> dict[str, frozenset[str]]:
        """{aggregate: uuids of its hosts} of those that name their hosts; a name that is not one host's names none."""
        return {
            one.uuid: frozenset(uuids[0] for host in one.hosts if len(uuids := self.uuids_of(host)) == 1)
            for one in aggregates
            if one.hosts is not None
        }

    def uuids_of(self, host: str) -> list[str]:
        """The hosts with this name or uuid. Of several with one name, those that have left do not count."""
        named = self.table.find(host)
        known = [one for one in named if self._is_there(one)] or named
        if known or self.replica.row_of(host) is None:
            return known
        return [host]

    def not_in_placement(self) -> list[str]:
        """The hosts that a service which is up reports and the replica does not have."""
        table = self.table
        missing = ~table.services.down()[table.service[: len(table)]]
        missing[self.reported_in_placement()] = False
        return [table.uuids[index] for index in np.flatnonzero(missing).tolist()]

    def hosts_matching(self, name: str, *, is_warming_up: bool = False) -> list[str]:
        """The hosts that an operator may mean by a name or uuid: reported, in placement, or kept out of use."""
        # A host with a decision on record counts even unreported: a fenced host may be gone for good, or is offered
        # only after its fence has been lifted. So does a host of placement, whose service may be dead; while hosts may
        # still be reported, it may have another name.
        decided = self.table.decided_about(name)
        if is_warming_up:
            return self.uuids_of(name) or decided
        kept = [one for one in decided if self.table.decisions()[one].state is not AdminState.ENABLED]
        found = list(dict.fromkeys((*self.uuids_of(name), *self._roots_named(name), *kept)))
        return found or decided

    def _roots_named(self, name: str) -> list[str]:
        """The hosts (uuids) that have this name in placement, reported or not."""
        replica = self.replica
        return [replica.uuid_of(row) for row in replica.rows_of_roots().tolist() if replica.name_of(row) == name]

    def _is_there(self, uuid: str) -> bool:
        """Whether a service manages a host, placement has it, or a decision about it is on record."""
        is_decided = self.table.decision_of(uuid) is not None
        return is_decided or self.cell_of(uuid) is not None or self.replica.row_of(uuid) is not None

    def rows_of(self, tried: Mapping[str, str]) -> dict[int, str]:
        """The present rows of rejected hosts, and why; hosts that have left have no row."""
        return {row: reason for uuid, reason in tried.items() if (row := self.replica.row_of(uuid)) is not None}

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes with all that decides which hosts pass, except usage, metrics and time that passes."""
        replica, table = self.replica, self.table
        return (replica.spec_changes.end, replica.epoch, table.revision, table.disabled_cells, self.config.revision)

    def rank(
        self, spec: RequestSpec, rng: Random, batching: CellBatching | None = None, *, among: Rows | None = None
    ) -> Ranking:
        """All hosts that can take the request now, best first; the list may be empty. batching: of the round it is made
        for. among: no others than these rows of placement.
        """
        left = self._passing(spec, explain=False)
        view, funnel = left.view, tuple(left.funnel)
        if among is not None:
            view = view.subset(np.isin(view.rows, among))
        return Ranking(
            view,
            spec,
            self.config.weighings,
            funnel,
            shuffle=self.config.settings.shuffle_best_same_weighed_hosts,
            rng=rng,
            batching=batching,
            judges=self._judges(spec),
        )

    def _judges(self, spec: RequestSpec) -> tuple[OptionFilter, ...]:
        return () if spec.forced else tuple(one for one in self.config.judges if applies_to(one, spec))

    def options_on(self, spec: RequestSpec, row: int, *, limit: int) -> list[ClaimOption]:
        """The possible allocations on one root that its filters let pass, best first. Raises QueryTooWide."""
        if not (judges := self._judges(spec)):
            return options_on(self.replica, spec, row, limit=limit)
        return options_of(self._view(np.array([row], dtype=np.intp)), spec, judges, limit=limit)

    def assume(self, instance: str, spec: RequestSpec, chosen: RankedHost) -> None:
        """Count the first of a chosen host's options as used."""
        first = chosen.options[0]
        self.replica.assume(instance, first.allocations)
        if self.in_flight is not None:
            self.in_flight.assume(instance, chosen.uuid, spec, first.mappings)

    def drop_assumed(self, instance: str) -> None:
        """Count what was assumed no more: it is not claimed."""
        self.replica.drop_assumed(instance)
        if self.in_flight is not None:
            self.in_flight.drop(instance)

    def passing(self, spec: RequestSpec) -> HostsView:
        """All hosts that can take the request now."""
        return self._passing(spec, explain=False).view

    def explain(self, spec: RequestSpec, tried: Mapping[str, str]) -> NoValidHost:
        """Why no host is left. `tried`: {host uuid: reason} of hosts that this request may not use any more."""
        left = self._passing(spec, explain=True)
        self._judge(left, spec)
        rows = self.rows_of(tried)
        out = {row: rows[row] for row in left.view.rows.tolist() if row in rows}
        if out:
            left.funnel.append(funnel_step("claim", len(left.view), Counter(out.values())))
            for code in dict.fromkeys(out.values()):
                left.excluded.append(rejected_roots("claim", code, np.array([row for row in out if out[row] == code])))
        not_reported = sum(count for s in left.funnel for reason, count in s.rejected.items() if reason == NOT_REPORTED)
        return NoValidHost(tuple(left.funnel), not_reported, excluded=tuple(left.excluded))

    def selection(self, candidate: RankedHost, option: int = 0) -> Selection:
        """One candidate as it is sent to the cell's conductor."""
        chosen = candidate.options[option]
        found = self.selection_on(candidate.uuid, chosen.allocations, chosen.spec_generations, candidate.service)
        return replace(found, mappings=chosen.mappings) if chosen.mappings else found

    def selection_on(
        self,
        host_uuid: str,
        allocations: Mapping[str, Mapping[str, int]],
        spec_generations: Mapping[str, int],
        service: str = "",
    ) -> Selection:
        """A selection on a host that is in the host table. service: that had it, if none has it any more."""
        index = self.table.index_of(host_uuid)
        assert index is not None, host_uuid
        manager = int(self.table.service[index])
        return Selection(
            host_uuid=host_uuid,
            host=self.table.names[index],
            service=service if manager == NO_SERVICE else self.table.services.states[manager].name,
            allocations={provider: dict(amounts) for provider, amounts in allocations.items()},
            spec_generations=dict(spec_generations),
            zone=self.zone_of(host_uuid),
        )

    def zone_of(self, host_uuid: str) -> str:
        """The zone of a host: that of its first aggregate that names one, else the default. "": no aggregate does."""
        if not self.config.zoned:
            return ""
        row = self.replica.row_of(host_uuid)
        in_replica = () if row is None else self.replica.aggregates_of(row)
        for aggregate in self.config.zoned:
            if self.config.membership.has(aggregate, host_uuid, in_replica):
                return aggregate.metadata[ZONE_KEY]
        return self.config.settings.default_availability_zone

    def cell_of(self, host_uuid: str) -> str | None:
        """The cell of a host; None when no service manages it."""
        index = self.table.index_of(host_uuid)
        if index is None or self.table.service[index] == NO_SERVICE:
            return None
        return self.table.cells[int(self.table.cell[index])]

    def name_of(self, host_uuid: str) -> str:
        """The name that its compute service reports, else that of placement, else that of the decision about it; its
        uuid where nothing names it.
        """
        index, row = self.table.index_of(host_uuid), self.replica.row_of(host_uuid)
        if index is not None:
            return self.table.names[index]
        if row is not None:
            return self.replica.name_of(row)
        decision = self.table.decision_of(host_uuid)
        return host_uuid if decision is None else decision.host

    def all_hosts(self) -> HostsView:
        """Every root of the replica that can be a host, reported or not, without a search."""
        rows = self.replica.rows_of_roots()
        return self._view(rows)

    def _view(self, rows: Rows) -> HostsView:
        index, down = self._index_of(rows), self.table.services.down()
        return HostsView(self.replica, self.table, self.config.membership, rows, index, down, self.metrics)

    def _passing(self, spec: RequestSpec, *, explain: bool) -> HostFiltering:
        """Search, then run each filter in order; the funnel counts the hosts that each step left."""
        found = search_hosts(self.replica, spec, explain=explain)
        left = HostFiltering(self._view(found.roots), found.funnel, found.rejected_roots, names=explain)
        if not (known := left.view.known).all():
            left.keep("reported", known, NOT_REPORTED)
        if spec.leaves is not None:
            left.keep("drain", ~left.view.in_cells((spec.leaves,)), "host.drained")
        if spec.cell is not None:
            cells = self.table.cells
            at = cells.index(spec.cell) if spec.cell in cells else NO_SERVICE
            left.keep("cell", left.view.cell == at, "host.other_cell")
        elif (disabled := left.view.in_cells(self.table.disabled_cells)).any():
            left.keep("cell", ~disabled, CELL_DISABLED)
        for state in (AdminState.MAINTENANCE, AdminState.FENCED) if spec.forced else ():
            if (excluded := left.view.is_in(state)).any():
                left.keep(state.value, ~excluded, f"host.{state}")
        left.run(() if spec.forced else self.config.filters, spec)
        if not (managed := left.view.service != NO_SERVICE).all():  # no filter has looked at that
            left.keep("reported", managed, NOT_REPORTED)
        return left

    def _judge(self, left: HostFiltering, spec: RequestSpec) -> None:
        """Leave those out of which no option suits a filter that hosts pass; of many hosts the first are looked at."""
        for one in self._judges(spec) if len(left.view) else ():
            passed = np.ones(len(left.view), dtype=np.bool_)
            for position in range(min(len(left.view), MAX_EXPLAINED)):
                host = left.view.subset(np.array([position], dtype=np.intp))
                passed[position] = bool(options_of(host, spec, (one,), limit=1))
            if not passed.all():
                left.keep(one.name, passed, UNSUITED)

    def suits_rebuild(self, host_uuid: str, spec: RequestSpec) -> NoValidHost | None:
        """Whether an image's traits and the filters that look at images let an instance stay on its host: None, or what
        they reject.
        """
        row = self.replica.row_of(host_uuid)
        if row is None:
            return None
        view = self._view(np.array([row], dtype=np.intp))
        if not view.known.all():
            return NoValidHost((funnel_step("reported", 1, {NOT_REPORTED: 1}),), not_reported=1)
        traits = traits_of_image(spec.image_properties)
        # As in Nova: some provider of the host has each that is required.
        members = np.flatnonzero(self.replica.root == row).tolist()
        here = {trait for member in members for trait in self.replica.traits_of(member)}
        if any((word == "required") != (trait in here) for trait, word in traits.items()):
            return NoValidHost((funnel_step("image_traits", 1, {IMAGE_TRAITS: 1}),))
        return _rejected(view, [one for one in self.config.filters if runs_on_rebuild(one)], spec)

    def rejects(self, host_uuid: str, spec: RequestSpec) -> NoValidHost | None:
        """None, or why the filters reject a host, whatever room it has: devices are room. One that is not known is not
        rejected.
        """
        spec, row = replace(spec, devices=()), self.replica.row_of(host_uuid)
        if row is None or spec.forced:
            return None
        view = self._view(np.array([row], dtype=np.intp))
        if not view.known.all():
            return None
        return _rejected(view, self.config.filters, spec)

    def reported_in_placement(self) -> Rows:
        """The indexes in the host table of the hosts that the replica has."""
        index = self._index_of(self.replica.rows_of_roots())
        reported: Rows = index[index != NO_SERVICE]
        return reported

    def _index_of(self, rows: Rows) -> Rows:
        """Host table index per row of the replica; computed again only after hosts or roots came or went.

        In one turn of the event loop: 4 ms for 40,000 hosts.
        """
        roots = self.replica.rows_of_roots()
        if roots is not self._roots or len(self.table) != self._known:
            self._index = np.full(len(self.replica.root), NO_SERVICE, dtype=np.intp)
            self._index[roots] = self.table.indexes_of(self.replica.uuids_of(roots))
            self._roots, self._known = roots, len(self.table)
        return self._index[rows]


def _rejected(view: HostsView, filters: Sequence[Filter], spec: RequestSpec) -> NoValidHost | None:
    """What filters reject of one host; None: nothing."""
    left = HostFiltering(view)
    left.run(filters, spec)
    return None if len(left.view) else NoValidHost(tuple(left.funnel))


class HostFiltering:
    """Hosts while step after step leaves some of them out."""

    def __init__(
        self,
        view: HostsView,
        funnel: Sequence[FunnelStep] = (),
        excluded: Sequence[RejectedRoots] = (),
        *,
        names: bool = False,  # whether to say which
    ) -> None:
        self.view = view
        self.funnel = list(funnel)
        self.excluded = list(excluded)
        self._names = names

    def keep(self, step: str, passed: Mask, reason: str) -> None:
        """Leave those out that do not pass, all for one reason."""
        self._keep(step, passed, {reason: int(passed.size - np.count_nonzero(passed))})

    def run(self, filters: Sequence[Filter], spec: RequestSpec) -> None:
        """Run in order those of the filters that apply."""
        for one in filters:
            if not applies_to(one, spec):
                continue
            result = one.filter(self.view, spec)
            # A plug-in may count wrongly; the funnel must add up all the same.
            out = int(result.passed.size - np.count_nonzero(result.passed))
            is_sound = sum(result.rejected.values()) == out
            self._keep(one.name, result.passed, result.rejected if is_sound else {one.name: out})

    def _keep(self, step: str, passed: Mask, rejected: Mapping[str, int]) -> None:
        before = self.view
        self.funnel.append(funnel_step(step, len(before), rejected))
        if passed.all():
            return
        self.view = before.subset(passed)
        if self._names:
            reasons = [reason for reason, count in rejected.items() if count]
            self.excluded.append(rejected_roots(step, reasons[0] if len(reasons) == 1 else "", before.rows[~passed]))
