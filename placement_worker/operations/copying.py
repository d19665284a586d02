"""Copies the book of a running Placement service over its API.

A quick pass reads a provider's rows again only if its generation has changed, and a consumer only if its generation or
its allocations have changed. It misses changes without a new generation (aggregates below 1.19, a consumer that was
removed and created again), so only a whole pass, which reads everything, proves that the copy is equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import msgspec

from bus.clock import Clock, SystemClock
from bus.contracts.base import reason_of
from bus.faults import Transient
from bus.retrying import Retrying, RetryPolicy
from placement_worker.domain.values import ConsumerState, Provider, is_custom
from placement_worker.operations.export import BookExport, InvalidExport
from placement_worker.rest.allocations import UNKNOWN
from placement_worker.rest.bodies import InventoryBody
from placement_worker.rest.http import NEWEST, SERVICE

SINCE_CONSUMER_GENERATIONS = 28  # the oldest version that returns everything that a copy needs
AT_ONCE = 8
TIMEOUT_S = 60.0
ASK = RetryPolicy(first_s=0.4, longest_s=3.2, least=1.0, attempts=5)  # for one page of the other service

Holdings = dict[str, dict[str, Any]]  # {provider: {class: amount}}


class CopySource:
    """A running Placement service of a release that supports 1.28 (Rocky) or newer."""

    def __init__(self, url: str, token: str, *, clock: Clock | None = None) -> None:
        headers = {"x-auth-token": token, "accept": "application/json"}
        try:
            self._client = httpx.AsyncClient(base_url=url.rstrip("/") + "/", headers=headers, timeout=TIMEOUT_S)
        except httpx.InvalidURL as error:
            raise InvalidExport(f"not a URL: {url!r}: {error}") from error
        self._clock = clock if clock is not None else SystemClock()
        self._free_slots = asyncio.Semaphore(AT_ONCE)
        self._version = 0
        self._providers: dict[str, Provider] = {}
        self._consumers: dict[str, ConsumerState] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def read(self, *, whole: bool = True) -> BookExport:
        """Read one pass, quick or whole. Raises InvalidExport when the source cannot be read."""
        if not self._version:
            self._version = await self._newest()
        if whole:
            self._providers, self._consumers = {}, {}
        try:
            return await self._pass()
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise InvalidExport(
                f"that does not answer as Placement does: {type(error).__name__} {reason_of(error)}"
            ) from error

    async def _newest(self) -> int:
        """Return the newest version that both sides support."""
        home = await self._get("")
        try:
            major, _, minor = home["versions"][0]["max_version"].partition(".")
            newest = int(minor) if major == "1" else 0
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise InvalidExport("that does not answer as Placement does") from error
        if newest < SINCE_CONSUMER_GENERATIONS:
            raise InvalidExport(f"it supports 1.{newest}; 1.{SINCE_CONSUMER_GENERATIONS} is needed")
        return min(newest, NEWEST)

    async def _pass(self) -> BookExport:
        traits = (await self._get("traits"))["traits"]
        classes = [row["name"] for row in (await self._get("resource_classes"))["resource_classes"]]
        rows = (await self._get("resource_providers"))["resource_providers"]
        found = await asyncio.gather(*(self._provider(row) for row in rows))
        self._providers = {provider.uuid: provider for provider in found if provider is not None}
        held = await asyncio.gather(*(self._held(uuid) for uuid in self._providers))
        generations: dict[str, int] = {}
        holdings: dict[str, Holdings] = {}
        for provider, part in zip(self._providers, held, strict=True):
            for consumer, fields in part.items():
                generations[consumer] = fields["consumer_generation"]
                holdings.setdefault(consumer, {})[provider] = fields["resources"]
        consumers = await asyncio.gather(*(self._consumer(c, generations[c], holdings[c]) for c in generations))
        self._consumers = dict(item for item in consumers if item is not None)
        return BookExport(_custom(classes), _custom(traits), self._providers, self._consumers)

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
        listed = inventories["inventories"]
        found = {name: msgspec.convert(fields, InventoryBody).inventory() for name, fields in listed.items()}
        own_traits, own_aggregates = sorted(traits["traits"]), sorted(aggregates["aggregates"])
        # If the parts were read at different generations, the oldest is recorded, so that the next pass reads them
        # again.
        parts = (row, inventories, traits, aggregates)
        generation = min(part.get("resource_provider_generation", row["generation"]) for part in parts)
        return Provider(
            row["uuid"],
            row["name"],
            row["parent_provider_uuid"],
            row["root_provider_uuid"],
            generation,
            0,
            found,
            {},
            tuple(own_traits),
            tuple(own_aggregates),
        )

    async def _held(self, provider: str) -> dict[str, Any]:
        found = await self._get(f"resource_providers/{provider}/allocations", gone=True)
        held: dict[str, Any] = found["allocations"] if found is not None else {}
        return held

    async def _consumer(self, uuid: str, generation: int, held: Holdings) -> tuple[str, ConsumerState] | None:
        known = self._consumers.get(uuid)
        if known is not None and (known.generation, known.holding) == (generation, held):
            return uuid, known
        found = await self._get(f"allocations/{uuid}")
        if not found["allocations"]:
            return None
        kind = found.get("consumer_type", UNKNOWN)  # answers before 1.38 have none
        holding = {provider: fields["resources"] for provider, fields in found["allocations"].items()}
        return uuid, ConsumerState(
            found["consumer_generation"],
            0,
            found["project_id"],
            found["user_id"],
            "" if kind == UNKNOWN else kind,
            holding,
        )

    async def _get(self, path: str, *, gone: bool = False) -> Any:
        """Return the answer's data; with `gone`, None for rows that do not exist."""
        headers = {"openstack-api-version": f"{SERVICE} 1.{self._version}"} if self._version else {}

        async def ask() -> Any:
            try:
                async with self._free_slots:
                    answer = await self._client.get(path, headers=headers)
            except httpx.TransportError as error:
                raise Transient(f"{type(error).__name__} {error}") from error
            except (httpx.InvalidURL, httpx.RequestError) as error:  # the answer's uuid or encoding is invalid
                raise InvalidExport(f"{path[:200]!r}: {type(error).__name__} {error}") from error
            if answer.status_code >= 500 or answer.status_code == 429:
                raise Transient(f"{answer.status_code} {answer.reason_phrase}")
            return self._data(answer, gone=gone)

        try:
            return await Retrying(ASK, self._clock).call(ask)
        except Transient as error:
            raise InvalidExport(f"{self._client.base_url.join(path)}: {error.reason}") from error

    @staticmethod
    def _data(answer: httpx.Response, *, gone: bool) -> Any:
        if gone and answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise InvalidExport(f"{answer.url}: {answer.status_code} {answer.text[:200]}")
        try:
            return msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidExport(f"{answer.url}: {reason_of(error)}") from error


def _custom(names: Iterable[str]) -> frozenset[str]:
    return frozenset(filter(is_custom, names))
