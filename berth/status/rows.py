"""The rows of the list: what waits for a person, how bad it is, since when, and the next command. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from berth.audit.findings import AuditFinding
from berth.client.repair_types import Recovery
from berth.client.status import Severity, StatusKind, StatusRow, SystemState, SystemStatus
from berth.client.types import NodeRecord
from berth.text import counted
from bus.contracts.build import BuildPage, HostRecord
from bus.contracts.drains import DrainProgress
from bus.contracts.operations import AdminState, ServiceRecord
from bus.contracts.workers import WorkersPage
from cell_conductor.state.breaker import Breaker
from cell_conductor.store.keyed_tables import PROTECT, UnknownMachineRecord

NAMED = 3  # of many, in a row
SERVICE_STOPPED = "service.stopped"  # an operator has stopped it
INSTANCE_LOST = "instance.lost"
RECOVERING = "recovering"
# A scheduler knows every worker once it has listened for so long.
HEARD_ALL_S = 20.0


_RANK = {kind: rank for rank, kind in enumerate(StatusKind)}
_ORDER = {severity: rank for rank, severity in enumerate(Severity)}
# The next command, and the page that shows more; {subject} is quoted for a shell.
_NEXT: Mapping[StatusKind, tuple[str, str]] = {
    StatusKind.DATABASE_AWAY: ("berth db check", ""),
    StatusKind.BUS_AWAY: ("berth bus url --bus {subject}", ""),
    StatusKind.SCHEDULER_AWAY: ("berth run scheduler", ""),
    StatusKind.PLACEMENT_AWAY: ("berth run placement", "/system"),
    StatusKind.CONDUCTOR_AWAY: ("berth run conductor --cell {subject}", "/system"),
    StatusKind.RECOVERY_WAITS: ("berth recovery show {subject}", "/operations"),
    StatusKind.BREAKER_OPEN: ("berth breaker list --cell {subject}", "/quarantine?cell={subject}"),
    StatusKind.INSTANCES_LOST: (
        f"berth list --state failed --code {INSTANCE_LOST}",
        "/builds?state=failed&code=" + INSTANCE_LOST,
    ),
    StatusKind.SERVICES_SILENT: ("berth service list --cell {subject} --down", "/system"),
    StatusKind.FENCER_HELD: ("berth host list --down --cell {subject}", "/fleet?cell={subject}"),
    StatusKind.FENCE_UNACKNOWLEDGED: ("berth host list --cell {subject}", "/operations"),
    StatusKind.QUARANTINE: ("berth quarantine list --cell {subject}", "/quarantine?cell={subject}"),
    StatusKind.CELL_RECOVERING: ("berth recovery show {subject}", "/operations"),
    StatusKind.DRAIN_STUCK: ("berth drain show {subject}", "/drains/{subject}"),
    StatusKind.DEAD_LETTERS: ("berth dead-letter list --bus {subject}", "/dead-letters"),
    StatusKind.AUDIT_FINDINGS: ("berth audit", ""),
    StatusKind.HOSTS_NOT_IN_PLACEMENT: ("berth host list --cell {subject}", "/fleet?cell={subject}"),
    StatusKind.HOSTS_NOT_REPORTED: ("berth host list", "/fleet"),
    StatusKind.NO_HOSTS: ("berth service list", "/system"),
    StatusKind.NODE_PROBLEMS: ("berth node check", "/metal"),
    StatusKind.WORKERS_SILENT: ("berth worker list", "/system"),
    StatusKind.WORKERS_NOT_READY: ("berth worker list", "/system"),
}


def status_of(rows: Iterable[StatusRow], at: float) -> SystemStatus:
    """The whole of these rows, ranked."""
    ranked = sorted(rows, key=lambda row: (_ORDER[row.severity], _RANK[row.kind], row.subject, row.what))
    state = SystemState(ranked[0].severity.value) if ranked else SystemState.FINE
    return SystemStatus(state=state, at=at, rows=tuple(ranked))


def row(
    kind: StatusKind,
    what: str,
    *,
    subject: str = "",
    detail: str = "",
    began_at: float | None = None,
    severity: Severity = Severity.WARNING,
) -> StatusRow:
    """A row with the next command of its kind."""
    return StatusRow(
        severity=severity,
        kind=kind,
        subject=subject,
        what=what,
        detail=detail,
        since=began_at or None,
        next=next_of(kind, subject),
        page=_NEXT[kind][1].format(subject=subject),
    )


def next_of(kind: StatusKind, subject: str) -> str:
    """The next command."""
    return _NEXT[kind][0].format(subject=shlex.quote(subject))


def not_read(what: str, code: str, reason: str, *, following: str = "") -> StatusRow:
    """The row of a part that could not be read."""
    return StatusRow(
        severity=Severity.NOT_KNOWN,
        kind=StatusKind.NOT_READ,
        subject=what,
        what=f"Not known: {what}",
        detail=f"{code}: {reason}" if reason else code,
        next=following,
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def of_breakers(cell: str, breakers: Sequence[Breaker]) -> list[StatusRow]:
    """The open ones of a cell."""
    found = [one for one in breakers if one.is_open]
    if not found:
        return []
    lost, unknown, over = (sum(getattr(one, name) for one in found) for name in ("lost", "quarantined", "over"))
    what = f"Cell {cell}: destruction is stopped for {counted(len(found), 'compute service')}"
    detail = f"{_named([one.service for one in found])}: {lost} machines lost, {unknown} unknown, {over} over"
    since = min(one.tripped_at for one in found)
    return [
        row(StatusKind.BREAKER_OPEN, what, subject=cell, detail=detail, began_at=since, severity=Severity.CRITICAL)
    ]  # fmt: skip


def of_quarantine(cell: str, machines: Sequence[UnknownMachineRecord]) -> list[StatusRow]:
    """Machines in quarantine of a cell, less those that an operator keeps."""
    found = [one for one in machines if one.decision != PROTECT]
    if not found:
        return []
    what = f"Cell {cell}: {counted(len(found), 'machine')} in quarantine"
    detail = "they have this database's tag, and no record explains them"
    return [
        row(StatusKind.QUARANTINE, what, subject=cell, detail=detail, began_at=min(one.first_seen for one in found))
    ]  # fmt: skip


def of_recovery(one: Recovery) -> list[StatusRow]:
    """A cell whose database was restored."""
    if one.state != RECOVERING:
        return []
    if one.is_waiting:
        what = f"Cell {one.cell}: its recovery waits for a decision"
        detail = f"{counted(one.losses.count, 'instance')} would be lost, {counted(one.losses.builds, 'build')} end"
        return [
            row(StatusKind.RECOVERY_WAITS, what, subject=one.cell, detail=detail, severity=Severity.CRITICAL)
        ]  # fmt: skip
    silent = sorted(name for name, has_nothing in one.absent.items() if not has_nothing)
    detail = f"compute services that have not listed their machines: {_named(silent)}" if silent else ""
    return [row(StatusKind.CELL_RECOVERING, f"Cell {one.cell}: recovers", subject=one.cell, detail=detail)]


def of_services(services: Sequence[ServiceRecord]) -> list[StatusRow]:
    """The silent compute services of each cell; those that were stopped on purpose are none."""
    of_cells: dict[str, list[ServiceRecord]] = defaultdict(list)
    for one in services:
        if one.code != SERVICE_STOPPED or one.up:
            of_cells[one.cell].append(one)
    found = []
    for cell, every in sorted(of_cells.items()):
        silent = [one for one in every if not one.up]
        if not silent:
            continue
        what = f"Cell {cell}: {len(silent):,} of {counted(len(every), 'compute service')} silent"
        hosts = sum(one.hosts for one in silent)
        detail = f"{counted(hosts, 'host')} take no builds: {_named([one.name for one in silent])}"
        since = min((one.since for one in silent if one.since), default=None)
        severity = Severity.CRITICAL if len(silent) == len(every) else Severity.WARNING
        found.append(
            row(StatusKind.SERVICES_SILENT, what, subject=cell, detail=detail, began_at=since, severity=severity)
        )
    return found


def of_workers(page: WorkersPage, cells: Sequence[str], now: float) -> list[StatusRow]:
    """Silent workers, workers that wait for a server, and roles that have none at work."""
    found = []
    silent = [one for one in page.workers if one.silent]
    waiting = [one for one in page.workers if one.heartbeat.not_ready and not one.silent]
    if silent:
        since = now - max(one.last_seen_s for one in silent)
        names = _named([one.heartbeat.worker for one in silent])
        found.append(
            row(StatusKind.WORKERS_SILENT, f"{counted(len(silent), 'worker')} silent", detail=names, began_at=since)
        )
    if waiting:
        reasons = [f"{one.heartbeat.worker} waits for {', '.join(one.heartbeat.not_ready)}" for one in waiting]
        what = f"{counted(len(waiting), 'worker')} not ready"
        found.append(row(StatusKind.WORKERS_NOT_READY, what, detail=_named(reasons)))
    if page.since_s < HEARD_ALL_S:
        return found
    alive = {(one.heartbeat.role, one.bus) for one in page.workers if not one.silent}
    if "placement" not in {role for role, _ in alive}:
        detail = "claims and inventory updates wait"
        found.append(
            row(StatusKind.PLACEMENT_AWAY, "No placement worker runs", detail=detail, severity=Severity.CRITICAL)
        )
    found += [
        row(
            StatusKind.CONDUCTOR_AWAY,
            f"Cell {cell}: no conductor runs",
            subject=cell,
            detail="its builds, deletes and moves wait",
            severity=Severity.CRITICAL,
        )
        for cell in cells
        if ("conductor", cell) not in alive
    ]
    return found


def of_hosts(hosts: Sequence[HostRecord]) -> list[StatusRow]:
    """Fences that a cell has not acknowledged, hosts that placement does not have, and hosts of no compute service.

    Those that no service has reported yet are not down: a scheduler that has just started has heard of none.
    """
    if not hosts:
        return [row(StatusKind.NO_HOSTS, "No hosts", detail="no compute service has announced one yet")]
    fenced: dict[str, list[HostRecord]] = defaultdict(list)
    unbooked: dict[str, list[HostRecord]] = defaultdict(list)
    for host in hosts:
        admin = host.admin
        if admin is not None and admin.state is AdminState.FENCED and not admin.is_fence_acknowledged:
            fenced[host.cell or ""].append(host)
        if host.not_in_placement:
            unbooked[host.cell or ""].append(host)
    found = []
    for cell, waiting in sorted(fenced.items()):
        what = f"Cell {cell or '?'}: {counted(len(waiting), 'fence')} not acknowledged"
        detail = f"leave these hosts off: {_named([host.name for host in waiting])}"
        since = min(host.admin.at for host in waiting if host.admin is not None)
        found.append(_of_cell(StatusKind.FENCE_UNACKNOWLEDGED, what, cell, detail, since))
    for cell, missing in sorted(unbooked.items()):
        what = f"Cell {cell or '?'}: {counted(len(missing), 'reported host')} not in placement"
        detail = f"{missing[0].name}: {missing[0].not_in_placement}"
        found.append(_of_cell(StatusKind.HOSTS_NOT_IN_PLACEMENT, what, cell, detail))
    if orphans := [host for host in hosts if not host.reported]:
        what = f"{len(orphans):,} of {counted(len(hosts), 'host')} not reported"
        detail = f"by no compute service since the scheduler's start: {_named([host.name for host in orphans])}"
        found.append(row(StatusKind.HOSTS_NOT_REPORTED, what, detail=detail))
    return found


def _of_cell(kind: StatusKind, what: str, cell: str, detail: str, since: float | None = None) -> StatusRow:
    """The row of a cell, or of hosts whose cell is not known."""
    if cell:
        return row(kind, what, subject=cell, detail=detail, began_at=since)
    return StatusRow(
        severity=Severity.WARNING,
        kind=kind,
        what=what,
        detail=detail,
        since=since,
        next="berth host list",
        page="/fleet",
    )


def of_held(held: Mapping[str, str], hosts: Iterable[HostRecord]) -> list[StatusRow]:
    """Silent hosts that the fencer leaves to a person. held: {name of a host: the code for it}."""
    of_cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    cells = {host.name: host.cell or "" for host in hosts}
    for name, code in sorted(held.items()):
        of_cells[cells.get(name, ""), code].append(name)
    return [
        _of_cell(
            StatusKind.FENCER_HELD,
            f"Cell {cell or '?'}: the fencer leaves {counted(len(names), 'silent host')} to a person",
            cell,
            f"{code}: {_named(names)}",
        )
        for (cell, code), names in of_cells.items()
    ]


def of_drains(drains: Iterable[DrainProgress], is_stuck: Callable[[DrainProgress], bool]) -> list[StatusRow]:
    """Drains of which nothing that is left can move."""
    return [
        row(
            StatusKind.DRAIN_STUCK,
            f"The drain of {one.target} {one.host} is stuck",
            subject=one.id,
            detail=f"{counted(len(one.failed), 'instance')} cannot move: {one.failed[0].code}" if one.failed else "",
            began_at=one.started_at,
        )
        for one in drains
        if is_stuck(one)
    ]


def of_losses(page: BuildPage) -> list[StatusRow]:
    """Instances that were lost and that nobody has deleted since."""
    if not page.builds:
        return []
    many = f"{len(page.builds):,}{'+' if page.searched_to is not None else ''}"
    what = f"{many} {'instance was' if many == '1' else 'instances were'} lost"
    detail = "their hosts do not run them any more; they end with a delete"
    since = min(one.updated_at or one.created_at for one in page.builds)
    return [row(StatusKind.INSTANCES_LOST, what, detail=detail, began_at=since, severity=Severity.CRITICAL)]


def of_dead_letters(bus: str, count: int, oldest: tuple[str, str, float | None] | None) -> list[StatusRow]:
    """Dead letters of a bus. oldest: (queue, code, when) of the oldest of them."""
    if not count:
        return []
    queue, code, at = oldest or ("", "", None)
    detail = f"the oldest of {queue}: {code}" if oldest else ""
    what = f"{counted(count, 'dead letter')} on bus {bus}"
    return [row(StatusKind.DEAD_LETTERS, what, subject=bus, detail=detail, began_at=at)]


def of_findings(findings: Sequence[AuditFinding]) -> list[StatusRow]:
    """Findings of an audit, by kind."""
    if not findings:
        return []
    kinds: dict[str, int] = defaultdict(int)
    for one in findings:
        kinds[one.kind.value.replace("_", " ")] += 1
    what = f"{counted(len(findings), 'finding')} of the audit"
    detail = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    return [row(StatusKind.AUDIT_FINDINGS, what, detail=detail)]


def of_nodes(nodes: Sequence[NodeRecord]) -> list[StatusRow]:
    """Nodes of Ironic that no build can go to."""
    wrong = [node for node in nodes if node.problems]
    if not wrong:
        return []
    what = f"{len(wrong):,} of {counted(len(nodes), 'bare-metal node')} take no builds"
    detail = f"{wrong[0].name or wrong[0].uuid}: {wrong[0].problems[0]}"
    return [row(StatusKind.NODE_PROBLEMS, what, detail=detail)]


def since(one: StatusRow, at: float) -> StatusRow:
    """The row, with this time if it has none."""
    return one if one.since is not None else msgspec.structs.replace(one, since=at)
