"""The routes /resource_providers and /resource_providers/{uuid}, and the traits and aggregates of a provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from bus.clock import new_uuid
from placement_worker.domain.refusal import RefusalCode
from placement_worker.domain.trees import CreateProvider, DeleteProvider, SetAggregates, SetTraits, UpdateProvider
from placement_worker.domain.values import Provider
from placement_worker.rest import bodies, schemas
from placement_worker.rest.api import Api
from placement_worker.rest.candidates_query import Checked, members_of, resources_of, traits_of
from placement_worker.rest.faults import HttpFault, RefusedAnswer
from placement_worker.rest.http import HttpRequest, QueryString, Response, at, json_response
from placement_worker.store.port import Listing, ProviderRow

SINCE_PARENTS = 14
SINCE_BODY = 20
SINCE_REPARENTING = 37

_LINKS = ((0, "inventories"), (0, "usages"), (1, "aggregates"), (6, "traits"), (11, "allocations"))
_LIST = tuple((since, Checked(schema)) for since, schema in schemas.LIST_PROVIDERS)


def shown(provider: Provider | ProviderRow, version: int) -> dict[str, Any]:
    """Return a provider as the API shows it."""
    path = f"/resource_providers/{provider.uuid}"
    links = [{"rel": "self", "href": path}]
    links += [{"rel": rel, "href": f"{path}/{rel}"} for since, rel in _LINKS if version >= since]
    data: dict[str, Any] = {
        "uuid": provider.uuid,
        "name": provider.name,
        "generation": provider.generation,
        "links": links,
    }
    if version >= SINCE_PARENTS:
        data["parent_provider_uuid"] = provider.parent
        data["root_provider_uuid"] = provider.root
    return data


async def create(api: Api, request: HttpRequest) -> Response:
    """POST a provider. The answer is 201 without a body, and from 1.20 on 200 with the provider."""
    kind = bodies.POST_PROVIDER_14 if request.version >= SINCE_PARENTS else bodies.POST_PROVIDER
    body = await api.parse(kind, request.body)
    uuid = new_uuid(api.rng) if body.uuid is UNSET else body.uuid
    parent = None
    if isinstance(body, bodies.PostProvider14) and isinstance(body.parent_provider_uuid, str):
        parent = body.parent_provider_uuid
    unable = f'Unable to create resource provider "{body.name}", {uuid}: '
    if not body.name:
        raise HttpFault(400, f"{unable}Object action create failed because: name is required")
    answers = {
        RefusalCode.DUPLICATE: RefusedAnswer("Conflicting resource provider {} already exists."),
        RefusalCode.BAD_PARENT: RefusedAnswer(unable + "{}"),
    }
    provider = await api.write_tree(CreateProvider(uuid, body.name, parent), answers)
    path = f"/resource_providers/{uuid}"
    if request.version < SINCE_BODY:
        return Response(201, path=path)
    return json_response(shown(provider, request.version), path=path).set_modified(request, api.clock.time())


async def show(api: Api, request: HttpRequest) -> Response:
    """GET one provider."""
    provider, updated_at = await api.provider(request.parts[1])
    return json_response(shown(provider, request.version)).set_modified(request, updated_at)


async def update(api: Api, request: HttpRequest) -> Response:
    """PUT a provider with another name or another parent."""
    uuid = request.parts[1]
    kind = bodies.PUT_PROVIDER_14 if request.version >= SINCE_PARENTS else bodies.PUT_PROVIDER
    body = await api.parse(kind, request.body, uuid)
    parent = body.parent_provider_uuid if isinstance(body, bodies.PutProvider14) else UNSET
    write = UpdateProvider(uuid, body.name, parent, may_reparent=request.version >= SINCE_REPARENTING)
    answers = {
        RefusalCode.DUPLICATE: RefusedAnswer(f"Conflicting resource provider {body.name} already exists."),
        RefusalCode.BAD_PARENT: RefusedAnswer(f"Unable to save resource provider {uuid}: {{}}"),
    }
    provider = await api.write_tree(write, answers)
    return json_response(shown(provider, request.version)).set_modified(request, api.clock.time())


async def delete(api: Api, request: HttpRequest) -> Response:
    """DELETE a provider."""
    uuid = request.parts[1]
    answers = {
        RefusalCode.NO_PROVIDER: RefusedAnswer("{} for delete"),
        RefusalCode.IS_PARENT: RefusedAnswer(f"Unable to delete parent resource provider {uuid}: {{}}"),
        RefusalCode.PROVIDER_IN_USE: RefusedAnswer(f"Unable to delete resource provider {uuid}: {{}}"),
    }
    await api.write_tree(DeleteProvider(uuid), answers)
    return Response(204)


async def list_all(api: Api, request: HttpRequest) -> Response:
    """GET the providers that meet the conditions of the query."""
    query = request.query
    at(_LIST, request.version).check(query)
    listing = await _listing(api, query, request.version)
    rows: Sequence[Sequence[Any]] = ()
    if listing is not None:
        rows = await api.store.reads.providers(listing)
    listed = await api.listed(rows, lambda row: msgspec.json.encode(shown(ProviderRow(*row), request.version)))
    modified = max((row[-1] for row in rows), default=api.clock.time())
    return Response(200, b'{"resource_providers":[' + listed + b"]}").set_modified(request, modified)


async def _listing(api: Api, query: QueryString, version: int) -> Listing | None:
    """Return the query as a Listing; None when it cannot match any provider."""
    members = members_of(query.all("member_of"), version)
    traits = traits_of(query.all("required"), version) if query.all("required") else traits_of([], 39)
    requested = resources_of(text) if (text := query.get("resources")) is not None else {}
    named = [name for group in traits.required for name in group] + list(traits.forbidden)
    unknown = await api.store.unknown_traits(named)
    if unknown:
        words = f"No such trait(s): {', '.join(sorted(unknown))}."
        raise HttpFault(400, f'Invalid trait(s) in "required" parameter: {words}')
    unknown = await api.store.unknown_classes(requested)
    if unknown:
        raise HttpFault(400, f"Invalid resource class in resources parameter: No such resource class {unknown[0]}.")
    uuid, in_tree = query.get("uuid"), query.get("in_tree")
    if any(value is not None and value != value.lower() for value in (uuid, in_tree)):
        return None
    return Listing(
        uuid=uuid,
        name=query.get("name") or None,
        in_tree=in_tree,
        required=tuple(tuple(group) for group in traits.required),
        forbidden=tuple(traits.forbidden),
        member_of=members.required,
        forbidden_aggregates=members.forbidden,
        resources=tuple(requested.items()),
    )


SINCE_AGGREGATE_GENERATION = 19


async def show_aggregates(api: Api, request: HttpRequest) -> Response:
    """GET the aggregates of a provider."""
    provider, _ = await api.provider(request.parts[1])
    return _aggregates(api, request, provider.aggregates, provider.generation)


async def set_aggregates(api: Api, request: HttpRequest) -> Response:
    """PUT the aggregates of a provider.

    From 1.19 on, the body states the provider's generation, and the write increments it.
    """
    uuid = request.parts[1]
    generation: int | None = None
    if request.version >= SINCE_AGGREGATE_GENERATION:
        body = await api.parse(bodies.AGGREGATES_19, request.body, uuid)
        listed, generation = body.aggregates, body.resource_provider_generation
    else:
        listed = await api.parse(bodies.AGGREGATES, request.body, uuid)
    provider = await api.write_tree(SetAggregates(uuid, listed, generation))
    return _aggregates(api, request, listed, provider.generation)


def _aggregates(api: Api, request: HttpRequest, listed: Sequence[str], generation: int) -> Response:
    data: dict[str, Any] = {"aggregates": listed}
    if request.version >= SINCE_AGGREGATE_GENERATION:
        data["resource_provider_generation"] = generation
    return json_response(data).set_modified(request, api.clock.time())


async def show_traits(api: Api, request: HttpRequest) -> Response:
    """GET the traits of a provider."""
    provider, updated_at = await api.provider(request.parts[1], "{0}: {0}")
    data = {"traits": provider.traits, "resource_provider_generation": provider.generation}
    return json_response(data).set_modified(request, updated_at if provider.traits else api.clock.time())


async def set_traits(api: Api, request: HttpRequest) -> Response:
    """PUT the traits of a provider."""
    body = await api.parse(bodies.PROVIDER_TRAITS, request.body)
    write = SetTraits(request.parts[1], body.traits, body.resource_provider_generation)
    provider = await api.write_tree(write)
    data = {"traits": list(provider.traits), "resource_provider_generation": provider.generation}
    return json_response(data).set_modified(request, api.clock.time())


async def delete_traits(api: Api, request: HttpRequest) -> Response:
    """DELETE all traits of a provider."""
    await api.write_tree(SetTraits(request.parts[1], ()))
    return Response(204)
