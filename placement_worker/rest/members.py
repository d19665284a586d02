"""/resource_providers/{uuid}/aggregates and /traits: what a provider belongs to and what it is like."""

from __future__ import annotations

from typing import Any

from placement_worker.domain.trees import SetAggregates, SetTraits
from placement_worker.rest import bodies
from placement_worker.rest.api import Api, no_provider, written
from placement_worker.rest.bodies import text_of
from placement_worker.rest.faults import Fault
from placement_worker.rest.http import Request, Response, json_response
from placement_worker.rest.query import is_canonical
from placement_worker.store.rest_reads import aggregates, traits

SINCE_AGGREGATE_GENERATION = 19


async def show_aggregates(api: Api, request: Request) -> Response:
    """GET aggregates."""
    uuid = request.parts[1]
    found = None
    if is_canonical(uuid):
        async with api.read() as connection:
            found = await aggregates(connection, uuid)
    if found is None:
        raise no_provider(uuid)
    return _aggregates(api, request, found[1], found[0])


async def set_aggregates(api: Api, request: Request) -> Response:
    """PUT aggregates; from 1.19 guarded by the provider's generation, which then moves."""
    uuid = request.parts[1]
    generation: int | None = None
    try:
        if request.version >= SINCE_AGGREGATE_GENERATION:
            body = bodies.AGGREGATES_19.parse(request.body)
            listed, generation = body.aggregates, body.resource_provider_generation
        else:
            listed = bodies.AGGREGATES.parse(request.body)
    except Fault:
        await api.provider(uuid)
        raise
    provider = written(await api.write_tree(SetAggregates(uuid, listed, generation)))
    return _aggregates(api, request, listed, provider.generation)


def _aggregates(api: Api, request: Request, listed: list[str], generation: int) -> Response:
    data: dict[str, Any] = {"aggregates": listed}
    if request.version >= SINCE_AGGREGATE_GENERATION:
        data["resource_provider_generation"] = generation
    return json_response(data).modified(request, api.clock.time())


async def show_traits(api: Api, request: Request) -> Response:
    """GET traits."""
    uuid = request.parts[1]
    found = None
    if is_canonical(uuid):
        async with api.read() as connection:
            found = await traits(connection, uuid)
    if found is None:
        fault = no_provider(uuid)
        raise Fault(404, f"{fault.words}: {fault.words}")
    generation, named = found
    data = {"traits": list(named), "resource_provider_generation": generation}
    return json_response(data).modified(request, max(named.values(), default=api.clock.time()))


async def set_traits(api: Api, request: Request) -> Response:
    """PUT traits."""
    body = bodies.PROVIDER_TRAITS.parse(request.body)
    named = [text_of(name) for name in body.traits]
    provider = written(await api.write_tree(SetTraits(request.parts[1], named, body.resource_provider_generation)))
    data = {"traits": list(provider.traits), "resource_provider_generation": provider.generation}
    return json_response(data).modified(request, api.clock.time())


async def delete_traits(api: Api, request: Request) -> Response:
    """DELETE all traits."""
    written(await api.write_tree(SetTraits(request.parts[1], ())))
    return Response(204)
