"""Where a host is that no compute service has announced here: in the cell of the dead service that the book has it as.

A fence has to reach that cell and no other: the first that acknowledges it may be one that does not have the host.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from bus.bus import Bus
from bus.contracts.book import ServiceHostsPage, ServiceHostsQuery
from bus.faults import Fault
from bus.port import BusError
from scheduler_worker.domain.selector import Selector

log = structlog.get_logger(__name__)

ANSWER_S = 2.0  # of placement; a person waits for the decision
MAX_HOSTS = 1000  # of one service, as a query may ask for
MAX_SERVICES = 20  # dead ones that the book is queried about
LOGGED = 10


class CellFinder:
    """Of one scheduler. api: the bus to placement."""

    def __init__(self, selector: Selector, api: Bus) -> None:
        self._selector = selector
        self._api = api

    async def find_cells(self, uuids: Collection[str]) -> None:
        """Find the cells of hosts that are to be fenced, unless nothing shows them or placement does not answer in
        time.

        The book has no two hosts of one name, and a host's cell is that which first reported it.
        """
        table, book = self._selector.table, self._selector.book
        unknown = sorted(uuid for uuid in uuids if table.last_cell_of(uuid) is None)
        wanted = {book.name_of(row): uuid for uuid in unknown if (row := book.row_of(uuid)) is not None}
        for cell, service in table.dead_unannounced()[:MAX_SERVICES]:
            if not wanted:
                return
            query = ServiceHostsQuery(service=service, cell=cell, limit=MAX_HOSTS)
            try:
                page = await self._api.request(query, ServiceHostsPage, timeout_s=ANSWER_S, cause=unknown[0])
            except (Fault, BusError) as fault:
                log.warning("host.cell_unknown", hosts=sorted(wanted)[:LOGGED], code=getattr(fault, "code", "bus"))
                return
            for host in wanted.keys() & set(page.hosts):
                table.learn_cell(wanted.pop(host), cell)
