"""Has compute services reserve, in their inventory, the resources of machines in quarantine.

Level-triggered: a report names the machines that are reserved; if they differ from the record, the service is sent the
right ones. So no state is kept here, and any conductor of the cell does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from bus.bus import Bus
from bus.contracts.cell import ComputeHosts, ReserveMachines

from . import metrics
from .domain.quarantine_reservations import misreserved, pages, reserved_on
from .domain.report import Unexplained
from .store.port import InstanceStore

log = structlog.get_logger(__name__)


class QuarantineReservations:
    """One conductor's."""

    def __init__(self, store: InstanceStore, bus: Bus) -> None:
        self._store = store
        self._bus = bus

    async def reserve(self, report: ComputeHosts, unexplained: Sequence[Unexplained]) -> None:
        """Send the machines to reserve for those hosts of a page that have others reserved."""
        wrong = misreserved(report, unexplained)
        if not wrong:
            return
        uuids = sorted({one.instance_uuid for machines in wrong.values() for one in machines})
        async with self._store.transaction() as transaction:
            records = await transaction.lock(uuids) if uuids else {}
        metrics.RESERVED.labels(report.service).inc()
        log.warning("quarantine.reserve", service=report.service, hosts=len(wrong), machines=len(uuids))
        for page in pages(wrong):
            order = ReserveMachines(
                service=report.service,
                cell=report.cell,
                epoch=report.epoch,
                sequence=report.sequence,
                hosts=tuple(reserved_on(host, wrong[host], records) for host in page),
            )
            await self._bus.publish(order, cause=report.service)
