"""The reports that ironic_sync may make of a node, judged by the messages that its process had received from Ironic by
then, and by the end of it all.

Written from Ironic's rules and its recorded notifications, not from ironic_sync's own rules.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from bus.contracts.placement import ProviderReport
from ironic_sync.domain.position import Position
from ironic_sync.domain.rules import ABSENT
from ironic_sync.store.port import Positions, Term
from lab.simulation.ironic import SimIronic, free
from lab.simulation.watch import Breach
from placement_worker.domain.values import Provider

# Published by what has just done it; of the others only an end is a fact.
FACTS = frozenset({"provision_set", "power_state_corrected"})


class NodeKnowledge:
    """One process's knowledge of one node: when it was last named, and whether it may be reported as free."""

    __slots__ = ("may_offer", "may_remove", "missing_at", "notified_at", "seen")

    def __init__(self) -> None:
        self.notified_at = -1.0
        self.may_remove = False  # Ironic has answered that there is no such node, and nothing newer was received since
        self.missing_at = -1.0  # when Ironic made that answer
        self.may_offer = False
        self.seen = ""


class IronicSyncWatch:
    """One life of one ironic_sync process: what it received and read, and that it offers nothing on less than that."""

    def __init__(self, now: Callable[[], float], fail: Callable[[Breach], None]) -> None:
        self._now = now
        self._fail = fail
        self._nodes: dict[str, NodeKnowledge] = {}

    def notified(self, body: bytes) -> None:
        """A notification arrives at the process."""
        outer = json.loads(body)
        if "oslo.message" not in outer:
            return  # placement's word, not Ironic's
        inner = json.loads(outer["oslo.message"])
        _, kind, action, status = inner["event_type"].split(".")
        node = inner["payload"]["ironic_object.data"]
        if kind != "node" or (status == "start" and action not in FACTS):
            return
        known = self._nodes.setdefault(node["uuid"], NodeKnowledge())
        known.notified_at = self._now()
        fact = action in FACTS or status in ("end", "success")
        late = str(node.get("updated_at") or known.seen)[:19] < known.seen[:19]
        if fact and not late and (action == "delete" or not free(node)):
            known.may_offer = False

    def answered(self, at: float, body: bytes) -> None:
        """An answer that Ironic made at this time arrives at the process."""
        answer = json.loads(body)
        shown = answer.get("nodes", [answer])
        for node in [one for one in shown if "provision_state" in one]:  # a ping requests a uuid alone
            known = self._nodes.setdefault(node["uuid"], NodeKnowledge())
            known.seen = node.get("updated_at") or known.seen
            if at >= known.missing_at:  # a page of a list may have been on its way for longer than that answer
                known.may_remove = False
            if not free(node):
                known.may_offer = False
            elif known.notified_at <= at:  # what was received by then had happened
                known.may_offer = True

    def missing(self, at: float, uuid: str) -> None:
        """An answer that Ironic made at this time, that it has no such node, arrives at the process."""
        known = self._nodes.setdefault(uuid, NodeKnowledge())
        if known.notified_at <= at:
            known.may_remove, known.missing_at = True, max(at, known.missing_at)

    def saving(self, positions: Sequence[Position], loaded: Mapping[str, Position]) -> None:
        """The process is about to keep these, and to report them to placement."""
        for position in positions:
            known, before = self._nodes.get(position.uuid), loaded.get(position.uuid)
            if before is not None and before.version == position.version:
                continue  # published in an earlier term, and not confirmed: published again
            removed = before is not None and before.report is not None and position.report is None
            held_back = before is not None and before.problem != ABSENT and position.problem == ABSENT
            if (removed or held_back) and not (known and known.may_remove):
                self._fail(Breach("removed_on_fresh_word", f"{position.uuid} is taken out; it was named since"))
            if offers(position.report) and not (known and known.may_offer):
                self._fail(Breach("offered_on_fresh_word", f"{position.uuid} is given back, and was not seen free"))


class WatchedPositions:
    """Positions whose every save is looked at before it is sent."""

    def __init__(self, inner: Positions, watch: IronicSyncWatch) -> None:
        self._inner = inner
        self._watch = watch
        self.database_id = inner.database_id

    def become_leader(self) -> AbstractAsyncContextManager[Term]:
        """As ever."""
        return self._become_leader()

    @asynccontextmanager
    async def _become_leader(self) -> AsyncIterator[Term]:
        async with self._inner.become_leader() as term:
            yield _WatchedTerm(term, self._watch)


class _WatchedTerm:
    def __init__(self, inner: Term, watch: IronicSyncWatch) -> None:
        self._inner = inner
        self._watch = watch
        self._loaded: Mapping[str, Position] = {}

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        positions, versions = await self._inner.load()
        self._loaded = dict(positions)
        return positions, versions

    async def save(self, positions: Sequence[Position]) -> None:
        self._watch.saving(positions, self._loaded)
        await self._inner.save(positions)
        self._loaded = {**self._loaded, **{position.uuid: position for position in positions}}

    async def mark_published(self, versions: Mapping[str, int]) -> None:
        await self._inner.mark_published(versions)

    async def purge(self, reported_before: float) -> int:
        return await self._inner.purge(reported_before)

    async def renew(self) -> None:
        await self._inner.renew()


def offers(report: ProviderReport | None) -> bool:
    """Whether a report puts anything on offer."""
    return report is not None and any(one.reserved < one.total for one in report.inventories.values())


def disagreements(
    ironic: SimIronic, providers: Mapping[str, Provider], positions: Mapping[str, Position]
) -> Iterator[str]:
    """At rest: every node is in placement as Ironic shows it, and none that Ironic does not have."""
    if not ironic.pool.idle:
        yield "liveness: a node is still on its way"
    for uuid, node in ironic.pool.nodes.items():
        provider = providers.get(uuid)
        if provider is None:
            yield f"ironic_agrees: placement has no node {uuid}"
        elif words := _differs(node, provider):
            yield f"ironic_agrees: {uuid} in {node['provision_state']}: {words}"
    for uuid in positions:
        provider = providers.get(uuid)
        if uuid in ironic.pool.nodes or provider is None:
            continue
        # Removed while it was in use, or with what others gave it, it is a shell.
        if is_reported(provider) or not (any(provider.used.values()) or provider.is_changed_by_clients):
            yield f"ironic_agrees: placement has {uuid}, Ironic has not"


def is_reported(provider: Provider) -> bool:
    """Whether a source reports any of its inventory: all of a removed provider in use is orphaned."""
    return any(not inventory.orphaned for inventory in provider.inventories.values())


def _differs(node: Mapping[str, Any], provider: Provider) -> str:
    name = "CUSTOM_" + str(node["resource_class"]).upper().replace("-", "_")
    inventory = provider.inventories.get(name)
    if inventory is None or inventory.total != 1:
        return f"no unit of {name}"
    if (inventory.reserved == 0) != free(node):
        return f"reserved {inventory.reserved}, and is {'free' if free(node) else 'not free'}"
    others = [other for other, held in provider.inventories.items() if other != name and held.capacity > 0]
    if others:
        return f"offers {others} too"
    return "" if set(node["traits"]) <= set(provider.traits) else f"traits {sorted(provider.traits)}"
