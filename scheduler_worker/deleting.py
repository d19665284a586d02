"""Delete requests: what a delete does depends on where its build stands (C-5)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.outbox import Addressed
from bus.outcome import Done, Outcome, Received, Refuse, Retry
from scheduler_worker import metrics
from scheduler_worker.decisions import Author, to_clients
from scheduler_worker.domain.records import DELETED, Standing
from scheduler_worker.store.port import Change, Kept, SchedulerStore, Unit

# A delete may overtake its build on the way to another scheduler: so often it is looked for again.
DELETE_RETRIES = 2
UNKNOWN = "instance.unknown"
UNKNOWN_REASON = "there is no such instance in this project"


async def delete_all(
    store: SchedulerStore, deletes: Sequence[Received], author: Author
) -> tuple[dict[int, Outcome], set[str]]:
    """Handle deletes in one transaction. Returns an outcome per `id(received)`, and the instances that are to go."""
    outcomes: dict[int, Outcome] = {}
    changes: dict[str, Change] = {}
    async with store.unit() as unit:
        kept = await unit.lock([_request(received).instance_uuid for received in deletes])
        going: set[str] = set()
        for received in deletes:
            request = _request(received)
            found = kept.get(request.instance_uuid)
            if found is None:
                outcomes[id(received)] = _unknown(unit, request, received, author)
            elif found.standing.project_id != request.project_id:
                # Not this project's to know about, and no event: the stream of that instance is its owner's.
                outcomes[id(received)] = Refuse(UNKNOWN, UNKNOWN_REASON)
            else:
                outcomes[id(received)] = Done(reply=BuildAccepted(instance_uuid=request.instance_uuid))
                going.add(request.instance_uuid)
                metrics.REQUESTS.labels("delete", "accepted").inc()
                if request.instance_uuid not in changes and (change := _delete(unit, found, author)) is not None:
                    changes[request.instance_uuid] = change
        await unit.change(list(changes.values()), author.at)
    return outcomes, going


def _delete(unit: Unit, found: Kept, author: Author) -> Change | None:
    """What a delete does to one build; None: it was asked before."""
    standing = found.standing
    if standing.state in (BuildState.DELETING, BuildState.DELETED):
        return None
    if standing.state is BuildState.ACCEPTED:
        # Whoever decides it sees this before dispatching, frees the claim and says `deleted`.
        if found.delete_requested:
            return None
        return Change(standing=standing, delete_requested=True, story=(author.line("delete_requested"),))
    if standing.cell is None:
        return never_built(unit, standing, author, "it was never built")
    command = CellDelete(instance_uuid=standing.instance_uuid, project_id=standing.project_id)
    unit.say(Addressed(standing.cell, command, standing.instance_uuid))
    line = author.line("delete_requested", f"passed to cell {standing.cell}")
    return Change(standing=replace(standing, state=BuildState.DELETING), delete_requested=True, story=(line,))


def never_built(unit: Unit, standing: Standing, author: Author, detail: str) -> Change:
    """The end of a build that no cell knows of: one terminal event, for the build and its delete."""
    event = BuildEvent(
        instance_uuid=standing.instance_uuid,
        project_id=standing.project_id,
        state=BuildState.DELETED,
        sequence=DELETED,
        terminal=True,
        at=author.at,
    )
    unit.say(to_clients(event))
    deleted = replace(standing, state=BuildState.DELETED, sequence=DELETED, terminal=True)
    return Change(standing=deleted, delete_requested=True, story=(author.line("deleted", detail),))


def _unknown(unit: Unit, request: DeleteRequest, received: Received, author: Author) -> Outcome:
    if received.meta.attempt < DELETE_RETRIES:
        return Retry(UNKNOWN, "not on record (yet)")
    metrics.REQUESTS.labels("delete", "unknown").inc()
    event = BuildEvent(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        state=BuildState.REFUSED,
        sequence=DELETED,
        terminal=True,
        code=UNKNOWN,
        reason=UNKNOWN_REASON,
        at=author.at,
    )
    unit.say(to_clients(event))
    return Done(reply=Refusal(code=UNKNOWN, reason=UNKNOWN_REASON))


def _request(received: Received) -> DeleteRequest:
    assert isinstance(received.message, DeleteRequest)
    return received.message
