"""What hosts are selected by: the settings with the objects of operators, flavors, filters and weighers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.objects import ZONE_KEY, group_named
from bus.contracts.placement import GroupPolicy, ServerGroup
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.selection.flavor import ParsedFlavor
from scheduler_worker.selection.flavor_query import request_spec
from scheduler_worker.selection.host_view import Membership
from scheduler_worker.selection.plugin import Filter, Weighing, is_own, judges_options, reads_image_property
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable

MAX_SPECS = 1_000  # of kinds of requests that are kept
ANTI_AFFINITY_FILTER = "ServerGroupAntiAffinityFilter"


class SelectorConfig:
    """A configuration as decisions use it. It does not change while it is in force."""

    def __init__(
        self,
        settings: SchedulerConfig,
        *,
        flavors: Mapping[str, ParsedFlavor],
        filters: Sequence[Filter],
        weighings: Sequence[Weighing],
        revision: Hashable = 0,  # of the objects that the settings hold
        membership: Membership | None = None,  # in their aggregates, where that is not placement's (None: it is)
    ) -> None:
        self.settings = settings
        self.flavors = flavors
        self.filters = tuple(filters)
        self.judges = tuple(one for one in filters if judges_options(one))
        self.weighings = tuple(weighings)
        self.revision = revision
        self.membership = Membership(settings.aggregates) if membership is None else membership
        self.zoned = self.membership.with_key(ZONE_KEY)
        self._specs: dict[tuple[str, str, str | None], RequestSpec] = {}  # of requests that name nothing else
        # An operator's plug-in may read the peers of any request.
        self._own_plugins_alone = all(map(is_own, filters)) and all(is_own(one.weigher) for one in weighings)
        self._keeps_groups_apart = any(one.name == ANTI_AFFINITY_FILTER for one in filters)

    def allows(self, flavor: str, project: str) -> bool:
        """Whether there is this flavor, and the project may request it."""
        known = self.settings.flavors.get(flavor)
        return known is not None and (not known.projects or project in known.projects)

    def flavors_for(self, project: str) -> tuple[str, ...]:
        """The names of the flavors that a project may request."""
        return tuple(name for name in self.settings.flavors if self.allows(name, project))

    def group_of(self, project: str, name: str) -> ServerGroup | None:
        """The server group on record that a project calls so."""
        full = f"{project}/{name}"
        definition = self.settings.groups.get(full)
        return None if definition is None else group_named(full, definition)

    def group_by_uuid(self, project: str, uuid: str) -> tuple[str, ServerGroup] | None:
        """(name, server group) on record of a project with this uuid."""
        for full, definition in self.settings.groups.items():
            if full.startswith(f"{project}/") and (group := group_named(full, definition)).uuid == uuid:
                return full, group
        return None

    def may_share_ranking(self, spec: RequestSpec) -> bool:
        """Whether a decision depends on the request's peers only through the hosts on which its anti-affinity group is
        full.
        """
        if not spec.has_policy(GroupPolicy.ANTI_AFFINITY):
            return False
        related = spec.related
        assert related is not None
        return (
            not spec.forced
            and related.different_hosts is None
            and related.same_hosts is None
            and self._own_plugins_alone
            and self._keeps_groups_apart
        )

    def request_spec(self, request: BuildRequest, hosts: tuple[str, ...] | None) -> RequestSpec | Unsatisfiable:
        """The request's spec under this configuration. hosts: which it names; None: it names none."""
        is_plain = request.host is None and not (request.forced or request.image_properties or request.group)
        plain = (request.flavor, request.project_id, request.availability_zone)
        if is_plain and (known := self._specs.get(plain)) is not None:
            return known
        flavor = self.flavors.get(request.flavor)
        if flavor is None:
            return Unsatisfiable("flavor.unknown", f"there is no flavor {request.flavor} any more", "flavor")
        if request.group is not None and request.server_group is None:
            return Unsatisfiable("group.unknown", f"there is no server group {request.group} any more", "server_group")
        found = request_spec(request, flavor, hosts, self.membership, self.settings)
        if isinstance(found, Unsatisfiable):
            return found
        # Requests that were read under different revisions of the objects share no ranking.
        spec = replace(found, key=(*found.key, *self._image_key(request.image_properties), str(self.revision)))
        if is_plain and len(self._specs) < MAX_SPECS:
            self._specs[plain] = spec
        return spec

    def _image_key(self, properties: Mapping[str, str]) -> list[str]:
        """The image properties that a filter reads: requests of images that differ in others share a ranking."""
        if not self._own_plugins_alone:  # an operator's plug-in may read any of them
            return [word for item in sorted(properties.items()) for word in item]
        return [
            word
            for name, value in sorted(properties.items())
            if any(reads_image_property(one, name, self.membership) for one in self.filters)
            for word in (name, value)
        ]
