"""A RequestSpec as a candidate query, by the rules of Nova's ResourceRequest and pre-filters (Nova 34,
`nova/scheduler/utils.py`). `querystring` writes it as `GET /allocation_candidates`, for tests against Nova's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, Protocol
from urllib.parse import urlencode
from uuid import UUID

import os_resource_classes
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import MAX_LOCATED_HOSTS
from nova_scheduler.config import NOT_OWNED, NUMA_FILTER, PCI_FILTER, PrefilterSettings
from nova_scheduler.fit.pci import NUMA_POLICIES
from nova_scheduler.request import hardware
from nova_scheduler.request.prefilters import Additions, device_traits, prefilter, tenant_aggregates
from nova_scheduler.request.releases import NEWEST, of_release
from nova_scheduler.request.request_spec import MAX_AMOUNT, NotDecided, NovaDestination, NovaFlavor, NovaRequest
from placement_worker.replica.request import UNNUMBERED, Group, Query
from scheduler_worker.config import Aggregate
from scheduler_worker.selection.flavor import MAX_GROUPS
from scheduler_worker.selection.flavor_query import HOST_UNKNOWN
from scheduler_worker.selection.request_spec import Unsatisfiable

__all__ = [
    "CloudState",
    "PrefilterSettings",
    "ResourceRequest",
    "has_topology",
    "named_nodes",
    "querystring",
    "resource_request",
    "specs_of_query",
    "translated",
    "undecided",
]

REFUSED: Final = "nova.query_refused"

MAX_TEXT = 255  # characters, as Nova's database bounds an extra spec
MAX_SPECS = 256  # each is compared with each host
MAX_NAMES = 3_000
MAX_FORCED = 100  # each host with each node

_OF_OTHERS = frozenset({"group", "same_host", "different_host"})  # with one of these hints Nova asks for all candidates

# Beginnings of extra specs that ask for what no query can say: parts of a NUMA topology, and devices by name.
BEYOND_QUERIES: Final = (
    "accel:", "hw:cpu_dedicated_mask", "hw:cpu_realtime", "hw:mem_page_size", "hw:numa_", "pci_passthrough:"
)  # fmt: skip
POLICY: Final = "hw:cpu_policy"

_STANDARD = frozenset(os_resource_classes.STANDARDS)
_CUSTOM = "CUSTOM_"
_GROUPED = re.compile(r"^(resources|trait)([a-zA-Z0-9_-]{1,64})?:(.*)$")
_SUFFIX = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_POLICIES: Final[dict[str, Literal["none", "isolate"]]] = {"none": "none", "isolate": "isolate"}


class CloudState(Protocol):
    """What Nova reads of its own database to shape a query; `state.NovaState` is one."""

    def aggregates(self) -> Sequence[Aggregate]:
        """All host aggregates with their metadata."""

    def nodes_named(self, host: str | None, nodename: str | None = None) -> Sequence[str]:
        """The uuids of the compute nodes of this host, and of this node name; None: any."""

    def cell_of(self, uuid: str) -> str | None:
        """The uuid of the cell that a compute node is in."""


class ResourceRequest(Struct, frozen=True, kw_only=True):
    """The query of one request."""

    query: Query
    limit: int | None  # the most candidates that Nova would ask for (None: all)
    # Nova asks a second time with `pinning=False`, as VCPU, and takes the candidates of both
    cpu_pinning_requested: bool = False


def undecided(
    request: NovaRequest, settings: PrefilterSettings, enabled: Collection[str], lacking: Sequence[str] = ()
) -> NotDecided | None:
    """Why berth does not decide this request, if so: a Nova filter that is not run here reads a part of it. enabled:
    names of such filters; what only others read is ignored. lacking: enabled filters of which berth does not know what
    they read.
    """
    if lacking:
        return NotDecided("filter", ", ".join(lacking))
    for what, count, most in _sizes(request):
        if count > most:
            return NotDecided("size", f"more than {most} {what}")
    for name in enabled:
        hint = NOT_OWNED.get(name)
        if hint and hint in request.hints:
            return NotDecided("hint", hint)
    if NUMA_FILTER in enabled and request.numa_topology is not None:
        return NotDecided("numa_topology", "the request has a NUMA topology")
    if PCI_FILTER in enabled and any(one.is_of_port for one in request.pci):
        return NotDecided("pci_ports", "a port asks for a PCI device")
    if PCI_FILTER in enabled and request.pci and not settings.pci_in_placement:
        return NotDecided("pci", "the flavor asks for PCI devices, and they are not in placement")
    return None


def _sizes(request: NovaRequest) -> Iterator[tuple[str, int, int]]:
    """(what is named, how often, the most that is looked at). No call of a Nova comes near. Each name takes time in
    which nothing else goes on, some of them for each host.
    """
    specs, groups, level = request.flavor.extra_specs, request.groups_of_requesters, request.request_level_params
    asked, group = request.requested_destination or NovaDestination(), request.instance_group
    yield "extra specs", len(specs), MAX_SPECS
    yield "characters in an extra spec", max(map(len, (*specs, *specs.values())), default=0), MAX_TEXT
    yield "hosts to be ignored", len(request.ignore_hosts or ()), MAX_NAMES
    yield "forced hosts", len(request.force_hosts or ()), MAX_FORCED
    yield "forced nodes", len(request.force_nodes or ()), MAX_FORCED
    yield "values of a hint", max(map(len, request.hints.values()), default=0), MAX_NAMES
    yield "members of the server group", len((group and group.members) or ()), MAX_LOCATED_HOSTS
    traits = [request.image_or_none.traits_required, level.root_required, level.root_forbidden]
    traits += [one for group in groups for one in (group.required_traits, group.forbidden_traits)]
    yield "traits", sum(map(len, traits)), MAX_SPECS
    yield "resource classes", sum(len(one.resources) for one in groups), MAX_SPECS
    any_of = [uuids for one in groups for uuids in one.aggregates] + [one.split(",") for one in asked.aggregates or ()]
    forbidden = [*(one.forbidden_aggregates for one in groups), asked.forbidden_aggregates or ()]
    yield "aggregates", sum(len(one) or 1 for one in any_of) + sum(map(len, forbidden)), MAX_NAMES
    yield "specs of PCI requests", sum(len(one.spec) for one in request.pci), MAX_SPECS
    yield "names of request groups", sum(len(one) or 1 for one in level.same_subtree), MAX_NAMES


def resource_request(
    request: NovaRequest,
    settings: PrefilterSettings,
    nova_state: CloudState,
    *,
    requires_owner: bool,
    pinning: bool = True,
    release: int = NEWEST,
) -> ResourceRequest | Unsatisfiable:
    """The query of a request, pre-filters applied; Unsatisfiable where Nova finds no host without asking, or Placement
    refuses the query. requires_owner: every compute node has the trait OWNER_NOVA, which is required. pinning:
    translate the CPU policy to PCPU (enable_pinning_translate). release: Nova's. Raises NotDecided.
    """
    # OWNER_NOVA stands for a comparison of the versions of compute services, which Nova's API does not tell.
    asked = translated(request, settings, nova_state, requires_owner=requires_owner, pinning=pinning, release=release)
    if isinstance(asked, Unsatisfiable):
        return asked
    why = _refused(asked.query)
    return asked if why is None else Unsatisfiable(REFUSED, f"Placement refuses the query: {why}", "flavor")


def translated(
    request: NovaRequest,
    settings: PrefilterSettings,
    nova_state: CloudState,
    *,
    requires_owner: bool,
    pinning: bool = True,
    release: int = NEWEST,
) -> ResourceRequest | Unsatisfiable:
    """`resource_request`, which may be one that Placement refuses. Raises NotDecided."""
    aggregates = nova_state.aggregates()
    tenant = tenant_aggregates(request, settings, aggregates)
    if isinstance(tenant, Unsatisfiable):
        return tenant
    drafted = _drafted(request, pinning=pinning, release=release)
    first = drafted if pinning else _drafted(request, pinning=True, release=release)  # Nova runs its pre-filters once
    added = prefilter(
        request,
        settings,
        aggregates,
        tenant=tenant,
        required_traits=frozenset(trait for group in first.groups.values() for trait in group.required),
        requires_owner=requires_owner,
        release=release,
    )
    _apply(drafted, added, request)
    nodes = named_nodes(request, nova_state)
    if isinstance(nodes, Unsatisfiable):
        return nodes
    if len(nodes) == 1:
        drafted.group().in_tree = nodes[0]
    has_several = sum(suffix != UNNUMBERED for suffix in drafted.groups) > 1
    if has_several and drafted.group_policy is None and drafted.suffixes_of_flavor <= 1:
        drafted.group_policy = "none"  # the groups are not the flavor's, so it could not state one
    asks_for_all = len(nodes) > 1 or not _OF_OTHERS.isdisjoint(request.hints)
    return ResourceRequest(
        query=drafted.query(request, added, only_roots=tuple(nodes) if len(nodes) > 1 else ()),
        limit=None if asks_for_all else settings.max_placement_results,
        cpu_pinning_requested=drafted.cpu_pinning_requested,
    )


def specs_of_query(flavor: NovaFlavor) -> dict[str, str]:
    """What Nova makes of a flavor's `hw:` and `os:` extra specs, as those of amounts and traits: the ones that say the
    same to any scheduler. Raises NotDecided: no query says it all, or the image has a part in it.
    """
    words = {key: value for key, value in flavor.extra_specs.items() if not _GROUPED.match(key)}
    beyond = sorted(key for key in words if key.startswith(BEYOND_QUERIES))
    if beyond or words.get(POLICY) == "mixed":
        raise NotDecided("flavor", ", ".join(beyond or [POLICY]))
    request = NovaRequest(flavor=replace(flavor, extra_specs=words))
    own = _drafted(request, pinning=True).group()
    plain = _drafted(NovaRequest(flavor=replace(flavor, extra_specs={})), pinning=True).group()
    amounts = {name: own.resources.get(name, 0) for name in sorted(own.resources | plain.resources)}
    specs = {f"resources:{name}": str(n) for name, n in amounts.items() if n != plain.resources.get(name)}
    specs |= {f"trait:{name}": "required" for name in sorted(own.required)}
    specs |= {f"trait:{name}": "forbidden" for name in sorted(own.forbidden)}
    of_root = ",".join(sorted(device_traits(request)))
    return specs | ({"root_required": of_root} if of_root else {})


def has_topology(flavor: NovaFlavor) -> bool:
    """Whether Nova gives its servers a NUMA topology, although `specs_of_query` says it: CPUs or memory are pinned."""
    return flavor.extra_specs.get(POLICY) == "dedicated" or "hw:pmem" in flavor.extra_specs


def querystring(requested: ResourceRequest) -> str:
    """The query as Nova writes it (`ResourceRequest.to_querystring`), parameters and names in order."""
    query = requested.query
    parameters: list[tuple[str, str]] = []
    if requested.limit is not None:
        parameters.append(("limit", str(requested.limit)))
    if query.group_policy is not None:
        parameters.append(("group_policy", query.group_policy))
    if of_root := _traits(query.root_required, query.root_forbidden):
        parameters.append(("root_required", of_root))
    parameters += [("same_subtree", ",".join(sorted(suffixes))) for suffixes in query.same_subtree]
    for group in (_unnumbered(query), *query.groups):
        if group.suffix == UNNUMBERED and group == Group():
            continue
        amounts = (f"{name}:{amount}" for name, amount in group.resources.items())
        parameters.append((f"resources{group.suffix}", ",".join(sorted(amounts))))
        if traits := _traits(group.required, group.forbidden):
            parameters.append((f"required{group.suffix}", traits))
        member_of = ["in:" + ",".join(sorted(uuids)) for uuids in group.member_of]
        if group.forbidden_aggregates:
            member_of.append("!in:" + ",".join(sorted(group.forbidden_aggregates)))
        parameters += [(f"member_of{group.suffix}", one) for one in member_of]
        if group.in_tree:
            parameters.append((f"in_tree{group.suffix}", group.in_tree))
    return urlencode(sorted(parameters))


def _traits(required: Sequence[Sequence[str]], forbidden: Sequence[str]) -> str:
    """Nova has no any-of groups: each has one trait."""
    return ",".join([*sorted(names[0] for names in required), *(f"!{name}" for name in sorted(forbidden))])


def _unnumbered(query: Query) -> Group:
    return Group(**{name: getattr(query, name) for name in Group.__struct_fields__ if name != "suffix"})


class _Draft(Struct):
    """A group while it is put together."""

    resources: dict[str, int] = {}
    required: set[str] = set()
    forbidden: set[str] = set()
    member_of: list[tuple[str, ...]] = []
    forbidden_aggregates: set[str] = set()
    in_tree: str | None = None

    def add(self, resource_class: str, amount: int | str) -> None:
        """An amount instead of an earlier one; what is no amount, or of a class that cannot be, is left out."""
        if resource_class not in _STANDARD and not resource_class.startswith(_CUSTOM):
            return
        try:
            number = int(amount)
        except ValueError:
            return
        if number >= 0:
            self.resources[resource_class] = number

    @property
    def is_empty(self) -> bool:
        rest = (self.required, self.forbidden, self.member_of, self.forbidden_aggregates)
        return not (self.resources or any(rest))

    def made(self, suffix: str) -> Group:
        return Group(
            suffix=suffix,
            resources=dict(sorted(self.resources.items())),
            required=_each(self.required),
            forbidden=tuple(sorted(self.forbidden)),
            member_of=tuple(self.member_of),
            forbidden_aggregates=tuple(sorted(self.forbidden_aggregates)),
            in_tree=self.in_tree,
        )


class _Drafted(Struct):
    """All groups while they are put together."""

    groups: dict[str, _Draft] = {}
    group_policy: Literal["none", "isolate"] | None = None
    suffixes_of_flavor: int = 0  # how many groups the flavor's extra specs name
    cpu_pinning_requested: bool = False

    def group(self, suffix: str = UNNUMBERED) -> _Draft:
        return self.groups.setdefault(suffix, _Draft())

    def has_class(self, resource_class: str) -> bool:
        """Whether any group names a class, be it with 0."""
        return any(resource_class in group.resources for group in self.groups.values())

    def query(self, request: NovaRequest, added: Additions, *, only_roots: tuple[str, ...]) -> Query:
        level = request.request_level_params
        own = self.groups.get(UNNUMBERED, _Draft()).made(UNNUMBERED)
        return Query(
            **{name: getattr(own, name) for name in Group.__struct_fields__ if name != "suffix"},
            groups=tuple(group.made(suffix) for suffix, group in sorted(self.groups.items()) if suffix != UNNUMBERED),
            group_policy=self.group_policy,
            root_required=_each(level.root_required | added.root_required),
            root_forbidden=tuple(sorted(level.root_forbidden | added.root_forbidden)),
            same_subtree=tuple(tuple(sorted(suffixes)) for suffixes in level.same_subtree),
            only_roots=only_roots,
        )


def _each(traits: set[str] | frozenset[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((name,) for name in sorted(traits))


def _drafted(request: NovaRequest, *, pinning: bool, release: int = NEWEST) -> _Drafted:
    """The groups of flavor, image and requesters, without what the pre-filters add. Raises NotDecided."""
    drafted = _Drafted()
    _add_extra_specs(drafted, request)
    drafted.suffixes_of_flavor = sum(suffix != UNNUMBERED for suffix in drafted.groups)
    if request.image_or_none.traits_required:
        drafted.group().required.update(request.image_or_none.traits_required)
    if pinning:
        _add_cpus(drafted, request)
    _add_groups_of_requesters(drafted, request)
    _add_sizes(drafted, request)
    _add_devices(drafted, request, release)
    for group in drafted.groups.values():
        group.resources = {name: amount for name, amount in group.resources.items() if amount}
    drafted.groups = {suffix: group for suffix, group in drafted.groups.items() if not group.is_empty}
    return drafted


def _add_extra_specs(drafted: _Drafted, request: NovaRequest) -> None:
    for key, value in request.flavor.extra_specs.items():
        if key == "group_policy":
            drafted.group_policy = _POLICIES.get(value, drafted.group_policy)
        elif found := _GROUPED.match(key):
            kind, suffix, name = found.groups()
            group = drafted.group(suffix or UNNUMBERED)
            if kind == "resources":
                group.add(name, value)
            elif value == "required":
                group.required.add(name)
            elif value == "forbidden":
                group.forbidden.add(name)


def _add_cpus(drafted: _Drafted, request: NovaRequest) -> None:
    """The CPU policy as PCPU and VCPU, and the trait of hyperthreads."""
    cpus = hardware.cpus(request)
    drafted.cpu_pinning_requested = cpus.is_dedicated
    if cpus.vcpus is not None:
        drafted.group().add("VCPU", cpus.vcpus)
    if cpus.pcpus is not None:
        drafted.group().add("PCPU", cpus.pcpus)
    if cpus.hyperthreading is not None:
        own = drafted.group()
        (own.required if cpus.hyperthreading else own.forbidden).add("HW_CPU_HYPERTHREADING")


def _add_groups_of_requesters(drafted: _Drafted, request: NovaRequest) -> None:
    """The groups of ports, device profiles and PCI requests, each under its requester's id."""
    for one in request.groups_of_requesters:
        suffix = one.requester_id
        if not suffix or suffix in drafted.groups or one.is_empty:
            raise NotDecided("request_groups", "a request group is empty, has no requester, or one that is there twice")
        drafted.groups[suffix] = _Draft(
            resources=dict(one.resources),
            required=set(one.required_traits),
            forbidden=set(one.forbidden_traits),
            member_of=[tuple(sorted(uuids)) for uuids in one.aggregates],
            forbidden_aggregates=set(one.forbidden_aggregates),
            in_tree=one.in_tree,
        )


def _add_sizes(drafted: _Drafted, request: NovaRequest) -> None:
    """The flavor's own sizes, of each class that nothing else names. A volume takes the place of the root disk."""
    flavor, own = request.flavor, drafted.group
    if not drafted.has_class("VCPU") and not drafted.has_class("PCPU"):
        own().add("VCPU", flavor.vcpus)
    if not drafted.has_class("MEMORY_MB"):
        own().add("MEMORY_MB", flavor.memory_mb)
    if not drafted.has_class("DISK_GB"):
        disk_gb = flavor.ephemeral_gb + -(-flavor.swap // 1024) + (0 if request.is_bfv else flavor.root_gb)
        own().add("DISK_GB", disk_gb)


def _add_devices(drafted: _Drafted, request: NovaRequest, release: int) -> None:
    """What flavor and image ask for in words of their own: memory encryption, persistent memory, TPM, firmware."""
    amounts = hardware.persistent_memory(request)
    traits = list(hardware.tpm_traits(request))
    if encryption := hardware.memory_encryption_trait(request):
        amounts["MEM_ENCRYPTION_CONTEXT"] = 1
        traits.append(encryption)
    if hardware.chosen(request, "pci_numa_affinity_policy", NUMA_POLICIES) == "socket":
        traits.append("COMPUTE_SOCKET_PCI_NUMA_AFFINITY")
    if hardware.chosen(request, "secure_boot", ("required", "disabled", "optional"), prefix="os") == "required":
        traits.append("COMPUTE_SECURITY_UEFI_SECURE_BOOT")
    mode = hardware.chosen(request, "maxphysaddr_mode", ("passthrough", "emulate"))
    if mode:
        traits.append(f"COMPUTE_ADDRESS_SPACE_{'EMULATED' if mode == 'emulate' else 'PASSTHROUGH'}")
    if hardware.stateless_firmware(request):
        traits.append("COMPUTE_SECURITY_STATELESS_FIRMWARE")
    for name, amount in amounts.items():
        drafted.group().add(name, amount)
    if required := of_release(traits, release):
        drafted.group().required.update(required)


def _apply(drafted: _Drafted, added: Additions, request: NovaRequest) -> None:
    """The aggregates of the pre-filters and of the destination, and what the groups of PCI requests must have."""
    asked = request.requested_destination or NovaDestination()
    member_of = [*(tuple(one.split(",")) for one in asked.aggregates or ()), *added.member_of]
    forbidden = added.forbidden_aggregates | (asked.forbidden_aggregates or frozenset())
    if member_of:
        drafted.group().member_of = member_of
    if forbidden:
        drafted.group().forbidden_aggregates |= forbidden
    if not added.of_pci:
        return
    of_pci = {one.request_id for one in request.pci if one.request_id and not one.is_of_port}
    for one in request.groups_of_requesters:
        if one.requester_id and one.requester_id.rsplit("-", 1)[0] in of_pci:
            drafted.group(one.requester_id).required |= added.of_pci


def named_nodes(request: NovaRequest, nova_state: CloudState) -> Sequence[str] | Unsatisfiable:
    """The compute nodes of the host or node that the request names; none: it names none."""
    asked = request.requested_destination or NovaDestination()
    host = asked.host or next(iter(request.force_hosts or ()), None)
    node = asked.node or next(iter(request.force_nodes or ()), None)
    if not host and not node:
        return ()
    cell = asked.cell.uuid if asked.cell is not None else None
    nodes = [one for one in nova_state.nodes_named(host, node) if cell is None or nova_state.cell_of(one) == cell]
    if not nodes:
        return Unsatisfiable(HOST_UNKNOWN, f"No such host - host: {host} node: {node} ", "requested_host")
    return nodes


def _refused(query: Query) -> str | None:
    """Why Placement refuses the query (status 400), which Nova takes as "no valid host". Raises NotDecided."""
    own = _unnumbered(query)
    groups = (*query.groups, *([own] if own != Group() else []))
    if len(groups) > MAX_GROUPS:
        raise NotDecided("groups", f"more than {MAX_GROUPS} request groups")
    if len(query.groups) > 1 and query.group_policy is None:
        return "more than one numbered group, and no group_policy"
    if not groups or any(not group.resources for group in groups):
        return "a request group has no resources"
    if any(amount > MAX_AMOUNT for group in groups for amount in group.resources.values()):
        return f"an amount is above {MAX_AMOUNT}"
    suffixes = {group.suffix for group in query.groups}
    if any(not _SUFFIX.fullmatch(suffix) for suffix in suffixes):
        return "a request group has a name that is not allowed"
    if any(not suffixes.issuperset(subtree) for subtree in query.same_subtree):
        return "same_subtree names a group that there is not"
    named = [uuid for group in groups for uuids in (*group.member_of, group.forbidden_aggregates) for uuid in uuids]
    if not all(map(_is_uuid, (*named, *(group.in_tree for group in groups if group.in_tree)))):
        return "an aggregate or a tree is named by no uuid"
    traits = [(group.required, group.forbidden) for group in groups] + [(query.root_required, query.root_forbidden)]
    if any(not {name for (name,) in required}.isdisjoint(forbidden) for required, forbidden in traits):
        return "a trait is required and forbidden"
    return None


def _is_uuid(text: str) -> bool:
    """Whether Placement takes it as a uuid: hyphens and upper case do not matter."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
