"""What the rows of `compute_nodes` in Nova's cell databases tell of each host, and no API does. Hostile until
`hardware_of` has returned: a part that cannot be read is None, and a filter that needs it rejects the host. Pure: rows
and times come in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

TABLE: Final = "compute_nodes"
MAX_TEXT: Final = 2**18  # characters of one column; MariaDB's TEXT has at most 64 KiB, PostgreSQL's any number
MAX_STATS: Final = 1_000  # entries of `stats`, one a project, kind of operating system and state
MAX_PLAIN: Final = 64  # of them those of a driver's own, as the properties of an Ironic node, and metrics of one host
MAX_WORD: Final = 255
MAX_SUPPORTED: Final = 256  # triples of architecture, hypervisor type and mode
MAX_COUNT: Final = 2**31 - 1
MAX_VALUE: Final = 1e15  # of a metric
CPU_RATIO, RAM_RATIO, MAX_RATIO = 4.0, 1.0, 1e6  # Nova's initial ratios, for rows that have none

_NAME = re.compile(r"[\w.+ -]{1,64}")
# Of `stats`: what changes with each instance, or with each minute; no flavor names it as a host's property.
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")
_CHANGING: Final = ("num_", "io_workload", "failed_builds", "uptime")
# Nova's database has these as parts of 1, its objects as hundredths.
_PERCENT: Final = re.compile(r"cpu\.((user|kernel|idle|iowait)\.)?percent")


class NodeRow(Struct, frozen=True, kw_only=True):
    """A row of TABLE, as read. JSON is text, cut off after MAX_TEXT + 1 characters."""

    id: int
    uuid: str | None = None
    host: str | None = None
    hypervisor_hostname: str | None = None
    hypervisor_version: int | None = None
    free_disk_gb: int | None = None  # None: its nova-compute has made the row, and not written it yet
    stats: str | None = None
    metrics: str | None = None
    supported_instances: str | None = None
    pci_stats: str | None = None
    numa_topology: str | None = None
    cpu_allocation_ratio: float | None = None
    ram_allocation_ratio: float | None = None


class HostStats(Struct, frozen=True, kw_only=True):
    """What a nova-compute counts of its instances, and its driver tells."""

    num_instances: int = 0
    num_io_ops: int = 0  # instances that are built, moved, resized, snapshotted, rescued or unshelved now
    failed_builds: int = 0  # since the last build that succeeded
    plain: Mapping[str, str] = {}  # the other values, which a flavor's capabilities may name


class HostHardware(Struct, frozen=True, kw_only=True):
    """What one compute node's row tells. A part that cannot be read is None, and named in `unreadable`."""

    host: str
    nodename: str
    hypervisor_version: int = 0  # 0: unknown
    stats: HostStats | None = HostStats()
    metrics: Mapping[str, float] | None = {}  # in the units of Nova's objects
    # (architecture, hypervisor type, mode), as its driver lists them; (): none
    supported_instances: tuple[tuple[str, str, str], ...] | None = ()
    # numa_topology, pci_pools: Nova's JSON of a NUMATopology and a PciDevicePoolList, not looked into; "": the host has
    # none
    numa_topology: str | None = ""
    pci_pools: str | None = ""
    cpu_allocation_ratio: float = CPU_RATIO
    ram_allocation_ratio: float = RAM_RATIO
    unreadable: tuple[str, ...] = ()  # names of columns


class ColumnUnreadable(ValueError):
    """A column that is not what Nova writes."""


def hardware_of(row: NodeRow) -> HostHardware:
    """A row, parsed. As in Nova a row that its nova-compute has not written yet tells nothing."""
    known = HostHardware(host=row.host or "", nodename=row.hypervisor_hostname or "")
    if row.free_disk_gb is None:
        return known
    parts: dict[str, Any] = {}
    unreadable: list[str] = []
    for name, column, parse in (
        ("stats", row.stats, _stats),
        ("metrics", row.metrics, _metrics),
        ("supported_instances", row.supported_instances, _supported),
        ("numa_topology", row.numa_topology, str),
        ("pci_pools", row.pci_stats, str),
    ):
        try:
            parts[name] = parse(_bounded(column))
        except (
            ValueError,
            msgspec.DecodeError,
            RecursionError,
        ):  # ValueError: ColumnUnreadable, or text that is no UTF-8
            parts[name] = None
            unreadable.append(name)
    version = row.hypervisor_version or 0
    parts["cpu_allocation_ratio"] = _ratio(row.cpu_allocation_ratio, CPU_RATIO)
    parts["ram_allocation_ratio"] = _ratio(row.ram_allocation_ratio, RAM_RATIO)
    parts["hypervisor_version"] = version if 0 <= version <= MAX_COUNT else 0
    return msgspec.structs.replace(known, **parts, unreadable=tuple(unreadable))


def _ratio(given: float | None, initial: float) -> float:
    """As Nova reads it: one that is 0 is none. NaN is in no bounds."""
    return given if given is not None and 0 < given <= MAX_RATIO else initial


def _bounded(column: str | None) -> str:
    if column is not None and len(column) > MAX_TEXT:
        raise ColumnUnreadable(f"more than {MAX_TEXT} characters")
    return column or ""


def _stats(text: str) -> HostStats:
    """Raises ColumnUnreadable, DecodeError, ValidationError."""
    found = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    if len(found) > MAX_STATS:
        raise ColumnUnreadable(f"more than {MAX_STATS} entries")
    plain: dict[str, str] = {}
    for key, value in found.items():
        is_plain = isinstance(value, (str, int, float)) and not key.startswith(_CHANGING)
        if is_plain and len(key) <= MAX_WORD and len(str(value)) <= MAX_WORD and len(plain) < MAX_PLAIN:
            plain[key] = str(value)
    return HostStats(
        num_instances=_count(found.get("num_instances", 0)),
        num_io_ops=_count(found.get("io_workload", 0)),
        failed_builds=_count(found.get("failed_builds", 0)),
        plain=plain,
    )


def _count(value: object) -> int:
    """A number, which Nova's older releases wrote as text. Raises ColumnUnreadable."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if not isinstance(value, (int, float)) or not -MAX_COUNT <= value <= MAX_COUNT:
        raise ColumnUnreadable("no number of instances")
    return int(value)


class _Metric(Struct, frozen=True):
    name: str
    value: float | None = None  # a metric may have other numbers instead


def _metrics(text: str) -> dict[str, float]:
    """{name: number}. Raises ColumnUnreadable, DecodeError, ValidationError."""
    given = msgspec.json.decode(text, type=list[_Metric]) if text else []
    if len(given) > MAX_PLAIN:
        raise ColumnUnreadable(f"more than {MAX_PLAIN} metrics")
    found: dict[str, float] = {}
    for one in given:
        if one.value is None or len(one.name) > MAX_WORD:
            continue
        value = one.value * 100 if _PERCENT.fullmatch(one.name) else one.value
        if not -MAX_VALUE <= value <= MAX_VALUE:  # NaN is none of these
            raise ColumnUnreadable("a metric out of bounds")
        found[one.name] = float(math.trunc(value))
    return found


def _supported(text: str) -> tuple[tuple[str, str, str], ...]:
    """Raises ColumnUnreadable, DecodeError, ValidationError."""
    given = msgspec.json.decode(text, type=list[list[str]]) if text else []
    if len(given) > MAX_SUPPORTED or not all(len(one) >= 3 and all(map(_NAME.fullmatch, one[:3])) for one in given):
        raise ColumnUnreadable("no list of what the host runs")
    return tuple((one[0].lower(), one[1].lower(), one[2].lower()) for one in given)


class KnownRow(Struct, frozen=True, kw_only=True):
    """What a row tells of the compute node with this root provider."""

    uuid: str
    hardware: HostHardware


class CellRead(Struct, frozen=True, kw_only=True):
    """What one complete read of a cell's database found, in one transaction."""

    present: Collection[int]  # the ids of all its compute nodes
    # {id: what it tells} of those whose row may have changed since the read before; None: not whose it is
    changed: Mapping[int, KnownRow | None]
    written: Collection[int] = ()  # the ids of those whose time is another than at the read before
    # {instance that was asked for: the (host, nodename) that it is on, or moves to}
    sights: Mapping[str, Collection[tuple[str, str]]] = {}


class TakenRead(Struct, frozen=True, kw_only=True):
    """A complete read that was taken over."""

    number: int
    read_s: float  # when it began
    before: int  # the number of the complete one before it
    written: Collection[str]  # the compute nodes (uuids) whose rows were written since that


class HostFacts:
    """The facts of all compute nodes, by uuid of their root providers, each as the last complete read of its cell has
    it. max_age_s: seconds after which a read counts no more; a row itself may be weeks old.
    """

    def __init__(self, cells: Collection[str], *, max_age_s: float) -> None:
        self.cells = tuple(sorted(cells))  # (uuids) whose databases are read
        self.max_age_s = max_age_s
        self.hardware: dict[str, HostHardware] = {}  # of each compute node, whatever its age
        self._cell_of: dict[str, str] = {}  # the cell whose read has named it last
        self._rows: dict[str, dict[int, KnownRow]] = {cell: {} for cell in self.cells}
        self._begun = dict.fromkeys(self.cells, 0)  # reads
        self._complete = dict.fromkeys(self.cells, 0)  # the number of the last complete one
        self._read_s = dict.fromkeys(self.cells, -math.inf)  # when that one began

    def begin(self, cell: str) -> int:
        """A read of a cell begins: its number."""
        self._begun[cell] += 1
        return self._begun[cell]

    def put(self, cell: str, number: int, read: CellRead, read_s: float) -> TakenRead:
        """Take a complete read over. read_s: when it began (monotonic)."""
        rows, present = self._rows[cell], frozenset(read.present)
        before: dict[str, HostHardware] = {}
        for at in [at for at in rows if at not in present or at in read.changed]:
            uuid = rows.pop(at).uuid
            if self._cell_of.get(uuid) == cell:
                before[uuid] = self.hardware.pop(uuid)
                del self._cell_of[uuid]
        written: set[str] = set()
        for at, row in read.changed.items():
            if row is None:
                continue
            known = before.get(row.uuid)
            rows[at] = row
            self._cell_of[row.uuid] = cell
            # The same object as long as it tells the same: what is made of it is kept.
            self.hardware[row.uuid] = known if known == row.hardware and known is not None else row.hardware
            if at in read.written or known != row.hardware:
                written.add(row.uuid)
        last, self._complete[cell], self._read_s[cell] = self._complete[cell], number, read_s
        return TakenRead(number=number, read_s=read_s, before=last, written=written)

    def begun(self, cell: str | None) -> int:
        """How many reads of a cell have begun."""
        return self._begun.get(cell or "", 0)

    def cell_of(self, uuid: str) -> str | None:
        """The cell whose read has named a compute node last; None: its row is not known."""
        return self._cell_of.get(uuid)

    def of(self, uuid: str, now_s: float) -> HostHardware | None:
        """The facts of a compute node; None: its row is not known, or was read too long ago."""
        cell = self._cell_of.get(uuid)
        return None if cell is None or not self.is_current(cell, now_s) else self.hardware[uuid]

    def is_current(self, cell: str, now_s: float) -> bool:
        """Whether a cell's database was read completely within the bound."""
        return now_s - self._read_s.get(cell, -math.inf) <= self.max_age_s

    def outdated(self, now_s: float) -> tuple[str, ...]:
        """The cells whose facts count no more, or do not count yet."""
        return tuple(cell for cell in self.cells if not self.is_current(cell, now_s))

    def all_of(self, cell: str) -> dict[str, HostHardware]:
        """{uuid: facts} of a cell's compute nodes, whatever their age."""
        return {uuid: self.hardware[uuid] for uuid, of in self._cell_of.items() if of == cell}
