"""A host that is forgotten: what shows that it may not be gone, and what leaves the record with it. Pure."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.drains import DrainState
from bus.contracts.objects import Aggregate, ChangedObject, HostDecision, ObjectKind
from bus.contracts.operations import AdminState
from scheduler_worker.domain.drains import drain_of
from scheduler_worker.domain.fences import fence_of
from scheduler_worker.domain.objects import Objects

FENCE_OPEN = "host.fence_open"
DRAINING = "host.draining"


def kept_by_record(present: Objects, uuid: str, cells: Collection[str]) -> Refusal | None:
    """Why the objects on record keep a host: a fence that its cell may still act on, or a drain that has not ended.

    cells: those that workers connect to. A fence that was ended by force counts until its cell has acknowledged that it
    is to be lifted; before that, the cell would put the fence on record again. A cell that is gone
    acknowledges nothing.
    """
    stored = present.get((ObjectKind.FENCE, uuid))
    fence = None if stored is None else fence_of(stored)
    if fence is not None and not fence.forced:
        reason = "it is fenced: enable it first, by force and with a reason if it can destroy its losses no more"
        return Refusal(code=FENCE_OPEN, reason=reason)
    if fence is not None and fence.acknowledged < fence.version and (fence.cell is None or fence.cell in cells):
        return Refusal(code=FENCE_OPEN, reason="its cell has not acknowledged yet that the fence is to be lifted")
    decided = present.get((ObjectKind.HOST, uuid))
    drain = None if decided is None else msgspec.convert(decided.body, HostDecision).drain
    of_drain = None if drain is None else present.get((ObjectKind.DRAIN, drain))
    if of_drain is not None and drain_of(of_drain).state is not DrainState.ENDED:
        return Refusal(code=DRAINING, reason=f"drain {drain} has not ended: stop it first")
    return None


def traces(present: Objects, uuid: str, names: Collection[str]) -> tuple[ChangedObject, ...]:
    """The changes that remove a host from the record: its decision, its fence, and its places in aggregates.

    names: by which aggregates may name it, its uuid among them.
    """
    found = [
        ChangedObject(kind=kind, name=uuid, before=stored.body)
        for kind in (ObjectKind.HOST, ObjectKind.FENCE)
        if (stored := present.get((kind, uuid))) is not None
    ]
    for (kind, name), stored in sorted(present.items()):
        if kind is not ObjectKind.AGGREGATE:
            continue
        aggregate = msgspec.convert(stored.body, Aggregate)
        if any(host in names for host in aggregate.hosts or ()):
            left = replace(aggregate, hosts=tuple(host for host in aggregate.hosts or () if host not in names))
            after = msgspec.to_builtins(left)
            found.append(ChangedObject(kind=kind, name=name, before=stored.body, after=after))
    return tuple(found)


def with_entry(changed: tuple[ChangedObject, ...], uuid: str, host: str) -> tuple[ChangedObject, ...]:
    """The changes with one of the host itself, so that the log of changes names it. A host without a decision is
    enabled.
    """
    if any(one.kind is ObjectKind.HOST for one in changed):
        return changed
    before = msgspec.to_builtins(HostDecision(host=host, state=AdminState.ENABLED))
    return (ChangedObject(kind=ObjectKind.HOST, name=uuid, before=before), *changed)
