"""A unit on what this process believes of its builds: written at its end, which holds only if it is so.

A request is new, a decision finds its request waiting, an announcement finds its build where this process has left it:
nearly always. So each is written at once and checked in the same act; where it is not so nothing is written, `Stale` is
raised, and the unit is done again with locks. Rows that were looked at are held in the version in which they were seen,
whether they change or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from bus.outbox import Addressed
from bus.service.known import Known
from bus.service.once import Mistaken
from scheduler_worker.domain.records import Standing
from scheduler_worker.store.port import Change, Decided, Kept, NewBuild, OnRecord, Stale


class Belief(Struct, frozen=True, kw_only=True):
    """All that one unit writes, if it is as believed. held: the version of every row that was looked at."""

    fresh: Sequence[NewBuild]
    decided: Sequence[Decided]
    held: Mapping[str, int]
    changed: Sequence[Change]
    said: Sequence[Addressed]
    at: float
    durable: bool


class Written(Struct, frozen=True):
    """What came of it: the version of the rows that were written, and the outbox row."""

    version: int
    row: int | None


class Ground(Protocol):
    """The rows themselves. Adapters: `store.one_statement`, `store.memory`."""

    async def look(self, instances: Sequence[str]) -> list[tuple[int, Kept]]:
        """Records with the versions of their rows, without locks."""

    async def write(self, belief: Belief) -> Written:
        """All of it or nothing, locking in uuid order. Raises Mistaken."""


class BelievingUnit:
    """Reads from memory, keeps what is to be written, and writes it all at once."""

    def __init__(self, ground: Ground, known: Known[Kept]) -> None:
        self._ground = ground
        self._known = known
        self._fresh: Sequence[NewBuild] = ()
        self._decided: Sequence[Decided] = ()
        self._versions: dict[str, int] = {}
        self._changed: Sequence[Change] = ()
        self._after: dict[str, Kept] = {}
        self._at = 0.0
        self.said: list[Addressed] = []
        self.row: int | None = None

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """Believed to be new, all of them."""
        self._fresh, self._at = builds, now
        self._after.update((kept.standing.instance_uuid, kept) for kept in map(_accepted, builds))
        return {build.request.instance_uuid for build in builds}

    async def read(self, instances: Sequence[str]) -> dict[str, OnRecord]:
        """Whoever has to look believes nothing."""
        if instances:
            raise Stale
        return {}

    async def decide(self, decided: Sequence[Decided], now: float) -> set[str]:
        """Believed to wait for it, all of them."""
        self._decided, self._at = decided, now
        for one in decided:
            known = self._known.get(one.instance_uuid)
            if known is not None:
                self._after[one.instance_uuid] = _decided(known[1], one)
        return {one.instance_uuid for one in decided}

    async def lock(self, instances: Sequence[str]) -> dict[str, Kept]:
        """As this process knows them; what it does not know is read. `change` follows, and checks it."""
        found: dict[str, Kept] = {}
        unknown: list[str] = []
        for instance in dict.fromkeys(instances):
            known = self._known.get(instance)
            if known is None:
                unknown.append(instance)
            else:
                self._versions[instance], found[instance] = known
        if unknown:
            for version, kept in await self._ground.look(unknown):
                self._versions[kept.standing.instance_uuid] = version
                found[kept.standing.instance_uuid] = kept
        return found

    async def change(self, changes: Sequence[Change], now: float) -> None:
        """Kept for the end."""
        self._changed, self._at = changes, now
        for change in changes:
            kept = Kept(standing=change.standing, delete_requested=change.delete_requested)
            self._after[change.standing.instance_uuid] = kept

    def say(self, message: Addressed) -> None:
        """Kept in the outbox with everything else of this unit."""
        self.said.append(message)

    async def write(self, *, durable: bool) -> None:
        """The whole unit. Raises Stale when anything was not as believed."""
        if not (self._fresh or self._decided or self._versions or self.said):
            return
        self._known.forget({*self._versions, *self._after})  # whatever comes of it, cancelled or the connection lost
        try:
            written = await self._ground.write(
                Belief(
                    fresh=self._fresh,
                    decided=self._decided,
                    held=self._versions,
                    changed=self._changed,
                    said=self.said,
                    at=self._at,
                    durable=durable,
                )
            )
        except Mistaken:
            raise Stale from None
        self.row = written.row
        self._known.put(written.version, self._after)


def _accepted(build: NewBuild) -> Kept:
    standing = Standing(
        instance_uuid=build.request.instance_uuid,
        project_id=build.request.project_id,
        state=build.state,
        sequence=build.sequence,
        terminal=build.terminal,
        cell=None,
        code=build.code,
        reason=build.reason,
    )
    return Kept(standing=standing, delete_requested=False)


def _decided(kept: Kept, one: Decided) -> Kept:
    standing = replace(
        kept.standing,
        state=one.state,
        sequence=one.sequence,
        terminal=one.terminal,
        cell=one.cell,
        host=one.host,
        code=one.code,
        reason=one.reason,
    )
    return Kept(standing=standing, delete_requested=False)
