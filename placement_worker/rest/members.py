"""The routes /resource_providers/{uuid}/aggregates and /resource_providers/{uuid}/traits."""

from __future__ import annotations

from typing import Any

from placement_worker.domain.trees import SetAggregates, SetTraits
from placement_worker.rest import bodies
from placement_worker.rest.api import Api, written
from placement_worker.rest.bodies import text_of
from placement_worker.rest.faults import HttpFault
from placement_worker.rest.http import HttpRequest, Response, json_response

SINCE_AGGREGATE_GENERATION = 19


async def show_aggregates(api: Api, request: HttpRequest) -> Response:
    """GET the aggregates of a provider."""
    generation, listed = await api.of_provider(request.parts[1], api.store.reads.aggregates)
    return _aggregates(api, request, listed, generation)


async def set_aggregates(api: Api, request: HttpRequest) -> Response:
    """PUT the aggregates of a provider.

    From 1.19 on, the body states the provider's generation, and the write increments it.
    """
    uuid = request.parts[1]
    generation: int | None = None
    try:
        if request.version >= SINCE_AGGREGATE_GENERATION:
            body = await api.parse(bodies.AGGREGATES_19, request.body)
            listed, generation = body.aggregates, body.resource_provider_generation
        else:
            listed = await api.parse(bodies.AGGREGATES, request.body)
    except HttpFault:
        await api.provider(uuid)
        raise
    provider = written(await api.write_tree(SetAggregates(uuid, listed, generation)))
    return _aggregates(api, request, listed, provider.generation)


def _aggregates(api: Api, request: HttpRequest, listed: list[str], generation: int) -> Response:
    data: dict[str, Any] = {"aggregates": listed}
    if request.version >= SINCE_AGGREGATE_GENERATION:
        data["resource_provider_generation"] = generation
    return json_response(data).set_modified(request, api.clock.time())


async def show_traits(api: Api, request: HttpRequest) -> Response:
    """GET the traits of a provider."""
    generation, named = await api.of_provider(request.parts[1], api.store.reads.traits, words="{0}: {0}")
    data = {"traits": list(named), "resource_provider_generation": generation}
    return json_response(data).set_modified(request, max(named.values(), default=api.clock.time()))


async def set_traits(api: Api, request: HttpRequest) -> Response:
    """PUT the traits of a provider."""
    body = await api.parse(bodies.PROVIDER_TRAITS, request.body)
    write = SetTraits(request.parts[1], [*map(text_of, body.traits)], body.resource_provider_generation)
    provider = written(await api.write_tree(write))
    data = {"traits": list(provider.traits), "resource_provider_generation": provider.generation}
    return json_response(data).set_modified(request, api.clock.time())


async def delete_traits(api: Api, request: HttpRequest) -> Response:
    """DELETE all traits of a provider."""
    written(await api.write_tree(SetTraits(request.parts[1], ())))
    return Response(204)
