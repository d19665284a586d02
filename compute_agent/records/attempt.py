"""A host's record of one instance, and the changes that a command makes: ended attempts, repeats, replacements."""

# One record per (host, instance). Commands come late, twice and out of order; the record is all that is needed to
# answer each of them the same way every time. Two rules keep an instance from being built twice: no attempt at or below
# one that was ever destroyed here starts again; an ended attempt stays on record, so a repeated command gets the first
# answer, not a second build.

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import ChangeKind
from bus.contracts.cell import ComputeOutcome


class AttemptPhase(StrEnum):
    """Where the attempt on record stands."""

    BUILDING = "b"
    RUNNING = "r"
    FAILED = "f"
    DESTROYING = "d"
    GONE = "g"


class HostAttempt(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The newest attempt of one instance on one host."""

    attempt: int
    phase: AttemptPhase
    max_ended_attempt: int = 0  # attempts up to this one never start here
    reported: bool = False  # the result of this phase reached the broker
    code: str = ""  # why the attempt failed
    reason: str = ""  # the same as a sentence; of an attempt that runs, the driver's warning
    final: bool = False  # no other host would do better
    database_id: str | None = None  # whose machine it is (None: unknown)
    change_number: int = 0  # number of the last change of this machine that was taken
    project: str = ""  # the project of the instance ("": unknown)
    changing: ChangeKind | None = None  # kind of that change, until its answer has reached the broker


class SpawnAction(StrEnum):
    """The effect of a Spawn on this host."""

    START = "start"  # nothing of this instance is here: build
    REPLACE = "replace"  # an older attempt is, or was, here: clear it away, then build
    UNDERWAY = "underway"  # this attempt is being built: its answer is on its way
    REPEAT = "repeat"  # this attempt has ended: report that again
    ALREADY_ENDED = "attempt_ended"  # this attempt was destroyed here: never
    SUPERSEDED = "superseded"  # a newer attempt is here: never
    NOT_OWNED = "not_owned"  # another database's machine is here: never


class DestroyAction(StrEnum):
    """The effect of a Destroy on this host."""

    DESTROY = "destroy"  # clear it away, then answer
    JOIN = "join"  # it is being cleared away: answer with the others
    STALE = "stale"  # a newer attempt is here and stays: only the ended attempt rises
    NOT_OWNED = "not_owned"  # another database's machine is here and stays
    BUILT = "built"  # it was to go unless it is complete, and it is: it stays, and is reported again
    VERIFY = "verify"  # it was to go unless it is complete, and is not on record: its host is looked at first


_OUTCOMES = {
    AttemptPhase.RUNNING: ComputeOutcome.ACTIVE,
    AttemptPhase.FAILED: ComputeOutcome.FAILED,
    AttemptPhase.GONE: ComputeOutcome.DESTROYED,
}
ENDED = frozenset({AttemptPhase.FAILED, AttemptPhase.GONE})
LIVE = frozenset({AttemptPhase.BUILDING, AttemptPhase.RUNNING})
LOST = "instance.lost"


def on_spawn(
    entry: HostAttempt | None, attempt: int, database_id: str | None = None, project: str = ""
) -> tuple[SpawnAction, HostAttempt]:
    """Decide a Spawn. The entry returned is the host's record from now on."""
    if entry is None:
        return SpawnAction.START, HostAttempt(attempt, AttemptPhase.BUILDING, database_id=database_id, project=project)
    if _is_foreign(entry, database_id):
        return SpawnAction.NOT_OWNED, entry
    if attempt <= entry.max_ended_attempt:
        return SpawnAction.ALREADY_ENDED, entry
    if attempt < entry.attempt:
        return SpawnAction.SUPERSEDED, entry
    if attempt > entry.attempt:
        # The conductor has abandoned the older attempt, or it would not have commanded a newer one. Its own Destroy
        # may still be on the way; the ended attempt makes sure that no late copy of the older Spawn undoes this.
        fresh = HostAttempt(
            attempt,
            AttemptPhase.BUILDING,
            max_ended_attempt=max(entry.max_ended_attempt, entry.attempt),
            database_id=database_id,
        )
        fresh = replace(fresh, project=project)
        return (SpawnAction.START if entry.phase is AttemptPhase.GONE else SpawnAction.REPLACE), fresh
    if entry.phase is AttemptPhase.BUILDING:
        return SpawnAction.UNDERWAY, entry
    assert entry.phase in (AttemptPhase.RUNNING, AttemptPhase.FAILED), entry  # else the attempt has ended
    return SpawnAction.REPEAT, entry


def on_destroy_if_incomplete(entry: HostAttempt | None, attempt: int, database_id: str | None) -> DestroyAction | None:
    """Whether a Destroy that spares a complete machine ends here. None: it is one like any other."""
    # A record that may be older than the machine, or has taken it for lost, does not show whether it is complete.
    if entry is None:
        return DestroyAction.VERIFY
    is_older = entry.phase in (*ENDED, AttemptPhase.RUNNING) and attempt > max(entry.attempt, entry.max_ended_attempt)
    if (is_older or (is_lost(entry) and attempt == entry.attempt)) and not _is_foreign(entry, database_id):
        return DestroyAction.VERIFY
    is_built = entry.phase is AttemptPhase.RUNNING and entry.attempt == attempt and attempt > entry.max_ended_attempt
    return DestroyAction.BUILT if is_built and not _is_foreign(entry, database_id) else None


def on_destroy(
    entry: HostAttempt | None, attempt: int, database_id: str | None = None
) -> tuple[DestroyAction, HostAttempt]:
    """Decide a Destroy. An unknown instance is cleared away too: the record may be younger than the machine."""
    # Whether the machine itself is this database's is checked by the driver, on the machine's own tag.
    if entry is None:
        return DestroyAction.DESTROY, HostAttempt(
            attempt, AttemptPhase.DESTROYING, max_ended_attempt=attempt, database_id=database_id
        )
    if _is_foreign(entry, database_id):
        return DestroyAction.NOT_OWNED, entry
    after = entry
    if (
        attempt > entry.max_ended_attempt
    ):  # a machine that is gone is gone up to a higher attempt now, and that is yet to be reported
        after = replace(
            entry, max_ended_attempt=attempt, reported=entry.reported and entry.phase is not AttemptPhase.GONE
        )
    if entry.phase is AttemptPhase.DESTROYING:
        return DestroyAction.JOIN, after
    if entry.phase is AttemptPhase.GONE:
        # Commanded again, as a report has named it: a request to a driver whose answer was not awaited can come true
        # after its undoing.
        return DestroyAction.DESTROY, replace(
            after, phase=AttemptPhase.DESTROYING, database_id=database_id or entry.database_id
        )
    # A newer attempt that failed may have failed to clear away the older one, and its own remains are of no use.
    if attempt < entry.attempt and (entry.phase in LIVE or is_lost(entry)):
        return DestroyAction.STALE, after
    return DestroyAction.DESTROY, HostAttempt(
        entry.attempt,
        AttemptPhase.DESTROYING,
        max_ended_attempt=max(attempt, entry.attempt),
        database_id=database_id or entry.database_id,
    )


def _is_foreign(entry: HostAttempt, database_id: str | None) -> bool:
    """Whether a machine that may be here was built for another database than the command's."""
    may_be_here = entry.phase not in ENDED
    return may_be_here and entry.database_id is not None and entry.database_id != database_id


def is_leaving(entry: HostAttempt | None, attempt: int) -> bool:
    """Whether this attempt's machine is being cleared away by a command on record."""
    if entry is None or attempt > entry.max_ended_attempt:
        return False
    return entry.phase in (
        AttemptPhase.DESTROYING,
        AttemptPhase.BUILDING,
    )  # building: the older attempt is cleared away first


def has_machine(entry: HostAttempt, database_id: str) -> bool:
    """Whether a machine of this database is there, or is being built, and no command has ended it."""
    is_kept = entry.phase in LIVE and entry.attempt > entry.max_ended_attempt
    return is_kept and not _is_foreign(entry, database_id)


def built(entry: HostAttempt | None, attempt: int, warning: str = "") -> HostAttempt | None:
    """Record that the attempt runs. None when a newer command for this host has overtaken it."""
    if entry is None or entry.attempt != attempt or entry.phase is not AttemptPhase.BUILDING:
        return None
    return HostAttempt(
        attempt,
        AttemptPhase.RUNNING,
        max_ended_attempt=entry.max_ended_attempt,
        reason=warning,
        database_id=entry.database_id,
        project=entry.project,
    )


def failed(
    entry: HostAttempt | None, attempt: int, code: str, reason: str, *, final: bool = False
) -> HostAttempt | None:
    """Record that the attempt did not become a machine. None when a newer command has overtaken it."""
    if entry is None or entry.attempt != attempt or entry.phase is not AttemptPhase.BUILDING:
        return None
    return HostAttempt(
        attempt,
        AttemptPhase.FAILED,
        max_ended_attempt=entry.max_ended_attempt,
        code=code,
        reason=reason,
        final=final,
        database_id=entry.database_id,
    )


def destroyed(entry: HostAttempt | None) -> HostAttempt | None:
    """Nothing is left. None when a newer attempt has come meanwhile."""
    if entry is None or entry.phase is not AttemptPhase.DESTROYING:
        return None
    return HostAttempt(
        entry.attempt,
        AttemptPhase.GONE,
        max_ended_attempt=max(entry.max_ended_attempt, entry.attempt),
        database_id=entry.database_id,
    )


def lost(entry: HostAttempt) -> HostAttempt:
    """A machine on record that the host does not run (it was reinstalled, or its disk is gone)."""
    # Its numbers stay: the host may list it again.
    return replace(entry, phase=AttemptPhase.FAILED, reported=True, code=LOST, reason="the host does not run it")


def listed_again(entry: HostAttempt) -> HostAttempt:
    """A machine that was taken for lost, and that its host lists."""
    return replace(entry, phase=AttemptPhase.RUNNING, code="", reason="")


def is_lost(entry: HostAttempt) -> bool:
    """Whether its host was seen without it, and no command has ended it since: the cell may not have received that."""
    return entry.phase is AttemptPhase.FAILED and entry.code == LOST and entry.attempt > entry.max_ended_attempt


def may_be_built(entry: HostAttempt) -> bool:
    """Whether a machine of this attempt that its host shows as built is one: its build is over, and has not failed."""
    return entry.phase is not AttemptPhase.BUILDING and (entry.phase is not AttemptPhase.FAILED or is_lost(entry))


def answer(entry: HostAttempt) -> tuple[int, ComputeOutcome] | None:
    """The result to report of this entry: the attempt and how it ended. None while work on it is under way."""
    outcome = _OUTCOMES.get(entry.phase)
    if outcome is None:
        return None
    return (entry.max_ended_attempt if entry.phase is AttemptPhase.GONE else entry.attempt), outcome
