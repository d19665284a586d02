"""Which compute services of a cell are up: its failure detector. It suspects; it never declares a service dead."""

# A service holds a lease, and each heartbeat or host report renews it. Time is counted only while the bus delivers:
# each delivery advances the clock by the time since the previous one, by `STEP_S` at most. So a conductor that was
# paused, disconnected, or whose broker stood still suspects no service because of that.
# The effects of a suspicion can be taken back: new builds go elsewhere, and so do builds under way that have another
# host to go to. A machine that the service may run is destroyed by its own fence.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.cell import Heartbeat
from cell_conductor.state.lease import DEFAULT_HEARTBEAT_S, Lease, LeaseState, StatePeriod

# At most this many services are kept; further ones are never suspected.
MAX_SERVICES = 100_000

# The most that a pause between two deliveries counts. The leader's service states arrive more often than that.
STEP_S = 2.0

# A service that misses this many heartbeats in a row leaves its ring: its free nodes go to the others. That does no
# harm if the service lives, so it is sooner than silence.
RING_MISSED = 3
# This many heartbeats of the slowest service have to have been due before it is known which services are up.
LISTEN_HEARTBEATS = 1.5
# A service may send one an hour. What it states later still begins a recovery.
MAX_LISTEN_S = 30.0


class _TrackedLease(Struct):
    """A lease as this conductor holds it."""

    lease: Lease
    sequence: int  # number of the last message of its epoch (_NONE: none was received here)
    heartbeat_at: float  # the clock's value at that message
    ring: str | None = None  # the ring by which it shares its free nodes
    stated: StatePeriod | None = None  # what the newest service states that had it say (None: none had it)


class LeaseTable:
    """The leases of one cell as one conductor knows them; missed_heartbeats in a row make a service silent."""

    def __init__(self, missed_heartbeats: int) -> None:
        self._missed_heartbeats = missed_heartbeats
        self._tracked: dict[str, _TrackedLease] = {}
        self._clock = 0.0
        self._listening_since: float | None = None  # by the clock, when the record was adopted
        self._delivered: float | None = None
        self._superseded: dict[str, int] = {}
        self._service_states = (0, 0)  # the newest one's term and number
        self._deleted: dict[
            str, StatePeriod | None
        ] = {}  # services that are gone for good, as the leader had them then
        self._unheard = set[str]()

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def leases(self) -> Mapping[str, Lease]:
        """All of them, by service."""
        return {service: tracked.lease for service, tracked in self._tracked.items()}

    @property
    def down(self) -> dict[str, Lease]:
        """Services that take no builds now."""
        return {
            service: tracked.lease
            for service, tracked in self._tracked.items()
            if tracked.lease.state is not LeaseState.UP
        }

    @property
    def up(self) -> tuple[str, ...] | None:
        """Services that are up; None: that is not known yet. This conductor has not adopted the record, or has not
        listened long enough since to have received a heartbeat of each.
        """
        if self._listening_since is None or self._clock - self._listening_since < self.listening_s:
            return None
        return tuple(service for service, tracked in self._tracked.items() if tracked.lease.state is LeaseState.UP)

    @property
    def listening_s(self) -> float:
        """How long until a heartbeat of each would have come. A service whose interval is unknown is assumed to send
        its heartbeats about as often as the others.
        """
        intervals = [tracked.lease.interval_s for tracked in self._tracked.values() if tracked.sequence >= 0]
        return LISTEN_HEARTBEATS * max(intervals, default=DEFAULT_HEARTBEAT_S)

    @property
    def heartbeats_s(self) -> float:
        """How long until a heartbeat of each service that is up on record would have come, but those that send few;
        0: there is none.
        """
        up = (one.lease.interval_s for one in self._tracked.values() if one.lease.state is LeaseState.UP)
        return min(LISTEN_HEARTBEATS * max(up, default=0.0), MAX_LISTEN_S)

    @property
    def unheard(self) -> frozenset[str]:
        """Services that are up on record, and have sent nothing since `hear_anew`."""
        return frozenset(one for one in self._unheard if one in self._tracked and one not in self.down)

    def hear_anew(self) -> None:
        """What services have sent before proves nothing any more about the database."""
        self._unheard = set(self._tracked)

    @property
    def alive_services(self) -> frozenset[str]:
        """Services that are certainly up: they have sent something here, and are not down since."""
        tracked = self._tracked.items()
        return frozenset(name for name, one in tracked if one.sequence >= 0 and one.lease.state is LeaseState.UP)

    @property
    def is_listening(self) -> bool:
        """Whether the record was adopted."""
        return self._listening_since is not None

    @property
    def deleted(self) -> frozenset[str]:
        """Services that are gone for good, as an operator has stated since this conductor started."""
        return frozenset(self._deleted)

    @property
    def abandoned(self) -> dict[str, Lease]:
        """Services whose builds are not awaited: silent, or stopped on purpose and not back within a lease."""
        return {
            service: lease
            for service, lease in self.down.items()
            if lease.state is LeaseState.SILENT or self._is_overdue(self._tracked[service])
        }

    def is_removed(self, service: str, at: float, takeover_s: float) -> bool:
        """Whether a service is gone for good, as far as its cell can know. at: seconds since the epoch."""
        # Stopped and not back within its lease, silent for `takeover_s`, or not on record any more. No service is gone
        # before it is known who is up.
        if self.up is None:
            return False
        tracked = self._tracked.get(service)
        if tracked is None or tracked.lease.state is LeaseState.STOPPED:
            return tracked is None or self._is_overdue(tracked)
        return tracked.lease.state is LeaseState.SILENT and at - tracked.lease.since >= takeover_s

    def load_record(self, recorded: Iterable[Lease]) -> None:
        """Adopt all the leases on record, and listen from then on: a service that was down before sends nothing."""
        self.load(recorded)
        if self._listening_since is None:
            self._listening_since = self._clock

    def load(self, recorded: Iterable[Lease]) -> None:
        """Adopt the recorded leases of services that have sent nothing to this conductor yet."""
        # A service that was up has a whole lease from now on to send something; one that was down stays down until it
        # does. One that has sent something under an older epoch than its recorded one has to be informed: schedulers,
        # and records of instances, count its messages as older than those of the recorded epoch.
        for lease in recorded:
            tracked = self._tracked.get(lease.service)
            if tracked is not None and tracked.lease.epoch < lease.epoch:
                self.record_superseded(lease.service, lease.epoch)
            is_deleted = self._deleted.get(lease.service) == lease.state_period
            if tracked is None and not is_deleted and len(self._tracked) < MAX_SERVICES:
                # After it was deleted no message of that epoch counts: it is a copy, or was overtaken.
                sequence = _LAST if lease.state is LeaseState.STOPPED else _NONE
                self._tracked[lease.service] = _TrackedLease(lease, sequence, self._clock)
                self._unheard.add(lease.service)
                self._deleted.pop(lease.service, None)  # it was back

    def apply_service_states(self, version: tuple[int, int], down: Sequence[Lease]) -> None:
        """Apply a page of the leader's service states, unless newer ones came. version: their term and number."""
        if version < self._service_states:
            return
        self._service_states = version
        self.load(down)
        for lease in down:
            if (tracked := self._tracked.get(lease.service)) is not None:
                tracked.stated = lease.state_period

    def delete(self, service: str) -> None:
        """Drop a service that an operator has stated to be gone. One that is up is kept: it sends heartbeats."""
        # Service states from before that may come later, which have of it what the last ones had: that is not applied.
        tracked = self._tracked.get(service)
        self.remove([service])
        if tracked is None:
            if len(self._deleted) < MAX_SERVICES:
                self._deleted.setdefault(service, None)
        elif service not in self._tracked and len(self._deleted) < MAX_SERVICES:
            self._deleted[service] = tracked.stated or tracked.lease.state_period

    def advance_clock(self, now_s: float) -> None:
        """Record that the bus has delivered a message; now_s: monotonic."""
        if self._delivered is not None:
            self._clock += min(max(0.0, now_s - self._delivered), STEP_S)
        self._delivered = now_s

    def rings(self) -> dict[str, tuple[str, ...]] | None:
        """The services of each ring that are up, by its name; None: one that is up on record has sent no heartbeat here
        yet.
        """
        # A conductor that has just started would leave that service out of its ring, and its nodes would move
        # needlessly.
        members: dict[str, list[str]] = {}
        for service, tracked in sorted(self._tracked.items()):
            if tracked.lease.state is not LeaseState.UP:
                continue
            if tracked.sequence < 0:
                return None
            if tracked.ring and self._clock - tracked.heartbeat_at <= RING_MISSED * tracked.lease.interval_s:
                members.setdefault(tracked.ring, []).append(service)
        return {ring: tuple(services) for ring, services in members.items()}

    def renew(self, heartbeat: Heartbeat, at: float) -> bool:
        """Apply one message of a service; at: seconds since the epoch. True: its state or its epoch has changed."""
        service, epoch, sequence = heartbeat.service, heartbeat.epoch, heartbeat.sequence
        self._unheard.discard(service)
        tracked = self._tracked.get(service)
        if tracked is None:
            if len(self._tracked) >= MAX_SERVICES:
                return False
            tracked = self._tracked[service] = _TrackedLease(Lease(service=service, epoch=_NONE), _NONE, self._clock)
            self._deleted.pop(service, None)
        before = tracked.lease
        if epoch < before.epoch:
            self.record_superseded(service, before.epoch)
        if (epoch, sequence) <= (before.epoch, tracked.sequence):
            return False
        interval_s = heartbeat.interval_s if heartbeat.interval_s > 0 else before.interval_s
        tracked.sequence, tracked.heartbeat_at, tracked.ring = sequence, self._clock, heartbeat.ring
        if heartbeat.stopping:
            tracked.sequence = _LAST
            tracked.lease = replace(
                before, epoch=epoch, interval_s=interval_s, state=LeaseState.STOPPED, since=at, reason="it was stopped"
            )
        elif (before.state, before.epoch, before.interval_s) != (LeaseState.UP, epoch, interval_s):
            tracked.lease = Lease(service=service, epoch=epoch, interval_s=interval_s, since=at)
        return tracked.lease is not before

    def record_superseded(self, service: str, epoch: int) -> None:
        """A message of this service came with an epoch below this one."""
        if service in self._superseded or len(self._superseded) < MAX_SERVICES:
            self._superseded[service] = max(epoch, self._superseded.get(service, epoch))

    def superseded(self) -> dict[str, int]:
        """{service: epoch} of those recorded since the last call."""
        superseded, self._superseded = self._superseded, {}
        return superseded

    def assess(self, at: float) -> list[Lease]:
        """Services that have fallen silent by now, in order of their names."""
        silent: list[Lease] = []
        for _, tracked in sorted(self._tracked.items()):
            if tracked.lease.state is LeaseState.UP and self._is_overdue(tracked):
                reason = (
                    f"nothing came from it for {self._clock - tracked.heartbeat_at:.1f} s while others were;"
                    f" it sends a heartbeat every {tracked.lease.interval_s:g} s"
                )
                tracked.lease = replace(tracked.lease, state=LeaseState.SILENT, since=at, reason=reason)
                silent.append(tracked.lease)
        return silent

    def down_before(self, at: float, limit: int) -> list[str]:
        """The services that are down since before this time, oldest first, up to a bound."""
        down = [lease for lease in self.down.values() if lease.since < at]
        return [one.service for one in sorted(down, key=lambda lease: lease.since)[:limit]]

    def remove(self, services: Iterable[str]) -> None:
        """Drop these: they are not on record any more. A service that is up is kept: it will be recorded again."""
        for service in services:
            tracked = self._tracked.get(service)
            if tracked is not None and tracked.lease.state is not LeaseState.UP:
                del self._tracked[service]

    def _is_overdue(self, tracked: _TrackedLease) -> bool:
        return self._clock - tracked.heartbeat_at > self._missed_heartbeats * tracked.lease.interval_s


_LAST = 2**63 - 1
_NONE = -1  # below every epoch and every sequence
