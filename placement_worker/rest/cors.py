"""CORS by Starlette's middleware, in front of the application."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from placement_worker.rest.application import App
from placement_worker.rest.config import CorsConfig

# Request headers that oslo.middleware allows besides those that every browser may send.
_SIMPLE = ("Cache-Control", "Expires", "Last-Modified", "Pragma")


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight request. As in oslo.middleware it names the requested headers only, and its
        status is 200 also when it is refused: the headers alone tell the browser.
        """
        response = super().preflight_response(request_headers)
        requested = request_headers.get("access-control-request-headers")
        if requested and response.status_code == 200:
            response.headers["access-control-allow-headers"] = requested
        response.status_code = 200
        return response


def with_cors(application: App, config: CorsConfig) -> App:
    """Return the application for pages of the allowed origins, too; unchanged when there is none."""
    if not config.allowed_origin:
        return application
    return _Cors(
        application,
        allow_origins=config.allowed_origin,
        allow_methods=config.allow_methods,
        allow_headers=(*config.allow_headers, *_SIMPLE),
        allow_credentials=config.allow_credentials,
        expose_headers=config.expose_headers,
        max_age=config.max_age,
    )
