"""Repairs that an audit carries out by itself: of findings whose proof two looks had, as the site's policy allows.

Just before a repair everything is read once more. Placement decides at last: it releases only the attempt that it had
before that reading, so an allocation that was claimed since stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from berth.audit.findings import AuditFinding, FindingKind, findings
from berth.audit.passes import read_facts
from berth.audit.readable_cells import unreadable
from berth.config.settings import AuditSettings
from berth.config.site import Site
from bus.contracts.base import MAX_REASON
from bus.contracts.objects import AuditRepair, ChangedObject, ObjectKind
from bus.contracts.placement import Release, ReleaseResult
from bus.persistence.database import Database
from bus.service.environment import Environment
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from scheduler_worker.records.object_records import ChangeActor
from scheduler_worker.store import object_rows

log = structlog.get_logger(__name__)

# With more at a time there is rather one cause, for a person to look at: none is repaired then.
MAX_AT_ONCE = 50
_ATTEMPTS = """
SELECT uuid::text, attempt FROM consumers
WHERE uuid = ANY($1::uuid[]) AND released_at IS NULL AND attempt > 0 ORDER BY uuid
"""


def chosen(policy: AuditSettings, proven: Sequence[AuditFinding]) -> list[AuditFinding]:
    """The findings that the policy has repaired. None when they are more than MAX_AT_ONCE."""
    repaired = {FindingKind.ORPHANED} if policy.orphaned == "repair" else set()
    found = [one for one in proven if one.kind in repaired]
    if len(found) > MAX_AT_ONCE:
        log.error("audit.too_many", findings=len(found), most=MAX_AT_ONCE)
        return []
    return found


async def release_ended(site: Site, proven: Sequence[AuditFinding], *, actor: str) -> list[str]:
    """Release the allocations of these orphans, if their proof still holds; a line for each. Raises Transient.

    Each is in the log of changes before it is released.
    """
    database = site.environment("audit").database("placement", pool_size=2)
    store = PlacementService(PostgresPlacementRows(database))
    await store.open()
    try:
        async with database.raw() as connection:
            attempts = dict(await connection.fetch(_ATTEMPTS, [one.subject for one in proven]))
        audited = await read_facts(site, await unreadable(site))
        still = {one.key: one for one in findings(audited) if one.proof}
        due = [still[one.key] for one in proven if one.key in still and one.subject in attempts]
        if not due:
            return []
        held = audited.facts.allocations
        repairs = {
            one.subject: AuditRepair(
                finding=one.kind.value,
                found=one.reason[:MAX_REASON],
                proof=one.proof[:MAX_REASON],
                held={provider: dict(amounts) for provider, amounts in held[one.subject].items()},
            )
            for one in due
        }
        await enter(site.environment("audit"), repairs, actor, "audit.orphaned = repair")
        replies = await store.apply([Release(consumer=one.subject, attempt=attempts[one.subject]) for one in due])
    finally:
        await store.close()
    lines = []
    for one, reply in zip(due, replies, strict=True):
        outcome = reply.outcome if isinstance(reply, ReleaseResult) else "refused"
        log.warning("audit.repaired", finding=one.kind.value, subject=one.subject, outcome=outcome, proof=one.proof)
        lines.append(f"{one.subject}: {outcome} ({one.proof})")
    return lines


async def enter(env: Environment, repairs: dict[str, AuditRepair], actor: str, reason: str) -> None:
    """Put the repairs into the log of changes of the schedulers' record."""
    database: Database = env.database("scheduler", pool_size=1)
    changed = [
        ChangedObject(kind=ObjectKind.REPAIR, name=consumer, before=msgspec.to_builtins(one))
        for consumer, one in repairs.items()
    ]
    try:
        async with database.raw() as connection:
            rows = object_rows.ObjectRows(connection)
            await rows.lock_objects()
            await rows.write_objects(changed, ChangeActor(actor, reason, env.clock.time()))
    finally:
        await database.close()
