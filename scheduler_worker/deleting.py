"""Delete requests: what a delete does depends on where its build stands (C-5).

One whose build nobody knows is put on record itself. Its client is told that there is no such instance, so a build that
comes after all must not be built: it waited in another scheduler's hands, or its record was lost with the database.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.outbox import Addressed
from bus.outcome import Done, Outcome, Received, Refuse, Retry
from scheduler_worker import metrics
from scheduler_worker.decisions import Author, to_clients
from scheduler_worker.domain.builds import DELETED, BuildUpdate, NewBuild, RecordedBuild
from scheduler_worker.store.port import BuildUnit, SchedulerStore

# A delete may overtake its build on the way to another scheduler: so often it is looked for again.
DELETE_RETRIES = 2
UNKNOWN = "instance.unknown"
UNKNOWN_REASON = "there is no such instance in this project"
NEVER_ASKED_FLAVOR = "unknown"


async def delete_all(
    store: SchedulerStore, deletes: Sequence[Received], author: Author
) -> tuple[dict[int, Outcome], set[str]]:
    """Handle deletes in one transaction. Returns an outcome per `id(received)`, and the instances that are to go."""
    outcomes: dict[int, Outcome] = {}
    changes: dict[str, BuildUpdate] = {}
    async with store.unit() as unit:
        kept = await unit.lock([_request(received).instance_uuid for received in deletes])
        going: set[str] = set()
        unknown: list[Received] = []
        for received in deletes:
            request = _request(received)
            found = kept.get(request.instance_uuid)
            if found is None or found.code == UNKNOWN:
                unknown.append(received)
            elif found.project_id != request.project_id:
                # Not this project's to know about, and no event: the stream of that instance is its owner's.
                outcomes[id(received)] = Refuse(UNKNOWN, UNKNOWN_REASON)
            else:
                outcomes[id(received)] = Done(reply=BuildAccepted(instance_uuid=request.instance_uuid))
                going.add(request.instance_uuid)
                metrics.REQUESTS.labels("delete", "accepted").inc()
                if request.instance_uuid not in changes and (change := _delete(unit, found, author)) is not None:
                    changes[request.instance_uuid] = change
        await unit.update(list(changes.values()), author.at)
        outcomes.update(await _unknown(unit, unknown, kept.keys(), author))
    return outcomes, going


def _delete(unit: BuildUnit, standing: RecordedBuild, author: Author) -> BuildUpdate | None:
    """What a delete does to one build; None: it was asked before."""
    if standing.state in (BuildState.DELETING, BuildState.DELETED):
        return None
    if standing.state is BuildState.ACCEPTED:
        # Whoever decides it sees this before dispatching, frees the claim and says `deleted`.
        if standing.delete_requested:
            return None
        return BuildUpdate(build=replace(standing, delete_requested=True), story=(author.line("delete_requested"),))
    if standing.cell is None:
        return never_built(unit, standing, author, "it was never built")
    command = CellDelete(instance_uuid=standing.instance_uuid, project_id=standing.project_id)
    unit.emit(Addressed(standing.cell, command, standing.instance_uuid))
    line = author.line("delete_requested", f"passed to cell {standing.cell}")
    return BuildUpdate(build=replace(standing, state=BuildState.DELETING, delete_requested=True), story=(line,))


def never_built(unit: BuildUnit, standing: RecordedBuild, author: Author, detail: str) -> BuildUpdate:
    """The end of a build that no cell knows of: one terminal event, for the build and its delete."""
    event = BuildEvent(
        instance_uuid=standing.instance_uuid,
        project_id=standing.project_id,
        state=BuildState.DELETED,
        sequence=DELETED,
        terminal=True,
        at=author.at,
    )
    unit.emit(to_clients(event))
    deleted = replace(standing, state=BuildState.DELETED, sequence=DELETED, terminal=True, delete_requested=True)
    return BuildUpdate(build=deleted, story=(author.line("deleted", detail),))


async def _unknown(
    unit: BuildUnit, deletes: Sequence[Received], noted: Collection[str], author: Author
) -> dict[int, Outcome]:
    """Deletes of what is not on record: look again, and in the end say so, for good."""
    outcomes: dict[int, Outcome] = {id(one): Retry(UNKNOWN, "not on record (yet)") for one in deletes}
    late = {id(one): _request(one) for one in deletes if one.meta.attempt >= DELETE_RETRIES}
    fresh = {one.instance_uuid: one for one in late.values() if one.instance_uuid not in noted}
    noted = await unit.insert([_never_to_be(one, author) for one in fresh.values()], author.at) | set(noted)
    for key, request in late.items():
        if request.instance_uuid not in noted:
            continue  # its build has come in this moment
        metrics.REQUESTS.labels("delete", "unknown").inc()
        unit.emit(to_clients(_no_such_instance(request, author)))
        outcomes[key] = Done(reply=Refusal(code=UNKNOWN, reason=UNKNOWN_REASON))
    return outcomes


def _never_to_be(request: DeleteRequest, author: Author) -> NewBuild:
    """The record of a build that was deleted before anybody had heard of it."""
    return NewBuild(
        request=BuildRequest(
            instance_uuid=request.instance_uuid, project_id=request.project_id, flavor=NEVER_ASKED_FLAVOR
        ),
        digest=b"",
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.DELETED,
            sequence=DELETED,
            terminal=True,
            code=UNKNOWN,
            reason=UNKNOWN_REASON,
        ),
        story=(author.line("refused", "a delete came, and no build"),),
    )


def _no_such_instance(request: DeleteRequest, author: Author) -> BuildEvent:
    return BuildEvent(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        state=BuildState.REFUSED,
        sequence=DELETED,
        terminal=True,
        code=UNKNOWN,
        reason=UNKNOWN_REASON,
        at=author.at,
    )


def _request(received: Received) -> DeleteRequest:
    assert isinstance(received.message, DeleteRequest)
    return received.message
