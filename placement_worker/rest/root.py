"""The route /, which lists the served versions."""

from __future__ import annotations

from placement_worker.rest.api import Api
from placement_worker.rest.http import HttpRequest, Response, json_response
from placement_worker.rest.versions import RANGE


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
