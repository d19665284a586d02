"""The request and the response of handlers, and the rendering of an error."""

from __future__ import annotations

import html
from email.utils import formatdate
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, Struct, UnsetType

from placement_worker.rest.auth import Caller
from placement_worker.rest.faults import SINCE_CODES, STATUS, HttpFault, best, invalid_query

T = TypeVar("T")

OLDEST, NEWEST = 0, 39
SERVICE = "placement"
HEADER = b"openstack-api-version"
RANGE = (f"1.{OLDEST}", f"1.{NEWEST}")


def version_of(header: str) -> int:
    """Return the minor version for placement in an `openstack-api-version` header, or else the oldest version.

    Raises HttpFault 406 for a version that is not served, and 400 for an invalid one.
    """
    for value in reversed(header.split(",")):
        service, _, version = value.strip().partition(" ")
        if service.lower() == SERVICE and version.strip():
            return _minor(version.strip())
    return OLDEST


def _minor(text: str) -> int:
    if text == "latest":
        return NEWEST
    major, dot, minor = text.partition(".")
    try:
        requested = (int(major), int(minor)) if dot else (int(major), -1)
        if not dot:
            raise ValueError("a minor version is missing")
    except ValueError as error:
        raise HttpFault(400, f"Invalid microversion: invalid version string: {text}; {error}") from error
    if requested[0] != 1 or not OLDEST <= requested[1] <= NEWEST:
        raise HttpFault(406, f"Invalid microversion: Unacceptable version header: {text}")
    return requested[1]


def at(table: tuple[tuple[int, T], ...], version: int) -> T:
    """Return the row for a microversion: the newest row that is not newer than the version."""
    return next(row for since, row in table if version >= since)


JSON = "application/json"
SINCE_CACHE_HEADERS = 15

MAX_PARAMETERS = 1000


class HttpRequest(Struct):
    """One request, whose version is negotiated and whose caller is known."""

    method: str
    parts: tuple[str, ...]
    query_string: bytes
    accept: str
    content_type: str
    id: str
    version: int = OLDEST
    version_known: bool = False
    route: str = "none"  # the path of the route table
    body: bytes = b""
    caller: Caller = Caller(user_id="")
    parsed: QueryString | None = None

    @property
    def query(self) -> QueryString:
        """The query string, parsed once. Raises HttpFault 400."""
        if self.parsed is None:
            self.parsed = QueryString(self.query_string)
        return self.parsed


class QueryString:
    """A query string's parameters in order; a name may repeat."""

    def __init__(self, raw: bytes) -> None:
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
            raise invalid_query(str(error)) from error
        if any("\x00" in name or "\x00" in value for name, value in self.pairs):
            raise invalid_query("NUL characters are not allowed")

    def get(self, name: str) -> str | None:
        """The last value of a parameter."""
        values = self.all(name)
        return values[-1] if values else None

    def all(self, name: str) -> list[str]:
        """All values of a parameter, in order."""
        return [value for key, value in self.pairs if key == name]


class Response(Struct):
    """An answer: a status, a body (JSON text or empty), and headers. path: for the Location header."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: list[tuple[bytes, bytes]] = []
    path: str = ""

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


def json_response(data: Any, status: int = 200, path: str = "") -> Response:
    """Return a response with this data as JSON."""
    return Response(status, msgspec.json.encode(data), path=path)


class ErrorBody(Struct, kw_only=True):
    """An error as JSON. code: stable and dotted, from 1.23. min_version, max_version: those that are served, where the
    requested one is not.
    """

    status: int
    title: str
    detail: str
    code: str | UnsetType = UNSET
    request_id: str
    min_version: str | UnsetType = UNSET
    max_version: str | UnsetType = UNSET


class ErrorsBody(Struct):
    """The errors of an answer."""

    errors: list[ErrorBody]


def render(fault: HttpFault, about: HttpRequest) -> Response:
    """Return the answer to a fault, in the form that the client accepts."""
    kind, body = _rendered(fault, about)
    headers = [(name.encode(), value.encode()) for name, value in fault.headers.items()]
    return Response(fault.status, body, kind, headers)


def _rendered(fault: HttpFault, about: HttpRequest) -> tuple[str, bytes]:
    title, explanation = STATUS[fault.status]
    explanation = explanation.format(method=about.method, accept=about.accept, content_type=about.content_type)
    kind = best(about.accept, ("text/html", "application/json")) or "text/plain"
    if kind == "application/json":
        words = fault.words.replace("\n", " ").encode("utf-8", "replace").decode()
        detail = f"{explanation}\n\n {words}  "
        error = ErrorBody(status=fault.status, title=title, detail=detail, request_id=about.id)
        if about.version_known and about.version >= SINCE_CODES:
            error.code = fault.code
        if fault.status == 406 and not about.version_known:
            error.min_version, error.max_version = RANGE
        return kind, msgspec.json.encode(ErrorsBody([error]))
    status = f"{fault.status} {title}"
    if kind == "text/html":
        page = (
            f"<html>\n <head>\n  <title>{status}</title>\n </head>\n <body>\n  <h1>{status}</h1>\n"
            f"  {html.escape(explanation)}<br /><br />\n{html.escape(fault.words)}\n </body>\n</html>"
        )
        return "text/html; charset=UTF-8", page.encode("utf-8", "replace")
    return "text/plain; charset=UTF-8", f"{status}\n\n{explanation}\n\n {fault.words}  ".encode("utf-8", "replace")
