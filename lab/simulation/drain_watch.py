"""The rules of drains: when one has ended as done, its hosts hold nothing of an instance; and so many of its moves are
under way as it may have, none once it has ended. Judged by record and book.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from bus.contracts.drains import DrainRecord, DrainState
from bus.contracts.objects import HostDecision, ObjectKind
from bus.contracts.operations import AdminState
from lab.simulation.watch import Breach
from placement_worker.store.memory_table import MemoryPlacementTable
from scheduler_worker.drain.drain_steps import DONE
from scheduler_worker.records.object_records import drains_of
from scheduler_worker.store.memory_units import MemoryBuildTable

# A scheduler may commit the end so long after its last look at placement; a move that was dispatched before the drain
# may claim its next host meanwhile.
LOOKED_S = 10.0


class DrainWatch:
    """Looks after every commit of placement and of the schedulers. now: the time.

    exempt: instances of which a restored database knows an old truth.
    """

    def __init__(
        self,
        placement: MemoryPlacementTable,
        builds: MemoryBuildTable,
        now: Callable[[], float],
        exempt: Collection[str],
    ) -> None:
        self._placement = placement
        self._builds = builds
        self._now = now
        self._exempt = exempt
        self._hosts: dict[str, str] = {}  # {host: its drain, which has not ended}
        self._since: dict[tuple[str, str], float] = {}  # {(consumer, host): when it was first seen to hold something}
        self._token: str | None = None
        self._drains: dict[str, DrainRecord] = {}

    def placement_committed(self) -> None:
        """After a commit of placement."""
        if not self._hosts:
            return
        held = {}
        for uuid, kept in self._placement.consumers.items():
            for provider in kept.consumer.allocations:
                if (found := self._placement.providers.get(provider)) is not None and found.root in self._hosts:
                    held[uuid, found.root] = self._since.get((uuid, found.root), self._now())
        self._since = held

    def builds_committed(self) -> None:
        """After a commit of the schedulers. Raises Breach."""
        present = self._builds.objects.present
        if present.token == self._token:
            self._keep_their_bound()
            return
        self._token, before = present.token, self._hosts
        self._drains = drains = drains_of(present.objects)
        self._keep_their_bound()
        self._hosts = {}
        for (kind, host), stored in present.objects.items():
            if kind is not ObjectKind.HOST:
                continue
            decision = msgspec.convert(stored.body, HostDecision)
            drain = drains.get(decision.drain or "")
            if drain is None or decision.state is AdminState.FENCED:
                continue
            if drain.state is not DrainState.ENDED:
                self._hosts[host] = decision.drain or ""
            elif drain.code == DONE and before.get(host) == decision.drain:
                self._holds_nothing(host)
        self.placement_committed()

    def _keep_their_bound(self) -> None:
        if not self._drains:
            return
        under_way = Counter(move.drain for move, _ in self._builds.actions.values() if move.drain and not move.terminal)
        for drain, record in self._drains.items():
            if under_way[drain] > (0 if record.state is DrainState.ENDED else record.at_once):
                raise Breach("drains_keep_their_bound", f"{under_way[drain]} of {drain}, which is {record.state}")

    def _holds_nothing(self, host: str) -> None:
        for (uuid, held_on), since in self._since.items():
            move = self._builds.actions.get(uuid)
            instance = uuid if move is None else move[0].instance_uuid
            is_ours = instance in self._builds.records and not {uuid, instance} & set(self._exempt)
            if held_on == host and is_ours and since < self._now() - LOOKED_S:
                raise Breach("drained_hosts_hold_nothing", f"{uuid} of {instance} on {host} since {since:.1f}")
