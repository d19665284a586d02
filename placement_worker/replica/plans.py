"""The plans that a book keeps: the same query asked again finds its verdicts nearly right."""

from __future__ import annotations

import msgspec

from placement_worker.replica.book import Book
from placement_worker.replica.plan import Plan
from placement_worker.replica.query import Query

# Plans kept, the least recently used forgotten first. One costs about 12 bytes a row.
PLANS_KEPT = 64


def plan_of(book: Book, query: Query) -> Plan:
    """The query's plan, refreshed."""
    plan = kept_plan(book, query)
    plan.refresh()
    return plan


def kept_plan(book: Book, query: Query) -> Plan:
    """The query's plan as it was last; its tables are right, its verdicts may be old."""
    key = (
        tuple(sorted(query.resources.items())),
        query.required,
        query.forbidden,
        query.member_of,
        query.forbidden_aggregates,
        query.root_required,
        query.root_forbidden,
        query.root_member_of,
        query.root_forbidden_aggregates,
        query.in_tree,
        msgspec.msgpack.encode(query.groups),
        query.group_policy,
        query.same_subtree,
    )
    plan = book.plans.get(key)
    if plan is None:
        plan = book.plans[key] = Plan(book, query)
        while len(book.plans) > PLANS_KEPT:
            book.plans.popitem(last=False)
    else:
        book.plans.move_to_end(key)
    if plan.epoch != book.epoch:
        plan.begin()
    return plan
