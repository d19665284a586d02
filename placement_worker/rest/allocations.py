"""The routes of allocations (/allocations, /reshaper, those of a provider) and of usages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import msgspec

from placement_worker.domain.allocations import Remove, Replace, Reshape
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.refusal import RefusalCode, no_provider
from placement_worker.rest import bodies, schemas
from placement_worker.rest.api import Api
from placement_worker.rest.bodies import AllocationBody, Allocations28, ReshapeBody, consumer_write
from placement_worker.rest.candidates_query import Checked, canonical, is_canonical, is_uuid
from placement_worker.rest.faults import PROVIDER_NOT_FOUND, HttpFault, RefusedAnswer, refused
from placement_worker.rest.http import HttpRequest, Response, at, json_response
from placement_worker.store.port import AllocationRow, UsageRow

SINCE_OWNERS = 12
SINCE_CONSUMER_GENERATIONS = 28
SINCE_CONSUMER_TYPES = 38


async def show(api: Api, request: HttpRequest) -> Response:
    """GET the allocations of one consumer. For a consumer without allocations the answer is empty and no error."""
    consumer = request.parts[1]
    rows = []
    if is_canonical(consumer):
        rows = await api.store.reads.allocations_of_consumer(consumer)
    held: dict[str, Any] = {}
    for row in rows:
        of_provider = held.setdefault(row.provider, {"resources": {}, "generation": row.provider_generation})
        of_provider["resources"][row.resource_class] = row.amount
    data: dict[str, Any] = {"allocations": held}
    if rows and request.version >= SINCE_OWNERS:
        data["project_id"], data["user_id"] = rows[0].project_id, rows[0].user_id
        if request.version >= SINCE_CONSUMER_GENERATIONS:
            data["consumer_generation"] = rows[0].consumer_generation
        if request.version >= SINCE_CONSUMER_TYPES:
            data["consumer_type"] = rows[0].consumer_type or UNKNOWN
    return json_response(data).set_modified(request, rows[0].updated_at if rows else api.clock.time())


async def of_provider(api: Api, request: HttpRequest) -> Response:
    """GET the allocations of one provider."""
    words = "Resource provider '{uuid}' not found: {0}"
    generation, rows = await api.of_provider(request.parts[1], api.store.reads.allocations_of_provider, words=words)
    with_generation = request.version >= SINCE_CONSUMER_GENERATIONS

    def text(consumer: list[AllocationRow]) -> bytes:
        held: dict[str, Any] = {"resources": {row.resource_class: row.amount for row in consumer}}
        if with_generation:
            held["consumer_generation"] = consumer[0].consumer_generation
        return f'"{consumer[0].consumer}":'.encode() + msgspec.json.encode(held)

    listed = await api.listed([list(each) for _, each in groupby(rows, lambda row: row.consumer)], text)
    modified = max((row.updated_at for row in rows), default=api.clock.time())
    body = b'{"allocations":{%b},"resource_provider_generation":%d}' % (listed, generation)
    return Response(200, body).set_modified(request, modified)


async def put(api: Api, request: HttpRequest) -> Response:
    """PUT the allocations of one consumer."""
    consumer = request.parts[1]
    if not is_uuid(consumer):
        raise HttpFault(400, f"Malformed consumer_uuid: {consumer}")
    consumer = canonical(consumer)
    kind, unowned = at(bodies.PUT_ALLOCATIONS, request.version), _unowned(api)
    write = consumer_write(consumer, await api.parse(kind, request.body), unowned)
    answers = _answers(f"Unable to allocate inventory for consumer {consumer}: {{}}")
    await api.write_allocations(Replace((write,)), answers)
    return Response(204)


async def post(api: Api, request: HttpRequest) -> Response:
    """POST the allocations of several consumers, all or none."""
    kind, unowned = at(bodies.POST_ALLOCATIONS, request.version), _unowned(api)
    writes = _writes(await api.parse(kind, request.body), unowned)
    await api.write_allocations(Replace(writes), _answers("Unable to allocate inventory {}"))
    return Response(204)


async def delete(api: Api, request: HttpRequest) -> Response:
    """DELETE all allocations of one consumer."""
    consumer = request.parts[1]
    if not is_canonical(consumer):
        raise HttpFault(404, f"No allocations for consumer '{consumer}'")
    await api.write_allocations(Remove(consumer))
    return Response(204)


async def reshape(api: Api, request: HttpRequest) -> Response:
    """POST /reshaper: inventories and the allocations that follow them, all or none."""
    kind, unowned = at(bodies.RESHAPE, request.version), _unowned(api)
    item = _reshape(await api.parse(kind, request.body), unowned)
    outcome = await api.reshape(item)
    if outcome is not None:
        answers = {**_answers("malformed reshaper data: {}"), RefusalCode.IN_USE: RefusedAnswer("update conflict: {}")}
        if outcome.about in item.inventories:
            answers[RefusalCode.NO_PROVIDER] = RefusedAnswer(status=400, code=PROVIDER_NOT_FOUND)
        raise refused(outcome, answers)
    return Response(204)


def _unowned(api: Api) -> tuple[str, str]:
    """The (project, user) of a body that states neither."""
    return api.config.incomplete_project_id, api.config.incomplete_user_id


def _reshape(body: ReshapeBody[Allocations28], unowned: tuple[str, str]) -> Reshape:
    inventories = {}
    for uuid, requested in body.inventories.items():
        if not is_canonical(uuid):
            words = f"Resource provider {uuid} in inventories not found: {no_provider(uuid).words}"
            raise HttpFault(400, words, PROVIDER_NOT_FOUND)
        offered = {name: inventory.inventory() for name, inventory in requested.inventories.items()}
        inventories[uuid] = (requested.resource_provider_generation, offered)
    return Reshape(inventories, _writes(body.allocations, unowned))


def _writes(body: Mapping[str, AllocationBody], unowned: tuple[str, str]) -> tuple[ConsumerWrite, ...]:
    writes = {}
    for consumer, requested in body.items():
        if not is_uuid(consumer):
            raise HttpFault(400, f"Malformed consumer_uuid: {consumer}")
        uuid = canonical(consumer)
        if uuid in writes:
            raise HttpFault(400, f"Consumer {uuid} is named twice")
        writes[uuid] = consumer_write(uuid, requested, unowned)
    return tuple(writes.values())


def _answers(unknown: str) -> dict[RefusalCode, RefusedAnswer]:
    """Return the answers to refused writes of allocations. unknown: the text for a class that does not exist."""
    return {
        RefusalCode.NO_SUCH: RefusedAnswer(unknown),
        RefusalCode.NO_PROVIDER: RefusedAnswer(status=400),
        RefusalCode.DOES_NOT_FIT: RefusedAnswer("Unable to allocate inventory: {}"),
    }


ALL, UNKNOWN = "all", "unknown"

_USAGES_9, _USAGES_38 = Checked(schemas.USAGES_9), Checked(schemas.USAGES_38)


async def usage_of_provider(api: Api, request: HttpRequest) -> Response:
    """GET the usage of one provider by class."""
    provider, _ = await api.provider(request.parts[1], "{0}: {0}")
    used = {name: provider.used.get(name, 0) for name in provider.inventories}
    data = {"resource_provider_generation": provider.generation, "usages": used}
    return json_response(data).set_modified(request, api.clock.time())


async def of_project(api: Api, request: HttpRequest) -> Response:
    """GET the usage of a project by class, optionally of one user and of one consumer type."""
    query = request.query
    typed = request.version >= SINCE_CONSUMER_TYPES
    (_USAGES_38 if typed else _USAGES_9).check(query)
    requested = query.get("consumer_type") if typed else None
    kind = "" if requested == UNKNOWN else None if requested == ALL else requested
    rows = await api.store.reads.totals(query.get("project_id") or "", query.get("user_id") or None, kind)
    data: dict[str, Any]
    if not typed:
        data = _summed(rows)
    elif requested == ALL:
        counts = {row.consumer_type: row.count for row in rows}
        data = {ALL: {**_summed(rows), "consumer_count": sum(counts.values())}} if rows else {}
    else:
        data = {}
        for row in rows:
            group = data.setdefault(row.consumer_type or UNKNOWN, {})
            group[row.resource_class] = row.amount
            group["consumer_count"] = row.count
    return json_response({"usages": data}).set_modified(request, api.clock.time())


def _summed(rows: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    row: UsageRow
    for row in rows:
        found[row.resource_class] = found.get(row.resource_class, 0) + row.amount
    return found
