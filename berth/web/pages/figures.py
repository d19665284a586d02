"""What pages show of many hosts and builds: states, capacity, and failures by their reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from bus.contracts.build import BuildRecord, HostRecord
from bus.contracts.operations import AdminState

UP = "up"
NOT_WELL = "not-well"  # of a filter: every state but up
# The states of hosts, what is worst first.
HOST_STATES = ("down", "not reported", "not in placement", "fenced", "maintenance", "disabled", UP)
SHOWN_CLASSES = ("VCPU", "MEMORY_MB", "DISK_GB")
FULL = 0.9
# The orders of a list of hosts.
BY_NAME, FULLEST, EMPTIEST, FAILING = "name", "fullest", "emptiest", "failing"
ORDERS = (BY_NAME, FULLEST, EMPTIEST, FAILING)


class Use(Struct, frozen=True):
    """What is used of one resource class."""

    name: str
    used: float
    total: float

    @property
    def share(self) -> float:
        """In percent; of nothing all is used."""
        return 100 * self.used / self.total if self.total else 100.0

    @property
    def is_full(self) -> bool:
        """Whether little is left."""
        return self.used >= FULL * self.total


class ListedHost(Struct, frozen=True):
    """A host in a list. why: the reason of a state that is not up. more: the amounts of its other classes."""

    host: HostRecord
    state: str
    why: str
    uses: tuple[Use, ...]
    more: tuple[Use, ...]


class FailureGroup(Struct, frozen=True, kw_only=True):
    """Builds that failed for one reason. instance, name, reason, at: of the newest. flavors: {name: how many}."""

    code: str
    count: int
    flavors: dict[str, int]
    instance: str
    name: str
    reason: str
    at: float


class MetalClass(Struct, frozen=True):
    """Bare-metal hosts of one resource class. held: those that take nothing, for whatever reason."""

    name: str
    free: int
    used: int
    held: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.free + self.used + self.held


def is_bare_metal(host: HostRecord) -> bool:
    """Whether a host is given away whole: Ironic's nodes have one class of their own and no CPUs."""
    return (
        bool(host.resources) and "VCPU" not in host.resources and any(n.startswith("CUSTOM_") for n in host.resources)
    )


def state_of(host: HostRecord) -> str:
    """One of HOST_STATES: what hides more of a host comes first."""
    if not host.reported:
        return "fenced" if host.admin is not None and host.admin.state is AdminState.FENCED else "not reported"
    if host.admin is not None and host.admin.state is AdminState.FENCED:
        return "fenced"
    if not host.up:
        return "down"
    if host.not_in_placement:
        return "not in placement"
    if host.enabled:
        return UP
    return "maintenance" if host.admin is not None and host.admin.state is AdminState.MAINTENANCE else "disabled"


def why_of(host: HostRecord) -> str:
    """The reason of a host's state, as far as its record has one; "" of one that is up."""
    match state_of(host):
        case "up":
            return ""
        case "not reported":
            return "by no compute service since the scheduler's start"
        case "down":
            return f"its compute service {host.service} is silent"
        case "not in placement":
            return host.not_in_placement
        case _ if host.admin is None:
            return "by its compute service"
    reason = f": {host.admin.reason}" if host.admin.reason else ""
    return f"by {host.admin.by}{reason}"


def row_of(host: HostRecord) -> ListedHost:
    """A host for a list."""
    uses = tuple(Use(name, *host.resources[name]) for name in SHOWN_CLASSES if name in host.resources)
    more = tuple(Use(name, *of) for name, of in sorted(host.resources.items()) if name not in SHOWN_CLASSES)
    return ListedHost(host, state_of(host), why_of(host), uses, more)


def states_of(hosts: Sequence[HostRecord]) -> dict[str, int]:
    """{state: how many hosts}, what is worst first, without those that no host is in."""
    counted = Counter(map(state_of, hosts))
    return {state: counted[state] for state in HOST_STATES if counted[state]}


def capacity_of(hosts: Sequence[HostRecord]) -> list[Use]:
    """What is used of all that these hosts have, the usual classes first; bare metal's own classes are not among it."""
    used: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for host in hosts:
        if is_bare_metal(host):
            continue
        for name, (taken, capacity) in host.resources.items():
            used[name] += taken  # type: ignore[assignment]
            total[name] += capacity  # type: ignore[assignment]
    first = {name: place for place, name in enumerate(SHOWN_CLASSES)}
    return [Use(name, used[name], total[name]) for name in sorted(total, key=lambda one: (first.get(one, 9), one))]


def metal_of(hosts: Sequence[HostRecord]) -> list[MetalClass]:
    """Bare-metal hosts by their class."""
    counted: dict[str, Counter[str]] = {}
    for host in hosts:
        if is_bare_metal(host):
            name = next(iter(sorted(host.resources)))
            used, capacity = host.resources[name]
            kind = "used" if used else "free" if capacity and state_of(host) == UP else "held"
            counted.setdefault(name, Counter())[kind] += 1
    return [MetalClass(name, of["free"], of["used"], of["held"]) for name, of in sorted(counted.items())]


def failures_of(builds: Sequence[BuildRecord]) -> list[FailureGroup]:
    """Builds that failed, by code, the most frequent first."""
    of_code: dict[str, list[BuildRecord]] = {}
    for build in builds:
        of_code.setdefault(build.code or "", []).append(build)
    groups = []
    for code, failed in of_code.items():
        newest = max(failed, key=lambda one: (one.updated_at, one.instance_uuid))
        flavors = Counter(one.flavor for one in failed)
        groups.append(
            FailureGroup(
                code=code,
                count=len(failed),
                flavors=dict(sorted(flavors.items(), key=lambda of: (-of[1], of[0]))),
                instance=newest.instance_uuid,
                name=newest.name,
                reason=newest.reason,
                at=newest.updated_at,
            )
        )
    return sorted(groups, key=lambda one: (-one.count, one.code))


def fullness(host: HostRecord) -> float:
    """The share of the fullest of the usual classes."""
    return max((Use(name, *host.resources[name]).share for name in SHOWN_CLASSES if name in host.resources), default=0)


def ordered(hosts: Sequence[HostRecord], order: str) -> list[HostRecord]:
    """Hosts in one of ORDERS."""
    keys: dict[str, Callable[[HostRecord], tuple[float, str]]] = {
        FULLEST: lambda host: (-fullness(host), host.name),
        EMPTIEST: lambda host: (fullness(host), host.name),
        FAILING: lambda host: (-host.failed_builds, host.name),
    }
    return sorted(hosts, key=keys.get(order, lambda host: (0.0, host.name)))


def wanted(hosts: Sequence[HostRecord], query: Mapping[str, str]) -> list[HostRecord]:
    """The hosts of the cell, zone, aggregate and state that the page's form names, whose names have what it names.
    `state` "not-well": all that are not up.
    """
    cell, zone, aggregate, state = (query.get(name, "") for name in ("cell", "zone", "aggregate", "state"))
    part = query.get("q", "").strip().lower()
    return [
        host
        for host in hosts
        if cell in ("", host.cell)
        and zone in ("", host.zone)
        and (not aggregate or aggregate in host.aggregates)
        and part in host.name.lower()
        and (not state or state == state_of(host) or (state == NOT_WELL and state_of(host) != UP))
    ]
