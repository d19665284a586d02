"""The request of a candidate search: groups of resources, as `GET /allocation_candidates` has them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import FunnelStep
from placement_worker.replica.columns import Rows

UNNUMBERED = ""


class QueryTooWide(Exception):
    """The request has more groups, classes or any-of groups than a search supports."""

    code = "search.too_wide"


class Group(Struct, frozen=True, kw_only=True):
    """One request group. With the suffix "" each class may come from any provider of the tree or one that shares with
    it; in other groups all classes come from one provider.

    required: AND of any-of groups of traits. The un-numbered group's are met by the providers that give it resources,
    together; a numbered group's by its one provider. forbidden: on none of them. member_of: AND of any-of groups of
    aggregates; forbidden_aggregates: in none. A provider counts as in its root's aggregates for the un-numbered group
    only (as Placement does it). in_tree: only the tree that this provider is in. A numbered group without resources
    picks a provider that meets the rest; it only serves `same_subtree`.
    """

    suffix: str = UNNUMBERED
    resources: dict[str, int] = {}
    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()
    member_of: tuple[tuple[str, ...], ...] = ()
    forbidden_aggregates: tuple[str, ...] = ()
    in_tree: str | None = None


class CandidatesRequest(Struct, frozen=True, kw_only=True):
    """All groups of one request, and the rules between them.

    group_policy: "isolate" puts numbered groups on different providers. root_required (AND of any-of groups),
    root_forbidden: traits of the root that anchors a candidate (from 1.35). root_member_of, root_forbidden_aggregates:
    the same of the root's own aggregates. same_subtree: sets of suffixes; of the providers of each set, one is an
    ancestor of the rest (microversion 1.36). one_per_tree: no two providers of one tree give resources (before 1.29).
    """

    groups: tuple[Group, ...]
    group_policy: Literal["none", "isolate"] | None = None
    root_required: tuple[tuple[str, ...], ...] = ()
    root_forbidden: tuple[str, ...] = ()
    root_member_of: tuple[tuple[str, ...], ...] = ()
    root_forbidden_aggregates: tuple[str, ...] = ()
    same_subtree: tuple[tuple[str, ...], ...] = ()
    one_per_tree: bool = False


class Slot(Struct, frozen=True):
    """The part of a candidate that comes from one provider: a whole numbered group, or one class of the un-numbered
    group.
    """

    suffix: str
    resources: dict[str, int]


def slots_of(request: CandidatesRequest) -> tuple[Slot, ...]:
    """Return the request's slots: groups in order, with the classes of the un-numbered group sorted by name."""
    slots: list[Slot] = []
    for group in request.groups:
        requested = {name: amount for name, amount in sorted(group.resources.items()) if amount > 0}
        each = [{name: amount} for name, amount in requested.items()] if group.suffix == UNNUMBERED else [requested]
        slots += [Slot(group.suffix, resources) for resources in each]
    return tuple(slots)


class Query(CandidatesRequest, frozen=True, kw_only=True):
    """The requirements on one host: its un-numbered group, whose amounts each come from one provider of its tree or one
    that shares with it, and further groups.

    The fields of the un-numbered group are those of a Group. A class with an amount of zero or less is not requested (a
    bare-metal flavor's VCPU=0). The conditions on the root's own aggregates are such as those of an availability zone.
    only_roots, ignore_roots: uuids of roots; an empty only_roots means any. groups: numbered groups.
    """

    groups: tuple[Group, ...] = ()
    resources: dict[str, int] = {}
    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()
    member_of: tuple[tuple[str, ...], ...] = ()
    forbidden_aggregates: tuple[str, ...] = ()
    in_tree: str | None = None
    only_roots: tuple[str, ...] = ()
    ignore_roots: tuple[str, ...] = ()


def request_of(query: Query) -> CandidatesRequest:
    """Return the query as a candidates request, with the un-numbered group among the others. Its pins (only_roots,
    ignore_roots) are applied by the caller.
    """
    own = Group(**{name: getattr(query, name) for name in Group.__struct_fields__ if name != "suffix"})
    requested = any(amount > 0 for amount in query.resources.values())
    return replace(query, groups=(own, *query.groups)) if requested else query


def total_resources(query: Query) -> dict[str, int]:
    """Return the sums over all groups, by class."""
    sums: dict[str, int] = {}
    for resources in (query.resources, *(group.resources for group in query.groups)):
        for name, amount in resources.items():
            sums[name] = sums.get(name, 0) + amount
    return dict(sorted(sums.items()))


MAX_NAMED_ROOTS = 20


class RejectedRoots(Struct, frozen=True):
    """Roots that one step rejected for one reason ("": several): the first MAX_NAMED_ROOTS of their rows."""

    step: str
    reason: str
    rows: tuple[int, ...]


def rejected_roots(step: str, reason: str, rows: Rows) -> RejectedRoots:
    """The first of these."""
    return RejectedRoots(step, reason, tuple(rows[:MAX_NAMED_ROOTS].tolist()))


class Found(Struct, frozen=True):
    """The roots that can take the request, ascending by row (do not write to it), and why the others were rejected.

    The funnel is empty unless requested (`explain=True`), and so are those that it counts.
    """

    roots: Rows
    funnel: tuple[FunnelStep, ...] = ()
    rejected_roots: tuple[RejectedRoots, ...] = ()
