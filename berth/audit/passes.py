"""Audits a running system at intervals: where placement, its records and its hosts disagree."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping

import msgspec
from msgspec import Struct

from berth.audit.facts import IS_OPEN, gather, of_placement
from berth.audit.findings import AuditFacts, AuditFinding, Confirmed, findings
from berth.audit.findings import of_placement as findings_of_placement
from berth.audit.invariants import Facts
from berth.audit.readable_cells import unreadable
from berth.config.site import Site
from bus.contracts.actions import Condition
from bus.contracts.build import ENDED_WITHOUT_MACHINE, BuildState
from bus.contracts.objects import ZONE_KEY, Aggregate
from bus.persistence.database import Database
from bus.persistence.tables import in_list
from scheduler_worker.records.build_record import UNLOCATABLE

MAX_CONSUMERS = 2_000
_CONSUMERS = "SELECT count(*) FROM (SELECT FROM consumers LIMIT $1) c"
_HELD_BY_BUS = "SELECT uuid::text, claim_owner FROM consumers WHERE released_at IS NULL AND attempt > 0"
# Instances about which the schedulers have something under way: what is read of them meanwhile is not judged.
UNDER_WAY = f"""
SELECT instance_uuid::text FROM build_requests WHERE {IS_OPEN}
    OR instance::json ->> 'under_way' IS NOT NULL OR instance::json ->> 'condition' = '{Condition.MOVING}'
"""
# Of these, what nothing goes on with: two passes in a row see it (`Confirmed`).
_MOVING = f"""
SELECT instance_uuid::text FROM build_requests WHERE state = '{BuildState.ACTIVE}'
    AND instance::json ->> 'under_way' IS NULL AND instance::json ->> 'condition' = '{Condition.MOVING}'
"""
# The requests on record of consumers. In doubt is a claim of another claim owner than that of the record which has
# ended, and one of a build that ended because its claim was on a host of no known cell: it may be that of a running
# instance whose record is lost, and no age shows that it is not. Of one that is deleted, its cell or the schedulers'
# record has proved that nothing of it is left. Has a machine: an active instance that is not offloaded by this record.
REQUESTS = f"""
SELECT b.instance_uuid::text, b.state, b.cell IS NULL
    AND b.state IN ({in_list(sorted({*ENDED_WITHOUT_MACHINE} - {BuildState.DELETED}))})
    AND (b.claim_owner <> held.claim_owner OR b.code = '{UNLOCATABLE}') AS in_doubt, {IS_OPEN} AS is_open,
    b.state = '{BuildState.ACTIVE}' AND (b.instance::json ->> 'under_way' IS NOT NULL
    OR b.instance::json ->> 'condition' IS DISTINCT FROM '{Condition.OFFLOADED}') AS has_machine
FROM build_requests b JOIN unnest($1::uuid[], $2::text[]) AS held (uuid, claim_owner) ON b.instance_uuid = held.uuid
"""
# Requests of moves: of one that is under way, or awaits its confirm, the id is the consumer that holds its source.
_MIGRATIONS = "SELECT request_id::text, instance_uuid::text FROM instance_actions WHERE request_id = ANY($1::uuid[])"
# Aggregates that make zones, and requests that name one. A host's aggregates are placement's: what Placement's API
# changes there, no scheduler can refuse.
_ZONES = "SELECT body FROM objects WHERE kind = 'aggregate' AND body LIKE '%\"availability_zone\"%' ORDER BY name"
# Requests of before U+0000 was refused may hold it, which PostgreSQL does not read as JSON.
_ZONED = r"""
SELECT instance_uuid::text, (CASE WHEN strpos(request, '\u0000') > 0
    THEN regexp_replace(request, '(\\\\)|\\u0000', '\1', 'g') ELSE request END)::json ->> 'availability_zone'
FROM build_requests
WHERE state = 'active' AND request LIKE '%"availability_zone":"%' ORDER BY instance_uuid
"""
_MEMBERS = """
SELECT p.uuid::text, a.aggregate::text FROM provider_aggregates a JOIN providers p ON p.id = a.provider_id
WHERE a.aggregate = ANY($1::uuid[]) ORDER BY 1, 2
"""


class AuditPass(Struct, frozen=True):
    """The changes of one pass. confirmed: every finding that is confirmed by now. unread: why a cell was not read."""

    new: tuple[AuditFinding, ...]
    gone: tuple[AuditFinding, ...]
    confirmed: Confirmed
    at_s: float
    unread: Mapping[str, Exception]


async def read_facts(site: Site, unread: Collection[str] = (), *, reports: bool = True) -> AuditFacts:
    """All facts of one pass. Requests under way are read before and after the rest: it is under way in between, too.

    unread: cells that are not read; what may be theirs is not judged, as if it were under way. reports: the hosts are
    asked what they run; otherwise that is not judged.
    """
    environment = site.environment("audit")
    scheduler, placement = (
        environment.database("scheduler", pool_size=1),
        environment.database("placement", pool_size=1),
    )
    try:
        busy = await _busy(scheduler)
        facts = await gather(site, unread=unread, reports=reports)
        async with placement.raw() as connection:
            held = dict(await connection.fetch(_HELD_BY_BUS))
        async with scheduler.raw() as connection:
            migrations = dict(await connection.fetch(_MIGRATIONS, list(facts.allocations)))
            moving = {row[0] for row in await connection.fetch(_MOVING)}
            requests = await connection.fetch(REQUESTS, list(held), list(held.values()))
        zones = await _outside_zones(site, facts, scheduler, placement)
        busy |= await _busy(scheduler) | facts.in_unread_cells()
        return AuditFacts(
            facts=facts,
            held_by_bus=held.keys(),
            busy=busy,
            migrations=migrations,
            zones=zones,
            in_doubt={row["instance_uuid"] for row in requests if row["in_doubt"]},
            with_machine={row["instance_uuid"] for row in requests if row["has_machine"]},
            moving=moving,
        )
    finally:
        await scheduler.close()
        await placement.close()


async def watch(site: Site, *, every_s: float) -> AsyncGenerator[AuditPass]:
    """One pass every `every_s` seconds, counted from the begin of the last; at once where a pass takes longer."""
    confirmed = Confirmed()
    while True:
        began_s = site.clock.monotonic()
        unread = await unreadable(site)
        found = findings(await read_facts(site, unread))
        now_s = site.clock.monotonic()
        new, gone = confirmed.apply(found, now_s)
        yield AuditPass(tuple(new), tuple(gone), confirmed, now_s, unread)
        await site.clock.sleep(max(0.0, began_s + every_s - site.clock.monotonic()))


async def findings_without_hosts(site: Site) -> list[AuditFinding]:
    """What one pass finds without asking the hosts. With more than MAX_CONSUMERS consumers only what placement's own
    tables show: the rest takes longer than whoever looks at the whole waits.
    """
    placement = site.environment("audit").database("placement", pool_size=1)
    try:
        async with placement.raw() as connection:
            many = await connection.fetchval(_CONSUMERS, MAX_CONSUMERS + 1) > MAX_CONSUMERS
        if many:
            return list(findings_of_placement(*await of_placement(placement)))
    finally:
        await placement.close()
    return findings(await read_facts(site, reports=False))


async def _outside_zones(
    site: Site, facts: Facts, scheduler: Database, placement: Database
) -> dict[str, tuple[str, str]]:
    """{instance: (the zone that its request names, its host's)} where they differ."""
    async with scheduler.raw() as connection:
        bodies = [msgspec.json.decode(row[0], type=Aggregate) for row in await connection.fetch(_ZONES)]
        zone_of = {one.uuid: one.metadata[ZONE_KEY] for one in bodies if ZONE_KEY in one.metadata}
        named = dict(await connection.fetch(_ZONED)) if zone_of else {}
    if not named:
        return {}
    async with placement.raw() as connection:
        members = await connection.fetch(_MEMBERS, list(zone_of))
    there = {host: zone_of[aggregate] for host, aggregate in members}
    default = site.settings.scheduler.default_availability_zone
    found: dict[str, tuple[str, str]] = {}
    for one in facts.instances:
        zone = there.get(one.host_uuid or "", default)
        if named.get(one.instance_uuid, zone) != zone:
            found[one.instance_uuid] = named[one.instance_uuid], zone
    return found


async def _busy(scheduler: Database) -> set[str]:
    async with scheduler.raw() as connection:
        return {row[0] for row in await connection.fetch(UNDER_WAY)}
