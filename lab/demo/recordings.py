"""Recorded runs of a real Ironic, and what Nova makes of the same nodes: what the book must hold after a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from berth.site import Site

SETTLE_TIMEOUT_S = 60.0
POLL_S = 0.1
# Ours on purpose (ironic_sync/README.md): a class that carries the prefix already keeps it once.
DEVIATIONS = {"CUSTOM_CUSTOM_GOLD": "CUSTOM_GOLD"}

_PROVIDERS = """
SELECT p.uuid::text, c.name, i.total, i.reserved,
       coalesce(array_agg(t.name ORDER BY t.name) FILTER (WHERE t.name IS NOT NULL), '{}')
FROM providers p
LEFT JOIN inventories i ON i.provider_id = p.id
LEFT JOIN resource_classes c ON c.id = i.class_id
LEFT JOIN provider_traits pt ON pt.provider_id = p.id
LEFT JOIN traits t ON t.id = pt.trait_id
WHERE p.uuid = ANY($1::uuid[])
GROUP BY p.uuid, c.name, i.total, i.reserved
"""


class Expected(Struct, frozen=True):
    """The book's required content for a node; None fields: the node is gone."""

    resource_class: str
    total: int
    reserved: int
    traits: tuple[str, ...]


class Deviation(Struct, frozen=True):
    """A node whose provider is not what it should be."""

    node: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.node}: expected {self.expected}, the book has {self.found}"


def scenario_names(recordings: Path) -> list[str]:
    """The recordings that are there, in order."""
    return sorted(path.name.removesuffix(".jsonl") for path in recordings.glob("*.jsonl"))


def expected_nodes(recordings: Path, names: Sequence[str]) -> dict[str, Expected | None]:
    """{node: what the book must hold after the last step}; a node that Nova cannot place is left out."""
    answers: dict[str, list[dict[str, Any]]] = msgspec.json.decode((recordings / "nova-expected.json").read_bytes())
    last: dict[str, Any] = {}
    for name in names:
        for step in answers[name]:
            last.update(step["nodes"])
    return {uuid: _expected(answer) for uuid, answer in last.items() if answer is None or "error" not in answer}


def _expected(answer: Mapping[str, Any] | None) -> Expected | None:
    if answer is None:
        return None
    name = answer["resource_class"]
    return Expected(DEVIATIONS.get(name, name), answer["total"], answer["reserved"], tuple(sorted(answer["traits"])))


async def compare(site: Site, expected: Mapping[str, Expected | None]) -> list[Deviation]:
    """Wait until the book holds what is expected; what still differs after SETTLE_TIMEOUT_S is returned."""
    database = site.environment("recordings").database("placement", pool_size=1)
    deadline = site.clock.monotonic() + SETTLE_TIMEOUT_S
    try:
        while True:
            async with database.raw() as connection:
                rows = await connection.fetch(_PROVIDERS, list(expected))
            found = {row[0]: Expected(row[1], row[2], row[3], tuple(row[4])) for row in rows}
            differ = [Deviation(u, e, found.get(u)) for u, e in expected.items() if found.get(u) != e]
            if not differ or site.clock.monotonic() > deadline:
                return differ
            await site.clock.sleep(POLL_S)
    finally:
        await database.close()
