"""One build request as the decision sees it: what to search for, and what the filters may ask about."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from placement_worker.replica.search import Query


class Wanted(Struct, frozen=True, kw_only=True):
    """What is wanted. Requests with an equal `key` see the same hosts in the same light and share one ranking.

    preferred_traits, preferred_classes: what the flavor would like and does not insist on; a weigher looks at them.
    """

    query: Query
    flavor: str
    project_id: str
    extra_specs: Mapping[str, str] = {}
    availability_zone: str | None = None
    preferred_traits: tuple[str, ...] = ()
    preferred_classes: tuple[str, ...] = ()
    key: tuple[str, ...] = ()


class Impossible(Struct, frozen=True):
    """No host can ever be asked for this as things are configured; `code` is stable, `reason` for a person."""

    code: str
    reason: str
    step: str
