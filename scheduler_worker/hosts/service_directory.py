"""The compute services that report hosts, and which of them are down: by the service states of their cell's
conductor, else by their silence. Reports may come late or twice; epoch and sequence reveal that.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from bus.contracts.cell import HostStates, ServiceDown, ServiceRemoved, ServiceStates

NO_RING = (0, 0)
NO_SERVICE = -1  # the index of no service
MAX_SERVICES = 100_000  # compute services kept; reports of further names are ignored
# A host stays with its cell this long after its service was last up: another cell cannot take its builds over.
CELL_HOLD_S = 60.0
# The hosts of a service that is down for this long have no service, until they are reported again. Conductors purge
# such a service much later, and do not list it then.
DOWN_HOLD_S = 3600.0
# A service that is up leaves at most this many requests in a row (`ServiceDirectory.count_request`) unanswered.
MAX_UNANSWERED = 3
UNRESPONSIVE = "service.unresponsive"
SERVICE_DELETED = "service.deleted"


class ServiceState(Struct):
    """The last report of one compute service."""

    name: str
    cell: str
    epoch: int
    sequence: int
    last_seen_s: float  # monotonic
    down: ServiceDown | None = None  # why it takes no builds now
    down_s: float = 0.0
    first_sequence: int = 0  # the sequence of the first page of its newest full report
    pages_received: int = 0  # of its newest full report
    listing: int = 0  # the revision of the table at that report
    unanswered: int = 0  # requests for its hosts that it has not answered since
    ring: tuple[int, int] = NO_RING  # the ring membership of its newest report ((0, 0): it shares no hosts)
    deleted: bool = False  # an operator has stated that it is gone for good, and it has reported nothing since


class CellServiceStates(Struct):
    """The newest service states of one cell."""

    version: tuple[int, int] = (-1, 0)
    last_seen_s: float = -math.inf  # when they, or equal ones, came (monotonic)
    page: int = 0  # the last page of them that came
    gathered: dict[str, ServiceDown] = {}
    down: dict[str, ServiceDown] = {}
    up: int = -1  # how many services they count; -1: none have come yet


class ServiceDirectory:
    """All compute services that have reported hosts, and their cells' service states. A service keeps its index."""

    def __init__(self, *, down_hold_s: float = DOWN_HOLD_S) -> None:
        self._down_hold_s = down_hold_s  # so long (seconds) a service that is down has its hosts
        self.states: list[ServiceState] = []
        self._index: dict[tuple[str, str], int] = {}  # by cell and name
        self._by_cell: dict[str, CellServiceStates] = {}  # by cell
        self.revision = 0  # incremented when a service comes to be up, down or deleted

    def apply_report(self, report: HostStates, now_s: float) -> int | None:
        """Note that a service has reported; its index. None: the report is outdated, or one service too many."""
        known = self._index.get((report.cell, report.service))
        if known is None:
            if len(self.states) >= MAX_SERVICES:
                return None
            known = self._index[report.cell, report.service] = len(self.states)
            self.states.append(ServiceState(report.service, report.cell, report.epoch, report.sequence, now_s))
        else:
            service = self.states[known]
            if (report.epoch, report.sequence) <= (service.epoch, service.sequence):
                return None
            if report.epoch != service.epoch:
                service.first_sequence = 0  # its sequence starts again
            service.epoch, service.sequence, service.last_seen_s = report.epoch, report.sequence, now_s
            service.unanswered = 0
            service.deleted = False
        self._assess(self.states[known], self._by_cell.get(report.cell, CellServiceStates()), now_s)
        return known

    def apply_states(self, message: ServiceStates, now_s: float) -> list[int] | None:
        """The services of the cell that have been down for too long to have hosts. None: they are outdated.

        They count when all their pages have come; until then, and for ever if a page is lost, the previous ones count.
        """
        known = self._by_cell.setdefault(message.cell, CellServiceStates())
        version = (message.term, message.number)
        if message.page == 1:
            if version <= known.version:
                return None
            known.version, known.page, known.gathered = version, 0, {}
        if version != known.version or message.page != known.page + 1:
            return None
        known.page = message.page
        known.gathered.update((down.service, down) for down in message.down)
        if message.page < message.pages:
            return []
        known.down, known.gathered, known.last_seen_s, known.up = known.gathered, {}, now_s, message.up
        down_long = []
        for index, service in enumerate(self.states):
            if service.cell == message.cell:
                self._assess(service, known, now_s)
                if service.down is not None and now_s - service.down_s > self._down_hold_s:
                    down_long.append(index)
        return down_long

    def count_request(self, cell: str, now_s: float) -> None:
        """Every service of this cell was requested to report its hosts; one that never does so counts as down."""
        stated = self._by_cell.get(cell, CellServiceStates())
        for service in self.states:
            if service.cell == cell:
                service.unanswered += 1
                self._assess(service, stated, now_s)

    def delete(self, removed: ServiceRemoved, now_s: float) -> int | None:
        """A service is gone for good, and is back once it reports its hosts: its index. None: it is not known."""
        index = self._index.get((removed.cell, removed.service))
        if index is None:
            return None
        service = self.states[index]
        service.deleted, service.down_s = True, now_s
        self.revision += 1
        service.down = ServiceDown(
            service=removed.service,
            epoch=service.epoch,
            code=SERVICE_DELETED,
            reason="an operator has stated that it is gone",
        )
        return index

    def _assess(self, service: ServiceState, stated: CellServiceStates, now_s: float) -> None:
        """The state that its cell lists for this service's present epoch or a later one; otherwise
        its silence decides.
        """
        if service.deleted:
            return
        down = stated.down.get(service.name)
        if down is not None and down.epoch < service.epoch:
            down = None
        if down is None and service.unanswered > MAX_UNANSWERED:
            reason = f"it answered none of the last {service.unanswered} questions for its hosts"
            down = ServiceDown(service=service.name, epoch=service.epoch, code=UNRESPONSIVE, reason=reason)
        if service.down is None:
            service.down_s = now_s  # if it is down from now on
        self.revision += (down is None) is not (service.down is None)
        service.down = down

    def down(self) -> npt.NDArray[np.bool_]:
        """Per service: whether its cell lists it as down. One more entry at the end stands for NO_SERVICE."""
        return np.array([*(service.down is not None for service in self.states), True], dtype=np.bool_)

    def index_of(self, cell: str, name: str) -> int:
        """The index of a compute service; NO_SERVICE: it has not reported itself here, or is deleted."""
        index = self._index.get((cell, name), NO_SERVICE)
        return NO_SERVICE if index != NO_SERVICE and self.states[index].deleted else index

    def is_seen(self, service: ServiceState, now_s: float) -> bool:
        """Whether this service or its cell's conductor has published something recently."""
        stated = self._by_cell.get(service.cell)
        return now_s - max(service.last_seen_s, stated.last_seen_s if stated else -math.inf) <= CELL_HOLD_S

    def knows_more(self, cell: str) -> bool:
        """Whether more services of this cell count as up here than in its service states: a conductor whose database
        was emptied or restored while a service died has no record of it, and cannot list it as down.
        """
        stated = self._by_cell.get(cell)
        return stated is not None and 0 <= stated.up < self._up_in(cell)

    def is_complete(self, cell: str, now_s: float) -> bool:
        """Whether every service that this cell's newest service states count as up has reported its hosts here.

        Not so of a cell without service states, or with ones that are older than CELL_HOLD_S.
        """
        stated = self._by_cell.get(cell)
        return stated is not None and 0 <= stated.up <= self._up_in(cell) and now_s - stated.last_seen_s <= CELL_HOLD_S

    def _up_in(self, cell: str) -> int:
        return sum(service.cell == cell and service.down is None for service in self.states)

    def cells_of(self, name: str) -> list[str]:
        """The cells that have a compute service of this name: one that is reported, or that its cell lists as down."""
        reported = {one.cell for one in self.states if one.name == name and not one.deleted}
        return sorted(reported | {cell for cell, stated in self._by_cell.items() if name in stated.down})

    def names_in(self, cell: str) -> list[str]:
        """The compute services of a cell: those that are reported, and those that it lists as down."""
        reported = {one.name for one in self.states if one.cell == cell and not one.deleted}
        return sorted(reported.union(self._by_cell[cell].down if cell in self._by_cell else ()))

    def dead_not_reported(self) -> list[tuple[str, str]]:
        """(cell, service) of those that a cell lists as down and that have reported nothing here, in order."""
        down = {(cell, name) for cell, stated in self._by_cell.items() for name in stated.down}
        return sorted(down - self._index.keys())

    def down_of(self, cell: str, service: str) -> ServiceDown:
        """Why a service is down that its cell lists."""
        return self._by_cell[cell].down[service]
