"""What an operator has defined in a Nova cloud, read by its REST API and Keystone's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import reason_of
from nova_scheduler.cloud.rest import AggregateRow, NovaRefused, NovaRest

T = TypeVar("T")

MAX_PROJECTS = 20_000  # whose quotas are read, each by a request
Amount = Annotated[int, Bound(ge=0, lt=2**31)]
# A project that Keystone no longer has; Nova keeps its server groups, and accesses to flavors.
NO_PROJECT = frozenset(f"nova.http_{status}" for status in (400, 404))
# Limits of Keystone that are Nova's: `servers`, and `class:VCPU` and the like.
SERVERS, CLASS = "servers", "class:"


class FlavorRow(Struct, frozen=True, kw_only=True):
    """A flavor as Nova's API has it. swap: MiB, "" for none in old releases. extra_specs: None: not shown to us."""

    id: str
    name: str
    vcpus: Amount
    ram: Amount
    disk: Amount
    swap: int | str = 0
    ephemeral: Amount = msgspec.field(name="OS-FLV-EXT-DATA:ephemeral", default=0)
    is_public: bool = msgspec.field(name="os-flavor-access:is_public", default=True)
    extra_specs: dict[str, str] | None = None


class GroupRow(Struct, frozen=True, kw_only=True):
    """A server group as Nova's API has it."""

    id: str
    name: str
    project_id: str
    policy: str | None = None
    rules: dict[str, Any] = {}


class _Access(Struct, frozen=True):
    tenant_id: str


class _Project(Struct, frozen=True):
    id: str


class RegisteredLimit(Struct, frozen=True, kw_only=True):
    """A limit of Keystone that holds for every project without one of its own."""

    resource_name: str
    default_limit: int
    region_id: str | None = None


class ProjectLimit(Struct, frozen=True, kw_only=True):
    """A limit of Keystone of one project, or of a domain."""

    resource_name: str
    resource_limit: int
    project_id: str | None = None
    domain_id: str | None = None
    region_id: str | None = None


class Cloud(Struct, kw_only=True):
    """All that was read. access: {private flavor's id: projects}. default_quota, quotas: Nova's own limits by name (-1:
    none). without_quota: (project, why) of those whose limits Nova does not tell. unreadable: (kind, name, why) of rows
    that could not be read.
    """

    flavors: list[FlavorRow] = []
    access: dict[str, tuple[str, ...]] = {}
    aggregates: list[AggregateRow] = []
    groups: list[GroupRow] = []
    default_quota: dict[str, int] = {}
    quotas: dict[str, dict[str, int]] = {}
    without_quota: list[tuple[str, str]] = []
    registered: list[RegisteredLimit] = []
    limits: list[ProjectLimit] = []
    unreadable: list[tuple[str, str, str]] = []

    @property
    def is_unified(self) -> bool:
        """Whether Keystone has limits for servers or resource classes, as Nova's unified limits do."""
        return any(is_nova_limit(one.resource_name) for one in self.registered)


def is_nova_limit(resource_name: str) -> bool:
    """Whether a limit of Keystone is one of Nova's that berth may have, too."""
    return resource_name == SERVERS or resource_name.startswith(CLASS)


async def read_cloud(nova: NovaRest, keystone_url: str = "", projects: Sequence[str] = ()) -> Cloud:
    """Read all of it. keystone_url: empty: only the quotas of `projects` are read, and of those that something names.

    Raises NovaUnavailable, NovaRefused.
    """
    cloud = Cloud()
    # Without `is_public` Nova lists public flavors only.
    async for page in nova.pages("/flavors/detail", "flavors", {"is_public": "None"}):
        cloud.flavors += _rows(cloud, page, "flavors", "flavor", FlavorRow)
    for flavor in cloud.flavors:
        if not flavor.is_public:
            found = await nova.get(f"/flavors/{flavor.id}/os-flavor-access")
            rows = _rows(cloud, found, "flavor_access", f"access to flavor {flavor.name}", _Access)
            cloud.access[flavor.id] = tuple(sorted(one.tenant_id for one in rows))
    cloud.aggregates = _rows(cloud, await nova.get("/os-aggregates"), "aggregates", "aggregate", AggregateRow)
    async for page in nova.pages("/os-server-groups", "server_groups", {"all_projects": "true"}, marker=None):
        cloud.groups += _rows(cloud, page, "server_groups", "server group", GroupRow)
    cloud.default_quota = _limits(await nova.get("/os-quota-class-sets/default"), "quota_class_set")
    named = {
        *projects,
        *(one.project_id for one in cloud.groups),
        *(one for row in cloud.access.values() for one in row),
    }
    if keystone_url:
        root = keystone_url.rstrip("/").removesuffix("/v3") + "/v3"
        listed = [one async for one in _keystone(nova, root, "projects", _Project, cloud)]
        named |= {one.id for one in listed}
        cloud.registered = [one async for one in _keystone(nova, root, "registered_limits", RegisteredLimit, cloud)]
        cloud.limits = [one async for one in _keystone(nova, root, "limits", ProjectLimit, cloud)]
    if len(named) > MAX_PROJECTS:
        raise NovaRefused(f"more than {MAX_PROJECTS} projects", code="nova.endless_list")
    for project in sorted(named) if not cloud.is_unified else ():
        try:
            cloud.quotas[project] = _limits(await nova.get(f"/os-quota-sets/{project}"), "quota_set")
        except NovaRefused as refused:
            if refused.code not in NO_PROJECT:
                raise
            cloud.without_quota.append((project, refused.reason))
    return cloud


async def _keystone(nova: NovaRest, root: str, name: str, kind: type[T], cloud: Cloud) -> AsyncIterator[T]:
    """The rows of one list of Keystone, which are one page. Raises NovaUnavailable, NovaRefused."""
    found = await nova.document(f"{root}/{name}")
    if not isinstance(found, dict):
        raise NovaRefused(f"{root}/{name}: the answer is no JSON object", code="nova.not_json")
    if found.get("truncated"):
        raise NovaRefused(f"Keystone lists not all of its {name}: raise its list_limit", code="nova.not_a_list")
    for one in _rows(cloud, found, name, name, kind):
        yield one


def _rows(cloud: Cloud, page: Mapping[str, Any], name: str, noun: str, kind: type[T]) -> list[T]:
    rows = page.get(name)
    if not isinstance(rows, list):
        raise NovaRefused(f"the answer has no {name}", code="nova.not_a_list")
    found = []
    for row in rows:
        try:
            found.append(msgspec.convert(row, kind))
        except msgspec.ValidationError as error:
            shown = str(row.get("name") or row.get("id")) if isinstance(row, dict) else "?"
            cloud.unreadable.append((noun, shown[:255], reason_of(error)))
    return found


def _limits(answer: Mapping[str, Any], name: str) -> dict[str, int]:
    """The limits of a set by name. Raises NovaRefused."""
    found = answer.get(name)
    if not isinstance(found, dict):
        raise NovaRefused(f"the answer has no {name}", code="nova.not_a_list")
    return {key: value for key, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}
