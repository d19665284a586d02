"""A host's record of one instance, and the changes that a command makes: fences, repeats, replacements.

One `Entry` per (host, instance). Commands come late, twice and out of order; an entry is all that is needed to
answer each of them the same way every time. Two rules keep an instance from being built twice:

- a fence: no attempt at or below one that was ever destroyed here starts again;
- an ended attempt stays on record, so a repeated command gets the first answer, not a second build.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.cell import ComputeOutcome
from bus.contracts.moves import ChangeKind


class Phase(StrEnum):
    """Where the attempt on record stands."""

    BUILDING = "b"
    RUNNING = "r"
    FAILED = "f"
    DESTROYING = "d"
    GONE = "g"


class Entry(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The newest attempt of one instance on one host.

    fence: attempts up to this one never start here. reported: the result of this phase reached the broker.
    code and reason: why it failed; of one that runs, the driver's remark. final: no other host would do better.
    deployment: whose machine it is (None: unknown). order: of the last change of
    this machine that was taken. project: whose instance it is ("": unknown).
    changing: that change, until its answer has reached the broker.
    """

    attempt: int
    phase: Phase
    fence: int = 0
    reported: bool = False
    code: str = ""
    reason: str = ""
    final: bool = False
    deployment: str | None = None
    order: int = 0
    project: str = ""
    changing: ChangeKind | None = None


class SpawnVerdict(StrEnum):
    """The effect of a Spawn on this host."""

    START = "start"  # nothing of this instance is here: build
    REPLACE = "replace"  # an older attempt is, or was, here: clear it away, then build
    UNDERWAY = "underway"  # this attempt is being built: its answer is on its way
    REPEAT = "repeat"  # this attempt has ended: report that again
    FENCED = "fenced"  # this attempt was destroyed here: never
    SUPERSEDED = "superseded"  # a newer attempt is here: never
    NOT_OURS = "not_ours"  # another deployment's machine is here: never


class DestroyVerdict(StrEnum):
    """The effect of a Destroy on this host."""

    DESTROY = "destroy"  # clear it away, then answer
    JOIN = "join"  # it is being cleared away: answer with the others
    STALE = "stale"  # a newer attempt is here and stays: only the fence rises
    NOT_OURS = "not_ours"  # another deployment's machine is here and stays
    BUILT = "built"  # it was to go unless it is complete, and it is: it stays, and is reported again
    LOOK = "look"  # it was to go unless it is complete, and is not on record: its host is looked at first


_OUTCOMES = {
    Phase.RUNNING: ComputeOutcome.ACTIVE,
    Phase.FAILED: ComputeOutcome.FAILED,
    Phase.GONE: ComputeOutcome.DESTROYED,
}
ENDED = frozenset({Phase.FAILED, Phase.GONE})
LIVE = frozenset({Phase.BUILDING, Phase.RUNNING})
LOST = "instance.lost"


def on_spawn(
    entry: Entry | None, attempt: int, deployment: str | None = None, project: str = ""
) -> tuple[SpawnVerdict, Entry]:
    """Decide a Spawn. The entry returned is the host's record from now on."""
    if entry is None:
        return SpawnVerdict.START, Entry(attempt, Phase.BUILDING, deployment=deployment, project=project)
    if _is_anothers(entry, deployment):
        return SpawnVerdict.NOT_OURS, entry
    if attempt <= entry.fence:
        return SpawnVerdict.FENCED, entry
    if attempt < entry.attempt:
        return SpawnVerdict.SUPERSEDED, entry
    if attempt > entry.attempt:
        # The conductor has given up the older attempt, or it would not have commanded a newer one. Its own Destroy
        # may still be on the way; the fence makes sure that no late copy of the older Spawn undoes this.
        fresh = Entry(attempt, Phase.BUILDING, fence=max(entry.fence, entry.attempt), deployment=deployment)
        fresh = replace(fresh, project=project)
        return (SpawnVerdict.START if entry.phase is Phase.GONE else SpawnVerdict.REPLACE), fresh
    if entry.phase is Phase.BUILDING:
        return SpawnVerdict.UNDERWAY, entry
    assert entry.phase in (Phase.RUNNING, Phase.FAILED), entry  # destroying and gone are fenced
    return SpawnVerdict.REPEAT, entry


def on_destroy_unless_built(entry: Entry | None, attempt: int, deployment: str | None) -> DestroyVerdict | None:
    """Whether a Destroy that spares a complete machine ends here. None: it is one like any other.

    A record that may be older than the machine, or has taken it for lost, does not show whether it is complete.
    """
    if entry is None:
        return DestroyVerdict.LOOK
    is_older = entry.phase in (*ENDED, Phase.RUNNING) and attempt > max(entry.attempt, entry.fence)
    if (is_older or (is_lost(entry) and attempt == entry.attempt)) and not _is_anothers(entry, deployment):
        return DestroyVerdict.LOOK
    is_built = entry.phase is Phase.RUNNING and entry.attempt == attempt and attempt > entry.fence
    return DestroyVerdict.BUILT if is_built and not _is_anothers(entry, deployment) else None


def on_destroy(entry: Entry | None, attempt: int, deployment: str | None = None) -> tuple[DestroyVerdict, Entry]:
    """Decide a Destroy. An unknown instance is cleared away too: the record may be younger than the machine.

    Whether the machine itself is this deployment's is checked by the driver, on the machine's own mark.
    """
    if entry is None:
        return DestroyVerdict.DESTROY, Entry(attempt, Phase.DESTROYING, fence=attempt, deployment=deployment)
    if _is_anothers(entry, deployment):
        return DestroyVerdict.NOT_OURS, entry
    fenced = entry
    if (
        attempt > entry.fence
    ):  # a machine that is gone is gone up to a higher attempt now, and that is yet to be reported
        fenced = replace(entry, fence=attempt, reported=entry.reported and entry.phase is not Phase.GONE)
    if entry.phase is Phase.DESTROYING:
        return DestroyVerdict.JOIN, fenced
    if entry.phase is Phase.GONE:
        # Ordered again, as a report has named it: a request to a driver whose answer was given up can come true after
        # its undoing.
        return DestroyVerdict.DESTROY, replace(
            fenced, phase=Phase.DESTROYING, deployment=deployment or entry.deployment
        )
    if attempt < entry.attempt:
        return DestroyVerdict.STALE, fenced
    owner = deployment or entry.deployment
    return DestroyVerdict.DESTROY, Entry(entry.attempt, Phase.DESTROYING, fence=attempt, deployment=owner)


def _is_anothers(entry: Entry, deployment: str | None) -> bool:
    """Whether a machine that may be here was built for another deployment than the command's."""
    may_be_here = entry.phase not in ENDED
    return may_be_here and entry.deployment is not None and entry.deployment != deployment


def is_leaving(entry: Entry | None, attempt: int) -> bool:
    """Whether this attempt's machine is being cleared away by an order on record."""
    if entry is None or attempt > entry.fence:
        return False
    return entry.phase in (Phase.DESTROYING, Phase.BUILDING)  # building: the older attempt is cleared away first


def is_there(entry: Entry, deployment: str) -> bool:
    """Whether a machine of this deployment is there, or is being built, and no order has ended it."""
    is_kept = entry.phase in LIVE and entry.attempt > entry.fence
    return is_kept and not _is_anothers(entry, deployment)


def built(entry: Entry | None, attempt: int, remark: str = "") -> Entry | None:
    """Record that the attempt runs. None when a newer command for this host has overtaken it."""
    if entry is None or entry.attempt != attempt or entry.phase is not Phase.BUILDING:
        return None
    return Entry(
        attempt,
        Phase.RUNNING,
        fence=entry.fence,
        reason=remark,
        deployment=entry.deployment,
        project=entry.project,
    )


def failed(entry: Entry | None, attempt: int, code: str, reason: str, *, final: bool = False) -> Entry | None:
    """Record that the attempt did not become a machine. None when a newer command has overtaken it."""
    if entry is None or entry.attempt != attempt or entry.phase is not Phase.BUILDING:
        return None
    return Entry(
        attempt, Phase.FAILED, fence=entry.fence, code=code, reason=reason, final=final, deployment=entry.deployment
    )


def destroyed(entry: Entry | None) -> Entry | None:
    """Nothing is left. None when a newer attempt has come meanwhile."""
    if entry is None or entry.phase is not Phase.DESTROYING:
        return None
    return Entry(entry.attempt, Phase.GONE, fence=max(entry.fence, entry.attempt), deployment=entry.deployment)


def lost(entry: Entry) -> Entry:
    """A machine on record that the host does not run (it was reinstalled, or its disk is gone)."""
    return Entry(
        entry.attempt,
        Phase.FAILED,
        fence=entry.fence,
        reported=True,
        code=LOST,
        reason="the host does not run it",
        deployment=entry.deployment,
    )


def is_lost(entry: Entry) -> bool:
    """Whether its host was seen without it, and no order has ended it since: the cell may not have received that."""
    return entry.phase is Phase.FAILED and entry.code == LOST and entry.attempt > entry.fence


def answer(entry: Entry) -> tuple[int, ComputeOutcome] | None:
    """The result to report of this entry: the attempt and how it ended. None while work on it is under way."""
    outcome = _OUTCOMES.get(entry.phase)
    if outcome is None:
        return None
    return (entry.fence if entry.phase is Phase.GONE else entry.attempt), outcome
