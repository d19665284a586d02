"""The proofs that a record gives about a machine on a host: only a machine that is proved to be over is destroyed."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol
from uuid import UUID, uuid5

from bus.contracts.cell import UNKNOWN_ATTEMPT
from bus.contracts.moves import Condition

from .desires import AT_REST, DELETE_REQUESTED, OVER, WANTED, Wish, Work, desire_of, in_text
from .events import Event, HostMissing, HostRuns
from .instance import Instance, Phase, State

_RESCANS = UUID("6d1f7b0e-1c57-4f1b-9a57-3f6a1c6f2d11")


class InstanceFacts(Protocol):
    """The part of a record that the proof reads."""

    @property
    def uuid(self) -> str:
        """The instance's uuid."""

    @property
    def since(self) -> float:
        """When its state was entered."""

    @property
    def state(self) -> State:
        """The state of the instance."""

    @property
    def phase(self) -> Phase:
        """Its state, and what follows."""

    @property
    def host_uuid(self) -> str | None:
        """The current attempt's host."""

    @property
    def attempt(self) -> int:
        """The current attempt."""

    @property
    def last_attempt(self) -> int:
        """The highest attempt number that was ever given out."""

    @property
    def source_host_uuid(self) -> str | None:
        """The host of the move's source, if that is not the current host."""

    @property
    def source_attempt(self) -> int:
        """The attempt that the move's source carries (0: no move, or one without a source)."""

    @property
    def first_not_tried(self) -> bool:
        """Whether attempt 1 was never commanded by this record, because its service was down."""

    @property
    def machine_exists(self) -> bool:
        """Whether the build was refused because of a machine that is not proved to be its project's."""

    @property
    def doubted(self) -> bool:
        """Whether the database was set back while this was being built or moved."""

    @property
    def reused_from(self) -> int:
        """Attempts from this one on may have been given out before the database was set back, too (0: none)."""


def is_over(record: InstanceFacts, attempt: int, host_uuid: str) -> bool:
    """Whether the record proves that this attempt, run by this host, is not wanted any more.

    An attempt above all that were given out, or a machine's own attempt on another host, was commanded by a record that
    this database does not have (it was restored from a backup): that proves nothing, and the machine is kept. The same
    holds for attempt 1 of a record that has passed over its first host, and for an attempt that a set-back record does
    not have. A record that was set back in the middle of a move numbers its attempts anew: an earlier number proves
    nothing. Nor does a number given out after a set-back, of an attempt that is neither the current one nor the source.
    A build that was refused because of a machine that may be another project's proves nothing about that machine, even
    after the build's own delete: an operator decides about it.
    """
    if record.state is State.ABSENT or attempt == UNKNOWN_ATTEMPT:
        return False
    if record.machine_exists:
        return False
    if record.phase in DELETE_REQUESTED:
        return True
    if is_untried(record, attempt) or is_unsure(record, attempt, host_uuid):
        return False
    if record.source_host_uuid is not None and attempt == record.source_attempt:
        return host_uuid == record.source_host_uuid and desire_of(record).source in OVER
    if attempt == record.attempt:
        is_kept = is_wanted_here(record) or desire_of(record).here is Wish.UNCOMMANDED
        return host_uuid == record.host_uuid and not is_kept
    return attempt <= record.last_attempt and not is_renumbered(record, attempt)


def is_renumbered(record: InstanceFacts, attempt: int) -> bool:
    """Whether this attempt may have been given out twice: the record was set back while it was moved, or before."""
    if 0 < record.reused_from <= attempt:
        return True
    # A build that was doubted goes on: it may end the attempts that it has commanded itself.
    return record.doubted and desire_of(record).work is not Work.BUILD


def is_wanted_here(record: InstanceFacts) -> bool:
    """Whether the current attempt is wanted on its host."""
    desire = desire_of(record)
    is_source = bool(record.source_attempt) and record.source_host_uuid is None
    return desire.here in WANTED or (is_source and desire.source is Wish.STAY)


def is_wanted_at_source(record: InstanceFacts) -> bool:
    """Whether the machine of the move's source is to be kept."""
    return record.source_host_uuid is not None and desire_of(record).source is Wish.STAY


def is_untried(record: InstanceFacts, attempt: int) -> bool:
    """Whether this attempt was never commanded by the record: a machine of it is another record's."""
    return attempt == 1 and record.first_not_tried


def is_unsure(record: InstanceFacts, attempt: int, host_uuid: str) -> bool:
    """Whether the build was given up without its host's answer, in doubt: its machine may be the one that the client
    had.
    """
    ended = desire_of(record).condition is Condition.FAILED
    return ended and record.doubted and (attempt, host_uuid) == (record.attempt, record.host_uuid)


def rescan_id(record: InstanceFacts) -> str:
    """The id of the rescan to request while the record is as it is now: a scan that names it began no earlier."""
    return rescan_of(record.uuid, record.attempt, in_text(record.phase), record.since)


def rescan_of(*facts: object) -> str:
    """The id of a rescan that is requested because of these facts, as long as they hold."""
    return str(uuid5(_RESCANS, " ".join(map(str, facts))))


def is_later(event: HostMissing | HostRuns, record: InstanceFacts) -> bool:
    """Whether the scan of this report began after the record became what it is.

    No clock shows that, nor the number of a scan: a host's may be minutes from ours, or be set, and scans of two
    services have no common order. A scan that names the record's rescan began after the conductor had requested it.
    """
    return rescan_id(record) in event.rescans


def has_just_changed(since: float, *, now: float, grace_s: float) -> bool:
    """Whether what was recorded at `since` changed within the grace, so that what a report lacks may be under way.

    A time that is still to come is of a clock that was ahead, by a day perhaps: it shows nothing, and counts as old.
    """
    return 0.0 <= now - since <= grace_s


# How an attempt ended that the record has left, with an order to destroy it there.
LEFT_WITH_ORDER = frozenset({"failed", "timed_out"})


def is_ordered(instance: Instance, event: Event) -> bool:
    """Whether the record has commanded that destruction itself: of an attempt that failed or was out of time, or of a
    machine that a move has left.

    The order waits in the queue of a service that is silent. When the service is back its first report may list the
    machines before it has taken the orders. And a scan that began before an order was carried out lists what is gone
    by now. Their destruction is then no finding of the report: a drain may end more machines at once than a breaker
    allows.
    """
    if not isinstance(event, HostRuns) or not is_over(instance, event.attempt, event.host_uuid):
        return False
    if (event.attempt, event.host_uuid) == (instance.source_attempt, instance.source_host_uuid):
        return True
    tried = instance.history if instance.move is None else (*instance.history, *instance.move.history)
    return event.attempt in instance.ended_attempts or any(
        one.attempt == event.attempt and one.outcome in LEFT_WITH_ORDER for one in tried
    )


def is_at(instance: Instance, service: str, fenced: Container[str]) -> bool:
    """Whether it is on this service's hosts, or moves from one. Not on fenced ones: a machine there is a loss."""
    places = [] if desire_of(instance).here is Wish.NONE else list(instance.selections[instance.position :][:1])
    if instance.phase not in AT_REST and instance.move is not None and instance.move.source is not None:
        places.append(instance.move.source)
    return any(one.service == service and one.host_uuid not in fenced for one in places)
