"""Every log line of a request carries its id, and not whose the one before it was."""

from __future__ import annotations

import random
from collections.abc import MutableMapping
from typing import Any, cast

import structlog

from bus.clock import SystemClock
from bus.faults import BrokenInvariant
from placement_worker.domain.refusal import Why, WriteRefusal
from placement_worker.rest.api import Api
from placement_worker.rest.application import Application
from placement_worker.rest.auth import NoAuth2
from placement_worker.rest.config import RestConfig
from placement_worker.rest.policy import Policy

THEIRS = "req-11111111-2222-4333-8444-555555555555"


class Book:
    """Refuses every write, and remembers what a log line would have held."""

    def __init__(self) -> None:
        self.config = RestConfig()
        self.clock = SystemClock()
        self.rng = random.Random(3)
        self.logged: list[dict[str, Any]] = []

    async def write_allocations(self, _write: object) -> WriteRefusal:
        self.logged.append(structlog.contextvars.get_contextvars())
        return WriteRefusal(Why.NO_ALLOCATIONS)


def never(error: BrokenInvariant) -> None:
    raise error


async def test_a_callers_own_request_id_is_not_logged_with_the_next_request() -> None:
    """A pipelined request is begun in its forerunner's context."""
    book = Book()
    config = book.config
    application = Application(cast(Api, book), NoAuth2(), Policy(config.policy, book.clock), broken=never)
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("there is no body")

    path = "/allocations/00000000-0000-4000-8000-000000000001"
    scope = {"type": "http", "method": "DELETE", "path": path, "query_string": b""}
    token = (b"x-auth-token", b"admin")
    await application({**scope, "headers": [token, (b"x-openstack-request-id", THEIRS.encode())]}, receive, send)
    await application({**scope, "headers": [token]}, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [404, 404]
    first, second = book.logged
    assert first["global_request_id"] == THEIRS
    assert "global_request_id" not in {key for key, value in second.items() if value is not ...}
    assert first["request_id"] != second["request_id"]
