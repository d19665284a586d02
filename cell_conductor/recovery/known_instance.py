"""What the schedulers have of a cell's instances, as `reconcile` takes it: from the pages that they send. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from bus.contracts.actions import Condition
from bus.contracts.base import DatabaseMark
from bus.contracts.build import BuildState
from bus.contracts.cell import Selection
from bus.contracts.operations import CellFence
from bus.contracts.recovery import CellKnown, CellRecovering, KnownPlace, KnownRecord
from cell_conductor.rules.recovery_facts import NO_SERVICE, KnownInstance
from cell_conductor.state.instance import Power

_POWERS = {
    Condition.ACTIVE: Power.RUNNING,
    Condition.STOPPED: Power.STOPPED,
    Condition.SHELVED: Power.SHELVED,
    Condition.OFFLOADED: Power.SHELVED,
    Condition.RESCUED: Power.RESCUED,
}
_DELETED = (BuildState.DELETING, BuildState.DELETED)
_MAPPED = (BuildState.SCHEDULED, BuildState.BUILDING, BuildState.ACTIVE, *_DELETED)


class PageContents(Struct, frozen=True):
    """What one page says."""

    instances: Mapping[str, KnownInstance]
    fences: tuple[CellFence, ...] = ()
    last: str = ""  # the uuid that the page ends with ("": nothing follows)
    marks: tuple[DatabaseMark, ...] = ()  # marks of the cell's database that were heard above


def contents_of(query: CellRecovering, page: CellKnown) -> PageContents | None:
    """What a page says; None: it answers another query, or does not say what was asked. What it has besides is not
    taken.
    """
    if (page.cell, page.process, page.query_id) != (query.cell, query.process, query.query_id):
        return None
    asked, last = set(query.asked), page.last
    if asked:
        found = {one.instance_uuid: one for one in page.instances if one.instance_uuid in asked}
        if any(uuid not in found for uuid in asked if not last or uuid <= last) or not found:
            return None
        return PageContents({uuid: known_instance(one, page.cell) for uuid, one in found.items()}, last=last)
    if last and last <= query.after:
        return None

    def is_within(uuid: str) -> bool:
        return query.after < uuid and (not last or uuid <= last)

    return PageContents(
        {one.instance_uuid: known_instance(one, page.cell) for one in page.instances if is_within(one.instance_uuid)},
        tuple(one for one in page.fences if is_within(one.host_uuid)),
        last,
        page.marks,
    )


def known_instance(record: KnownRecord, cell: str) -> KnownInstance:
    """The schedulers' record of one instance, for this cell. A build that no cell has, or that has
    failed, is nowhere by the map.
    """
    state = record.state
    is_mapped = record.cell is not None and state in _MAPPED
    return KnownInstance(
        exists=is_mapped,
        is_active=is_mapped and state is BuildState.ACTIVE,
        is_deleted=state in _DELETED,
        is_in_other_cell=is_mapped and record.cell != cell,
        cell=record.cell or "",
        attempt=record.attempt,
        sequence=record.sequence,
        project_id=record.project_id,
        spec=record.spec,
        selections=tuple(map(_selection, record.places)),
        snapshot=record.snapshot,
        power=_POWERS.get(record.condition) if state is BuildState.ACTIVE else None,
        request_id=record.request_id,
        kind=record.kind,
        is_transferred_in=record.transferred_in,
        own_count=sum(one.migration is None for one in record.places),
        migrations=tuple(dict.fromkeys(one.migration for one in record.places if one.migration is not None)),
    )


def _selection(place: KnownPlace) -> Selection:
    return Selection(
        host_uuid=place.host_uuid, host=place.host, service=place.service or NO_SERVICE, allocations=place.allocations
    )
