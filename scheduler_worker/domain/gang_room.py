"""How many members of a gang a host may take: a bound, so that hosts without enough room are not tried."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement_worker.replica.request import Query, total_resources
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.domain.hosts import Rows
from scheduler_worker.domain.view import HostsView


def room_for(members: Sequence[Query], view: HostsView) -> Rows:
    """Per host, the most members that its tree has enough of each class for, if the smallest are taken.

    A host may take fewer, because a member takes each class from one provider. A class that other trees share with
    hosts bounds nothing.
    """
    room = np.full(len(view), len(members), dtype=np.intp)
    needed = [total_resources(query) for query in members]
    shared = {name for row in sharing_of(view.book).givers.tolist() for name in view.book.inventory_of(row)}
    for name in sorted({name for one in needed for name in one} - shared):
        sums = np.cumsum(sorted(one.get(name, 0) for one in needed))
        room = np.minimum(room, np.searchsorted(sums, view.book.free(name, view.rows), side="right"))
    return room
