"""Hosts that placement assigns to another compute service: builds for them are refused here until that service has
given them up or ended for good.
"""

# Two services with a host of one uuid would send one host's builds to two computers. Placement keeps the first one's
# inventory and refuses the second one's report (`InventoryConflict`). The second one takes no builds for the host and
# reports it with its owner. The cell's conductor knows which services are up: it notifies the owner, and releases the
# host to the second service once the owner has given it up or is gone for good (the host has passed to it).

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog

from bus.clock import Clock
from bus.contracts.cell import HostConflict, HostsReleased
from bus.contracts.placement import COMPUTE_REPORTER, OTHER_SERVICE, InventoryConflict
from compute_agent import metrics
from compute_agent.hosts.pending_reports import PendingHostReports
from compute_agent.hosts.service_name import reporter_name

log = structlog.get_logger(__name__)

RESEND_S = 10.0  # the interval of reports of refused hosts, in answer to which the conductor releases them
MAX_HOSTS = 100_000  # refused hosts kept; placement refuses the hosts beyond them again
LOGGED = 10  # hosts of one message
HINT = "two compute services have a host of this uuid: give one of the hosts another uuid, or stop one of the services"


class HostConflicts:
    """The contested hosts of one service, by the refusals since its start. The owners are stored in placement."""

    def __init__(self, *, service: str, changes: PendingHostReports, clock: Clock) -> None:
        self._service = service
        self._changes = changes
        self._clock = clock
        self._owners: dict[str, str] = {}  # by host: the service that has it
        self._taking_over: dict[str, str] = {}  # by host: the service that had it
        self._others: dict[str, str] = {}  # by host of this service: the one that was refused it
        self._name_conflicts: dict[str, str] = {}  # by host that was refused for its name: why
        self._to_report: set[str] = set()  # those of them that are to be reported again
        metrics.HOST_CONFLICTS.labels(service).set_function(lambda: len(self._owners))

    def owner_of(self, host: str) -> str | None:
        """The other service that has this host; None: it is this one's."""
        return self._owners.get(host)

    def pop_former_reporter(self, host: str) -> str | None:
        """The reporter whose root the next report of this host takes over. Asked once for each release: the owner may
        come back, and be the owner again.
        """
        owner = self._taking_over.pop(host, None)
        return None if owner is None else reporter_name(owner)

    def keep(self, hosts: Collection[str]) -> None:
        """Set all hosts of this service, and drop contested hosts that are no longer among them."""
        for known in (self._owners, self._taking_over, self._others, self._name_conflicts):
            for host in [one for one in known if one not in hosts]:
                del known[host]

    def on_inventory_conflict(self, refused: InventoryConflict) -> None:
        """Placement has refused a report of this service."""
        host = refused.root_uuid
        if refused.owner is None:
            self._on_name_conflict(refused)
            return
        owner = refused.owner.removeprefix(COMPUTE_REPORTER)
        if self._owners.get(host) == owner or owner == self._service:
            return
        if self._taking_over.get(host) == owner:  # a report from before the release
            return
        if host not in self._owners and len(self._owners) >= MAX_HOSTS:
            return
        self._owners[host] = owner
        log.error(OTHER_SERVICE, code=OTHER_SERVICE, service=self._service, host=host, owner=owner, hint=HINT)
        self._changes.announcements.add((host,))

    def _on_name_conflict(self, refused: InventoryConflict) -> None:
        """Another host has the name of this one by placement."""
        host, reason = refused.root_uuid, refused.reason
        if host not in self._name_conflicts and len(self._name_conflicts) >= MAX_HOSTS:
            return
        if self._name_conflicts.get(host) != reason:
            log.error("host.name_conflict", code=refused.code, service=self._service, host=host, reason=reason)
        self._name_conflicts[host] = reason
        self._to_report.add(host)

    def on_host_conflict(self, message: HostConflict) -> None:
        """Another service was refused these hosts, which are this one's. The hosts are reported once more, because a
        scheduler that has just started may have received the other service's report first.
        """
        new = [host for host in message.hosts if self._others.get(host) != message.other]
        self._others.update(dict.fromkeys(new[: max(0, MAX_HOSTS - len(self._others))], message.other))
        for host in new[:LOGGED]:
            log.error(
                "host.conflict",
                code=OTHER_SERVICE,
                service=self._service,
                host=host,
                other=message.other,
                hosts=len(new),
                hint=HINT,
            )
        if new:
            self._changes.announcements.add(new)

    def on_released(self, message: HostsReleased) -> None:
        """The owner is gone for good, or has given these hosts up."""
        released = [host for host in message.hosts if self._owners.get(host) == message.owner]
        for host in released:
            del self._owners[host]
            self._taking_over[host] = message.owner
            log.warning("host.taken_over", service=self._service, host=host, former=message.owner)
        if released:
            self._changes.on_host_changed(released)

    async def report_refused(self) -> None:
        """A side task: report repeated refusals, and report hosts again whose name may be free, until cancelled."""
        while True:
            await self._clock.sleep(RESEND_S)
            if self._owners:
                self._changes.announcements.add(self.list_refused())
            if self._to_report:
                self._changes.inventory.add(sorted(self._to_report))
                self._to_report.clear()

    def list_refused(self) -> Sequence[str]:
        """The hosts of which builds are refused."""
        return list(self._owners)
