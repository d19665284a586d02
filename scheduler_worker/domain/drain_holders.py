"""Instances that a host of a drain holds something of although none of them can be moved away from it now. Pure.

The book has an allocation of each on the host, or a move to the host is under way. A drain does not end as done before
the host holds nothing: such an instance waits as a row of the drain with a code of HELD, and is looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.book import TreeHolder
from bus.contracts.build import TERMINAL_STATES, BuildState
from bus.contracts.drains import DrainMoveState
from bus.contracts.moves import Condition, MoveKind
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.drain_targets import DrainedHost
from scheduler_worker.domain.drains import (
    ARRIVING,
    BUILDING,
    MAX_FAILURES,
    MAX_LOOKS,
    MISPLACED,
    RELEASING,
    UNCONFIRMED,
    UNRELEASED,
    DrainMove,
    failed,
    is_held,
)
from scheduler_worker.domain.recorded_moves import MoveContext, RecordedMove, flavor_of

LOOK_S = 2.0  # between two looks at an instance that waits for others
# Each of these is in progress and ends by itself. A client's confirm may never come, and nothing in progress ends what
# is misplaced; what is not released should be soon.
_PASSING = frozenset({BUILDING, ARRIVING, RELEASING})
_ENDED = TERMINAL_STATES - {BuildState.ACTIVE}
_UNBUILT = frozenset({BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.BUILDING})
_OPEN_TO_REVIEW = frozenset({DrainMoveState.WAITING, DrainMoveState.MOVED, DrainMoveState.LEFT})


class HeldInstance(Struct, frozen=True, kw_only=True):
    """An instance, and a host that holds something of it. code, reason: why it cannot be moved away now; "": it is
    active there. flavor: "": not known.
    """

    instance_uuid: str
    project_id: str
    source: DrainedHost
    code: str = ""
    reason: str = ""
    flavor: str = ""


def is_migration(holder: TreeHolder) -> bool:
    """Whether it is a migration, which keeps the source of an instance that moves. A claim has a number; without one
    it was written by a client of placement's API, which is no concern of a drain.
    """
    return holder.attempt > 0 and holder.consumer_type.startswith("MIGRATION")


def held_as_instance(host: DrainedHost, known: MoveContext) -> HeldInstance | None:
    """The instance whose own allocation is on this host; None: it is no instance on record."""
    build = known.build
    if build is None:
        return None
    if build.state in _UNBUILT:
        return _held(host, known, BUILDING, f"its build is {build.state}")
    if build.state is not BuildState.ACTIVE:
        return _held(host, known, _leaving(build), f"it is {build.state}, and its resources are not released yet")
    if _is_on(host, known):
        return _held(host, known)
    if known.now.under_way is not None:
        return _held(host, known, ARRIVING, f"request {known.now.under_way} is under way")
    return _held(host, known, MISPLACED, f"the book has it here, the record on {build.host}")


def held_by_migration(
    host: DrainedHost, holder: TreeHolder, move: RecordedMove | None, known: MoveContext | None
) -> HeldInstance:
    """The instance whose source a migration keeps on this host. move, known: the record of the migration's request, and
    of its instance. Where the request is not on record any more the move is unconfirmed, and the migration is named.
    """
    if move is None or known is None or known.build is None:
        reason = f"migration {holder.consumer} keeps a source here, and its request is not on record"
        uuid = holder.consumer if move is None else move.instance_uuid
        return HeldInstance(
            instance_uuid=uuid, project_id=holder.project_id, source=host, code=UNCONFIRMED, reason=reason
        )
    if known.build.state is not BuildState.ACTIVE:
        reason = f"it is {known.build.state}, and its source is not released yet"
        return _held(host, known, _leaving(known.build), reason)
    if _is_on(host, known):
        return _held(host, known)
    if known.now.under_way is not None:  # it is being confirmed, or reverted to this host
        return _held(host, known, ARRIVING, f"request {known.now.under_way} about it is under way")
    if known.now.condition is Condition.RESIZED:
        reason = f"{move.kind} {move.request_id} to {known.build.host} awaits confirm or revert"
        return _held(host, known, UNCONFIRMED, reason)
    return _held(host, known, UNRELEASED, f"the source of {move.kind} {move.request_id} is not released yet")


def arriving(host: DrainedHost, move: RecordedMove, known: MoveContext) -> HeldInstance | None:
    """The instance that a request under way brings to this host; None: it is there already."""
    if known.build is None or _is_on(host, known):
        return None
    return _held(host, known, ARRIVING, f"{move.kind} {move.request_id} to {host.name} is {move.state}")


def _leaving(build: RecordedBuild) -> str:
    """The code of an instance that is being deleted, or has ended."""
    return UNRELEASED if build.state in _ENDED else RELEASING


def _is_on(host: DrainedHost, known: MoveContext) -> bool:
    return known.build is not None and known.build.host_uuid == host.uuid


def _held(host: DrainedHost, known: MoveContext, code: str = "", reason: str = "") -> HeldInstance:
    build = known.build
    assert build is not None
    return HeldInstance(
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        source=host,
        code=code,
        reason=reason,
        flavor="" if known.build_request is None else flavor_of(known),
    )


class LookedAt(Struct, frozen=True, kw_only=True):
    """One look at hosts of a drain. uuids: of the hosts. down: {host of the drain: why nothing can be moved away from
    it now, "" where it can}.
    """

    drain: str
    kind: MoveKind
    uuids: Collection[str]
    down: Mapping[str, str]
    at: float


def reviewed(look: LookedAt, rows: Sequence[DrainMove], held: Sequence[HeldInstance]) -> list[DrainMove]:
    """The rows of a drain that change after a look at its hosts. held: all that these hold something of.

    An instance that is active there waits for its move. One that nothing in progress ends is looked at a number of
    times, as a move is tried a few times, and has then failed; so is one whose host is down. Of one that is not held
    any more `step` decides.
    """
    known = {row.instance_uuid: row for row in rows}
    found: dict[str, HeldInstance] = {}
    for one in held:
        if one.instance_uuid not in found or not one.code:
            found[one.instance_uuid] = one
    changed: list[DrainMove] = []
    for one in found.values():
        row = known.get(one.instance_uuid)
        if row is not None and not _is_due(row, look.at):
            continue
        position = len(rows) + len(changed) if row is None else row.position
        changed.append(_after(look, _placed(look, one, row, position), one))
    for row in rows:
        is_gone = row.source_uuid in look.uuids or row.source_uuid not in look.down
        if is_held(row) and is_gone and row.instance_uuid not in found and row.due_at <= look.at:
            changed.append(replace(row, code="", reason="", failures=0, due_at=0.0))
    return changed


def _is_due(row: DrainMove, now: float) -> bool:
    """Whether a look may change it: not one that is tried, or has failed, or that another scheduler has looked at."""
    if row.state is DrainMoveState.WAITING:
        return is_held(row) and row.due_at <= now
    return row.state in _OPEN_TO_REVIEW


def new_row(drain: str, kind: MoveKind, one: HeldInstance, position: int) -> DrainMove:
    """The row of an instance that the drain did not have yet. It waits."""
    return DrainMove(
        drain=drain,
        instance_uuid=one.instance_uuid,
        position=position,
        project_id=one.project_id,
        source_uuid=one.source.uuid,
        source=one.source.name,
        kind=kind,
        code=one.code,
        reason=one.reason,
    )


def _placed(look: LookedAt, one: HeldInstance, row: DrainMove | None, position: int) -> DrainMove:
    """Its row, waiting on the host that holds it. The host where the drain has moved it stays known."""
    if row is None:
        return new_row(look.drain, look.kind, one, position)
    is_same = row.source_uuid == one.source.uuid
    return replace(
        row,
        state=DrainMoveState.WAITING,
        source_uuid=one.source.uuid,
        source=one.source.name,
        host_uuid=row.host_uuid if is_same else None,
        failures=row.failures if is_held(row) else 0,
    )


def _after(look: LookedAt, row: DrainMove, one: HeldInstance) -> DrainMove:
    if not one.code:
        return replace(row, code="", reason="", failures=0, due_at=0.0)
    down = look.down.get(one.source.uuid, "")
    counted = row if row.code == one.code else replace(row, failures=0)
    if one.code in _PASSING and not down:  # what other schedulers have counted stays: they may not reach its service
        return replace(counted, code=one.code, reason=one.reason, due_at=look.at + LOOK_S)
    reason = f"{one.reason}; {one.source.name}: {down}" if down else one.reason
    most = MAX_LOOKS if one.code == UNRELEASED and not down else MAX_FAILURES
    return failed(counted, one.code, reason, look.at, most)
