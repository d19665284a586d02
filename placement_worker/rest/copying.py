"""Copies a live Placement's book over its own API, while it runs.

A pass reads everything that may have changed since the one before: what a provider has only when its generation moved;
who holds what always, because a DELETE of allocations moves no generation. A pass that finds nothing new has seen the
source equal to the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from placement_worker.domain.names import is_custom
from placement_worker.domain.values import Consumer, Provider, Stock
from placement_worker.rest.bodies import InventoryBody
from placement_worker.rest.usages import UNKNOWN
from placement_worker.store.image import Image, ImageError

VERSION = "placement 1.39"
AT_ONCE = 8
TIMEOUT_S = 60.0


class Source:
    """A Placement that speaks 1.39."""

    def __init__(self, url: str, token: str) -> None:
        headers = {"x-auth-token": token, "openstack-api-version": VERSION, "accept": "application/json"}
        self._client = httpx.AsyncClient(base_url=url.rstrip("/") + "/", headers=headers, timeout=TIMEOUT_S)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._providers: dict[str, Provider] = {}
        self._consumers: dict[str, Consumer] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def read(self) -> Image:
        """One pass. Raises ImageError when the source cannot be read."""
        traits = (await self._get("traits"))["traits"]
        classes = [row["name"] for row in (await self._get("resource_classes"))["resource_classes"]]
        rows = (await self._get("resource_providers"))["resource_providers"]
        found = await asyncio.gather(*(self._provider(row) for row in rows))
        self._providers = {provider.uuid: provider for provider in found if provider is not None}
        held = await asyncio.gather(*(self._held(uuid) for uuid in self._providers))
        generations = {consumer: generation for part in held for consumer, generation in part.items()}
        consumers = await asyncio.gather(*(self._consumer(*item) for item in generations.items()))
        self._consumers = dict(item for item in consumers if item is not None)
        return Image(_custom(classes), _custom(traits), self._providers, self._consumers)

    async def _provider(self, row: Mapping[str, Any]) -> Provider | None:
        known = self._providers.get(row["uuid"])
        place = (row["name"], row["parent_provider_uuid"], row["root_provider_uuid"], row["generation"])
        if known is not None and place == (known.name, known.parent, known.root, known.generation):
            return known
        path = f"resource_providers/{row['uuid']}"
        inventories = await self._get(f"{path}/inventories", gone=True)
        traits = await self._get(f"{path}/traits", gone=True)
        aggregates = await self._get(f"{path}/aggregates", gone=True)
        if inventories is None or traits is None or aggregates is None:
            return None
        stocks = {name: _stock(fields) for name, fields in inventories["inventories"].items()}
        own_traits, own_aggregates = sorted(traits["traits"]), sorted(aggregates["aggregates"])
        # Of reads at different generations the oldest is said: the next pass then looks again.
        parts = (row, inventories, traits, aggregates)
        generation = min(part.get("resource_provider_generation", row["generation"]) for part in parts)
        return Provider(
            row["uuid"],
            row["name"],
            row["parent_provider_uuid"],
            row["root_provider_uuid"],
            generation,
            0,
            stocks,
            {},
            tuple(own_traits),
            tuple(own_aggregates),
        )

    async def _held(self, provider: str) -> dict[str, int]:
        found = await self._get(f"resource_providers/{provider}/allocations", gone=True)
        held = found["allocations"] if found is not None else {}
        return {consumer: fields["consumer_generation"] for consumer, fields in held.items()}

    async def _consumer(self, uuid: str, generation: int) -> tuple[str, Consumer] | None:
        known = self._consumers.get(uuid)
        if known is not None and known.generation == generation:
            return uuid, known
        found = await self._get(f"allocations/{uuid}")
        if not found["allocations"]:
            return None
        kind = found["consumer_type"]
        holding = {provider: fields["resources"] for provider, fields in found["allocations"].items()}
        return uuid, Consumer(
            found["consumer_generation"],
            0,
            found["project_id"],
            found["user_id"],
            "" if kind == UNKNOWN else kind,
            holding,
        )

    async def _get(self, path: str, *, gone: bool = False) -> Any:
        """The answer's data; with `gone`, None for what is not there (any more)."""
        async with self._room:
            try:
                answer = await self._client.get(path)
            except httpx.HTTPError as error:
                raise ImageError(f"{path}: {type(error).__name__} {error}") from error
        if gone and answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise ImageError(f"{path}: {answer.status_code} {answer.text[:200]}")
        return answer.json()


def _stock(fields: Mapping[str, Any]) -> Stock:
    return InventoryBody(**fields).stock()


def _custom(names: Iterable[str]) -> frozenset[str]:
    return frozenset(filter(is_custom, names))
