"""Errors of `/api/v1` as `application/problem+json` (RFC 9457), with the codes that the messages have."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from berth.client.types import ProblemBody
from bus.contracts.base import MAX_REASON
from bus.faults import Fault, RequestRefused, RequestTimeout, Transient
from bus.transport import BusError, PublishRefused

PROBLEM_JSON = "application/problem+json"

# Refusals that are a conflict with what is on record, or of what is not; every other refusal is 422.
_STATUS = {
    "request.duplicate": 409,
    "object.conflict": 409,
    "object.in_use": 409,
    "cell.in_use": 409,
    "host.service_up": 409,
    "host.cell_silent": 409,
    "host.cell_unknown": 409,
    "host.fence_open": 409,
    "host.draining": 409,
    "host.has_instances": 409,
    "host.in_use": 409,
    "service.up": 409,
    "service.has_hosts": 409,
    "service.has_instances": 409,
    "drain.stuck": 409,
    "drain.overlap": 409,
    "drain.ended": 409,
    "drain.stopping": 409,
    "drain.too_many": 429,
    "aggregate.zone_conflict": 409,
    "object.unknown": 404,
}


class Problem(Exception):
    """Ends a request with a status, a stable code, and a sentence for a person."""

    def __init__(self, status: int, code: str, detail: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail[:MAX_REASON]
        self.headers = headers or {}


_TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    415: "Unsupported media type",
    422: "Refused",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
    504: "No answer in time",
}


def problem_response(problem: Problem) -> Response:
    """The answer that a problem is."""
    body = ProblemBody(_TITLES.get(problem.status, "Error"), problem.status, problem.code, problem.detail)
    return Response(msgspec.json.encode(body), problem.status, problem.headers, PROBLEM_JSON)


def problem_of(fault: Exception) -> Problem | None:
    """The answer to a caller for a fault of the bus; None: a defect of ours."""
    if isinstance(fault, Problem):
        return fault
    if isinstance(fault, RequestRefused):
        return Problem(_STATUS.get(fault.code, 422), fault.code, fault.reason)
    if isinstance(fault, RequestTimeout):
        return Problem(504, fault.code, "no scheduler has answered in time; the request may still be carried out")
    if isinstance(fault, PublishRefused):
        return Problem(429, "queue.full", "the queue is full: ask again later", headers={"retry-after": "1"})
    if isinstance(fault, BusError | Transient):
        return Problem(503, getattr(fault, "code", "bus.unavailable"), str(fault), headers={"retry-after": "1"})
    if isinstance(fault, Fault):
        return Problem(422, fault.code, str(fault))
    return None
