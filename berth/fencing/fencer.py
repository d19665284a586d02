"""Switches hosts off and fences them: one that an operator names, or those that the plan finds due."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import structlog
from msgspec import Struct

from berth.client import BuildClient
from berth.fencing.plugin import FencingFailed, FencingPlugin
from berth.settings import FencingSettings
from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState, HostAdminState, ServiceRecord, SetAdminState
from bus.faults import Fault
from bus.port import BusError
from cell_conductor.domain.leases import SILENT

TOO_MANY = "fencing.too_many"
CELL_SILENT = "fencing.cell_silent"


# Which silent hosts may be switched off without a person. A host counts when its compute service is silent (not
# stopped on purpose) and manages this host alone, when instances use it, and when no operator has taken it out of
# service. One that is seen silent is a suspect; it is switched off only when each look for `after_s` has found it
# silent. With more than `max_hosts` suspects, or no service of the same cell up, the cause is rather what lies
# between: then none is.
class FencingPlan(Struct, frozen=True, kw_only=True):
    """The actions that one look leads to. suspects: {host uuid: when it was first seen silent, by the monotonic clock}.
    due: to be switched off now. held: {host name: code of why it is not, though it has been silent for long enough}.
    """

    suspects: Mapping[str, float]
    due: tuple[HostRecord, ...] = ()
    held: Mapping[str, str] = {}


def plan(
    hosts: Iterable[HostRecord],
    services: Iterable[ServiceRecord],
    suspects: Mapping[str, float],
    settings: FencingSettings,
    now_s: float,
) -> FencingPlan:
    """The plan after one look at all hosts and services. suspects: of the look before."""
    listed = list(services)
    silent = {(one.cell, one.name) for one in listed if not one.up and one.code == SILENT and one.hosts == 1}
    alive = {one.cell for one in listed if one.up}
    found = [host for host in hosts if (host.cell, host.service) in silent and _may_be_fenced(host)]
    first_seen = {host.uuid: suspects.get(host.uuid, now_s) for host in found}
    ripe = [host for host in found if now_s - first_seen[host.uuid] >= settings.after_s]
    if len(found) > settings.max_hosts:
        return FencingPlan(suspects=first_seen, held={host.name: TOO_MANY for host in ripe})
    return FencingPlan(
        suspects=first_seen,
        due=tuple(host for host in ripe if host.cell in alive),
        held={host.name: CELL_SILENT for host in ripe if host.cell not in alive},
    )


def _may_be_fenced(host: HostRecord) -> bool:
    """Whether there are instances to evacuate, and no operator is handling them."""
    is_used = any(used > 0 for used, _ in host.resources.values())
    in_hand = host.admin is not None and host.admin.state in (AdminState.MAINTENANCE, AdminState.FENCED)
    return is_used and not in_hand and not host.up


log = structlog.get_logger(__name__)

LOOK_S = 2.0
ANSWER_TIMEOUT_S = 10.0
MAX_HOSTS = 100_000  # as a query may ask for
MAX_TRIES = 5  # of one host; then a person has to look, until its service reports again
RETRY_S = 30.0


class Fencer:
    """One plug-in, and a client of the API bus. Two fencers side by side do the same things twice, and no harm."""

    def __init__(self, client: BuildClient, plugin: FencingPlugin, settings: FencingSettings, *, clock: Clock) -> None:
        self._client = client
        self._plugin = plugin
        self._settings = settings
        self._clock = clock
        self._suspects: Mapping[str, float] = {}
        self._tries: dict[str, tuple[int, float]] = {}  # of a suspect: how often, and not again before (monotonic)
        self._held: Mapping[str, str] = {}

    async def run(self, *, dry_run: bool = False) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.look(dry_run=dry_run)
            except (Fault, BusError) as fault:  # it does not judge hosts that it cannot see: suspicion begins anew
                self._suspects = {}
                log.warning("fencing.blind", code=getattr(fault, "code", "bus"), reason=str(fault))
            await self._clock.sleep(LOOK_S)

    async def look(self, *, dry_run: bool = False) -> FencingPlan:
        """One look, and the first action that is due by it. Raises what asking a scheduler raises."""
        services = await self._client.services(limit=MAX_HOSTS, timeout_s=ANSWER_TIMEOUT_S)
        hosts = await self._client.hosts(limit=MAX_HOSTS, up=False, timeout_s=ANSWER_TIMEOUT_S)
        now_s = self._clock.monotonic()
        found = plan(hosts.hosts, services.services, self._suspects, self._settings, now_s)
        for uuid in found.suspects.keys() - self._suspects.keys():
            log.info("fencing.suspected", host=next(one.name for one in hosts.hosts if one.uuid == uuid))
        for name, code in found.held.items() - self._held.items():
            log.error(code, host=name, suspects=len(found.suspects), max_hosts=self._settings.max_hosts)
        self._suspects, self._held = found.suspects, found.held
        self._tries = {uuid: tries for uuid, tries in self._tries.items() if uuid in found.suspects}
        for host in found.due:
            if dry_run:
                log.info("fencing.due", host=host.name, silent_s=round(now_s - found.suspects[host.uuid]))
            elif await self._fence_suspect(host, now_s - found.suspects[host.uuid]):
                break  # that took its time: whether the others are silent still, the next look shows
        return found

    async def _fence_suspect(self, host: HostRecord, silent_s: float) -> bool:
        """Try it; False: it is not tried now."""
        tries, not_before_s = self._tries.get(host.uuid, (0, 0.0))
        if tries >= MAX_TRIES or self._clock.monotonic() < not_before_s:
            return False
        self._tries[host.uuid] = (tries + 1, self._clock.monotonic() + RETRY_S)
        try:
            await self.fence(host, f"its compute service was silent for {silent_s:.0f} s", by="fencer")
        except Fault as fault:
            left = MAX_TRIES - tries - 1
            log.error("fencing.not_fenced", host=host.name, code=fault.code, reason=fault.reason, tries_left=left)
        return True

    async def fence(
        self, host: HostRecord, reason: str, *, by: str, force: bool = False, cell: str | None = None
    ) -> HostAdminState:
        """Switch one host off, then decide that it is fenced.

        force: also though its compute service is up (else FencingFailed, `host.service_up`, before anything is done).
        cell: of a host whose cell nothing else shows. Raises FencingFailed (nothing is decided), RequestRefused
        (`host.service_up`: it has come back; it is off now), or RequestTimeout.
        """
        if host.up and not force:
            raise FencingFailed("its compute service is up", code="host.service_up")
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                proof = await self._plugin.switch_off(host)
        except FencingFailed:
            raise
        except TimeoutError:
            raise FencingFailed(f"not proved to be off within {self._settings.timeout_s:g} s") from None
        except Exception as error:  # an operator's own code
            raise FencingFailed(f"{type(error).__name__}: {error}") from error
        command = SetAdminState(
            host=host.uuid,
            state=AdminState.FENCED,
            reason=f"{reason}; {proof}"[:MAX_REASON],
            by=by,
            force=force,
            cell=cell,
        )
        decided = await self._client.set_admin_state(command, timeout_s=ANSWER_TIMEOUT_S)
        log.warning("fencing.fenced", host=host.name, reason=command.reason)
        return decided
