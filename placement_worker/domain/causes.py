"""Which request each change of a group of writes comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.feed import MAX_CAUSES, Change


class Caused(Struct, frozen=True, kw_only=True):
    """A write and its cause: the id of the request that caused it, empty when there is none."""

    cause: str = ""


def caused(changes: Sequence[Change], touched: Iterable[tuple[str, Iterable[str]]]) -> list[Change]:
    """Return the changes with their causes. touched: each write's cause, and the providers that the write named.

    A provider that no write named (a child whose root has moved) gets the causes of all writes.
    """
    by_provider: dict[str, dict[str, None]] = {}
    everything: dict[str, None] = {}
    for cause, providers in touched:
        if cause:
            everything[cause] = None
            for provider in providers:
                by_provider.setdefault(provider, {})[cause] = None
    if not everything:
        return list(changes)
    return [replace(change, causes=_of(by_provider.get(change.provider, everything))) for change in changes]


def _of(causes: Mapping[str, None]) -> tuple[str, ...]:
    return tuple(causes)[:MAX_CAUSES]
