"""The door of `berth serve web`: its HTTP API and pages, as bytes, before a scheduler and placement on a database."""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from msgspec import inspect

from berth.config.settings import Settings
from berth.web.server import WebServer
from berth.web.sign_in_sessions import Access
from bus.contracts.build import BuildRequest
from tests.fuzz import hostile
from tests.fuzz.live import CONNECTIONS, HOSTS, Stalls, _answers
from tests.integration.scheduler_worker.world import World
from tests.kit import servers

PATHS = (
    "/",
    "/login",
    "/operations",
    "/dead-letters",
    "/objects/log",
    "/objects/flavors",
    "/builds",
    "/now/events",
    "/fleet",
    "/fleet/map",
    "/fleet/{uuid}",
    "/builds/{uuid}",
    "/api/v1/builds",
    "/api/v1/builds/{uuid}",
    "/api/v1/builds/{uuid}/events",
    "/api/v1/hosts",
    "/api/v1/hosts/{uuid}/admin-state",
    "/api/v1/hosts/{uuid}/delete",
    "/api/v1/services",
    "/api/v1/hosts/{uuid}",
    "/api/v1/hosts/{uuid}/drain-plan",
    "/api/v1/hosts/{uuid}/drain",
    "/api/v1/drains/{uuid}",
    "/api/v1/workers",
    "/api/v1/cells",
    "/api/v1/flavors/{uuid}",
    "/api/v1/aggregates/{uuid}",
    "/api/v1/quotas/{uuid}",
    "/api/v1/rules/default",
    "/api/v1/objects",
    "/api/v1/objects/log",
    "/api/v1/dead-letters",
    "/api/v1/dead-letters/api/{uuid}",
    "/api/v1/moves/{uuid}",
    "/api/v1/events",
    "/api/v1/openapi.json",
)
METHODS = ("GET", "GET", "GET", "POST", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "\x00")
# A page of which a part cannot be read ends with 503, whole otherwise: no cell has a database here.
WITHOUT_PART = re.compile(rb"\w+ /operations[ ?]")
NAMES = ("project_id", "state", "limit", "before", "cell", "name", "page", "q")


async def web(seed: int, numbers: range) -> dict[str, Any]:
    """Requests to the web server that are whole, odd and broken; answers below 500, no callback stands still."""
    with (
        tempfile.TemporaryDirectory(prefix="berth-fuzz-") as state,
        servers.postgres_server() as admin,
        servers.fresh_database(admin) as url,
    ):
        world = World(url)
        await world.open()
        env, access = world.environment("web"), Access(None, world.clock)
        server = WebServer(env, Settings(state_dir=state), host="127.0.0.1", port=0, access=access)
        try:
            await world.placement()
            await world.scheduler()
            await world.add_hosts("c1", HOSTS, VCPU=10_000, MEMORY_MB=2**30, DISK_GB=10**6)
            await server.open()
            stalls = Stalls()
            with stalls.watched():
                return await _to_web(server.url, seed, iter(numbers), stalls)
        finally:
            await server.close()
            await world.close()


async def _to_web(url: str, seed: int, numbers: Iterator[int], stalls: Stalls) -> dict[str, Any]:
    began, count = time.monotonic(), 0
    statuses: Counter[int] = Counter()
    defects: list[dict[str, Any]] = []
    (kind,) = hostile.kinds([BuildRequest])

    async def visitor() -> None:
        nonlocal count
        for number in numbers:
            raw = _request(random.Random(f"{seed}/web/{number}"), kind, url.removeprefix("http://"))
            count += 1
            for status in await _answers(url, raw):
                statuses[status] += 1
                if status >= 500 and not (status == 503 and WITHOUT_PART.match(raw)):
                    defects.append({"number": number, "wrong": f"answered {status}", "input": repr(raw)[:2_000]})

    await asyncio.gather(*(visitor() for _ in range(CONNECTIONS)))
    defects += [{"number": -1, "wrong": wrong, "input": ""} for wrong in stalls.found]
    return {
        "inputs": count,
        "defects": defects,
        "answers": dict(sorted(statuses.items())),
        "slowest_ms": round(stalls.slowest_s * 1000, 2),
        "stalls": len(stalls.found),
        "seconds": round(time.monotonic() - began, 1),
    }


def _request(rng: random.Random, kind: inspect.Type, host: str) -> bytes:
    text = quote(hostile.text(rng), errors="surrogatepass")
    path = rng.choice(PATHS).replace("{uuid}", rng.choice((*hostile.UUIDS, text, "%00", "..")))
    if rng.random() < 0.4:
        pairs = (f"{rng.choice(NAMES)}={quote(hostile.text(rng), errors='surrogatepass')}" for _ in range(3))
        path += "?" + "&".join(pairs)
    method = rng.choice(METHODS)
    body = hostile.bytes_of(kind, rng) if method in {"POST", "PUT", "PATCH"} or rng.random() < 0.1 else b""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host if rng.random() < 0.9 else text[:200]}", "Connection: close"]
    if body or rng.random() < 0.1:
        length = len(body) if rng.random() < 0.9 else rng.choice((0, len(body) + 5, -1, 10**30))
        kinds = ("application/json", "application/x-www-form-urlencoded", "text/plain", "")
        lines += [f"Content-Type: {rng.choice(kinds)}", f"Content-Length: {length}"]
    if rng.random() < 0.3:
        more = (
            "Origin: http://evil",
            "Authorization: Bearer \xff",
            "Cookie: berth=" + "x" * 5_000,
            "Last-Event-ID: -1",
        )
        lines.append(rng.choice(more))
    raw = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
    return hostile.broken(raw, rng) if rng.random() < 0.3 else raw
