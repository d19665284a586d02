"""PCI devices of a host as Nova summarises them: pools of alike devices, and which of them a request may take.

Facts are those of Nova 29 to 34 (`nova/pci/stats.py`, `compute_nodes.pci_stats`, `InstancePCIRequest`). Where Nova has
a choice of devices it is made here in the same order, so that several instances consume a host's pools as they would
there. Which device it becomes is nova-compute's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal, Self

from msgspec import Meta, Struct
from msgspec.structs import replace

from nova_scheduler.fit.numa import InstanceCell, PciView
from nova_scheduler.wire.versioned import is_true

MAX_REQUESTS = 256  # of one instance
MAX_SPECS = 64  # that one request names, of which one must hold
MAX_TAGS = 64  # of a pool, or of such a spec
MAX_DEVICES = 2**31 - 1
Devices = Annotated[int, Meta(ge=0, le=MAX_DEVICES)]
Tags = Annotated[dict[str, str | None], Meta(max_length=MAX_TAGS)]

NumaPolicy = Literal["required", "legacy", "preferred", "socket"]
NUMA_POLICIES: Final = ("required", "legacy", "preferred", "socket")

# Why a host's pools do not do: by the rule that left too few devices.
NO_MATCH: Final = "pci.no_match"  # vendor, product, type or a tag
NUMA: Final = "pci.numa_affinity"
ONLY_PARENTS: Final = "pci.physical_function"
ONLY_VDPA: Final = "pci.vdpa"
ONLY_REMOTE: Final = "pci.remote_managed"
OTHER_PROVIDER: Final = "pci.other_provider"
SPLIT_PROVIDER: Final = "pci.split_provider"

# Tags that are not compared: placement's query has, or `rp_uuid` and `rp_uuids` with one another.
_NOT_COMPARED = frozenset({"resource_class", "traits", "rp_uuid", "rp_uuids"})
_PARENT, _VDPA = "type-PF", "vdpa"


class PciRequest(Struct, frozen=True, kw_only=True):
    """`InstancePCIRequest` 1.x: devices that a flavor's alias or a Neutron port asks for."""

    count: Devices = 1
    # what a device must be, one of these; of a port's request, its tags are in it (`physical_network`)
    spec: Annotated[tuple[Tags, ...], Meta(max_length=MAX_SPECS)] = ()
    alias_name: str | None = None
    request_id: str | None = None
    requester_id: str | None = None  # a port's uuid
    numa_policy: NumaPolicy | None = None

    @property
    def is_of_port(self) -> bool:
        """Whether a Neutron port asks for it; else the flavor's alias does (as Nova tells them apart)."""
        return self.alias_name is None

    def has(self, tag: str, value: str) -> bool:
        """Whether some of its specs has exactly this value."""
        return any(spec.get(tag) == value for spec in self.spec)


class PciPool(Struct, frozen=True):
    """Free devices that are alike: of one kind and one parent, beside one NUMA cell."""

    count: int
    numa_node: int | None  # None: its host does not tell
    # vendor_id, product_id, numa_node and the tags, by name; texts in lower case, as they are compared
    properties: Mapping[str, str | int | None]
    dev_type: str | None = None
    is_remote_managed: bool = False
    provider: str | None = None  # uuid of the resource provider whose inventory they are
    live_migratable: str | None = None  # "true", "false", or not said

    @classmethod
    def of(cls, count: int, vendor_id: str, product_id: str, numa_node: int | None, tags: Tags) -> Self:
        """The pool with these fields of Nova's `PciDevicePool`."""
        texts: dict[str, str | None] = {"vendor_id": vendor_id, "product_id": product_id, **tags}
        return cls(
            count=count,
            numa_node=numa_node,
            properties=_folded(texts) | {"numa_node": numa_node},
            dev_type=tags.get("dev_type"),
            is_remote_managed=is_true(tags.get("remote_managed")),
            provider=tags.get("rp_uuid"),
            live_migratable=tags.get("live_migratable"),
        )


class NumaAffinity(Struct, frozen=True):
    """The host's NUMA cells (ids) that an instance is on, and those of the sockets of these."""

    cells: frozenset[int]
    of_sockets: frozenset[int]


class Consumed(Struct, frozen=True):
    """The pools of a host after some requests, and what these took (`count` is the devices taken)."""

    pools: tuple[PciPool, ...]
    taken: tuple[PciPool, ...]


class PciRefusal(Struct, frozen=True):
    """A host's pools do not have what is requested. reason: a code of the funnel."""

    reason: str


class _Ask(Struct, frozen=True):
    request: PciRequest
    per_provider: Counter[str]  # devices that placement has allocated; empty: any may be taken
    affinity: NumaAffinity | None


# Pools by their place among the host's; one that became empty is gone.
_Pools = dict[int, PciPool]


def ordered(pools: Iterable[PciPool]) -> tuple[PciPool, ...]:
    """A host's pools in the order in which Nova takes devices of them: those with fewer tags first."""
    return tuple(sorted(pools, key=lambda pool: len(pool.properties)))


def affinity_of(cells: Iterable[int], sockets: Mapping[int, int | None]) -> NumaAffinity | None:
    """Where an instance is on its host. cells: ids of the host's NUMA cells; none of them: anywhere, which is None.

    sockets: {id of each NUMA cell of the host: its socket}. Where one has none, no cell is of the same socket.
    """
    chosen = frozenset(cells)
    if not chosen:
        return None
    of_chosen = {socket for cell, socket in sockets.items() if cell in chosen}
    is_known = None not in sockets.values()
    return NumaAffinity(chosen, frozenset(cell for cell, one in sockets.items() if is_known and one in of_chosen))


def consume(
    pools: Sequence[PciPool],
    requests: Sequence[PciRequest],
    mapping: Mapping[str, Sequence[str]] | None = None,
    affinity: NumaAffinity | None = None,
) -> Consumed | PciRefusal:
    """What is left of a host's pools (in order) after these requests of one instance, all or none.

    mapping: {suffix of a request group: uuids of the providers that an allocation candidate gives it}; without it, the
    requests say themselves what was allocated for them. affinity: None where NUMA cells do not matter.
    """
    left, taken = dict(enumerate(pools)), list[PciPool]()
    for request in requests:
        per_provider = Counter(providers_of(request, mapping))
        rows = _fitting(left, _Ask(request, per_provider, affinity))
        if isinstance(rows, PciRefusal):
            return rows
        if not per_provider:
            taken += _take_in_order(left, rows, request.count)
        elif is_split(left.values()):
            return PciRefusal(SPLIT_PROVIDER)
        else:
            taken += _take_allocated(left, rows, per_provider)
    return Consumed(tuple(left.values()), tuple(taken))


def release(pools: Sequence[PciPool], taken: Iterable[PciPool]) -> tuple[PciPool, ...]:
    """The pools of a host after the return of what `consume` took."""
    counts = list(pools)
    for one in taken:
        kind = replace(one, count=0)
        row = next((row for row, pool in enumerate(counts) if replace(pool, count=0) == kind), None)
        if row is None:
            counts.append(one)
        else:
            counts[row] = replace(counts[row], count=counts[row].count + one.count)
    return ordered(counts)


def free_devices(pools: Iterable[PciPool]) -> int:
    """How many devices are in these pools."""
    return sum(pool.count for pool in pools)


def view_of(
    pools: Sequence[PciPool],
    requests: Sequence[PciRequest],
    mapping: Mapping[str, Sequence[str]] | None,
    sockets: Mapping[int, int | None],
) -> PciView:
    """The same for the fit of an instance's NUMA topology. mapping, sockets: as of `consume` and `affinity_of`."""
    free: Counter[int | None] = Counter()
    for pool in pools:
        free[pool.numa_node] += pool.count

    def fits(cells: Sequence[InstanceCell]) -> bool:
        affinity = affinity_of((cell.id for cell in cells), sockets)
        return isinstance(consume(pools, requests, mapping, affinity), Consumed)

    return PciView(free_by_node=free, fits=fits if requests else None)


def providers_of(request: PciRequest, mapping: Mapping[str, Sequence[str]] | None) -> tuple[str, ...]:
    """The resource providers that placement has allocated a request's devices of, one for each device.

    None: any will do, as for a port's devices, which are not in placement.
    """
    if request.is_of_port:
        return ()
    if not mapping:
        said = request.spec[0].get("rp_uuids") if request.spec else None
        return tuple(said.split(",")) if said else ()
    # A request's group for each device is `{request_id}-{number}`, and is of one provider.
    return tuple(uuids[0] for suffix, uuids in mapping.items() if uuids and suffix.startswith(request.request_id or ""))


def is_split(pools: Iterable[PciPool]) -> bool:
    """Whether the devices of one provider are in several pools, so that it is not known of which to take."""
    named = [pool.provider for pool in pools if pool.provider is not None]
    return len(named) != len(set(named))


def _take_in_order(left: _Pools, rows: Sequence[int], count: int) -> list[PciPool]:
    taken = []
    for row in rows:
        pool = left[row]
        devices = min(count, pool.count)
        if devices:
            taken.append(replace(pool, count=devices))
        _keep(left, row, pool.count - devices)
        count -= devices
        if not count:
            break
    return taken


def _take_allocated(left: _Pools, rows: Sequence[int], per_provider: Mapping[str, int]) -> list[PciPool]:
    # As in Nova, what a provider lacks is not taken of another; nova-compute's claim fails then.
    taken = [replace(left[row], count=per_provider[left[row].provider or ""]) for row in rows]
    for row, one in zip(rows, taken, strict=True):
        _keep(left, row, left[row].count - one.count)
    return taken


def _keep(left: _Pools, row: int, count: int) -> None:
    if count:
        left[row] = replace(left[row], count=count)
    else:
        del left[row]


# --- which pools a request may take devices of


def _fitting(left: _Pools, ask: _Ask) -> list[int] | PciRefusal:
    """The pools that together have what is requested, those to be used up first in front."""
    rows = list(left)
    for reason, rule in _RULES:
        rows = rule(left, rows, ask)
        if not rows or _free(left, rows) < ask.request.count:
            return PciRefusal(reason)
    return rows


def _free(left: _Pools, rows: Iterable[int]) -> int:
    return free_devices(left[row] for row in rows)


def _folded(texts: Mapping[str, str | None]) -> dict[str, str | int | None]:
    return {name: text.lower() if text is not None else None for name, text in texts.items()}


def matching(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """Those with all that one of the request's specs names."""
    specs = [
        _folded({name: text for name, text in one.items() if name not in _NOT_COMPARED}) for one in ask.request.spec
    ]
    return [row for row in rows if any(_has_all(left[row].properties, spec) for spec in specs)]


def _has_all(properties: Mapping[str, str | int | None], spec: Mapping[str, str | int | None]) -> bool:
    return all(properties.get(name) == value for name, value in spec.items())


def near(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """Those as near to the instance's NUMA cells as its policy requires; nearer ones alone where they are enough."""
    if ask.affinity is None:
        return rows
    policy, cells = ask.request.numa_policy or "legacy", ask.affinity.cells
    beside = [row for row in rows if left[row].numa_node in cells]
    if policy == "required" or _free(left, beside) >= ask.request.count:
        return beside
    if policy == "socket":
        return [row for row in rows if left[row].numa_node in ask.affinity.of_sockets]
    perhaps = [row for row in rows if left[row].numa_node is None or left[row].numa_node in cells]
    if policy == "legacy" or _free(left, perhaps) >= ask.request.count:
        return perhaps
    return [*perhaps, *(row for row in rows if row not in set(perhaps))]


def without_parents(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """Physical functions only where the request names them."""
    named = ask.request.has("dev_type", _PARENT)
    return [row for row in rows if named or left[row].dev_type != _PARENT]


def without_vdpa(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """VDPA devices only where the request names them."""
    named = ask.request.has("dev_type", _VDPA)
    return [row for row in rows if named or left[row].dev_type != _VDPA]


def without_remote_managed(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """Devices that a SmartNIC manages only where the request names them."""
    named = any(is_true(spec.get("remote_managed")) for spec in ask.request.spec)
    return [row for row in rows if named or not left[row].is_remote_managed]


def allocated(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """Those of the providers that placement has allocated, each with all devices that are allocated of it."""
    wanted = ask.per_provider
    if not wanted:
        return rows
    return [row for row in rows if left[row].count >= wanted.get(left[row].provider or "", MAX_DEVICES + 1)]


def live_migratable(left: _Pools, rows: list[int], ask: _Ask) -> list[int]:
    """Devices that can, or cannot, move with a running instance, where all specs of the request say which."""
    said = {spec.get("live_migratable") for spec in ask.request.spec}
    if said not in ({"true"}, {"false"}):
        return rows
    return [row for row in rows if left[row].live_migratable in said]


_Rule = Callable[[_Pools, list[int], _Ask], list[int]]
_RULES: Sequence[tuple[str, _Rule]] = (
    (NO_MATCH, matching),
    (NUMA, near),
    (ONLY_PARENTS, without_parents),
    (ONLY_VDPA, without_vdpa),
    (ONLY_REMOTE, without_remote_managed),
    (OTHER_PROVIDER, allocated),
    (NO_MATCH, live_migratable),
)
