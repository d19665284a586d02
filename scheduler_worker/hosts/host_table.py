"""The host table: which compute service manages each host, its cell, whether it takes builds, in columns because every
decision reads all. An operator's decision has its own column, which no report changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.cell import HostReport, HostStates, ServiceRemoved, ServiceStates
from bus.contracts.operations import AdminState, HostAdminState
from scheduler_worker.hosts.service_directory import CELL_HOLD_S, NO_RING, NO_SERVICE, ServiceDirectory, ServiceState

Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

PROJECT = "project_id"  # the attribute of a host that takes builds of one project only
HEALTH = "health"  # the attribute of a host that reports a problem: `warning`
OPEN, CLOSED = -1, -2  # no project: a host takes builds of all, or of none
MAX_PROJECTS = 1_000_000
MAX_HOSTS = 4_000_000  # reported hosts kept; a cell that reports more is broken
INITIAL_CAPACITY = 1024
STOPPED = "service.stopped"
CELL_UNKNOWN = "host.cell_unknown"  # nothing shows in which cell a host is
SERVICE_UP = "host.service_up"
CELL_SILENT = "host.cell_silent"
# The columns of the table, with a row a host.
COLUMNS = ("service", "last_service", "cell", "listed", "enabled", "failed_builds", "admin", "project", "warning")
ADMIN_STATES = tuple(AdminState)  # a column holds the index of a state in this tuple; 0 is enabled


class HostTable:
    """All reported hosts as columns. A host keeps its index; the service that manages it may change."""

    def __init__(self, services: ServiceDirectory | None = None) -> None:
        self.services = services or ServiceDirectory()
        self.cells: list[str] = []
        self._index: dict[str, int] = {}
        self._by_name: dict[str, list[int]] = {}
        self.uuids: list[str] = []
        self.names: list[str] = []
        self.attributes: list[Mapping[str, str]] = []
        self.service = np.full(INITIAL_CAPACITY, NO_SERVICE, dtype=np.int32)
        # That reported the host last. It stays when that one is down for long, because it may still have the machines.
        self.last_service = np.full(INITIAL_CAPACITY, NO_SERVICE, dtype=np.int32)
        self.cell = np.full(INITIAL_CAPACITY, NO_SERVICE, dtype=np.int32)
        self.listed = np.zeros(
            INITIAL_CAPACITY, dtype=np.int64
        )  # the newest full report of its service that contains it
        self.enabled = np.zeros(INITIAL_CAPACITY, dtype=np.bool_)
        self.failed_builds = np.zeros(INITIAL_CAPACITY, dtype=np.float64)
        self.admin = np.zeros(INITIAL_CAPACITY, dtype=np.int8)
        self.project = np.full(INITIAL_CAPACITY, OPEN, dtype=np.int32)  # index of the one project that it serves
        self.projects: dict[str, int] = {}
        self.warning = np.zeros(INITIAL_CAPACITY, dtype=np.bool_)  # its service reports a problem with it
        self._decided: dict[str, HostAdminState] = {}
        self._cells_in_placement: dict[str, str] = {}  # of hosts that were fenced without having been reported here
        # {uuid: (the service that also reports this host, and was refused it; its listing then)}
        self._claims_refused: dict[str, tuple[int, int]] = {}
        self.disabled_cells: frozenset[str] = frozenset()  # by operators: they take no new builds
        self._revision = 0  # of the hosts alone

    @property
    def revision(self) -> int:
        """A number that grows with every change that may let another set of hosts pass."""
        return self._revision + self.services.revision

    def __len__(self) -> int:
        return len(self.uuids)

    def index_of(self, uuid: str) -> int | None:
        """The host's index, or None when no service has reported it."""
        return self._index.get(uuid)

    def indexes_of(self, uuids: Iterable[str]) -> list[int]:
        """The hosts' indexes; NO_SERVICE for those that no service has reported."""
        index_of = self._index.get
        return [index_of(uuid, NO_SERVICE) for uuid in uuids]

    def find(self, name: str) -> list[str]:
        """The uuids of the hosts with this name or uuid, in report order."""
        if name in self._index:
            return [name]
        return [self.uuids[index] for index in self._by_name.get(name, ())]

    def apply(self, message: HostStates | ServiceStates, now_s: float) -> bool:
        """Apply one report. False: it is outdated, and ignored."""
        if isinstance(message, ServiceStates):
            down_long = self.services.apply_states(message, now_s)
            for index in down_long or ():
                self._revision += self._leave_without_service(self.service, index)
            return down_long is not None
        service = self.services.apply_report(message, now_s)
        if service is None:
            return False
        if message.cell not in self.cells:
            self.cells.append(message.cell)
        self._apply_hosts(service, message, now_s)
        self._revision += 1
        return True

    def apply_decisions(self, decisions: Mapping[str, HostAdminState]) -> None:
        """Replace all decisions of operators: {uuid: decision}, also about hosts that are not reported yet."""
        self._revision += self._decided != decisions
        self.admin[: len(self)] = 0
        for uuid, decision in decisions.items():
            index = self._index.get(uuid)
            if index is not None:
                self.admin[index] = ADMIN_STATES.index(decision.state)
        self._decided = dict(decisions)

    def last_cell_of(self, uuid: str) -> str | None:
        """The cell that last reported a host, also when no service manages it any more; else that which placement has
        it in, if that was needed.
        """
        index = self._index.get(uuid)
        return self._cells_in_placement.get(uuid) if index is None else self.cells[int(self.cell[index])]

    def learn_cell(self, uuid: str, cell: str) -> None:
        """Note the cell of a host that no service has reported."""
        self._cells_in_placement[uuid] = cell

    def live_service_of(self, uuid: str) -> str | None:
        """The name of the compute service that manages a host, if it is up."""
        service = self._service_of(uuid)
        return service.name if service is not None and service.down is None else None

    def last_service_of(self, uuid: str) -> str:
        """The name of the compute service that reported a host last, whatever it does now; "": none is known."""
        index = self._index.get(uuid)
        service = NO_SERVICE if index is None else int(self.last_service[index])
        return "" if service == NO_SERVICE else self.services.states[service].name

    def claimed_also_by(self, uuid: str) -> str | None:
        """The service that is up and also reports this host, although placement has it as another service's."""
        refused = self._claims_refused.get(uuid)
        service = None if refused is None else self.services.states[refused[0]]
        return service.name if service is not None and service.down is None else None

    def reported(self, uuid: str, cells: Iterable[str], now_s: float) -> Refusal | None:
        """Why a service that is up may report a host: one does, or not every service of these cells, in one of which
        the host is, is known here.
        """
        service = self.live_service_of(uuid) or self.claimed_also_by(uuid)
        if service is not None:
            return Refusal(code=SERVICE_UP, reason=f"the compute service {service} is up and reports host {uuid}")
        silent = [cell for cell in cells if not self.services.is_complete(cell, now_s)]
        if silent:
            reason = f"not every compute service of {', '.join(silent)} is known here: one may report host {uuid}"
            return Refusal(code=CELL_SILENT, reason=reason[:MAX_REASON])
        return None

    def decision_of(self, uuid: str) -> HostAdminState | None:
        """The operator's newest decision about a host; None: there never was one."""
        return self._decided.get(uuid)

    def decisions(self) -> Mapping[str, HostAdminState]:
        """The operators' newest decisions, by uuid of the host, reported or not."""
        return self._decided

    def decided_about(self, name: str) -> list[str]:
        """The uuids of the hosts with this name or uuid that a decision is on record about, reported or not."""
        return sorted(uuid for uuid, decision in self._decided.items() if name in (uuid, decision.host))

    def hosts_of_drain(self, drain: str) -> dict[str, HostAdminState]:
        """The hosts (uuids) that belong to a drain, and the decisions about them."""
        return {uuid: decision for uuid, decision in self._decided.items() if decision.drain == drain}

    def delete_service(self, removed: ServiceRemoved, now_s: float) -> None:
        """Drop a compute service that is gone for good; it is back once it reports its hosts."""
        index = self.services.delete(removed, now_s)
        if index is not None:
            for column in (self.service, self.last_service):
                self._leave_without_service(column, index)

    def _leave_without_service(self, column: npt.NDArray[np.int32], service: int) -> bool:
        """Whether a host of this column had the service; it has none now."""
        left = column[: len(self)] == service
        column[: len(self)][left] = NO_SERVICE
        return bool(left.any())

    def is_down(self, uuid: str) -> bool:
        """Whether the compute service of a host is known, and is down."""
        service = self._service_of(uuid)
        return service is not None and service.down is not None

    def _service_of(self, uuid: str) -> ServiceState | None:
        """The compute service that manages a host."""
        index = self._index.get(uuid)
        if index is None or self.service[index] == NO_SERVICE:
            return None
        return self.services.states[int(self.service[index])]

    def _apply_hosts(self, service: int, message: HostStates, now_s: float) -> None:
        cell = self.cells.index(message.cell)
        state = self.services.states[service]
        state.ring = (message.ring_term, message.ring_number)
        first_sequence = message.first_sequence or (message.sequence if message.complete else 0)
        if first_sequence and first_sequence != state.first_sequence:
            state.first_sequence, state.pages_received, state.listing = first_sequence, 0, self.revision
        for host in message.hosts:
            if host.owner is not None:
                self._refuse(host.uuid, service, self.services.index_of(message.cell, host.owner))
                continue
            if host.uuid in self._claims_refused and self._claims_refused[host.uuid][0] == service:
                del self._claims_refused[host.uuid]
            if not self._is_held(host.uuid, cell, now_s) and not self._is_foreign(host.uuid, service, now_s):
                self._put(host, service, cell)
        if not first_sequence:
            return
        state.pages_received += 1
        # A lost page must not remove its hosts: only a complete report shows which hosts have left.
        if message.complete and state.pages_received == message.pages:
            # A host that the service no longer lists is managed by another service (a node re-homed) or gone.
            unlisted = self.listed[: len(self)] != state.listing
            for column in (self.service[: len(self)], self.last_service[: len(self)]):
                column[unlisted & (column == service)] = NO_SERVICE
            for uuid in [
                uuid for uuid, at in self._claims_refused.items() if at[0] == service and at[1] != state.listing
            ]:
                del self._claims_refused[uuid]

    def _is_held(self, uuid: str, cell: int, now_s: float) -> bool:
        """Whether a service of another cell that is up manages this host."""
        holder = self._service_of(uuid)
        if holder is None or self.cell[self._index[uuid]] == cell:
            return False
        if holder.down is not None:
            return holder.down.code != STOPPED and now_s - holder.down_s <= CELL_HOLD_S
        return self.services.is_seen(holder, now_s)

    def _refuse(self, uuid: str, service: int, owner: int) -> None:
        """Placement has this host as the owner's, so it does not belong to this service. It is the owner's again if
        this one was taken to have succeeded it: the owner is down, and still has what runs there.
        """
        if uuid in self._claims_refused or len(self._claims_refused) < MAX_HOSTS:
            self._claims_refused[uuid] = (service, self.services.states[service].listing)
        index = self._index.get(uuid)
        if index is not None and self.service[index] == service:
            self.service[index] = owner
        if index is not None and self.last_service[index] == service:
            self.last_service[index] = owner

    def _is_foreign(self, uuid: str, service: int, now_s: float) -> bool:
        """Whether another service of this cell has the host, and this one does not take it over: in a ring, by a newer
        membership; otherwise while the other one is up and lists it (placement decides which of the two has it).
        """
        index, ring = self._index.get(uuid), self.services.states[service].ring
        if index is None or self.service[index] in (NO_SERVICE, service):
            return False
        holder = self.services.states[int(self.service[index])]
        if holder.cell != self.services.states[service].cell or holder.down is not None:
            return False
        if ring != NO_RING:
            return ring < holder.ring
        is_listed = bool(self.listed[index] == holder.listing)
        return holder.ring == NO_RING and is_listed and self.services.is_seen(holder, now_s)

    def _put(self, host: HostReport, service: int, cell: int) -> None:
        index = self._index.get(host.uuid)
        if index is None:
            if len(self) >= MAX_HOSTS:
                return
            index = self._add(host)
        if self.names[index] != host.name:
            self._rename(index, host)
        self.attributes[index] = host.attributes
        self.project[index] = self._project_index(host.attributes.get(PROJECT))
        self.warning[index] = host.attributes.get(HEALTH) == "warning"
        self.service[index] = self.last_service[index] = service
        self.cell[index] = cell
        self.listed[index] = self.services.states[service].listing
        self.enabled[index] = host.enabled
        self.failed_builds[index] = host.failed_builds

    def _project_index(self, project: str | None) -> int:
        """Hosts of projects beyond the bound take no builds, which is safe."""
        if not project:
            return OPEN
        if project not in self.projects and len(self.projects) >= MAX_PROJECTS:
            return CLOSED
        return self.projects.setdefault(project, len(self.projects))

    def _add(self, host: HostReport) -> int:
        index = len(self.uuids)
        if index == len(self.service):
            self._grow()
        self.uuids.append(host.uuid)
        self.names.append(host.name)
        self.attributes.append(host.attributes)
        self._index[host.uuid] = index
        self._by_name.setdefault(host.name, []).append(index)
        if (decision := self._decided.get(host.uuid)) is not None:
            self.admin[index] = ADMIN_STATES.index(decision.state)
        return index

    def _rename(self, index: int, host: HostReport) -> None:
        self._by_name[self.names[index]].remove(index)
        self._by_name.setdefault(host.name, []).append(index)
        self.names[index] = host.name

    def _grow(self) -> None:
        for name in COLUMNS:
            setattr(self, name, _duplicate(getattr(self, name)))


def _duplicate(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """With room for as many more: a row is written whole when its host is put there, and no other row is read."""
    return np.concatenate([column, np.zeros_like(column)])
