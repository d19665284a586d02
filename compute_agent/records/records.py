"""A compute service's records across its own restarts: attempts, also ended ones, failures, and used numbers."""

# In memory, and in a journal when there is a directory for it. Everything is an absolute value, so reading the journal
# again in order gives the same memory.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import MachineChanged
from bus.contracts.base import MAX_EPOCH, DatabaseMark, Resources, encode
from bus.contracts.cell import ComputeResult, Destroy, InstanceSpec, ReservedMachine, Spawn
from compute_agent.records.attempt import ENDED, AttemptPhase, HostAttempt, answer, is_lost
from compute_agent.records.journal import Journal

Key = tuple[str, str]  # (host uuid, instance uuid)
K = TypeVar("K")
V = TypeVar("V")

MAX_ENDED = (
    200_000  # ended attempts and failures kept; a command that comes later than that many others is not expected
)
MAX_SPEC_BYTES = 64 * 1024  # of the spec and the allocations of one machine, as JSON
REWRITE_AFTER = 100_000  # journal rows beyond four times what is alive
HOSTS_A_ROW = 1000
VERSIONS_PER_MS = 2**20  # versions are milliseconds with room to count within one
FARTHEST = 2**62 - 2**52  # no clock comes near it before the year 2100, and no contract lets versions pass 2**62


class HostAttemptRow(Struct, frozen=True, array_like=True, tag="e"):
    """An attempt's entry; with the command while it is being built, so that a restart can go on."""

    host: str
    instance: str
    entry: HostAttempt
    spawn: Spawn | None = None


class CheckRow(Struct, frozen=True, array_like=True, tag="c"):
    """A command to destroy what is not complete, for which the host is yet to be looked at."""

    command: Destroy
    is_due: bool  # whether it still is


class PurgeRow(Struct, frozen=True, array_like=True, tag="f"):
    """An old ended attempt is no longer remembered."""

    host: str
    instance: str


class SpecRow(Struct, frozen=True, array_like=True, tag="s"):
    """The spec and the allocations of an attempt's machine, as they were commanded last."""

    host: str
    instance: str
    attempt: int
    spec: InstanceSpec | None  # None: spec and allocations are too long
    allocations: dict[str, Resources]


class FailuresRow(Struct, frozen=True, array_like=True, tag="h"):
    """Consecutive failed builds of a host."""

    host: str
    failed_builds: int


class ReservedRow(Struct, frozen=True, array_like=True, tag="r"):
    """All machines of a host whose resources are kept out of its inventory."""

    host: str
    machines: tuple[ReservedMachine, ...]  # empty: it has no such machines any more


class InPlacementRow(Struct, frozen=True, array_like=True, tag="b"):
    """Hosts whose inventory may be published under this name, or was taken back."""

    hosts: tuple[str, ...]
    is_in: bool


class UndeployingRow(Struct, frozen=True, array_like=True, tag="u"):
    """The tag of a machine, which undeploying its node wipes."""

    host: str
    instance: str
    owner_tag: tuple[int, str] | None  # attempt and database id (None: it is undeployed)


class NumbersRow(Struct, frozen=True, array_like=True, tag="n"):
    """Epoch of the last start, last inventory version used, and how many times the service has started."""

    epoch: int
    version: int
    starts: int


class MarkRow(Struct, frozen=True, array_like=True, tag="i"):
    """The highest incarnation of the cell's database by which the service was commanded, and what of it was on disk."""

    database_incarnation: int
    sent_sequences: tuple[int, ...] = ()


Row = (
    MarkRow
    | HostAttemptRow
    | CheckRow
    | PurgeRow
    | SpecRow
    | FailuresRow
    | ReservedRow
    | InPlacementRow
    | UndeployingRow
    | NumbersRow
)


class Records:
    """One service's memory. Reads are plain dictionary look-ups; each change is written before it is relied on."""

    def __init__(self, path: Path | None = None, *, synced: bool = True) -> None:
        """synced: whether a power cut is to be survived, as machines do that are real."""
        self._journal: Journal[Row] | None = Journal(path, Row, synced=synced) if path else None  # type: ignore[arg-type]
        self._entries: dict[Key, HostAttempt] = {}
        self._spawns: dict[Key, Spawn] = {}
        self.checks: dict[Key, tuple[Destroy, ...]] = {}  # for which the host is yet to be looked at
        self._specs: dict[Key, SpecRow] = {}  # of machines that are there, are being built, or were not listed
        self._failed: dict[Key, None] = {}  # that may have left something
        self._ended: dict[Key, None] = {}  # in the order they ended: the oldest is deleted first
        self._running: dict[Key, None] = {}
        self._lost: dict[Key, None] = {}
        self._failures: dict[str, int] = {}
        self._reserved: dict[str, tuple[ReservedMachine, ...]] = {}
        self._in_placement: dict[str, bool] = {}
        self._undeploying: dict[Key, tuple[int, str]] = {}  # one a node at most
        self.mark = self._mark_written = DatabaseMark()  # the highest by which it was commanded
        self.epoch = 0
        self.former: set[int] = set()  # epochs of this process that it has outgrown
        self.version = 0
        self.starts = 0
        self.scans = 0  # of the hosts, begun in this process: orders results and reports, whatever clocks do
        self.accepted = 0  # builds accepted since the first start in this process

    @classmethod
    def of_service(cls, state_dir: str | None, cell: str, service: str, *, synced: bool) -> Records:
        """The records of this service: in a file below this directory, or in memory without one."""
        return cls(Path(state_dir) / f"{cell}.{service}.records", synced=synced) if state_dir else cls()

    def open(self) -> None:
        """Read the journal, if there is one."""
        if self._journal is not None:
            for row in self._journal.open():
                self._apply(row)

    def close(self) -> None:
        """Let go of the journal; the memory stays readable."""
        if self._journal is not None:
            self._journal.close()

    # --- attempts

    def get(self, key: Key) -> HostAttempt | None:
        """The record of this instance on this host."""
        return self._entries.get(key)

    def spawn_of(self, key: Key) -> Spawn | None:
        """The command of a build that has not ended."""
        return self._spawns.get(key)

    def spec_of(self, key: Key, attempt: int | None) -> SpecRow | None:
        """The spec of this attempt's machine; None: it is too long, or a release recorded it that kept none."""
        row = self._specs.get(key)
        return row if row is not None and row.attempt == attempt and row.spec is not None else None

    def keep_spec(self, key: Key, attempt: int, spec: InstanceSpec, allocations: Mapping[str, Resources]) -> None:
        """Its machine is of this spec now: it was resized or rebuilt."""
        row = _spec_row(key, attempt, spec, allocations)
        self._apply(row)
        self.write([row])

    def unlisted(self) -> list[Key]:
        """The builds that have not ended, and those that have failed since and no command has ended: a host may have
        something of them, and not list it.
        """
        return [*self._spawns, *self._failed]

    def entries(self) -> Iterator[tuple[Key, HostAttempt]]:
        """All of them, oldest first."""
        return iter(list(self._entries.items()))

    def note(self, key: Key, entry: HostAttempt, spawn: Spawn | None = None) -> HostAttemptRow:
        """Remember an entry in memory; returns the row to `write`, so that a batch is written at once."""
        row = HostAttemptRow(key[0], key[1], entry, spawn)
        self._apply(row)
        return row

    def note_check(self, command: Destroy, *, is_due: bool) -> CheckRow:
        """As `note`: the host is to be looked at for this command, or has been."""
        row = CheckRow(command, is_due)
        self._apply(row)
        return row

    def write(self, rows: Sequence[Row]) -> None:
        """Write these rows, and the purges that they cause, to the journal."""
        more: list[Row] = []
        if rows and self._mark_written is not self.mark:
            self._mark_written = self.mark
            more.append(_mark_row(self.mark))
        while len(self._ended) > MAX_ENDED:
            row = PurgeRow(*next(iter(self._ended)))
            self._apply(row)
            more.append(row)
        if self._journal is not None:
            self._journal.append([*rows, *more])
            if self._journal.rows > REWRITE_AFTER + 4 * len(self._entries):
                self._journal.rewrite(self._snapshot())

    async def sync(self) -> None:
        """Return when what was written so far survives a power cut, if it is to. Raises JournalUnusable."""
        # Awaited before a command is acknowledged, a result published or a machine's tag wiped.
        if self._journal is not None:
            await self._journal.sync()

    def put(self, key: Key, entry: HostAttempt, spawn: Spawn | None = None) -> None:
        """Remember one entry and write it."""
        self.write([self.note(key, entry, spawn)])

    def reported(self, results: Sequence[ComputeResult | MachineChanged]) -> None:
        """These results have reached the broker: a restart need not publish them again."""
        rows: list[Row] = []
        for result in results:
            key = (result.host_uuid, result.instance_uuid)
            entry = self._entries.get(key)
            if isinstance(result, MachineChanged):
                if entry is not None and entry.changing is not None and entry.change_number == result.change_number:
                    rows.append(self.note(key, replace(entry, changing=None)))
            elif entry is not None and not entry.reported and answer(entry) == (result.attempt, result.outcome):
                rows.append(self.note(key, replace(entry, reported=True)))
        self.write(rows)

    def is_live(self, host: str, instance: str) -> bool:
        """Whether a machine of this instance may be on this host, as far as is known."""
        entry = self._entries.get((host, instance))
        return entry is not None and entry.phase not in ENDED

    def running(self) -> dict[Key, HostAttempt]:
        """The machines that run, as far as is known."""
        return {key: self._entries[key] for key in self._running}

    def holding_hosts(self) -> frozenset[str]:
        """Hosts with a machine on record that the cell has not ended, also those that were seen without it."""
        return frozenset(host for host, _ in (*self._running, *self._lost))

    # --- hosts and numbers

    def reserved(self, host: str) -> tuple[ReservedMachine, ...]:
        """The machines of this host whose resources are kept out of its inventory."""
        return self._reserved.get(host, ())

    def count_reserved(self, *, sized: bool) -> int:
        """This many of them; sized: whose resources are known."""
        return sum(bool(one.allocations) is sized for machines in self._reserved.values() for one in machines)

    def reserve(self, hosts: Mapping[str, tuple[ReservedMachine, ...]]) -> list[str]:
        """Put these in place of those that each host had; returns the hosts where that changed something."""
        rows = [ReservedRow(host, machines) for host, machines in hosts.items() if machines != self.reserved(host)]
        for row in rows:
            self._apply(row)
        self.write(rows)
        return [row.host for row in rows]

    def in_placement(self) -> list[str]:
        """The hosts whose inventory may be published and was not taken back."""
        return [host for host, is_in in self._in_placement.items() if is_in]

    def record_in_placement(self, hosts: Sequence[str], *, is_in: bool) -> None:
        """The inventory of these hosts is about to be published, or is taken back."""
        changed = tuple(host for host in hosts if self._in_placement.get(host, False) is not is_in)
        if changed:
            row = InPlacementRow(changed, is_in)
            self._apply(row)
            self.write([row])

    def undeploying(self, host: str) -> dict[str, tuple[int, str]]:
        """{instance: (attempt, database_id)} in the tags of the machines that are being undeployed here."""
        return {instance: tag for (at, instance), tag in self._undeploying.items() if at == host}

    def record_teardown(self, host: str, instance: str, tag: tuple[int, str] | None) -> None:
        """This machine is about to be undeployed; None: nothing of it is left."""
        if self._undeploying.get((host, instance)) != tag:
            row = UndeployingRow(host, instance, tag)
            self._apply(row)
            self.write([row])

    def may_predate_restore(self, mark: DatabaseMark) -> bool:
        """Whether what was decided by this incarnation of the cell's database is refused. A higher one than any before
        is remembered, and a higher mark in it with what is written next.
        """
        known, self.mark = self.mark, self.mark.joined(mark)
        if self.mark.database_incarnation > known.database_incarnation:
            self._mark_written = self.mark
            self.write([_mark_row(self.mark)])
        return mark.database_incarnation < self.mark.database_incarnation

    def failed_builds(self, host: str) -> int:
        """Consecutive failed builds of a host."""
        return self._failures.get(host, 0)

    def record_failed_builds(self, host: str, failed_builds: int) -> bool:
        """Set them; returns whether that changed anything."""
        if self._failures.get(host, 0) == failed_builds:
            return False
        row = FailuresRow(host, failed_builds)
        self._apply(row)
        self.write([row])
        return True

    def start(self, now_s: float) -> int:
        """Record a start. Its epoch is higher than all earlier ones, also when the clock was restored."""
        epoch = min(max(self.epoch + 1, int(now_s * 1000)), MAX_EPOCH)
        self._numbers(NumbersRow(epoch, self.version, self.starts + 1))
        return self.epoch

    def outgrow(self, epoch: int = 0, version: int = 0) -> bool:
        """Continue above the versions that others have received under this name; returns whether it was higher."""
        # A version at most `FARTHEST`.
        if not (self.epoch < epoch < MAX_EPOCH or self.version < version <= FARTHEST):
            return False
        if self.epoch < epoch < MAX_EPOCH:
            self.former.add(self.epoch)
            self.epoch = epoch + 1
        if self.version < version <= FARTHEST:
            self.version = version
        self._numbers(NumbersRow(self.epoch, self.version, self.starts))
        return True

    def begin_scan(self) -> int:
        """Count one more scan of the hosts; returns its number."""
        self.scans += 1
        return self.scans

    def versions(self, count: int, now_s: float) -> int:
        """Reserve `count` inventory versions, higher than all before; returns the first."""
        first = max(self.version + 1, int(now_s * 1000) * VERSIONS_PER_MS)
        self._numbers(NumbersRow(self.epoch, first + count - 1, self.starts))
        return first

    def _numbers(self, row: NumbersRow) -> None:
        self._apply(row)
        self.write([row])

    def _apply(self, row: Row) -> None:
        match row:
            case MarkRow():
                self.mark = self._mark_written = DatabaseMark(row.database_incarnation, row.sent_sequences)
            case HostAttemptRow(host, instance, entry, spawn):
                self._apply_entry((host, instance), entry, spawn)
            case CheckRow(command, is_due):
                key = (command.host_uuid, command.instance_uuid)
                others = tuple(one for one in self.checks.get(key, ()) if one != command)
                _set(self.checks, key, (*others, command) if is_due else others)
            case PurgeRow(host, instance):
                for forgetful in (self._entries, self._spawns, self._specs, self._ended, self._failed, self._lost):
                    forgetful.pop((host, instance), None)
            case SpecRow(host, instance):
                self._specs[host, instance] = row
            case FailuresRow(host, failed_builds):
                self._failures[host] = failed_builds
            case ReservedRow(host, machines):
                _set(self._reserved, host, machines)
            case InPlacementRow(hosts, is_in):
                self._in_placement.update(dict.fromkeys(hosts, is_in))
            case UndeployingRow(host, instance, tag):
                _set(self._undeploying, (host, instance), tag)
            case NumbersRow(epoch, version, starts):
                self.epoch, self.version, self.starts = epoch, version, starts

    def _apply_entry(self, key: Key, entry: HostAttempt, spawn: Spawn | None) -> None:
        self._entries[key] = entry
        if entry.phase in ENDED and not is_lost(entry):
            self._specs.pop(key, None)
        if spawn is not None:
            self._spawns[key] = spawn
            self._specs[key] = _spec_row(key, spawn.attempt, spawn.spec, spawn.allocations)
        elif entry.phase is not AttemptPhase.BUILDING:
            self._spawns.pop(key, None)
        for table, belongs in (
            (self._running, entry.phase is AttemptPhase.RUNNING),
            (self._lost, is_lost(entry)),
            (self._ended, entry.phase in ENDED),
            (self._failed, entry.phase is AttemptPhase.FAILED and not is_lost(entry)),
        ):
            if belongs:
                table[key] = None
            else:
                table.pop(key, None)

    def _snapshot(self) -> Iterator[Row]:
        yield NumbersRow(self.epoch, self.version, self.starts)
        yield _mark_row(self.mark)
        for host, count in self._failures.items():
            yield FailuresRow(host, count)
        for host, machines in self._reserved.items():
            yield ReservedRow(host, machines)
        in_placement = self.in_placement()
        for at in range(0, len(in_placement), HOSTS_A_ROW):
            yield InPlacementRow(tuple(in_placement[at : at + HOSTS_A_ROW]), is_in=True)
        for key, tag in self._undeploying.items():
            yield UndeployingRow(key[0], key[1], tag)
        for key, entry in self._entries.items():
            yield HostAttemptRow(key[0], key[1], entry, self._spawns.get(key))
        yield from self._specs.values()
        for commands in self.checks.values():
            yield from (CheckRow(command, is_due=True) for command in commands)


def _set(table: dict[K, V], key: K, value: V | None) -> None:
    """As the newest; nothing, if it is empty."""
    table.pop(key, None)
    if value:
        table[key] = value


def _mark_row(mark: DatabaseMark) -> MarkRow:
    return MarkRow(mark.database_incarnation, mark.sent_sequences)


def _spec_row(key: Key, attempt: int, spec: InstanceSpec, allocations: Mapping[str, Resources]) -> SpecRow:
    """Without its config drive where it is too long with that, and without all where it is too long without."""
    row = SpecRow(*key, attempt, spec, dict(allocations))
    if len(encode(row)) > MAX_SPEC_BYTES:
        row = replace(row, spec=replace(spec, config_drive=None))
    return row if len(encode(row)) <= MAX_SPEC_BYTES else SpecRow(*key, attempt, None, {})
