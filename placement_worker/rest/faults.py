"""The error answers of the API: a table of statuses and codes, and which form the caller accepts. The texts are
Placement's, because clients show them and some match them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from placement_worker.domain.refusal import RefusalCode, WriteRefusal

# Placement's error codes.
UNDEFINED = "placement.undefined_code"
INVENTORY_IN_USE = "placement.inventory.inuse"
CONCURRENT_UPDATE = "placement.concurrent_update"
DUPLICATE_NAME = "placement.duplicate_name"
PROVIDER_IN_USE = "placement.resource_provider.inuse"
CANNOT_DELETE_PARENT = "placement.resource_provider.cannot_delete_parent"
PROVIDER_NOT_FOUND = "placement.resource_provider.not_found"
DUPLICATE_KEY = "placement.query.duplicate_key"
BAD_VALUE = "placement.query.bad_value"
MISSING_VALUE = "placement.query.missing_value"

SINCE_CODES = 23  # 1.23

STATUS = {
    400: (
        "Bad Request",
        "The server could not comply with the request since it is either malformed or otherwise incorrect.",
    ),
    401: (
        "Unauthorized",
        "This server could not verify that you are authorized to access the document you requested. Either you "
        "supplied the wrong credentials (e.g., bad password), or your browser does not understand how to supply the "
        "credentials required.",
    ),
    403: ("Forbidden", "Access was denied to this resource."),
    404: ("Not Found", "The resource could not be found."),
    405: ("Method Not Allowed", "The method {method} is not allowed for this resource."),
    406: (
        "Not Acceptable",
        "The resource could not be generated that was acceptable to your browser (content of type {accept}).",
    ),
    408: ("Request Timeout", "The server has waited too long for the request to be sent by the client."),
    409: ("Conflict", "There was a conflict when trying to complete your request."),
    413: ("Request Entity Too Large", "The body of your request was too large for this server."),
    415: ("Unsupported Media Type", "The request media type {content_type} is not supported by this server."),
    500: (
        "Internal Server Error",
        "The server has either erred or is incapable of performing the requested operation.",
    ),
    503: ("Service Unavailable", "The server is currently unavailable. Please try again at a later time."),
}

# The status and code of a refused write, unless its handler states others.
REFUSED: Mapping[RefusalCode, tuple[int, str]] = {
    RefusalCode.NO_PROVIDER: (404, UNDEFINED),
    RefusalCode.NO_SUCH: (400, UNDEFINED),
    RefusalCode.NO_INVENTORY: (404, UNDEFINED),
    RefusalCode.NO_ALLOCATIONS: (404, UNDEFINED),
    RefusalCode.GENERATION: (409, CONCURRENT_UPDATE),
    RefusalCode.CONSUMER_GENERATION: (409, CONCURRENT_UPDATE),
    RefusalCode.DUPLICATE: (409, DUPLICATE_NAME),
    RefusalCode.IN_USE: (409, INVENTORY_IN_USE),
    RefusalCode.PROVIDER_IN_USE: (409, PROVIDER_IN_USE),
    RefusalCode.IS_PARENT: (409, CANNOT_DELETE_PARENT),
    RefusalCode.BAD_PARENT: (400, UNDEFINED),
    RefusalCode.BAD_INVENTORY: (400, UNDEFINED),
    RefusalCode.DOES_NOT_FIT: (409, UNDEFINED),
}


class HttpFault(Exception):
    """An error as the answer to a request."""

    def __init__(self, status: int, words: str = "", code: str = UNDEFINED, **headers: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words
        self.code = code
        self.headers = headers


def invalid_query(words: str, code: str = UNDEFINED) -> HttpFault:
    """The answer to a query string that cannot be read."""
    return HttpFault(400, f"Invalid query string parameters: {words}", code)


class RefusedAnswer(msgspec.Struct, frozen=True):
    """How a handler answers a refused write where it differs from REFUSED. words: the text, whose last `{}` is the
    place of the refusal's own.
    """

    words: str = "{}"
    status: int = 0
    code: str = ""


Results = Mapping[RefusalCode, RefusedAnswer]
NO_RESULTS: Results = {}


def refused(refusal: WriteRefusal, answers: Results = NO_RESULTS) -> HttpFault:
    """Return the answer to a refused write."""
    own = answers.get(refusal.code, RefusedAnswer())
    status, code = REFUSED[refusal.code]
    before, place, after = own.words.rpartition("{}")
    return HttpFault(own.status or status, f"{before}{refusal.words if place else ''}{after}", own.code or code)


def best(accept: str, offers: tuple[str, ...]) -> str | None:
    """Return the offer with the highest quality in an Accept header, the first of equal ones; None when none is
    accepted.
    """
    if accept in offers:
        return accept
    if not accept:
        return offers[0]
    found, best_quality = None, 0.0
    for offer in offers:
        quality = _quality(accept, offer)
        if quality > best_quality:
            found, best_quality = offer, quality
    return found


def _quality(accept: str, offer: str) -> float:
    """Return the quality of a media type in an Accept header, by the most specific range."""
    family = offer.partition("/")[0] + "/*"
    quality, rank = 0.0, 0
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        specific = {offer: 3, family: 2, "*/*": 1}.get(media.lower(), 0)
        if specific <= rank:
            continue
        rank, quality = specific, 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "q":
                quality = _number(value)
    return quality


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= 1.0 else 0.0
