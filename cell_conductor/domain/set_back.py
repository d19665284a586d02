"""What the cell's records prove once its database came to be older than the world: it was restored from a backup, was
promoted without its last commits, or was made anew. Pure.

Nothing else reads when that was (`tests/test_house.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace

from bus.clock import CLOCKS_APART_S
from bus.contracts.base import MAX_ATTEMPT

from .desires import DELETE_REQUESTED, desire_of
from .events import BuildRequested, DeleteRequested, Event, MoveRequested, is_begun_by
from .instance import Instance

# Of an instance that the record has forgotten: so many attempts may have been made of it since.
FORGOTTEN_ATTEMPTS = 1000
# The most announcements of a record that a set-back can have lost.
LOST_NUMBERS = 10_000


class SetBack(Struct, frozen=True):
    """When the database was last found to be set back or replaced (0: never), and when its schema was made (0: that is
    not known), in seconds since the epoch. incarnation: the number of its history, which each set-back raises.
    """

    at: float = 0.0
    made_at: float = 0.0
    incarnation: int = 1

    @property
    def has_been(self) -> bool:
        """Whether it ever was."""
        return self.at > 0

    def may_lack(self, at: float) -> bool:
        """Whether the database may have no record of what happened then: it was set back since, or its schema was made
        anew. The former allows for clocks that are apart: what comes in these minutes after a restore is searched for
        needlessly, and waits longer for a silent host. The latter does not: the first moves of a new system would be in
        doubt.
        """
        return (self.has_been and at <= self.at + CLOCKS_APART_S) or 0 < at <= self.made_at

    @property
    def first_number(self) -> int:
        """Above the numbers of all announcements from before, of records that were set back several times too: those
        after a set-back begin with its time in ms, and a record has fewer than one in each.
        """
        return int(max(self.at, self.made_at) * 1000)

    def is_of(self, incarnation: int) -> bool:
        """Whether no set-back has come since something was recorded under this incarnation."""
        return incarnation == self.incarnation

    def doubted_for_s(self, since: float, now: float) -> float:
        """For how long services could have answered for a record that is as it is since then. Another set-back begins
        that anew.
        """
        return now - max(since, self.at)


def is_doubted_request(event: BuildRequested, set_back: SetBack) -> bool:
    """Whether it may have been handed in before, to a record that the database has lost: it was sent before the
    set-back, or this cell has claimed for it already, or its schedulers wait for its end.

    `stamps.requested` is when its client sent it; `requested_at` when a scheduler decided it, perhaps a second time.
    """
    if event.attempt > 1 or event.is_query:
        return True
    decided_at = event.requested_at
    return set_back.may_lack(decided_at if event.stamps is None else min(decided_at, event.stamps.requested))


def is_outdated(record: Instance, set_back: SetBack) -> bool:
    """Whether an instance at rest may have been moved since, before the database was set back: another machine of it
    may be the one that its client has. It is searched for before anything is begun with it. What has come to rest since
    by its host's word is of that kind too, as long as it is doubted.
    """
    is_old = set_back.has_been and set_back.may_lack(record.since)
    return desire_of(record).ends and (record.doubted or is_old)


def is_unsearched(instance: Instance, event: Event, set_back: SetBack, unexplained: Collection[str] = ()) -> bool:
    """Whether the cell's services are to be queried about the instance before a request is taken, and were not since
    the database was set back: it may begin, or end, what the database has no record of.

    unexplained: instances of which a host has a machine that no record explains.
    """
    if not isinstance(event, BuildRequested | DeleteRequested | MoveRequested):
        return False
    if event.found is not None and set_back.is_of(event.incarnation):
        return False
    if isinstance(event, MoveRequested):
        return is_begun_by(event) and is_outdated(instance, set_back)
    if isinstance(event, BuildRequested) and not event.is_query:
        is_unsure = is_doubted_request(event, set_back) or is_outdated(instance, set_back)
        return is_unsure or instance.uuid in unexplained
    if isinstance(event, BuildRequested):
        return instance.spec is None
    return (event.begun or set_back.has_been) and (instance.spec is None or has_come_back(instance, event))


def has_come_back(instance: Instance, event: DeleteRequested) -> bool:
    """Whether an instance that has left is here again by the schedulers' record: that of this cell is lost."""
    return desire_of(instance).elsewhere and event.attempt > instance.last_attempt


def numbered_on(instance: Instance, set_back: SetBack, event: BuildRequested | None = None) -> Instance:
    """The record of an instance whose announcements may be lost: schedulers and clients ignore numbers that they have
    had. Where the clock of the database, or of another cell, was ahead of this one, they go on above the record's.
    """
    known = 0 if event is None else event.sequence
    lost = LOST_NUMBERS if set_back.first_number else 0
    return replace(instance, sequence=max(instance.sequence + lost, set_back.first_number, known + 1))


def in_doubt(instance: Instance, set_back: SetBack) -> Instance:
    """The record of what was under way, and may have come further, as the recognition of a set-back leaves it: it is
    searched for at once (`doubt`). In SQL it is `postgres.DOUBT`.
    """
    return replace(numbered_on(instance, set_back), doubted=True, deadline=set_back.at)


def marked_reused(instance: Instance, set_back: SetBack) -> Instance:
    """Record the first number that a record gives out after it was set back: it may have given it out before."""
    if instance.reused_from or not set_back.may_lack(instance.requested_at):
        return instance
    return replace(instance, reused_from=instance.next_attempt)


def certain(instance: Instance, at: float) -> Instance:
    """The record of an instance at rest of which no service of the cell has another machine: it is as it was then."""
    return replace(instance, doubted=False, since=at)


def doubted_from(instance: Instance, set_back: SetBack) -> Instance:
    """The record of an instance that is as it was before a set-back: it may have been moved since, also to another
    cell. So its attempts are numbered as they were: a release far above them would fence what another cell claims. Of
    one that its client has deleted nothing is to be claimed any more (`forgotten_attempts`).
    """
    if instance.doubted or not set_back.may_lack(instance.since):
        return instance
    reused_from = instance.reused_from or instance.next_attempt
    return replace(numbered_on(instance, set_back), doubted=True, reused_from=reused_from)


def forgotten_attempts(instance: Instance) -> int:
    """How many numbers above those on record the release of what its client has deleted covers: a record in doubt may
    lack moves, whose claims have later numbers. Nothing of them is wanted any more, wherever they are.
    """
    if not instance.doubted or instance.phase not in DELETE_REQUESTED:
        return 0
    return min(FORGOTTEN_ATTEMPTS, MAX_ATTEMPT - instance.next_attempt)
