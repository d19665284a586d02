"""From a flavor's words to a candidate query (N-2), and the pre-filters that shape it (R-1, R-2, R-4)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from placement_worker.replica.search import Query
from scheduler_worker.config import Aggregate, Flavor, SchedulerConfig
from scheduler_worker.domain.view import Membership
from scheduler_worker.domain.wanted import Impossible, Wanted
from scheduler_worker.filters.tenant_is_allowed import KEY as TENANT_KEY
from scheduler_worker.filters.tenant_is_allowed import tenants

DISABLED_TRAIT = "COMPUTE_STATUS_DISABLED"
ZONE_KEY = "availability_zone"
HOST_UNKNOWN = "host.unknown"
_GROUPED = re.compile(r"^(resources|trait)(\d+|_[A-Za-z0-9_-]+):|^group_policy$")
_NAME = re.compile(r"^[A-Z0-9_]{1,255}$")


class FlavorInvalid(ValueError):
    """A configured flavor that can never be asked for; found at start."""

    code = "flavor.invalid"


class Asked(Struct, frozen=True):
    """A flavor as a query, without anything that depends on the request."""

    query: Query
    extra_specs: Mapping[str, str]


def parse(name: str, flavor: Flavor) -> Asked:
    """The query of a flavor. Amounts given as `resources:` win over the flavor's own sizes; 0 takes a class away."""
    resources = {"VCPU": flavor.vcpus, "MEMORY_MB": flavor.memory_mb, "DISK_GB": flavor.disk_gb}
    required: list[tuple[str, ...]] = []
    forbidden: list[str] = []
    others: dict[str, str] = {}
    for key, value in flavor.extra_specs.items():
        if _GROUPED.match(key):
            raise FlavorInvalid(f"flavor {name}: {key}: numbered groups are not supported yet")
        kind, colon, word = key.partition(":")
        if colon and kind == "resources":
            resources[_known(name, word)] = _amount(name, key, value)
        elif colon and kind == "trait":
            _sort_trait(name, _known(name, word), value, required, forbidden)
        else:
            others[key] = value
    resources = {resource_class: amount for resource_class, amount in resources.items() if amount}
    if not resources:
        raise FlavorInvalid(f"flavor {name} asks for nothing")
    query = Query(
        resources=resources,
        required=tuple(required),
        forbidden=tuple(forbidden),
        root_forbidden=(DISABLED_TRAIT,),  # R-4, always
    )
    return Asked(query, others)


def _known(flavor: str, word: str) -> str:
    if not _NAME.match(word):
        raise FlavorInvalid(f"flavor {flavor}: {word!r} is no resource class or trait")
    return word


def _amount(flavor: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) >= 2**31:
        raise FlavorInvalid(f"flavor {flavor}: {key} = {value!r} is no amount")
    return int(value)


def _sort_trait(flavor: str, trait: str, value: str, required: list[tuple[str, ...]], forbidden: list[str]) -> None:
    if value == "required":
        required.append((trait,))
    elif value == "forbidden":
        forbidden.append(trait)
    else:
        raise FlavorInvalid(f"flavor {flavor}: trait:{trait} = {value!r}; it is `required` or `forbidden`")


def want(
    request: BuildRequest, asked: Asked, hosts: tuple[str, ...] | None, membership: Membership, config: SchedulerConfig
) -> Wanted | Impossible:
    """What one request wants, pre-filters applied. `hosts`: uuids that its `host` names, if any (N-12)."""
    query = asked.query
    if hosts is not None:
        if not hosts:
            return Impossible(HOST_UNKNOWN, f"there is no host {request.host}", "requested_host")
        query = replace(query, only_roots=hosts)
    for prefilter in (_tenant_aggregate, _availability_zone):
        shaped = prefilter(request, query, membership, config)
        if isinstance(shaped, Impossible):
            return shaped
        query = shaped
    return Wanted(
        query=query,
        flavor=request.flavor,
        project_id=request.project_id,
        extra_specs=asked.extra_specs,
        availability_zone=request.availability_zone,
        key=(request.flavor, request.project_id, request.availability_zone or "", request.host or ""),
    )


def _tenant_aggregate(
    request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig
) -> Query | Impossible:
    """R-1: the project's own aggregates, where there are any; optionally a project without one fits nowhere."""
    if not config.limit_tenants_to_placement_aggregate:
        return query
    named = [a for a in membership.with_prefix(TENANT_KEY) if request.project_id in tenants(a.metadata)]
    if named:
        return _any_of(query, named)
    if config.placement_aggregate_required_for_tenants:
        return Impossible(
            "tenant.no_aggregate", f"no aggregate is set aside for project {request.project_id}", "tenant"
        )
    return query


def _availability_zone(
    request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig
) -> Query | Impossible:
    """R-2: the aggregates that make the zone; the default zone is every host that no aggregate puts in another."""
    zone = request.availability_zone
    if zone is None:
        return query
    zoned = membership.with_key(ZONE_KEY)
    mine = [aggregate for aggregate in zoned if aggregate.metadata[ZONE_KEY] == zone]
    if mine:
        return _any_of(query, mine)
    if zone == config.default_availability_zone:
        return replace(query, forbidden_aggregates=query.forbidden_aggregates + tuple(a.uuid for a in zoned))
    known = ", ".join(sorted({config.default_availability_zone, *(a.metadata[ZONE_KEY] for a in zoned)}))
    return Impossible("zone.unknown", f"there is no availability zone {zone} (there are: {known})", "availability_zone")


def _any_of(query: Query, aggregates: list[Aggregate]) -> Query:
    return replace(query, member_of=(*query.member_of, tuple(aggregate.uuid for aggregate in aggregates)))
