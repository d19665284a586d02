"""A ranking: the hosts that passed for one kind of request, best first, drawn lazily. Like requests of one batch share
it. Each pick is assumed in the replica, and only the picked host is weighed again, on the scales of the ranking's
start, so a pick costs the same at 1,000 and at 1,000,000 hosts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from random import Random

import numpy as np

from bus.contracts.build import FunnelStep
from placement_worker.replica.replica import Replica
from scheduler_worker.hosts.host_table import Rows
from scheduler_worker.selection.choice import MAX_OPTIONS, NONE_FULL, CellBatching, Choice, RankedHost, Weights
from scheduler_worker.selection.host_heap import LEAST_CHUNK, Entry, HostHeap, ServiceRotation
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import OptionFilter, Weighing, options_of
from scheduler_worker.selection.request_spec import RequestSpec, options_on
from scheduler_worker.selection.weighing import KEPT_HOSTS, reweigh, score

CHUNK = 128  # hosts sorted at a time, over all cells; when a cell's are used up, the next ones are sorted

RADIX_KEYS = 2**16  # up to this many places (cell and service) are sorted in linear time, as numpy does for 16 bits
MAX_UNSUITED = 1_000  # hosts none of whose options suits: each takes long, and nothing else goes on meanwhile
OTHER_SERVICE_WALK = 4  # hosts looked at for an alternate of another compute service; fewer alternates may result


class GroupExclusions:
    """The hosts that are full with members of one anti-affinity group, for all of its members in one round."""

    __slots__ = ("_known", "_max_per_host", "_members", "_placed", "_replica", "full_hosts")

    def __init__(self, replica: Replica, placed: Mapping[str, int], max_per_host: int) -> None:
        self._replica = replica
        # {host uuid: members that this round has added, not claimed yet}. A full host stays full for the round.
        self._placed = placed
        self._max_per_host = max_per_host
        self._members: dict[str, int] = {}
        self._known: Mapping[str, int] | None = None
        self.full_hosts = 0

    def learn(self, members: Mapping[str, int]) -> None:
        """Add the members that placement reported to one of the group: {host uuid: count}."""
        if members is self._known:  # most members of a batch have one answer
            return
        self._known = members
        for uuid, count in members.items():
            before = self._members.get(uuid, 0)
            self._members[uuid] = max(before, count)
            self.full_hosts += before < self._max_per_host <= count

    def __contains__(self, row: object) -> bool:
        assert isinstance(row, int)
        uuid = self._replica.uuid_of(row)
        return self._members.get(uuid, 0) + self._placed.get(uuid, 0) >= self._max_per_host


class Ranking:
    """Hosts in order of weight; equal ones in random order with `shuffle`, else in the order of the replica."""

    def __init__(
        self,
        view: HostsView,
        spec: RequestSpec,
        weighings: tuple[Weighing, ...],
        funnel: tuple[FunnelStep, ...],
        *,
        shuffle: bool,
        rng: Random,
        # with `shuffle`, equal hosts of several cells come from one cell at a time
        batching: CellBatching | None = None,
        judges: Sequence[OptionFilter] = (),  # the filters that judge a host's options as it is drawn
    ) -> None:
        self.view = view
        self._judges = judges
        self._unsuited = 0  # hosts that the last pick has drawn in vain
        self.spec = spec
        self.funnel = funnel
        self._rng = rng
        self._batches = batching if shuffle else None
        self._cells = view.cell
        self._services = view.service
        self._scores, self._scales = score(view, spec, weighings)
        self._kept = [(one.weighing.weigher.name, one.weights.item) for one in self._scales if one.weights is not None]
        self._rotations: dict[int, deque[ServiceRotation]] = {}
        self._full = NONE_FULL  # of the last pick, and what was drawn of it since it was set
        self._full_drawn: list[Entry] = []
        self._heaps = self._sorted(rng, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.view)

    def pick(
        self, excluded: Container[int], *, subset: int, alternates: int, full_hosts: Container[int] = NONE_FULL
    ) -> Choice | None:
        """The best host that still fits and is not excluded (rows of the replica), with its alternates. `subset`: it is
        drawn at random from this many of the best. full_hosts: excluded here and in every later pick with the same
        `full_hosts`, drawn once.
        """
        if full_hosts is not self._full:
            self._put_back(self._full_drawn)
            self._full, self._full_drawn = full_hosts, []
        self._unsuited = 0
        drawn: list[Entry] = []
        viable: list[RankedHost] = []
        while len(viable) < subset and (found := self._next(excluded, drawn, MAX_OPTIONS)):
            viable.append(found)
        if not viable:
            self._put_back(drawn)
            return None
        selected = viable.pop(self._rng.randrange(len(viable)) if len(viable) > 1 else 0)
        same_cell = self._alternates(selected, viable, excluded, drawn, alternates)
        self._put_back(drawn)
        return Choice(selected, same_cell, len(self.view), self._weights_of((selected, *same_cell)))

    def _weights_of(self, hosts: Sequence[RankedHost]) -> tuple[Weights, ...]:
        """The parts of the scores of these hosts."""
        if len(self.view) <= KEPT_HOSTS:  # one by one: an index of several costs more than a handful of numbers
            return tuple({name: weight(host.position) for name, weight in self._kept} for host in hosts)
        some = self.view.subset(np.array([host.position for host in hosts], dtype=np.intp))
        by_weigher = [
            (scale.weighing.weigher.name, weights.tolist()) for scale, weights in reweigh(some, self.spec, self._scales)
        ]
        return tuple({name: weights[at] for name, weights in by_weigher} for at in range(len(hosts)))

    def consumed(self, candidate: RankedHost) -> None:
        """Weigh this host again: a claim on it was assumed in the replica."""
        if self._batches is not None:
            self._batches.chose(int(self._cells[candidate.position]))
        one = self.view.subset(np.array([candidate.position], dtype=np.intp))
        new = 0.0
        for scale, weights in reweigh(one, self.spec, self._scales):
            new += weights.item(0)
            if scale.weights is not None:
                scale.weights[candidate.position] = weights.item(0)
        heap = self._heaps[int(self._cells[candidate.position])].entries
        for at, (_, tie, position) in enumerate(heap):
            if position == candidate.position:
                heap[at] = (-new, tie, position)
                heapq.heapify(heap)
                return

    def _alternates(
        self,
        selected: RankedHost,
        others: list[RankedHost],
        excluded: Container[int],
        drawn: list[Entry],
        count: int,
    ) -> tuple[RankedHost, ...]:
        """Hosts of the same cell, best first; not claimed, so other requests may name them too. Each is of another
        compute service while there are others: the death of one service must not take all of them along.
        """
        cell = int(self._cells[selected.position])
        others = [other for other in others if int(self._cells[other.position]) == cell]
        services = {int(self._services[selected.position])}
        chosen: list[RankedHost] = []
        for other in others:
            if len(chosen) < count and int(self._services[other.position]) not in services:
                chosen.append(other)
                services.add(int(self._services[other.position]))
        rotations = self._rotations[cell]
        for _ in range(min(len(rotations), count + len(services))):
            rotations.rotate(-1)
            if len(chosen) < count and rotations[-1].service not in services:
                chosen += self._from(rotations[-1], excluded)
        taken = {selected.position, *(host.position for host in chosen)}
        chosen += [other for other in others if other.position not in taken][: count - len(chosen)]
        while len(chosen) < count and (found := self._next(excluded, drawn, 1, cell=cell)):
            if found.position not in taken:
                chosen.append(found)
        return tuple(sorted(chosen, key=lambda host: -host.score))

    def _from(self, rotation: ServiceRotation, excluded: Container[int]) -> list[RankedHost]:
        """The next host of one service that may be claimed, if there is one within a few."""
        for score_, _, position in rotation.draw(OTHER_SERVICE_WALK):
            row = int(self.view.rows[position])
            out = row in excluded or row in self._full
            if not out and (found := self._found(position, row, score_, limit=1)):
                return [found]
        return []

    def _next(
        self, excluded: Container[int], drawn: list[Entry], limit: int, cell: int | None = None
    ) -> RankedHost | None:
        """Draw hosts (of one cell) until one fits, or MAX_UNSUITED do not suit; each is kept in `drawn`, to be put
        back.
        """
        while self._unsuited < MAX_UNSUITED:
            heap = self._best_heap() if cell is None else self._heaps[cell]
            if not heap or not (entry := heap.draw()):
                break
            position = entry[2]
            row = int(self.view.rows[position])
            if row in self._full:
                self._full_drawn.append(entry)
                continue
            drawn.append(entry)
            if row in excluded:
                continue
            if found := self._found(position, row, entry[0], limit=limit):
                return found
            drawn.pop()  # full by now, and in this round it can only become fuller
        return None

    def _found(self, position: int, row: int, score_: float, *, limit: int) -> RankedHost | None:
        """The host at a position of the view, which is this row of the replica, if it still fits."""
        replica = self.view.replica
        if self._judges:
            host = self.view.subset(np.array([position], dtype=np.intp))
            found = options_of(host, self.spec, self._judges, limit=limit)
            self._unsuited += not found
        else:
            found = options_on(replica, self.spec, row, limit=limit)
        if not found:
            return None
        service = self.view.table.services.states[self._services.item(position)].name
        return RankedHost(replica.uuid_of(row), row, position, -score_, found, service)

    def _best_heap(self) -> HostHeap | None:
        """The heap of the cell whose best host is the best of all; of equally good cells, that of the cell whose turn
        it is.
        """
        best: list[HostHeap] = []
        first: tuple[float, int] | None = None
        for cell, heap in self._heaps.items():
            if heap.is_empty:
                continue
            order = (-heap.best_score, 0 if self._batches is None else self._batches.place(cell))
            if first is None or order < first:
                best, first = [heap], order
            elif order == first:
                best.append(heap)
        return min(best, key=HostHeap.top, default=None)

    def _put_back(self, drawn: list[Entry]) -> None:
        for entry in drawn:
            self._heaps[int(self._cells[entry[2]])].push(entry)

    def _sorted(self, rng: Random, *, shuffle: bool) -> dict[int, HostHeap]:
        """The hosts by cell, so that alternates of one cell are found without a walk over all hosts."""
        services = len(self.view.table.services.states) + 1
        keys = self._cells * services + self._services
        if len(self.view.table.cells) * services <= RADIX_KEYS:
            keys = keys.astype(np.uint16)
        order = np.argsort(keys, kind="stable")
        by_cell: dict[int, list[Rows]] = {}  # a cell's hosts, by service
        for part in _batches(order, keys):
            by_cell.setdefault(int(self._cells[part[0]]), []).append(part)
        shuffle_rng = rng if shuffle else None
        heaps = {}
        for cell, parts in by_cell.items():
            self._rotations[cell] = deque(
                ServiceRotation(int(self._services[one[0]]), one, self._scores, shuffle_rng) for one in parts
            )
            heaps[cell] = HostHeap(
                np.concatenate(parts), self._scores, max(LEAST_CHUNK, CHUNK // len(by_cell)), shuffle_rng
            )
        return heaps


def _batches(order: Rows, column: Rows) -> list[Rows]:
    """A sorted order in pieces of one value each."""
    values = column[order]
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(order)]
    return [order[start:end] for start, end in pairwise(cuts) if end > start]
