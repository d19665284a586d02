"""The routes /resource_providers/{uuid}/inventories and .../inventories/{resource_class}."""

from __future__ import annotations

from typing import Any

from placement_worker.domain.refusal import RefusalCode
from placement_worker.domain.trees import DeleteInventory, SetInventories, WriteInventory
from placement_worker.domain.values import StoredInventory
from placement_worker.rest import bodies
from placement_worker.rest.api import Api
from placement_worker.rest.bodies import InventoryBody
from placement_worker.rest.faults import CONCURRENT_UPDATE, HttpFault, RefusedAnswer
from placement_worker.rest.http import HttpRequest, Response, json_response

SINCE_RESERVED_MAY_BE_TOTAL = 26


def shown(inventory: StoredInventory) -> dict[str, Any]:
    """Return an inventory as the API shows it."""
    fields = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")
    return {name: getattr(inventory, name) for name in fields}


def problem_of(name: str, body: InventoryBody, uuid: str, version: int) -> str:
    """Return the error of an inventory without capacity (from 1.26 on: with a negative one); empty when there is
    none.
    """
    if version >= SINCE_RESERVED_MAY_BE_TOTAL:
        how = "greater than" if body.product <= -1 else ""
    else:
        how = "greater than or equal to" if body.product < 1 else ""
    if not how:
        return ""
    return f"Invalid inventory for '{name}' on resource provider '{uuid}'. The reserved value is {how} total."


async def show_all(api: Api, request: HttpRequest) -> Response:
    """GET all inventories of a provider."""
    provider, updated_at = await api.provider(request.parts[1], "{0} : {0}")
    data = {
        "resource_provider_generation": provider.generation,
        "inventories": {name: shown(inventory) for name, inventory in provider.inventories.items()},
    }
    return json_response(data).set_modified(request, updated_at if provider.inventories else None)


async def show(api: Api, request: HttpRequest) -> Response:
    """GET one inventory."""
    uuid, name = request.parts[1], request.parts[3]
    provider, updated_at = await api.provider(uuid, "{0} : {0}")
    if (inventory := provider.inventories.get(name)) is None:
        raise HttpFault(404, f"No inventory of class {name} for {uuid}")
    data = {**shown(inventory), "resource_provider_generation": provider.generation}
    return json_response(data).set_modified(request, updated_at)


async def set_all(api: Api, request: HttpRequest) -> Response:
    """PUT all inventories of a provider."""
    uuid = request.parts[1]
    body = await api.parse(bodies.PUT_INVENTORIES, request.body, uuid)
    problems = (problem_of(name, inventory, uuid, request.version) for name, inventory in body.inventories.items())
    stored = {name: inventory.inventory() for name, inventory in body.inventories.items()}
    problem = next(filter(None, problems), "")
    write = SetInventories(uuid, stored, body.resource_provider_generation, problem)
    answers = {
        RefusalCode.NO_SUCH: RefusedAnswer(f"Unknown resource class in inventory for resource provider {uuid}: {{}}"),
        RefusalCode.IN_USE: RefusedAnswer("update conflict: {}"),
        RefusalCode.BAD_INVENTORY: RefusedAnswer(f"Unable to update inventory for resource provider {uuid}: {{}}"),
    }
    provider = await api.write_tree(write, answers)
    data = {
        "resource_provider_generation": provider.generation,
        "inventories": {name: shown(provider.inventories[name]) for name in write.inventories},
    }
    return json_response(data).set_modified(request, api.clock.time() if write.inventories else None)


async def create(api: Api, request: HttpRequest) -> Response:
    """POST an inventory that does not exist."""
    uuid = request.parts[1]
    body = await api.parse(bodies.POST_INVENTORY, request.body, uuid)
    name = body.resource_class
    problem = problem_of(name, body, uuid, request.version)
    unable = RefusedAnswer(f"Unable to create inventory for resource provider {uuid}: {{}}")
    conflict = RefusedAnswer("Update conflict: {}", code=CONCURRENT_UPDATE)
    answers = {RefusalCode.DUPLICATE: conflict, RefusalCode.BAD_INVENTORY: unable, RefusalCode.NO_SUCH: unable}
    provider = await api.write_tree(WriteInventory(uuid, name, body.inventory(), problem=problem), answers)
    data = {**shown(provider.inventories[name]), "resource_provider_generation": provider.generation}
    path = f"/resource_providers/{uuid}/inventories/{name}"
    return json_response(data, 201, path).set_modified(request, api.clock.time())


async def update(api: Api, request: HttpRequest) -> Response:
    """PUT an existing inventory."""
    uuid, name = request.parts[1], request.parts[3]
    body = await api.parse(bodies.PUT_INVENTORY, request.body, uuid)
    problem = problem_of(name, body, uuid, request.version)
    no_inventory = f"No inventory record with resource class for resource provider {uuid}: {{}}"
    answers = {
        RefusalCode.NO_INVENTORY: RefusedAnswer(no_inventory, 400),
        RefusalCode.BAD_INVENTORY: RefusedAnswer(f"Unable to update inventory for resource provider {uuid}: {{}}"),
        RefusalCode.NO_SUCH: RefusedAnswer(status=404),
    }
    write = WriteInventory(uuid, name, body.inventory(), body.resource_provider_generation, problem)
    provider = await api.write_tree(write, answers)
    data = {**shown(provider.inventories[name]), "resource_provider_generation": provider.generation}
    return json_response(data).set_modified(request, api.clock.time())


async def delete(api: Api, request: HttpRequest) -> Response:
    """DELETE one inventory."""
    uuid, name = request.parts[1], request.parts[3]
    answers = {
        RefusalCode.IN_USE: RefusedAnswer(f"Unable to delete inventory of class {name}: {{}}", code=CONCURRENT_UPDATE),
        RefusalCode.NO_INVENTORY: RefusedAnswer(f"No inventory of class {name} found for delete: {{}}"),
    }
    await api.write_tree(DeleteInventory(uuid, name), answers)
    return Response(204)


async def delete_all(api: Api, request: HttpRequest) -> Response:
    """DELETE all inventories of a provider."""
    await api.write_tree(SetInventories(request.parts[1], {}))
    return Response(204)
