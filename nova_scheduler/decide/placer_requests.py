"""The request side of `select_destinations`: a RequestSpec of Nova as what berth's own placer is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Uuid, reason_of
from bus.contracts.placement import MAX_CLAIMS_TOGETHER, MAX_NAMED, ServerGroup
from nova_scheduler.cloud.state import NovaState
from nova_scheduler.config import NUMA_FILTER, NovaConfig
from nova_scheduler.filters.numa import DevicesOf
from nova_scheduler.fit.numa import NumaLimits
from nova_scheduler.request.numa import devices, numa_request
from nova_scheduler.request.releases import SINCE
from nova_scheduler.request.request_spec import NotDecided, NovaGroup, NovaRequest, SpecRefused
from nova_scheduler.request.resource_request import ResourceRequest, resource_request, undecided
from nova_scheduler.wire.envelope import Call
from placement_worker.replica.request import Query
from scheduler_worker.build.host_search import ExternalClaim, HostSearchRequest
from scheduler_worker.filters.image import ImagePropertiesFilter, IsolatedHostsFilter, supports
from scheduler_worker.records.build_record import Gang
from scheduler_worker.selection.flavor_query import TRAIT_KEY
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.selection.selector import Selector

NOTHING: Final = Query()
OWNER_TRAIT: Final = "OWNER_NOVA"
ARCHITECTURE: Final = "hw_architecture"
MAX_ASKED_FOR: Final = 10  # hosts that the placer names for one instance
_WORD = re.compile(r"[A-Za-z0-9_\-]{1,64}")


class SelectArguments(Struct, frozen=True, kw_only=True):
    """The arguments of a call, version 4.5."""

    spec_obj: Any
    # None from a conductor older than Nova 16
    instance_uuids: Annotated[tuple[Uuid, ...], Bound(min_length=1, max_length=MAX_CLAIMS_TOGETHER)] | None = None
    return_objects: bool = False
    return_alternates: bool = False


class NovaInstance(Struct, frozen=True, kw_only=True):
    """One instance of a call, as the placer takes it (`SchedulableRequest`)."""

    instance_uuid: str
    project_id: str
    user_id: str
    server_group: ServerGroup | None = None
    different_host: tuple[str, ...] = ()
    same_host: tuple[str, ...] = ()
    ignore_hosts: tuple[str, ...] = ()
    max_attempts: int | None = None


class PlacerRequests:
    """Makes what the placer is asked for of Nova's requests."""

    def __init__(
        self,
        selector: Selector,
        nova_state: NovaState,
        config: NovaConfig,
        *,
        # enabled filters that berth does not have: every call is left to the fallback then
        lacking: Sequence[str] = (),
        # the cells whose databases were read too long ago
        outdated: Callable[[], Sequence[str]] = tuple,
        # the devices of hosts' rows (uuid), of whatever age, for the filters that read them; None: no database is read
        row_of: DevicesOf | None = None,
    ) -> None:
        self._selector = selector
        self._nova_state = nova_state
        self._settings = config.prefilters
        self._row_of_host = row_of
        self._release = config.release
        self._outdated = outdated
        self._default_architecture = config.image_properties_default_architecture
        self._is_one_of_two = config.is_one_of_two
        self.enable(config, lacking)

    def enable(self, config: NovaConfig, lacking: Sequence[str]) -> None:
        """Translate for these enabled filters from now on."""
        self._enabled = frozenset(one.rpartition(".")[2] for one in config.enabled_filters)
        self._undecided = frozenset(config.undecided_filters)
        self._needs_facts = bool(config.fact_filters)
        self._row_of = self._row_of_host if config.device_filters else None
        self._lacking = lacking

    def undecided(self, request: NovaRequest) -> NotDecided | None:
        """Why a request is left to the fallback; None: it is decided here."""
        # Where there is no fallback the filters reject the hosts of these cells.
        needs_facts = self._needs_facts or (self._row_of is not None and _asks_devices(request))
        if needs_facts and self._is_one_of_two and (cells := self._outdated()):
            return NotDecided("host_facts", ", ".join(cells))
        return undecided(request, self._settings, self._undecided, self._lacking)

    def check_architecture(self, request: NovaRequest) -> None:
        """Raises NotDecided: no host's processor has the architecture of the image. A hypervisor may emulate it, which
        Nova's API does not tell.
        """
        wanted = self._image_properties(request).get(ARCHITECTURE)
        if not self._is_one_of_two or not wanted or ImagePropertiesFilter.name not in self._enabled:
            return
        if not any(supports(one, [wanted.lower(), "", ""]) for one in self._nova_state.supported()):
            raise NotDecided("architecture", wanted)

    def spec(self, request: NovaRequest) -> RequestSpec | Unsatisfiable:
        """The spec of a request. One for pinned CPUs takes others where a host does not offer these apart, as in Nova,
        which asks twice. Raises NotDecided.
        """
        translate = partial(
            resource_request,
            request,
            self._settings,
            self._nova_state,
            requires_owner=self._owns_all(),
            release=self._release,
        )
        asked = translate(pinning=True)
        if isinstance(asked, Unsatisfiable):
            return asked
        is_asked_twice = asked.cpu_pinning_requested and not self._settings.disable_fallback_pcpu_query
        second = translate(pinning=False) if is_asked_twice else None
        destination = request.requested_destination
        cell = None
        if destination is not None and destination.cell is not None and not destination.allow_cross_cell_move:
            cell = destination.cell.uuid
        spec = RequestSpec(
            query=asked.query,
            otherwise=second.query if isinstance(second, ResourceRequest) else None,
            flavor=request.flavor.name,
            project_id=request.project_id or "",
            extra_specs=request.flavor.extra_specs,
            availability_zone=request.availability_zone,
            image_properties=self._image_properties(request),
            image=self._image(request),
            forced=bool(request.force_hosts or request.force_nodes),
            cell=cell,
            devices=devices(request) if self._row_of is not None else (),
        )
        return replace(spec, key=(msgspec.json.encode(spec, order="sorted").decode(),))

    def limits(self, host_uuid: str, request: NovaRequest) -> NumaLimits | None:
        """The limits that NUMATopologyFilter gives a host for a request. Raises NotDecided."""
        if self._row_of is None or NUMA_FILTER not in self._enabled or request.numa_topology is None:
            return None
        if request.force_hosts or request.force_nodes or request.is_rebuild:  # no filter is run
            return None
        asked, found = numa_request(request), self._row_of(host_uuid)
        if asked is None or asked.topology is None or found is None or found.topology is None:
            return None
        return found.limits(asked)

    def spec_of_rebuild(self, request: NovaRequest) -> RequestSpec:
        """The spec of a rebuild, which claims nothing and stays on its host."""
        return RequestSpec(
            query=NOTHING,
            flavor=request.flavor.name,
            project_id=request.project_id or "",
            extra_specs=request.flavor.extra_specs,
            image_properties=self._image_properties(request),
            image=self._image(request),
        )

    def own_cell_first(self, request: NovaRequest, spec: RequestSpec) -> list[RequestSpec]:
        """The spec; where the server may leave its cell first within that, which Nova weighs above all."""
        asked = request.requested_destination
        own = None if spec.cell is not None or asked is None or asked.cell is None else asked.cell.uuid
        if own is None or own in self._selector.table.disabled_cells:
            return [spec]
        return [replace(spec, cell=own, key=(*spec.key, own)), spec]

    def for_instances(
        self, call: Call, asked: SelectArguments, request: NovaRequest, spec: RequestSpec
    ) -> list[HostSearchRequest]:
        """The instances as the placer takes them: several together or not at all."""
        assert asked.instance_uuids is not None
        uuids = tuple(dict.fromkeys(asked.instance_uuids))
        gang = Gang(uuid=uuids[0], size=len(uuids), min_count=len(uuids)) if len(uuids) > 1 else None
        group = request.instance_group
        members = _uuids(group.members or (), "group") if group is not None else ()
        one = NovaInstance(
            instance_uuid=uuids[0],
            project_id=_word(request.project_id, "project_id"),
            user_id=_word(request.user_id or call.context.get("user_id") or "unknown", "user_id"),
            server_group=_server_group(group),
            different_host=_hinted(request, "different_host") if "DifferentHostFilter" in self._enabled else (),
            same_host=_hinted(request, "same_host") if "SameHostFilter" in self._enabled else (),
            ignore_hosts=tuple(
                uuid for host in request.ignore_hosts or () for uuid in self._nova_state.nodes_named(host)
            ),
            # Some of them will be hosts of the call's other instances.
            max_attempts=min(self._selector.config.settings.max_attempts + len(uuids) - 1, MAX_ASKED_FOR)
            if asked.return_alternates and asked.return_objects
            else 1,
        )
        external, owner = ExternalClaim(group_members=members), claim_owner_of(call)
        return [
            HostSearchRequest(
                request=replace(one, instance_uuid=uuid), spec=spec, claim_owner=owner, gang=gang, external=external
            )
            for uuid in uuids
        ]

    def _image_properties(self, request: NovaRequest) -> dict[str, str]:
        """As filters read them, required traits among them."""
        image = request.image_or_none
        default = {ARCHITECTURE: self._default_architecture} if self._default_architecture else {}
        named = {name: str(value) for name, value in image.properties.items() if value is not None}
        return default | named | {f"{TRAIT_KEY}{trait}": "required" for trait in image.traits_required}

    def _image(self, request: NovaRequest) -> str:
        """The image's id, if a filter reads it: requests of one image more share no ranking then."""
        return request.image_or_none.id or "" if IsolatedHostsFilter.name in self._enabled else ""

    def _owns_all(self) -> bool:
        """Whether all of Nova's hosts have the trait of their owner, and its release requires it then."""
        if self._release < SINCE[OWNER_TRAIT]:
            return False
        view = self._selector.all_hosts()
        view = view.subset(view.known)
        return bool(len(view)) and bool(view.has_trait(OWNER_TRAIT).all())


def _asks_devices(request: NovaRequest) -> bool:
    return request.numa_topology is not None or bool(request.pci)


def parse_arguments(arguments: Mapping[str, object]) -> SelectArguments:
    """The arguments of a call. Raises SpecRefused."""
    try:
        return msgspec.convert(arguments, SelectArguments)
    except msgspec.ValidationError as error:
        raise SpecRefused(f"arguments: {reason_of(error)}") from None


def claim_owner_of(call: Call) -> str:
    """The name of a call's claims: the same when its message is delivered again."""
    if _WORD.fullmatch(call.unique_id):
        return call.unique_id
    return uuid5(NAMESPACE_OID, f"{call.unique_id} {call.message_id}").hex


def _word(value: object, name: str) -> str:
    """An id as placement takes one. Raises NotDecided: one of another form, as a directory may give users."""
    if not isinstance(value, str) or not value:
        raise SpecRefused(f"{name}: a text")
    if not _WORD.fullmatch(value):
        raise NotDecided(name, "berth takes ids of 1 to 64 letters, digits, _ and -")
    return value


def _uuids(values: Sequence[str], name: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(msgspec.convert(values, tuple[Uuid, ...])))
    except msgspec.ValidationError:
        raise SpecRefused(f"{name}: an instance is named by its uuid") from None


def _hinted(request: NovaRequest, name: str) -> tuple[str, ...]:
    """The instances that a hint names. What is no uuid, a server's name for one, names an instance that there is not:
    Nova's API takes any text, keeps it with the server, and sends it again with each move. Raises NotDecided.
    """
    found: dict[str, None] = {}
    for one in request.hints.get(name, ()):
        try:
            found[str(UUID(one))] = None
        except ValueError:
            found[str(uuid5(NAMESPACE_OID, one))] = None
    if len(found) > MAX_NAMED:
        raise NotDecided("hint", f"{name} names more than {MAX_NAMED} instances")
    return tuple(found)


def _server_group(group: NovaGroup | None) -> ServerGroup | None:
    """The server group of a request. Raises NotDecided: of a policy that berth does not know."""
    if group is None or group.group_policy is None:
        return None
    try:
        rules = {"max_per_host": int(group.rules.get("max_server_per_host", 1))}
        return msgspec.convert({"uuid": group.uuid, "policy": group.group_policy, **rules}, ServerGroup)
    except (msgspec.ValidationError, ValueError):
        raise NotDecided("group_policy", "a rule of the server group that berth does not know") from None
