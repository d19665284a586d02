"""Providers and changes for tests."""

from __future__ import annotations

from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def inventory(
    capacity: int, *, low: int = 1, high: int = 2**31 - 1, step: int = 1
) -> tuple[float, int, int, int, int, int, float]:
    return (float(capacity), low, high, step, max(capacity, 1), 0, 1.0)


def provider(
    number: int,
    *,
    root: int | None = None,
    parent: int | None = None,
    generation: int = 1,
    shape: int = 1,
    inventories: dict[str, int] | None = None,
    used: dict[str, int] | None = None,
    traits: tuple[str, ...] = (),
    aggregates: tuple[str, ...] = (),
) -> ProviderState:
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(number if root is None else root),
        parent_uuid=None if parent is None else uuid(parent),
        generation=generation,
        shape=shape,
        inventories={name: inventory(capacity) for name, capacity in (inventories or {}).items()},
        used=used or {},
        traits=traits,
        aggregates=aggregates,
    )


def changed(sequence: int, state: ProviderState) -> Change:
    return Change(sequence=sequence, provider=state.uuid, generation=state.generation, state=state)


def used(sequence: int, number: int, generation: int, amounts: dict[str, int]) -> Change:
    return Change(sequence=sequence, provider=uuid(number), generation=generation, used=amounts)


def removed(sequence: int, number: int, generation: int) -> Change:
    return Change(sequence=sequence, provider=uuid(number), generation=generation, removed=True)
