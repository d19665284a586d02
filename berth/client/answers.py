"""Reads the answers of the server, whatever it sends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from berth.client.faults import ApiAnswerInvalid, ApiProblem, ApiUnavailable
from berth.client.types import ProblemBody
from bus.contracts.base import MAX_REASON, reason_of

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
EVENT_STREAM = "text/event-stream"
# The hosts of a whole site, of which `list_hosts` takes at most 100,000, are some 80 MB.
MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_PROBLEM_BYTES = 64 * 1024
MAX_RETRY_AFTER_S = 3600.0

_CODE = re.compile(r"[a-z][a-z0-9_.]{0,99}")
_REDIRECTS = range(300, 400)
_OF_PROXIES = (502, 503, 504)


class ApiAnswer:
    """The answer to one call, as it comes."""

    def __init__(self, status: int, headers: Mapping[str, str], kind: Any, media: str = JSON) -> None:
        """kind: the type of a good answer. media: its media type. Raises ApiAnswerInvalid, ApiUnavailable."""
        self._status, self._headers, self._kind = status, headers, kind
        self.is_good = 200 <= status < 300
        self._received = bytearray()
        self._most = MAX_ANSWER_BYTES if self.is_good else MAX_PROBLEM_BYTES
        found = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status in _REDIRECTS:
            raise ApiAnswerInvalid(f"it redirects (status {status}): give the address itself", code="api.redirected")
        if status in _OF_PROXIES and found != PROBLEM_JSON:
            raise ApiUnavailable(f"a proxy answers {status}: berth behind it is away")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiAnswerInvalid("it is compressed, which was not asked for")
        if found != (media if self.is_good else PROBLEM_JSON):
            raise ApiAnswerInvalid(f"status {status} with media type {found[:64]!r}: is this the address of berth?")

    def take(self, piece: bytes) -> None:
        """Take a part of the body. Raises ApiAnswerInvalid as soon as there is too much of it."""
        self._received += piece
        if len(self._received) > self._most:
            raise ApiAnswerInvalid(f"more than {self._most} bytes", code="api.answer_too_large")

    def result(self) -> Any:
        """The whole answer. Raises ApiProblem, ApiAnswerInvalid."""
        if not self.is_good:
            raise self.problem()
        return decoded(bytes(self._received), self._kind)

    def problem(self) -> ApiProblem:
        """The refusal that it is. Raises ApiAnswerInvalid."""
        body = decoded(bytes(self._received), ProblemBody)
        if not _CODE.fullmatch(body.code):
            raise ApiAnswerInvalid(f"status {self._status} with a code that is none")
        detail = (body.detail or body.title)[:MAX_REASON]
        return ApiProblem(self._status, body.code, detail, _seconds(self._headers.get("retry-after", "")))


def decoded(body: bytes, kind: Any) -> Any:
    """JSON as a value of this type. Raises ApiAnswerInvalid."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiAnswerInvalid(f"not as this version knows it: {reason_of(error)[:MAX_REASON]}") from None


def _seconds(text: str) -> float | None:
    return min(float(text), MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() and len(text) < 10 else None
