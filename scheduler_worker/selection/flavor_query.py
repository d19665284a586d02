"""The candidate query of a request: its flavor, the traits of its image, and the pre-filters. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.objects import ZONE_KEY
from placement_worker.replica.request import Query
from scheduler_worker.config import Aggregate, SchedulerConfig
from scheduler_worker.selection.flavor import ParsedFlavor
from scheduler_worker.selection.host_view import Membership
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable

TRAIT_KEY = "trait:"
IMAGE_TRAITS = "image.traits"
HOST_UNKNOWN = "host.unknown"
NOT_FORCED = "host.not_forced"


def request_spec(
    request: BuildRequest,
    requested: ParsedFlavor,
    hosts: tuple[str, ...] | None,
    membership: Membership,
    config: SchedulerConfig,
) -> RequestSpec | Unsatisfiable:
    """The request spec of one build request, pre-filters applied. `hosts`: uuids of the host that it names, if any."""
    query = requested.query
    if request.forced and (hosts is None or request.project_id not in config.force_host_projects):
        problem = "it names no host" if hosts is None else f"project {request.project_id} may not pass the filters by"
        return Unsatisfiable(NOT_FORCED, f"it cannot be forced: {problem}", "requested_host")
    if hosts is not None:
        if not hosts:
            return Unsatisfiable(HOST_UNKNOWN, f"there is no host {request.host}", "requested_host")
        query = replace(query, only_roots=hosts)
    for prefilter in (_image_traits, _tenant_aggregate, _availability_zone, _isolated_aggregates):
        shaped = prefilter(request, query, membership, config)
        if isinstance(shaped, Unsatisfiable):
            return shaped
        query = shaped
    return RequestSpec(
        query=query,
        flavor=request.flavor,
        project_id=request.project_id,
        extra_specs=requested.extra_specs,
        preferred_traits=requested.preferred_traits,
        preferred_classes=requested.preferred_classes,
        availability_zone=request.availability_zone,
        image_properties=request.image_properties,
        forced=request.forced,
        key=(
            request.flavor,
            request.project_id,
            request.availability_zone or "",
            request.host or "",
            "forced" if request.forced else "",
            *sorted(f"{trait} {word}" for trait, word in traits_of_image(request.image_properties).items()),
        ),
    )


def traits_of_image(properties: Mapping[str, str]) -> dict[str, str]:
    """{trait: `required` or `forbidden`} as the image's properties have it."""
    return {name.removeprefix(TRAIT_KEY): value for name, value in properties.items() if name.startswith(TRAIT_KEY)}


def _image_traits(
    request: BuildRequest, query: Query, _membership: Membership, _config: SchedulerConfig
) -> Query | Unsatisfiable:
    """The traits of the image, which count as the flavor's do; of the host where the flavor has only groups."""
    traits = traits_of_image(request.image_properties)
    if not traits:
        return query
    required, forbidden = (
        [trait for trait in sorted(traits) if traits[trait] == word] for word in ("required", "forbidden")
    )
    of_root = not query.resources
    known = (query.root_required, query.root_forbidden) if of_root else (query.required, query.forbidden)
    all_required = (*known[0], *((trait,) for trait in required if (trait,) not in known[0]))
    all_forbidden = (*known[1], *(trait for trait in forbidden if trait not in known[1]))
    both = [trait for trait in all_forbidden if (trait,) in all_required]
    if both or len(required) + len(forbidden) < len(traits):
        problem = f"{', '.join(both)} is required and forbidden" if both else "a trait is `required` or `forbidden`"
        return Unsatisfiable(IMAGE_TRAITS, f"the image's traits and the flavor's: {problem}", "image_traits")
    if of_root:
        return replace(query, root_required=all_required, root_forbidden=all_forbidden)
    return replace(query, required=all_required, forbidden=all_forbidden)


def _tenant_aggregate(
    request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig
) -> Query | Unsatisfiable:
    """The project's aggregates, if it has any; a setting decides whether a project without one gets no host."""
    if not config.limit_tenants_to_placement_aggregate:
        return query
    named = [a for a in membership.with_prefix(TENANT_KEY) if request.project_id in tenants(a.metadata)]
    if named:
        return _any_of(query, named)
    if config.placement_aggregate_required_for_tenants:
        return Unsatisfiable("tenant.no_aggregate", f"no aggregate belongs to project {request.project_id}", "tenant")
    return query


def _availability_zone(
    request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig
) -> Query | Unsatisfiable:
    """The aggregates of the zone; the default zone has every host that is in no aggregate of another zone."""
    zone = request.availability_zone
    if zone is None:
        return query
    zoned = membership.with_key(ZONE_KEY)
    mine = [aggregate for aggregate in zoned if aggregate.metadata[ZONE_KEY] == zone]
    if mine:
        return _any_of(query, mine)
    if zone == config.default_availability_zone:
        zones = tuple(aggregate.uuid for aggregate in zoned)
        return replace(query, root_forbidden_aggregates=query.root_forbidden_aggregates + zones)
    known = ", ".join(sorted({config.default_availability_zone, *(a.metadata[ZONE_KEY] for a in zoned)}))
    return Unsatisfiable(
        "zone.unknown", f"there is no availability zone {zone} (there are: {known})", "availability_zone"
    )


def _isolated_aggregates(request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig) -> Query:
    """A host in an aggregate with `trait:X` = required metadata takes only flavors that require each such X."""
    if not config.enable_isolated_aggregate_filtering:
        return query
    requested = (*query.required, *query.root_required, *(names for group in query.groups for names in group.required))
    required = {names[0] for names in requested if len(names) == 1}
    kept = tuple(
        aggregate.uuid
        for aggregate in membership.with_prefix(TRAIT_KEY)
        if any(
            key.startswith(TRAIT_KEY) and value == "required" and key.removeprefix(TRAIT_KEY) not in required
            for key, value in aggregate.metadata.items()
        )
    )
    return replace(query, root_forbidden_aggregates=query.root_forbidden_aggregates + kept)


def _any_of(query: Query, aggregates: list[Aggregate]) -> Query:
    """Of the host itself: a sharing provider that gives it disk need not be in the aggregate of zone or tenant."""
    uuids = tuple(aggregate.uuid for aggregate in aggregates)
    return replace(query, root_member_of=(*query.root_member_of, uuids))


TENANT_KEY = "filter_tenant_id"


def tenants(metadata: dict[str, str]) -> set[str]:
    """The projects that an aggregate's `filter_tenant_id*` keys name (comma lists)."""
    named = (value.split(",") for key, value in metadata.items() if key.startswith(TENANT_KEY))
    return {word.strip() for words in named for word in words if word.strip()}
