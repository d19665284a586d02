"""CORS as in oslo.middleware: answers to preflight requests, and headers of other answers to a known origin."""

from __future__ import annotations

from collections.abc import Mapping

from placement_worker.rest.config import CorsConfig

Pairs = list[tuple[bytes, bytes]]

_SIMPLE = (
    "Accept",
    "Accept-Language",
    "Content-Type",
    "Cache-Control",
    "Content-Language",
    "Expires",
    "Last-Modified",
    "Pragma",
)


class Cors:
    """Returns the headers for pages of other origins."""

    def __init__(self, config: CorsConfig) -> None:
        self._config = config
        self._origins = frozenset(config.allowed_origin)
        self._allowed = {name.upper() for name in (*config.allow_headers, *_SIMPLE)}

    @property
    def on(self) -> bool:
        """Whether an origin is allowed."""
        return bool(self._origins)

    def headers(self, headers: Mapping[bytes, bytes]) -> Pairs:
        """Return the headers of an answer to a request that is no preflight."""
        origin = _text(headers, b"origin")
        if origin not in self._origins:
            return []
        pairs = [(b"vary", b"Origin"), (b"access-control-allow-origin", origin.encode("latin-1"))]
        if self._config.allow_credentials:
            pairs.append((b"access-control-allow-credentials", b"true"))
        if self._config.expose_headers:
            pairs.append((b"access-control-expose-headers", ",".join(self._config.expose_headers).encode()))
        return pairs

    def preflight(self, headers: Mapping[bytes, bytes]) -> Pairs:
        """Return the headers of the answer to OPTIONS, none unless origin, method and headers are all allowed."""
        origin = _text(headers, b"origin")
        method = _text(headers, b"access-control-request-method")
        requested = [
            name.strip() for name in _text(headers, b"access-control-request-headers").split(",") if name.strip()
        ]
        if origin not in self._origins or method not in self._config.allow_methods:
            return []
        if not all(name.upper() in self._allowed for name in requested):
            return []
        pairs = [(b"vary", b"Origin"), (b"access-control-allow-origin", origin.encode("latin-1"))]
        if self._config.allow_credentials:
            pairs.append((b"access-control-allow-credentials", b"true"))
        if self._config.max_age:
            pairs.append((b"access-control-max-age", str(self._config.max_age).encode()))
        pairs.append((b"access-control-allow-methods", method.encode("latin-1")))
        if requested:
            pairs.append((b"access-control-allow-headers", ",".join(requested).encode("latin-1")))
        return pairs


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")
