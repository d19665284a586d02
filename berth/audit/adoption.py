"""An operator's decision that a machine in quarantine is its instance: checked against the cells' records, and put on
record for the conductor, which checks the hosts' own answers before it carries it out.
"""

from __future__ import annotations

from berth.audit.repairing import enter
from berth.site import Site
from bus.contracts.objects import AuditRepair
from bus.faults import DatabaseUnprepared, RequestRefused
from bus.persistence.database import Database
from cell_conductor.domain.adopt_rules import why_not_adoptable
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import UnexplainedKind
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.rows import decode
from cell_conductor.store.safety import ADOPT, UnexplainedRecord

# In another cell: it has no instance of this uuid, or has one no more.
OVER = frozenset({State.ABSENT, State.TOMBSTONE, State.DELETED, State.DEPARTED, State.FAILED})


async def decide_adoption(site: Site, uuid: str, host: str, *, who: str, why: str) -> str:
    """Put the decision on record, and into the log of changes; returns the cell. Raises RequestRefused (`quarantine.`
    unknown, several, not_adoptable, recorded_elsewhere).
    """
    kept: dict[str, list[UnexplainedRecord]] = {}
    records: dict[str, Instance] = {}
    for cell in site.cells:
        database = site.environment("operator").database(f"cell_{cell}", pool_size=1)
        try:
            kept[cell], record = await _read(database, uuid)
            if record is not None:
                records[cell] = record
        except DatabaseUnprepared:  # a cell that was never started has no instances
            continue
        finally:
            await database.close()
    cell, machine = _checked(kept, records, uuid, host)
    found = f"runs on {host}, in quarantine: {machine.machine.why}; {cell} has it as {_described(records[cell])}"
    repair = AuditRepair(finding="quarantined", found=found, proof="by an operator's word")
    await enter(site, {uuid: repair}, who, why)
    database = site.environment("operator").database(f"cell_{cell}", pool_size=1)
    try:
        decided = await PostgresInstances(database).safety.decide(uuid, ADOPT, who, site.clock.time(), host=host)
    finally:
        await database.close()
    if not decided:
        raise RequestRefused(f"no machine of {uuid} is in quarantine on {host} any more", code="quarantine.unknown")
    return cell


def _checked(
    kept: dict[str, list[UnexplainedRecord]], records: dict[str, Instance], uuid: str, host: str
) -> tuple[str, UnexplainedRecord]:
    found = [(cell, one) for cell, machines in kept.items() for one in machines]
    here = [(cell, one) for cell, one in found if one.machine.host_uuid == host]
    if not here:
        raise RequestRefused(f"no machine of {uuid} is in quarantine on {host}", code="quarantine.unknown")
    if len(found) > 1:
        others = ", ".join(one.machine.host_uuid for _, one in found if one.machine.host_uuid != host)
        reason = f"there are others of it, on {others}: decide about these first (`berth quarantine release`)"
        raise RequestRefused(reason, code="quarantine.several")
    cell, machine = here[0]
    if why := why_not_adoptable(records.get(cell)):
        raise RequestRefused(f"{uuid} in {cell}: {why}", code="quarantine.not_adoptable")
    if elsewhere := [name for name, one in records.items() if name != cell and one.state not in OVER]:
        reason = f"{uuid} is on record in {', '.join(elsewhere)} as well"
        raise RequestRefused(reason, code="quarantine.recorded_elsewhere")
    return cell, machine


def _described(record: Instance) -> str:
    return f"{record.state} on {record.here.host}"


async def _read(database: Database, uuid: str) -> tuple[list[UnexplainedRecord], Instance | None]:
    store = PostgresInstances(database)
    records = await store.safety.records()
    async with database.raw() as connection:
        record = await connection.fetchval("SELECT record::text FROM instances WHERE uuid = $1::uuid", uuid)
    quarantined = [
        one for one in records if one.machine.uuid == uuid and one.machine.kind is UnexplainedKind.QUARANTINED
    ]
    return quarantined, None if record is None else decode(record)
