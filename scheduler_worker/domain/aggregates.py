"""Which hosts join and leave a provider aggregate so that it has the hosts that its aggregate names. Pure."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from bus.contracts.objects import MAX_AGGREGATE_HOSTS
from scheduler_worker.config import Aggregate
from scheduler_worker.domain.selector import Selector


class MembersDue(Struct, frozen=True):
    """The change of one provider aggregate: uuids of hosts, at most MAX_AGGREGATE_HOSTS each."""

    aggregate: str
    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def members_due(selector: Selector, aggregate: Aggregate) -> MembersDue | None:
    """Return None when the replica agrees with the aggregate on record, or when the aggregate names no hosts at all.

    A host whose name this scheduler has not received yet stays a member until its name is known.
    """
    if aggregate.hosts is None:
        return None
    book, table, named = selector.book, selector.table, set(aggregate.hosts)
    rows = book.rows_of_roots()
    present = {book.uuid_of(int(row)) for row in rows[np.flatnonzero(book.in_aggregate(aggregate.uuid, rows))]}
    wanted = {uuids[0] for host in aggregate.hosts if len(uuids := selector.uuids_of(host)) == 1}
    leaves = []
    for uuid in sorted(present - wanted):
        at = table.index_of(uuid)
        if at is not None and not named & {uuid, table.names[at], selector.name_of(uuid)}:
            leaves.append(uuid)
    joins = [uuid for uuid in sorted(wanted - present) if book.row_of(uuid) is not None]
    if not joins and not leaves:
        return None
    return MembersDue(aggregate.uuid, tuple(joins[:MAX_AGGREGATE_HOSTS]), tuple(leaves[:MAX_AGGREGATE_HOSTS]))
