"""The table of the served routes: method, path, handler, policy rule, versions, and bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from placement_worker.rest import allocations, bodies, candidates, inventories, names, providers, schemas
from placement_worker.rest.api import Api
from placement_worker.rest.bodies import Body
from placement_worker.rest.faults import HttpFault
from placement_worker.rest.http import NEWEST, RANGE, HttpRequest, Response, json_response

Handler = Callable[[Api, HttpRequest], Awaitable[Response]]


class Route(Struct, frozen=True):
    """One operation. rule: the policy rule; None: open to all. too_new: the status below microversion `since`. takes:
    the body of a request, of its newest version; the caller must then send JSON. gives: whether the answer is JSON,
    which the caller must then accept. query: the schema of the query string, of the newest version.
    """

    method: str
    path: str
    handler: Handler
    rule: str | None = None
    since: int = 0
    until: int = NEWEST
    takes: Body[Any] | None = None
    gives: bool = False
    query: schemas.Schema = {}
    too_new: int = 404


async def home(api: Api, request: HttpRequest) -> Response:
    """GET the version document, which needs no token."""
    version = {
        "id": f"v{RANGE[0]}",
        "max_version": RANGE[1],
        "min_version": RANGE[0],
        "status": "CURRENT",
        "links": [{"rel": "self", "href": ""}],
    }
    return json_response({"versions": [version]}).set_modified(request, api.clock.time())


USAGES, RESHAPE, _SEARCH = "placement:usages", "placement:reshaper:reshape", "placement:allocation_candidates:list"
_C, _P = "placement:resource_classes:", "placement:resource_providers:"
_RP = "/resource_providers"
_ONE = "/resource_providers/{uuid}"
_INV = "/resource_providers/{uuid}/inventories"
_CLASS, _MEMBER_OF = "/resource_classes/{name}", "/resource_providers/{uuid}/aggregates"
_POSTED, _PUT, _RESHAPED = (table[0][1] for table in (bodies.POST_ALLOCATIONS, bodies.PUT_ALLOCATIONS, bodies.RESHAPE))

# fmt: off
ROUTES = (
    Route("GET", "/", home),
    Route("GET", "/resource_classes", names.list_classes, _C + "list", 2, gives=True),
    Route("POST", "/resource_classes", names.create_class, _C + "create", 2, takes=bodies.RESOURCE_CLASS),
    Route("GET", _CLASS, names.show_class, _C + "show", 2, gives=True),
    Route("PUT", _CLASS, names.rename_class, _C + "update", 2, 6, takes=bodies.RESOURCE_CLASS),
    Route("PUT", _CLASS, names.ensure_class, _C + "update", 7),
    Route("DELETE", _CLASS, names.delete_class, _C + "delete", 2),
    Route("GET", _RP, providers.list_all, _P + "list", gives=True, query=schemas.LIST_PROVIDERS[0][1]),
    Route("POST", _RP, providers.create, _P + "create", takes=bodies.POST_PROVIDER_14),
    Route("GET", _ONE, providers.show, _P + "show", gives=True),
    Route("PUT", _ONE, providers.update, _P + "update", takes=bodies.PUT_PROVIDER_14),
    Route("DELETE", _ONE, providers.delete, _P + "delete"),
    Route("GET", _INV, inventories.show_all, _P + "inventories:list", gives=True),
    Route("POST", _INV, inventories.create, _P + "inventories:create", takes=bodies.POST_INVENTORY),
    Route("PUT", _INV, inventories.set_all, _P + "inventories:update", takes=bodies.PUT_INVENTORIES),
    Route("DELETE", _INV, inventories.delete_all, _P + "inventories:delete", 5, too_new=405),
    Route("GET", _INV + "/{class}", inventories.show, _P + "inventories:show", gives=True),
    Route("PUT", _INV + "/{class}", inventories.update, _P + "inventories:update", takes=bodies.PUT_INVENTORY),
    Route("DELETE", _INV + "/{class}", inventories.delete, _P + "inventories:delete"),
    Route("GET", _ONE + "/usages", allocations.usage_of_provider, _P + "usages", gives=True),
    Route("GET", _MEMBER_OF, providers.show_aggregates, _P + "aggregates:list", 1, gives=True),
    Route("PUT", _MEMBER_OF, providers.set_aggregates, _P + "aggregates:update", 1, takes=bodies.AGGREGATES_19),
    Route("GET", _ONE + "/allocations", allocations.of_provider, _P + "allocations:list", gives=True),
    Route("GET", _ONE + "/traits", providers.show_traits, _P + "traits:list", 6, gives=True),
    Route("PUT", _ONE + "/traits", providers.set_traits, _P + "traits:update", 6, takes=bodies.PROVIDER_TRAITS),
    Route("DELETE", _ONE + "/traits", providers.delete_traits, _P + "traits:delete", 6),
    Route("POST", "/allocations", allocations.post, "placement:allocations:manage", 13, takes=_POSTED),
    Route("GET", "/allocations/{consumer}", allocations.show, "placement:allocations:list", gives=True),
    Route("PUT", "/allocations/{consumer}", allocations.put, "placement:allocations:update", takes=_PUT),
    Route("DELETE", "/allocations/{consumer}", allocations.delete, "placement:allocations:delete"),
    Route("GET", "/allocation_candidates", candidates.search, _SEARCH, 10, gives=True, query=schemas.CANDIDATES[0][1]),
    Route("GET", "/traits", names.list_traits, "placement:traits:list", 6, gives=True, query=schemas.LIST_TRAITS),
    Route("GET", "/traits/{name}", names.show_trait, "placement:traits:show", 6),
    Route("PUT", "/traits/{name}", names.put_trait, "placement:traits:update", 6),
    Route("DELETE", "/traits/{name}", names.delete_trait, "placement:traits:delete", 6),
    Route("GET", "/usages", allocations.of_project, USAGES, 9, gives=True, query=schemas.USAGES_38),
    Route("POST", "/reshaper", allocations.reshape, RESHAPE, 30, takes=_RESHAPED),
)
# fmt: on

Shape = tuple[str, ...]


class Router:
    """Finds the route of a path. The key is the sequence of the path's fixed words."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, dict[str, list[Route]]] = {}
        for route in ROUTES:
            shape = _shape(parts_of(route.path))
            self._by_shape.setdefault(shape, {}).setdefault(route.method, []).append(route)

    def find(self, method: str, parts: tuple[str, ...], version: int) -> Route:
        """Return the route. Raises HttpFault 404 for a path or version that is not served, and 405 for a method that is
        not.
        """
        by_method = self._by_shape.get(_shape(parts))
        if by_method is None or not all(parts):
            raise HttpFault(404)
        routes = by_method.get(method)
        if routes is None:
            raise HttpFault(405, allow=", ".join(by_method))
        for route in routes:
            if route.since <= version <= route.until:
                return route
        raise HttpFault(routes[0].too_new)


def parts_of(path: str) -> tuple[str, ...]:
    """Return the segments of a path, none for the root."""
    return tuple(path[1:].split("/")) if len(path) > 1 else ()


def _shape(parts: tuple[str, ...]) -> Shape:
    """Return the fixed words of a path, which stand at the even places; names stand at the odd ones."""
    return (str(len(parts)), *parts[::2])
