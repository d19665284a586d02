"""The position of one node: its last report to placement, and how notifications and reads change it. Pure."""

# `seq` numbers what happens in one process: each notification received and each read sent takes the next number. A read
# shows the node as it was at some moment after it was sent, so its number decides which notifications it may
# contradict.

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import InventoryUpdate, ProviderReport
from bus.retrying import doubled_s
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Node
from ironic_sync.domain.rules import ABSENT, frees_more, is_transient, place, reserve_all

REPORTER = "ironic"
DELETED_AT = 0.0  # `absent_since` of a node whose deletion Ironic has announced: long enough


def reporter_name(name: str) -> str:
    """The name of an Ironic as a reporter of inventory."""
    return f"{REPORTER}_{name}" if name else REPORTER


class Position(Struct, frozen=True, kw_only=True):
    """The last report to placement about a node, and its further state."""

    uuid: str
    # Of the last report; it outlives a removal, so that a node created again under its old uuid still reports with a
    # newer one.
    version: int = 0
    report: ProviderReport | None = None  # the last report (None: nothing reported, or removed)
    problem: str = ""
    state: str | None = None
    updated_at: str | None = None
    read_at: float | None = None
    due_at: float | None = None  # when to read it next (None: with all)
    absent_since: float | None = None  # when Ironic first answered that there is no such node, though it was reported
    tries: int = 0
    notified_seq: int = 0
    read_seq: int = 0


def update_of(position: Position, cell: str = "", reporter: str = REPORTER) -> InventoryUpdate:
    """The inventory update of this node, as it stands, with the cell it belongs to."""
    return InventoryUpdate(
        reporter=reporter,
        version=position.version,
        root_uuid=position.uuid,
        providers=() if position.report is None else (position.report,),
        cell=cell or None,
    )


def next_version(last: int, now: float) -> int:
    """Return a version that is higher than the last one, and higher than those of former processes, whose positions may
    have been lost.
    """
    return max(last + 1, int(now * 1_000_000))


def on_notification(position: Position, *, taken: bool, deleted: bool = False, seq: int, now: float) -> Position:
    """A notification named the node: plan a read now, and reserve the node at once if the notification takes it
    away.
    """
    absent_since = DELETED_AT if deleted else position.absent_since
    wanted = replace(position, notified_seq=seq, due_at=now, tries=0, absent_since=absent_since)
    if not taken or position.report is None:
        return wanted
    return _with_report(wanted, reserve_all(position.report), now)


def on_announcement(position: Position, *, now: float, config: IronicSyncConfig) -> Position:
    """Something is about to happen to the node. The next notification causes a read; without one, read later."""
    due_at = now + config.announced_retry_s
    return replace(position, due_at=due_at if position.due_at is None else min(due_at, position.due_at))


def with_read_due(position: Position, *, now: float) -> Position:
    """Something other than a notification wants the node read now."""
    return replace(position, due_at=now)


def apply_read(position: Position, node: Node, *, seq: int, now: float, config: IronicSyncConfig) -> Position:
    """The node was read; the read was sent at `seq`."""
    # A read that may be older than a later notification gives nothing back: it is repeated instead. One sent before the
    # read that was last applied may have been answered after it, as a page of a list: it only takes away.
    placed = place(node, position.report)
    if seq < position.read_seq:
        if position.report is None or not frees_more(position.report, placed.report):
            return position
        return _with_report(replace(position, due_at=now), reserve_all(position.report), now)
    overtaken = position.notified_seq > seq
    if overtaken and frees_more(placed.report, position.report):
        return replace(position, due_at=now, read_seq=seq)
    known = replace(
        position,
        problem=placed.problem,
        state=node.provision_state,
        updated_at=node.updated_at or position.updated_at,
        read_at=now,
        read_seq=seq,
        tries=position.tries + 1 if node.provision_state == position.state else 0,
        due_at=None,
        absent_since=position.absent_since if overtaken else None,  # a deletion may be announced since
    )
    due_at = now if overtaken else _due(known, now, config)
    return _with_report(replace(known, due_at=due_at), placed.report, now)


def apply_removed(position: Position, *, seq: int, now: float, config: IronicSyncConfig) -> Position:
    """Ironic answered that the node does not exist (a 404 to a read of it; absence from a list proves nothing)."""
    # Ironic also answers so while it hides nodes, as from a user who has lost a role. A removal takes along what was
    # given to the provider, so the node is held back until it is seen again, or Ironic's notification of the deletion
    # or a long time proves that it is gone.
    if seq < position.read_seq:
        return position
    if position.notified_seq > seq:
        return replace(position, due_at=now, read_seq=seq)
    since = now if position.absent_since is None else position.absent_since
    if position.report is not None and now < since + config.absent_retention_s:
        due_at = since + config.absent_retention_s
        absent = replace(position, problem=ABSENT, absent_since=since, read_seq=seq, due_at=due_at, tries=0)
        return _with_report(absent, reserve_all(position.report), now)
    gone = replace(position, problem="", state=None, updated_at=None, read_at=now, read_seq=seq, due_at=None, tries=0)
    return _with_report(replace(gone, absent_since=None), None, now)


def apply_unreadable(position: Position, problem: str, *, seq: int, now: float, config: IronicSyncConfig) -> Position:
    """Ironic's answer about the node is no node. It is held back, reported as a problem, and read again."""
    if seq < position.read_seq:
        return position
    since = position.absent_since if position.notified_seq > seq else None
    wrong = replace(
        on_read_failure(position, now=now, config=config), problem=problem, read_seq=seq, absent_since=since
    )
    return wrong if wrong.report is None else _with_report(wrong, reserve_all(wrong.report), now)


def on_read_failure(position: Position, *, now: float, config: IronicSyncConfig) -> Position:
    """The read failed: plan another one, after a growing delay."""
    return replace(
        position,
        tries=position.tries + 1,
        due_at=now + doubled_s(config.failed_retry_s, config.failed_retry_max_s, position.tries),
    )


def is_absent(position: Position) -> bool:
    """Whether Ironic has no such node, as far as is known, and placement had it."""
    return position.problem == ABSENT or (position.report is None and position.version > 0)


def has_free_inventory(position: Position) -> bool:
    """Whether the last report offers something."""
    return position.report is not None and reserve_all(position.report) is not position.report


def with_new_version(position: Position, *, now: float) -> Position:
    """The same report under a new version, for a placement service that may have lost or changed it."""
    return replace(position, version=next_version(position.version, now))


def _with_report(position: Position, report: ProviderReport | None, now: float) -> Position:
    if report == position.report:
        return position
    return replace(position, report=report, version=next_version(position.version, now))


def _due(position: Position, now: float, config: IronicSyncConfig) -> float | None:
    """A stable state waits for a notification or the next read of all; the end of any other may come without one."""
    if not is_transient(position.state):
        return None
    return now + doubled_s(config.transient_retry_s, config.transient_retry_max_s, position.tries)
