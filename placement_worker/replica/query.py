"""What a candidate search is asked, and what it answers."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.build import FunnelStep
from placement_worker.replica.columns import Rows


class Query(Struct, frozen=True, kw_only=True):
    """One un-numbered request (P-49): each class from one provider of one tree.

    resources: amounts asked; a class asked with nothing or less is not asked (a bare-metal flavor's VCPU=0).
    required: AND of any-of groups, each met by some provider that gives resources (P-48); forbidden: on none of them.
    member_of: AND of any-of groups of aggregates, met by one provider itself or by its root (P-47);
    forbidden_aggregates: neither the provider nor its root is in any of them.
    in_tree: only the tree that this provider is in. root_required, root_forbidden: traits of the root (P-1.35).
    only_roots, ignore_roots: uuids of roots; an empty only_roots means any.
    """

    resources: dict[str, int]
    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()
    member_of: tuple[tuple[str, ...], ...] = ()
    forbidden_aggregates: tuple[str, ...] = ()
    in_tree: str | None = None
    root_required: tuple[tuple[str, ...], ...] = ()
    root_forbidden: tuple[str, ...] = ()
    only_roots: tuple[str, ...] = ()
    ignore_roots: tuple[str, ...] = ()


class Found(Struct, frozen=True):
    """The roots that can take the request, ascending by row (do not write to it), and why the others fell.

    The funnel is empty unless asked for (`explain=True`).
    """

    roots: Rows
    funnel: tuple[FunnelStep, ...] = ()
