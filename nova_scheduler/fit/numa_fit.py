"""Whether an instance's topology fits a host's, and its cells with their pins on which of the host's (Nova 29 to 34,
numa_fit_instance_to_host).

Nova keeps what a try has made of a cell, also where the try or another cell of the arrangement fails: its page size,
its pins, and its id, by which it remembers what fits. nova-compute repeats the fit with the same outcome, so this does
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from msgspec import Struct
from msgspec.structs import replace

from nova_scheduler.fit.numa import (
    NETWORKS,
    NO_TOPOLOGY,
    PCI,
    TOO_FEW_CELLS,
    TOO_MANY_ARRANGEMENTS,
    HostCell,
    HostTopology,
    InstanceTopology,
    NetworkMetadata,
    NumaLimits,
    PciView,
    Unfit,
)
from nova_scheduler.fit.numa_cell import fit_cell

MAX_ARRANGEMENTS = 10_000  # that are looked at, of a host; of those that must fail few are


class Arrangements(Struct):
    """How many more may be looked at, of all hosts together."""

    left: int


def fit_instance_to_host(
    host: HostTopology | None,
    instance: InstanceTopology,
    limits: NumaLimits | None = None,
    pci: PciView | None = None,
    *,
    pack: bool = False,
    allowed: Arrangements | None = None,
) -> InstanceTopology | Unfit:
    """The topology with its cells on the host's, pinned, or why it does not fit. pack: prefer cells that are used
    more (`[compute] packing_host_numa_cells_allocation_strategy`). pci: None where the devices are not known. allowed:
    less those that it has looked at.
    """
    allowed = allowed or Arrangements(MAX_ARRANGEMENTS)
    if host is None or not host.cells or not instance.cells:
        return Unfit(NO_TOPOLOGY)
    if len(host.cells) < len(instance.cells):
        return Unfit(TOO_FEW_CELLS)
    search = _Search(host, instance, limits, pci)
    cells, arrangement = _ordered(host, instance, pci, pack), list(range(len(instance.cells)))
    for _ in range(min(allowed.left, MAX_ARRANGEMENTS)):
        allowed.left -= 1
        failed = search.fails_at([cells[number] for number in arrangement])
        if failed is None:
            return InstanceTopology(cells=tuple(search.cells), emulator_threads_policy=instance.emulator_threads_policy)
        following = None if search.is_hopeless else _following(arrangement, failed, len(cells))
        if following is None:
            return Unfit(search.reason)
        arrangement = following
    return Unfit(TOO_MANY_ARRANGEMENTS)


def _following(arrangement: Sequence[int], place: int, numbers: int) -> list[int] | None:
    """The next arrangement of so many numbers (as of itertools.permutations) that differs up to this place."""
    for changed in range(place, -1, -1):
        kept = arrangement[:changed]
        higher = [one for one in range(arrangement[changed] + 1, numbers) if one not in kept]
        if higher:
            prefix = [*kept, higher[0]]
            rest = [one for one in range(numbers) if one not in prefix]
            return [*prefix, *rest[: len(arrangement) - len(prefix)]]
    return None


class _Search:
    """The instance's cells as the arrangements tried so far have left them, and what these have shown."""

    def __init__(
        self, host: HostTopology, instance: InstanceTopology, limits: NumaLimits | None, pci: PciView | None
    ) -> None:
        self._host, self._limits, self._pci = host, limits, pci
        self._isolates_emulator = instance.emulator_threads_policy == "isolate"
        self.cells = list(instance.cells)
        self._tried: dict[tuple[int, int], str | None] = {}  # {(host's cell, instance's cell): why not}
        self._rejected: dict[frozenset[int], str | None] = {}  # {the host's cells, in whatever order: why not}
        self._choices = comb(len(host.cells), len(instance.cells))  # of the host's cells
        self._furthest, self.reason = -1, NO_TOPOLOGY
        self.is_hopeless = False  # no arrangement can succeed any more

    def fails_at(self, arrangement: Sequence[HostCell]) -> int | None:
        """The place from which on another arrangement may do better than this, by what is known; None: this fits."""
        before, known = [cell.id for cell in self.cells], len(self._tried)
        for place, host in enumerate(arrangement):
            reason = self._cell_rejection(place, host)
            if reason is not None:
                self._fail(place, reason)
                # Arrangements that begin alike fail alike, once that changes nothing.
                has_changed = len(self._tried) > known or before != [cell.id for cell in self.cells]
                return len(arrangement) - 1 if has_changed else place
        chosen = frozenset(host.id for host in arrangement)
        if chosen not in self._rejected:
            self._rejected[chosen] = self._joint_rejection(arrangement)
        reason = self._rejected[chosen]
        if reason is None:
            return None
        self._fail(len(arrangement), reason)
        self.is_hopeless = len(self._rejected) == self._choices
        return len(arrangement) - 1

    def _cell_rejection(self, place: int, host: HostCell) -> str | None:
        cell = self.cells[place]
        pair = (host.id, cell.id)
        if pair not in self._tried:
            # The emulator's CPU is beside the instance's first cell.
            fit = fit_cell(host, cell, self._limits, int(self._isolates_emulator and place == 0))
            self.cells[place], self._tried[pair] = fit.cell, fit.reason
            self.is_hopeless = all(self._tried.get((one.id, fit.cell.id)) for one in self._host.cells)
        elif self._tried[pair] is None:
            self.cells[place] = replace(cell, id=host.id)
        return self._tried[pair]

    def _joint_rejection(self, arrangement: Sequence[HostCell]) -> str | None:
        if self._pci is not None and self._pci.fits is not None and not self._pci.fits(self.cells):
            return PCI
        wanted = self._limits.network_metadata if self._limits is not None else None
        return None if wanted is None or networks_are_near(self._host, arrangement, wanted) else NETWORKS

    def _fail(self, progress: int, reason: str) -> None:
        if progress > self._furthest:
            self._furthest, self.reason = progress, reason


def networks_are_near(host: HostTopology, chosen: Sequence[HostCell], wanted: NetworkMetadata) -> bool:
    """Whether no cell but the chosen ones is near to a network that is wanted and that these are not near to."""
    here = [cell.network_metadata for cell in chosen if cell.network_metadata is not None]
    anywhere = [cell.network_metadata for cell in host.cells if cell.network_metadata is not None]
    lacking = wanted.physnets.difference(*(one.physnets for one in here))
    if any(lacking & one.physnets for one in anywhere):
        return False
    return not wanted.tunneled or any(one.tunneled for one in here) or not any(one.tunneled for one in anywhere)


def _ordered(host: HostTopology, instance: InstanceTopology, pci: PciView | None, pack: bool) -> Sequence[HostCell]:
    """The host's cells in the order in which they are tried: those used least (pack: most) first. Cells with PCI
    devices come first for instances that want some, else last.
    """
    cells: Sequence[HostCell] = host.cells
    if len(cells) == len(instance.cells):
        return cells
    cells = sorted(cells, key=lambda cell: cell.avail_memory, reverse=not pack)
    if instance.cells[0].is_pinned:
        cells = sorted(cells, key=lambda cell: len(cell.free_pcpus), reverse=not pack)
    else:
        cells = sorted(cells, key=lambda cell: cell.cpu_usage, reverse=pack)
    if pci is None:
        return cells
    devices = pci.free_by_node
    return sorted(cells, key=lambda cell: devices.get(cell.id, 0), reverse=pci.fits is not None)
