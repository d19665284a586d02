"""The placement REST API under load, over real HTTP: `python -m lab.benchmarks.rest --url http://127.0.0.1:8778`.

Works on any Placement (noauth2, token `admin`), so the same run measures OpenStack's own. Adds providers and consumers
of its own and removes the consumers again; the providers stay, so use a book that may be thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

HEAD = "Host: bench\r\nX-Auth-Token: admin\r\nAccept: application/json\r\nOpenStack-API-Version: placement 1.39\r\n"
TIMEOUT_S = 60.0
rng = random.Random()


class Client:
    """One keep-alive connection, as little work as possible."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None

    async def __call__(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """(status, body)."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**26)
        data = b"" if body is None else json.dumps(body).encode()
        kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{HEAD}{kind}\r\n".encode() + data)
        async with asyncio.timeout(TIMEOUT_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            size = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
            answer = await self._reader.readexactly(size)
        if "connection: close" in head:
            self._reader = None
        return int(head.split(" ", 2)[1]), answer


def new() -> str:
    """A uuid of this run."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


async def provider(client: Client, number: int) -> str:
    """A flat host: four calls."""
    own = new()
    traits = ["HW_CPU_X86_AVX2", "COMPUTE_NODE"] if number % 10 == 0 else ["COMPUTE_NODE"]
    inventories = {
        "VCPU": {"total": 64, "allocation_ratio": 16.0},
        "MEMORY_MB": {"total": 262_144, "reserved": 512},
        "DISK_GB": {"total": 4000},
    }
    path = f"/resource_providers/{own}"
    calls: list[tuple[str, str, object, int]] = [
        ("POST", "/resource_providers", {"uuid": own, "name": f"bench-{own}"}, 200),
        ("PUT", f"{path}/inventories", {"resource_provider_generation": 0, "inventories": inventories}, 200),
        ("PUT", f"{path}/traits", {"resource_provider_generation": 1, "traits": traits}, 200),
        (
            "PUT",
            f"{path}/aggregates",
            {"resource_provider_generation": 2, "aggregates": [AGGREGATES[number % len(AGGREGATES)]]},
            200,
        ),
    ]
    for method, where, body, expected in calls:
        status, answer = await client(method, where, body)
        assert status == expected, answer
    return own


AGGREGATES = [f"{number:08d}-0000-4000-8000-000000000000" for number in range(10)]


def holding(host: str) -> dict[str, object]:
    """One small instance's worth of a host."""
    return {host: {"resources": {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1}}}


def body_of(allocations: object, generation: int | None) -> dict[str, object]:
    """The body of PUT /allocations."""
    return {
        "allocations": allocations,
        "consumer_generation": generation,
        "project_id": "bench",
        "user_id": "bench",
        "consumer_type": "INSTANCE",
    }


async def measure(
    name: str, clients: list[Client], work: Callable[[Client, int], Awaitable[object]], count: int
) -> None:
    """Do `count` pieces of work with all clients at once and measure how fast they went."""
    numbers = iter(range(count))
    times: list[float] = []

    async def one(client: Client) -> None:
        for number in numbers:
            began = time.perf_counter()
            await work(client, number)
            times.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(one(client) for client in clients))
    took = time.perf_counter() - began
    p50, p99 = statistics.median(times), sorted(times)[int(len(times) * 0.99)]
    print(f"{name:52} {count / took:9.1f} /s   p50 {p50 * 1e3:8.2f} ms   p99 {p99 * 1e3:8.2f} ms", flush=True)


async def main() -> None:
    """All phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8778")
    parser.add_argument("--providers", type=int, default=1000)
    parser.add_argument("--claims", type=int, default=2000)
    parser.add_argument("--searches", type=int, default=20)
    options = parser.parse_args()
    where = urlsplit(options.url)

    def clients(count: int) -> list[Client]:
        return [Client(where.hostname or "127.0.0.1", where.port or 80) for _ in range(count)]

    hosts: list[str] = []

    async def add(client: Client, number: int) -> None:
        hosts.append(await provider(client, number))

    await measure("set up a provider (4 calls), 8 clients", clients(8), add, options.providers)

    async def search(client: Client, query: str) -> None:
        status, answer = await client("GET", f"/allocation_candidates?{query}")
        assert status == 200, answer

    ask = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1"
    queries = {
        "candidates, limit=1000": f"{ask}&limit=1000",
        "candidates, limit=1": f"{ask}&limit=1",
        "candidates, trait and member_of": f"{ask}&required=HW_CPU_X86_AVX2&member_of={AGGREGATES[0]}&limit=1000",
        "candidates, none (trait)": f"{ask}&required=HW_CPU_X86_SGX",
    }
    for name, query in queries.items():

        async def one(client: Client, _number: int, query: str = query) -> None:
            await search(client, query)

        await measure(name, clients(1), one, options.searches)

    consumers: list[str] = []

    async def claim(client: Client, number: int) -> None:
        consumer = new()
        status, answer = await client(
            "PUT", f"/allocations/{consumer}", body_of(holding(hosts[number % len(hosts)]), None)
        )
        assert status == 204, answer
        consumers.append(consumer)

    await measure("PUT allocations, 8 clients", clients(8), claim, options.claims)
    some, hosts[4:] = hosts[4:], []
    await measure("PUT allocations, 64 clients on 4 providers", clients(64), claim, min(options.claims, 1000))
    hosts.extend(some)

    async def swap(client: Client, number: int) -> None:
        host = hosts[number % len(hosts)]
        both = {new(): body_of(holding(host), None), consumers[number]: body_of({}, 1)}
        status, answer = await client("POST", "/allocations", both)
        assert status == 204, answer
        consumers[number] = next(iter(both))

    await measure("POST allocations, swap, 8 clients", clients(8), swap, len(consumers) // 2)

    async def boot(client: Client, _: int) -> None:
        _, answer = await client("GET", f"/allocation_candidates?{ask}&limit=1000")
        chosen = rng.choice(json.loads(answer)["allocation_requests"])
        consumer = new()
        status, answer = await client("PUT", f"/allocations/{consumer}", body_of(chosen["allocations"], None))
        assert status == 204, answer
        consumers.append(consumer)

    await measure("GET candidates (limit=1000) + PUT, 8 clients", clients(8), boot, options.searches * 8)

    async def forget(client: Client, number: int) -> None:
        status, answer = await client("DELETE", f"/allocations/{consumers[number]}")
        assert status == 204, answer

    await measure("DELETE allocations, 8 clients", clients(8), forget, len(consumers))


if __name__ == "__main__":
    asyncio.run(main())
