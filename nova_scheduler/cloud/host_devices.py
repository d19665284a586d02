"""The PCI devices of Nova's hosts: the pools of their rows, less what was chosen there and is not in the rows yet.
Pure: rows and choices come in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from nova_scheduler.fit.pci import Consumed, NumaAffinity, PciPool, PciRequest, consume
from nova_scheduler.fit.pci_pools import parse_pools


class ChosenDevices(Struct, frozen=True, kw_only=True):
    """What an instance that a host was chosen for takes of its pools; the arguments of `consume`."""

    requests: tuple[PciRequest, ...]
    mapping: Mapping[str, Sequence[str]] | None = None
    affinity: NumaAffinity | None = None


class HostDevices:
    """By uuid of each compute node's root provider."""

    def __init__(self) -> None:
        self._stored: dict[str, str | None] = {}
        self._of_rows: dict[str, tuple[PciPool, ...]] = {}
        self._chosen: dict[str, dict[str, ChosenDevices]] = {}
        self._free: dict[str, tuple[PciPool, ...]] = {}

    def put(self, host: str, stored: str | None, *, counted: Collection[str] = ()) -> None:
        """Take the column pci_stats of a row over. counted: instances that it has, which count no more beside it.
        Raises PciPoolsUnreadable: nothing is known of the host's devices then.
        """
        chosen = self._chosen.get(host, {})
        for instance in chosen.keys() & set(counted):
            del chosen[instance]
        if host not in self._of_rows or self._stored[host] != stored:
            self.drop(host)
            self._of_rows[host] = parse_pools(stored)
            self._stored[host] = stored
        self._count(host)

    def drop(self, host: str) -> None:
        """Nothing is known of a host's devices any more; what was chosen there still counts when it is known again."""
        for known in (self._stored, self._of_rows, self._free):
            known.pop(host, None)

    def choose(self, host: str, instance: str, devices: ChosenDevices) -> None:
        """An instance gets this host: what it takes counts until `put` says that the row has it, or `release`."""
        self._chosen.setdefault(host, {})[instance] = devices
        self._count(host)

    def release(self, host: str, instance: str) -> None:
        """An instance does not get this host, or has left it before its row had it."""
        self._chosen.get(host, {}).pop(instance, None)
        self._count(host)

    def pools_of(self, host: str) -> tuple[PciPool, ...] | None:
        """What is free on a host, in order; None: not known."""
        return self._free.get(host)

    def _count(self, host: str) -> None:
        if not (chosen := self._chosen.get(host)):
            self._chosen.pop(host, None)
        if host not in self._of_rows:
            return
        free = self._of_rows[host]
        for one in (chosen or {}).values():
            after = consume(free, one.requests, one.mapping, one.affinity)
            # What does not fit any more is in the row already, or another has it.
            free = after.pools if isinstance(after, Consumed) else free
        self._free[host] = free
