"""Switches hosts off and fences them: one that an operator names, or those that the plan finds due."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import structlog
from msgspec import Struct

from berth.bus_client import BuildClient
from berth.bus_client.object_edits import stored_objects
from berth.config.settings import FencingSettings
from berth.fencing.plugin import FencingFailed, FencingPlugin
from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.build import MAX_HOSTS, HostRecord
from bus.contracts.objects import ObjectKind
from bus.contracts.operations import AdminState, HostAdminState, ServiceRecord, SetAdminState
from bus.faults import Fault
from bus.transport import BusError
from cell_conductor.state.lease import SILENT

TOO_MANY = "fencing.too_many"
CELL_SILENT = "fencing.cell_silent"
TOO_OFTEN = "fencing.too_often"
AMBIGUOUS = "fencing.ambiguous"
FENCER = "fencer"  # who has decided, on record
HOUR_S = 3600.0


# Which silent hosts may be switched off without a person. A host counts when its compute service is silent (not
# stopped on purpose) and manages this host alone, when instances use it, and when no operator has taken it out of
# service. One that is seen silent is a suspect; it is switched off only when each look for `after_s` has found it
# silent. With more than `max_hosts` suspects, or no service of the same cell up, the cause is rather what lies
# between: then none is, and the time of each begins anew, since such an outage does not end at one moment.
class FencingPlan(Struct, frozen=True, kw_only=True):
    """The actions that one look leads to. suspects: {host uuid: since when each look may count, by the monotonic
    clock}. due: to be switched off now. held: {host name: code of why it is not}.
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
    too_many = len(found) > settings.max_hosts
    held = {host.uuid for host in found if too_many or host.cell not in alive}
    since = {host.uuid: now_s if host.uuid in held else suspects.get(host.uuid, now_s) for host in found}
    return FencingPlan(
        suspects=since,
        due=tuple(one for one in found if one.uuid not in held and now_s - since[one.uuid] >= settings.after_s),
        held={host.name: TOO_MANY if too_many else CELL_SILENT for host in found if host.uuid in held},
    )


def _may_be_fenced(host: HostRecord) -> bool:
    """Whether there are instances to evacuate, and no operator is handling them."""
    is_used = any(used > 0 for used, _ in host.resources.values())
    in_hand = host.admin is not None and host.admin.state in (AdminState.MAINTENANCE, AdminState.FENCED)
    return is_used and not in_hand and not host.up


def why_held(
    host: HostRecord, names: Mapping[str, int], fenced_at: Mapping[str | None, Sequence[float]], most: int
) -> str:
    """The code of why a host that is due is left to a person, or "".

    names: how many hosts have each name. fenced_at: by cell (None: not known), when the fencer fenced the hosts that no
    person has decided about since. So many of one cell within an hour stop it there until a person decides about one of
    them: a fault that spreads slowly never has many suspects at a time.
    """
    if names[host.name] > 1:
        return AMBIGUOUS
    times = sorted([*fenced_at.get(host.cell, ()), *fenced_at.get(None, ())])
    in_an_hour = any(last - first < HOUR_S for first, last in zip(times, times[most - 1 :], strict=False))
    return TOO_OFTEN if in_an_hour else ""


async def fenced_by_fencer(bus: Bus, *, timeout_s: float) -> dict[str | None, list[float]]:
    """By cell: when each host that is fenced by a fencer's decision was, as the schedulers' database has it."""
    fences = [one async for one in stored_objects(bus, ObjectKind.FENCE, timeout_s=timeout_s)]
    cells = {one.name: one.body.get("cell") for one in fences}
    found: dict[str | None, list[float]] = defaultdict(list)
    async for one in stored_objects(bus, ObjectKind.HOST, timeout_s=timeout_s):
        if one.changed_by == FENCER and one.body.get("state") == AdminState.FENCED:
            found[cells.get(one.name)].append(one.changed_at)
    return found


async def held_by_record(
    bus: Bus, hosts: Sequence[HostRecord], suspects: Sequence[HostRecord], most: int, *, timeout_s: float
) -> dict[str, str]:
    """Of these suspects by uuid: the code of why the record leaves each to a person, or ""."""
    names = Counter(host.name for host in hosts)
    fenced_at = await fenced_by_fencer(bus, timeout_s=timeout_s)
    return {one.uuid: why_held(one, names, fenced_at, most) for one in suspects}


log = structlog.get_logger(__name__)

LOOK_S = 2.0
ANSWER_TIMEOUT_S = 10.0
MAX_TRIES = 5  # of one host; then a person has to look, until its service reports again
RETRY_S = 30.0


class Fencer:
    """One plug-in, and a client of the API bus. Two fencers side by side do the same things twice, and no harm: what is
    decided by what was done before is on record.
    """

    def __init__(self, client: BuildClient, plugin: FencingPlugin, settings: FencingSettings, *, clock: Clock) -> None:
        self._client = client
        self._plugin = plugin
        self._settings = settings
        self._clock = clock
        self._suspects: Mapping[str, float] = {}
        self._tries: dict[str, tuple[int, float]] = {}  # of a suspect: how often, and no try before (monotonic)
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
        if any(map(self._may_be_tried, found.due)):
            found = await self._by_record(found, now_s)
        for uuid in found.suspects.keys() - self._suspects.keys():
            log.info("fencing.suspected", host=next(one.name for one in hosts.hosts if one.uuid == uuid))
        for name, code in found.held.items() - self._held.items():
            log.error(code, host=name, suspects=len(found.suspects), max_hosts=self._settings.max_hosts)
        self._suspects, self._held = found.suspects, found.held
        self._tries = {uuid: tries for uuid, tries in self._tries.items() if uuid in found.suspects}
        for host in filter(self._may_be_tried, found.due):
            silent_s = now_s - found.suspects[host.uuid]
            if not dry_run:
                await self._fence_suspect(host, silent_s)
                break  # that took its time: whether the others are silent still, the next look shows
            self._tries[host.uuid] = (0, math.inf)  # logged once
            log.info("fencing.due", host=host.name, silent_s=round(silent_s))
        return found

    def _may_be_tried(self, host: HostRecord) -> bool:
        tries, not_before_s = self._tries.get(host.uuid, (0, 0.0))
        return tries < MAX_TRIES and self._clock.monotonic() >= not_before_s

    async def _by_record(self, found: FencingPlan, now_s: float) -> FencingPlan:
        """The plan without the hosts that the record leaves to a person; their time begins anew."""
        everything = await self._client.hosts(limit=MAX_HOSTS, timeout_s=ANSWER_TIMEOUT_S)
        codes = await held_by_record(
            self._client.bus,
            everything.hosts,
            found.due,
            self._settings.max_per_hour,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        return FencingPlan(
            suspects={**found.suspects, **{uuid: now_s for uuid, code in codes.items() if code}},
            due=tuple(host for host in found.due if not codes[host.uuid]),
            held={**found.held, **{host.name: codes[host.uuid] for host in found.due if codes[host.uuid]}},
        )

    async def _fence_suspect(self, host: HostRecord, silent_s: float) -> None:
        tries, _ = self._tries.get(host.uuid, (0, 0.0))
        self._tries[host.uuid] = (tries + 1, self._clock.monotonic() + RETRY_S)
        try:
            await self.fence(host, f"its compute service was silent for {silent_s:.0f} s", by=FENCER)
        except Fault as fault:
            left = MAX_TRIES - tries - 1
            log.error("fencing.not_fenced", host=host.name, code=fault.code, reason=fault.reason, tries_left=left)

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
