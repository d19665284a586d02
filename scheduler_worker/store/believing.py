"""A unit on what this process believes of its builds: one statement at its end, which holds only if it is so.

A request is new, a decision finds its request waiting, an announcement finds its build where this process has left it:
nearly always. So each is written at once and checked in the same statement; where it is not so nothing is written,
`Stale` is raised, and the unit is done again with locks. Rows that were looked at are held in the version (xmin: the
transaction that wrote it) in which they were seen, whether they change or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
from msgspec.structs import replace

from bus import outbox
from bus.outbox import Addressed
from bus.service.known import Known
from bus.service.once import Mistaken, Once
from scheduler_worker.domain.records import Standing
from scheduler_worker.store import rows
from scheduler_worker.store.port import Change, Decided, Kept, NewBuild, OnRecord, Stale

LOOK = f"SELECT xmin, {rows.KEPT} FROM build_requests WHERE instance_uuid = ANY($1::uuid[])"

# Locks what was looked at, in uuid order, where it is still the same.
HELD = """
SELECT b.instance_uuid FROM build_requests b
JOIN unnest({}::uuid[], {}::xid[]) AS k (instance_uuid, version) ON b.instance_uuid = k.instance_uuid
WHERE b.xmin = k.version ORDER BY b.instance_uuid FOR UPDATE OF b
"""

# All or nothing. Not joined with what is held: planned by key, two lists of values are compared pair by pair.
CHANGE = f"{rows.CHANGE} AND (SELECT count(*) FROM held) = {{}}::bigint RETURNING 1"
CHANGE_ONE = f"{rows.CHANGE} AND b.xmin = {{}}::xid RETURNING 1"


class BelievingUnit:
    """Reads from memory, keeps what is to be written, and writes it all at once."""

    def __init__(self, connection: asyncpg.Connection, known: Known[Kept]) -> None:
        self._connection = connection
        self._known = known
        self._versions: dict[str, int] = {}
        self._after: dict[str, Kept] = {}
        self._once = Once()
        self._empty = True
        self.said: list[Addressed] = []
        self.row: int | None = None

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """Believed to be new, all of them."""
        if builds:
            ordered = sorted(builds, key=lambda build: build.request.instance_uuid)
            self._part("fresh", rows.INSERT, *rows.new(ordered), now, count=len(ordered))
            self._after.update((kept.standing.instance_uuid, kept) for kept in map(_accepted, ordered))
        return {build.request.instance_uuid for build in builds}

    async def read(self, instances: Sequence[str]) -> dict[str, OnRecord]:
        """Whoever has to look believes nothing."""
        if instances:
            raise Stale
        return {}

    async def decide(self, decided: Sequence[Decided], now: float) -> set[str]:
        """Believed to wait for it, all of them."""
        if decided:
            ordered = sorted(decided, key=lambda one: one.instance_uuid)
            self._part("decided", rows.DECIDE, *rows.decided(ordered), now, count=len(ordered))
            placed = [one for one in ordered if one.host_uuid is not None]
            if placed:
                self._part("mapped", rows.MAP, *rows.mapping(placed), now, count=len(placed))
            for one in ordered:
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
            for row in await self._connection.fetch(LOOK, unknown):
                kept = rows.kept(row)
                self._versions[kept.standing.instance_uuid] = row["xmin"]
                found[kept.standing.instance_uuid] = kept
        return found

    async def change(self, changes: Sequence[Change], now: float) -> None:
        """Kept for the end."""
        held = sorted(self._versions)
        versions = [self._versions[one] for one in held]
        # One row needs no order of locks, so it is checked where it is changed.
        if len(held) == len(changes) == 1:
            self._part("changed", CHANGE_ONE, *rows.changed(changes), now, versions[0], count=1)
        elif held:
            self._part("held", HELD, held, versions, count=len(held))
            if changes:
                self._part("changed", CHANGE, *rows.changed(changes), now, len(held), count=len(changes))
        for change in changes:
            kept = Kept(standing=change.standing, delete_requested=change.delete_requested)
            self._after[change.standing.instance_uuid] = kept

    def say(self, message: Addressed) -> None:
        """Kept in the outbox with everything else of this unit."""
        self.said.append(message)

    async def write(self, *, durable: bool) -> None:
        """The whole unit. Raises Stale when anything was not as believed."""
        touched = {*self._versions, *self._after}
        outbox.add_once(self._once, self.said)
        if self._empty and not self.said:
            return
        self._once.column("pg_current_xact_id()::xid AS version")
        self._known.forget(touched)  # whatever comes of it, cancelled or the connection lost
        try:
            written = await self._once.run(self._connection, durable=durable)
        except Mistaken:
            raise Stale from None
        self.row = written["said"]
        self._known.put(written["version"], self._after)

    def _part(self, name: str, statement: str, *values: object, count: int) -> None:
        self._empty = False
        self._once.part(name, statement, *values, rows=count)


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
