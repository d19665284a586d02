"""What the rows of `compute_nodes` in Nova's cell databases tell of each host, parsed: what Nova's API does not tell its
scheduler. Hostile until `hardware_of` has returned: a part that cannot be read is None, and its host is not chosen by it.
Pure: rows and times come in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

MAX_TEXT: Final = 2**18  # characters of one column; MariaDB's TEXT has at most 64 KiB, PostgreSQL's any number
MAX_STATS: Final = 1_000  # entries of `stats`, one a project, kind of operating system and state
MAX_PLAIN: Final = 64  # of them those of a driver's own, as the properties of an Ironic node, and metrics of one host
MAX_WORD: Final = 255
MAX_SUPPORTED: Final = 256  # triples of architecture, hypervisor type and mode
MAX_COUNT: Final = 2**31 - 1
MAX_VALUE: Final = 1e15  # of a metric

_NAME = re.compile(r"[\w.+ -]{1,64}")
# Of `stats`: numbers that change with each instance, which are no property of a host that a flavor names.
_COUNTED: Final = ("num_", "io_workload", "failed_builds")
# Nova's database has these as parts of 1, its objects as hundredths.
_PERCENT: Final = frozenset(f"cpu.{name}percent" for name in ("user.", "kernel.", "idle.", "iowait.", ""))


class NodeRow(Struct, frozen=True, kw_only=True):
    """A row of `compute_nodes`, as read. JSON is text, cut off after MAX_TEXT + 1 characters."""

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
    unreadable: tuple[str, ...] = ()  # names of columns


class Unreadable(ValueError):
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
        except (Unreadable, msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            parts[name] = None
            unreadable.append(name)
    version = row.hypervisor_version or 0
    parts["hypervisor_version"] = version if 0 <= version <= MAX_COUNT else 0
    return msgspec.structs.replace(known, **parts, unreadable=tuple(unreadable))


def _bounded(column: str | None) -> str:
    if column is not None and len(column) > MAX_TEXT:
        raise Unreadable(f"more than {MAX_TEXT} characters")
    return column or ""


def _stats(text: str) -> HostStats:
    """Raises Unreadable, DecodeError, ValidationError."""
    found = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    if len(found) > MAX_STATS:
        raise Unreadable(f"more than {MAX_STATS} entries")
    plain: dict[str, str] = {}
    for key, value in found.items():
        is_plain = isinstance(value, (str, int, float)) and not key.startswith(_COUNTED)
        if is_plain and len(key) <= MAX_WORD and len(str(value)) <= MAX_WORD and len(plain) < MAX_PLAIN:
            plain[key] = str(value)
    return HostStats(
        num_instances=_count(found.get("num_instances", 0)),
        num_io_ops=_count(found.get("io_workload", 0)),
        failed_builds=_count(found.get("failed_builds", 0)),
        plain=plain,
    )


def _count(value: object) -> int:
    """A number, which Nova's older releases wrote as text. Raises Unreadable."""
    if isinstance(value, str) and len(value) <= 20 and value.strip().lstrip("-").isdecimal():
        value = int(value)
    if not isinstance(value, (int, float)) or not -MAX_COUNT <= value <= MAX_COUNT:
        raise Unreadable("no number of instances")
    return int(value)


class _Metric(Struct, frozen=True):
    name: str
    value: float | None = None  # a metric may have other numbers instead


def _metrics(text: str) -> dict[str, float]:
    """{name: number}. Raises Unreadable, DecodeError, ValidationError."""
    given = msgspec.json.decode(text, type=list[_Metric]) if text else []
    if len(given) > MAX_PLAIN:
        raise Unreadable(f"more than {MAX_PLAIN} metrics")
    found: dict[str, float] = {}
    for one in given:
        if one.value is None or len(one.name) > MAX_WORD:
            continue
        value = one.value * 100 if one.name in _PERCENT else one.value
        if not -MAX_VALUE <= value <= MAX_VALUE:  # NaN is none of these
            raise Unreadable("a metric out of bounds")
        found[one.name] = float(math.trunc(value))
    return found


def _supported(text: str) -> tuple[tuple[str, str, str], ...]:
    """Raises Unreadable, DecodeError, ValidationError."""
    given = msgspec.json.decode(text, type=list[list[str]]) if text else []
    if len(given) > MAX_SUPPORTED or not all(len(one) >= 3 and all(map(_NAME.fullmatch, one[:3])) for one in given):
        raise Unreadable("no list of what the host runs")
    return tuple((one[0].lower(), one[1].lower(), one[2].lower()) for one in given)


class CellRead(Struct, frozen=True, kw_only=True):
    """What one complete read of a cell's database found, in one transaction."""

    present: Collection[int]  # the ids of all its compute nodes
    # {id: (uuid, facts)} of those whose row may have changed since the read before
    changed: Mapping[int, tuple[str, HostHardware]]


class _KnownNode(Struct, frozen=True):
    cell: str
    id: int
    hardware: HostHardware


class HostFacts:
    """The facts of all compute nodes, by uuid of their root providers, each as the last complete read of its cell has
    it. max_age_s: seconds after which a read counts no more; a row itself may be weeks old.
    """

    def __init__(self, cells: Collection[str], *, max_age_s: float) -> None:
        self.cells = tuple(sorted(cells))  # (uuids) of which a database is read
        self._max_age_s = max_age_s
        self._nodes: dict[str, _KnownNode] = {}
        self._read_s: dict[str, float] = {}

    def put(self, cell: str, read: CellRead, read_s: float) -> None:
        """Take a complete read over. read_s: when it began (monotonic)."""
        present = frozenset(read.present)
        for uuid in [uuid for uuid, one in self._nodes.items() if one.cell == cell and one.id not in present]:
            del self._nodes[uuid]
        for number, (uuid, hardware) in read.changed.items():
            self._nodes[uuid] = _KnownNode(cell, number, hardware)
        self._read_s[cell] = read_s

    def of(self, uuid: str, now_s: float) -> HostHardware | None:
        """The facts of a compute node; None: its row is not known, or was read too long ago."""
        known = self._nodes.get(uuid)
        return None if known is None or not self.is_current(known.cell, now_s) else known.hardware

    def is_current(self, cell: str, now_s: float) -> bool:
        """Whether a cell's database has been read completely within the bound."""
        return now_s - self._read_s.get(cell, -math.inf) <= self._max_age_s

    def outdated(self, now_s: float) -> tuple[str, ...]:
        """The cells whose facts count no more, or do not count yet."""
        return tuple(cell for cell in self.cells if not self.is_current(cell, now_s))

    def all_of(self, cell: str) -> dict[str, HostHardware]:
        """{uuid: facts} of a cell, whatever their age."""
        return {uuid: one.hardware for uuid, one in self._nodes.items() if one.cell == cell}
