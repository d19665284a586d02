"""The request and the response of handlers."""

from __future__ import annotations

from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from placement_worker.rest.auth import Caller
from placement_worker.rest.faults import HttpFault

JSON = "application/json"
SINCE_CACHE_HEADERS = 15

MAX_PARAMETERS = 1000


class HttpRequest:
    """One request, whose version is negotiated and whose caller is known."""

    __slots__ = (
        "_query",
        "accept",
        "body",
        "caller",
        "content_type",
        "id",
        "method",
        "parts",
        "query_string",
        "version",
    )

    def __init__(
        self, method: str, parts: tuple[str, ...], query_string: bytes, accept: str, content_type: str
    ) -> None:
        self.method = method
        self.parts = parts
        self.query_string = query_string
        self.accept = accept
        self.content_type = content_type
        self.id = ""
        self.version = 0
        self.body = b""
        self.caller = Caller(user_id="")
        self._query: QueryString | None = None

    @property
    def query(self) -> QueryString:
        """The query string, parsed once. Raises HttpFault 400."""
        if self._query is None:
            self._query = QueryString(self.query_string)
        return self._query


class QueryString:
    """A query string's parameters in order; a name may repeat."""

    def __init__(self, raw: bytes) -> None:
        if not raw:
            self.pairs: list[tuple[str, str]] = []
            return
        try:
            self.pairs = parse_qsl(
                raw.decode("ascii", "surrogateescape"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=MAX_PARAMETERS,
            )
            for name, value in self.pairs:  # a byte is not ASCII
                (name + value).encode()
        except (UnicodeError, ValueError) as error:
            raise HttpFault(400, f"Invalid query string parameters: {error}") from error
        if any("\x00" in name or "\x00" in value for name, value in self.pairs):
            raise HttpFault(400, "Invalid query string parameters: NUL characters are not allowed")

    def last(self) -> dict[str, str]:
        """Each parameter's last value."""
        return dict(self.pairs)

    def get(self, name: str) -> str | None:
        """The last value of a parameter."""
        values = self.all(name)
        return values[-1] if values else None

    def all(self, name: str) -> list[str]:
        """All values of a parameter, in order."""
        return [value for key, value in self.pairs if key == name]


class Response:
    """An answer: a status, a body (JSON text or empty), and headers."""

    __slots__ = ("body", "content_type", "headers", "path", "status")

    def __init__(self, status: int, body: bytes = b"", content_type: str = JSON) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers: list[tuple[bytes, bytes]] = []
        self.path = ""

    def set_location(self, path: str) -> Response:
        """Set the Location header."""
        self.path = path
        return self

    def set_modified(self, request: HttpRequest, at: float | None) -> Response:
        """From 1.15 on, set Cache-Control: no-cache, and Last-Modified. at: seconds since the epoch; None: no
        Last-Modified.
        """
        if request.version >= SINCE_CACHE_HEADERS:
            if at is not None:
                self.headers.append((b"last-modified", _http_date(int(at))))
            self.headers.append((b"cache-control", b"no-cache"))
        return self


@lru_cache(maxsize=1024)
def _http_date(second: int) -> bytes:
    """Format a time in seconds since the epoch. The result is cached: most answers have one of the last few seconds,
    and formatting costs as much as the body.
    """
    return formatdate(second, usegmt=True).encode()


def json_response(data: Any, status: int = 200) -> Response:
    """Return a response with this data as JSON."""
    return Response(status, msgspec.json.encode(data))
