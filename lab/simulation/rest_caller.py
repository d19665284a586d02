"""Requests to Placement's REST API, at the application that serves HTTP, in the process that serves it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import MutableMapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lab.simulation.watch import Breach
from lab.simulation.world import World
from placement_worker.rest.application import Application

ANSWER_S = 5.0  # an answer is waited for so long
RETRY_S = 0.5
TRIES = 4  # of one request that has no answer, or 503
SENT_S = 0.002  # how long a request is on its way at most, and its answer
LOST_SHARE = 0.05  # of the answers, in runs in which connections break
DOUBTED = 503  # whether placement has been written is open: the commit's own answer may be lost

VERSION = "1.38"
PROJECT, USER, TYPE = "theirs", "another-client", "RESERVATION"
Holding = dict[str, dict[str, int]]


class RestRequest(Struct, frozen=True):
    """A request. version: the microversion."""

    method: str
    path: str
    body: Any
    version: str


class RestAnswer(Struct, frozen=True):
    """The answer to a request. repeated: it had been sent before, and that may have been carried out, too."""

    status: int
    body: Any = None
    repeated: bool = False


class RestCaller:
    """Sends requests to the placement workers that run, each to one of them at random."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"berth.sim.rest {world.plan.seed}")

    async def request(self, method: str, path: str, body: Any = None, *, version: str = "") -> RestAnswer | None:
        """One request, tried again while there is no answer; None when there never was one. Raises Breach.

        version: the microversion, if not the newest.
        """
        answer = None
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_S)
            answer = await self._try(RestRequest(method, path, body, version or VERSION))
            if answer is not None and answer.status != DOUBTED:
                answer = replace(answer, repeated=number > 0)
                break
        self._world.event_log.record("rest-answer", f"{method} {path} {answer.status if answer else 'none'}")
        if answer is not None and answer.status >= 500 and answer.status != DOUBTED:
            raise Breach("rest_answers", f"{method} {path}: {answer.status}")
        return None if answer is None or answer.status == DOUBTED else answer

    async def _try(self, request: RestRequest) -> RestAnswer | None:
        applications = self._world.wiring.applications
        names = sorted(name for name in applications if name in self._world.lives)
        if not names:
            return None
        name = self._rng.choice(names)
        await asyncio.sleep(self._rng.uniform(0.0, SENT_S))
        if name not in self._world.lives:
            return None
        answered: asyncio.Future[RestAnswer] = asyncio.get_running_loop().create_future()
        served = _serve(applications[name], request, answered)
        # As by a server: each request has a context of its own, of its process.
        context = self._world.lives[name].process.context.copy()
        asyncio.get_running_loop().create_task(served, name=f"rest {request.method} {request.path}", context=context)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await answered
        except TimeoutError:
            return None  # killed, standing still, or slow: it may yet be carried out
        await asyncio.sleep(self._rng.uniform(0.0, SENT_S))
        is_lost = self._world.network_faults.rates.lost_after > 0 and self._rng.random() < LOST_SHARE
        return None if is_lost else answer


async def _serve(application: Application, request: RestRequest, answered: asyncio.Future[RestAnswer]) -> None:
    """One request in the server's process, as an ASGI server hands it over."""
    content = b"" if request.body is None else json.dumps(request.body).encode()
    path, _, query = request.path.partition("?")
    headers = [
        (b"x-auth-token", b"admin"),
        (b"x-roles", b"admin,service"),
        (b"openstack-api-version", f"placement {request.version}".encode()),
        (b"content-length", str(len(content)).encode()),
        *(((b"content-type", b"application/json"),) if content else ()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "method": request.method,
        "path": path,
        "query_string": query.encode(),
        "headers": headers,
    }
    status, parts = 0, []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await application(scope, receive, send)
    if not answered.done():
        text = b"".join(parts)
        answered.set_result(RestAnswer(status, json.loads(text) if text else None))


def allocations_body(wanted: Holding, generation: int | None) -> dict[str, Any]:
    """The body that gives one consumer these allocations."""
    return {
        "allocations": {provider: {"resources": resources} for provider, resources in wanted.items()},
        "project_id": PROJECT,
        "user_id": USER,
        "consumer_generation": generation,
        "consumer_type": TYPE,
    }


def expect_status(method: str, path: str, answer: RestAnswer | None, *statuses: int) -> None:
    """Raise Breach unless the answer, if there is one, has one of these statuses."""
    if answer is not None and answer.status not in statuses:
        raise Breach("rest_answers", f"{method} {path}: {answer.status} {answer.body}")
