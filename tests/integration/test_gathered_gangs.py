"""The members of a gang that count as started, as `berth check` reads them from the schedulers' record."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from berth.audit.gather import _gangs
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildRequest, BuildState, DeleteRequest
from bus.persistence.database import Database
from scheduler_worker.domain.builds import (
    FAILED_OR_REFUSED,
    SCHEDULED,
    Author,
    BuildDecision,
    Gang,
    NewBuild,
    RecordedBuild,
)
from scheduler_worker.domain.deletes import PendingDelete, plan_deletes
from scheduler_worker.domain.delivery import RequestDelivery
from scheduler_worker.store.postgres import PostgresBuilds
from tests.kit.sent import Sent

pytestmark = pytest.mark.postgres

SENT, FAILED, KEPT, KEPT_DELETED, DELETED = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcde")
GANG = Gang(uuid=SENT, size=5, min_count=3)
AUTHOR = Author("w", 3.0)


def accepted(uuid: str) -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    return NewBuild(request=request, digest=b"1", build=build, gang=GANG)


def decided(uuid: str) -> BuildDecision:
    build = accepted(uuid).build
    if uuid == SENT:
        scheduled = replace(build, state=BuildState.SCHEDULED, sequence=SCHEDULED, cell="c1", host="h")
        return BuildDecision(build=scheduled, timeline=(AUTHOR.entry("dispatched", "to cell c1"),))
    return BuildDecision(build=replace(build, state=BuildState.FAILED, sequence=FAILED_OR_REFUSED, terminal=True))


async def test_a_member_that_was_only_given_the_cell_of_an_older_allocation_is_not_started(postgres_url: str) -> None:
    """`gangs_whole` reported a gang of which one member had failed, and an older claim of it was found."""
    database = Database(postgres_url, "scheduler")
    store = PostgresBuilds(database)
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    async with store.unit() as unit:
        await unit.insert([accepted(uuid) for uuid in (SENT, FAILED, KEPT, KEPT_DELETED, DELETED)], 1.0)
    async with store.unit() as unit:
        await unit.write_decisions([decided(uuid) for uuid in (SENT, FAILED, KEPT)], 2.0)
        builds = await unit.lock([KEPT, KEPT_DELETED, DELETED])
        held = HeldAllocation(
            consumer=KEPT,
            project_id="p",
            run="another",
            attempt=1,
            consumer_generation=1,
            holding={},
            hosts=(),
            cell="c1",
        )
        kept = {(uuid, "p"): held for uuid in (KEPT, KEPT_DELETED)}
        deletes = [
            PendingDelete(
                position=at, request=DeleteRequest(instance_uuid=uuid, project_id="p"), delivery=RequestDelivery()
            )
            for at, uuid in enumerate((KEPT, KEPT_DELETED, DELETED))
        ]
        await unit.update(plan_deletes(deletes, builds, AUTHOR, kept).updates, 3.0)
    try:
        (gang,) = await _gangs(database, 0.0)
    finally:
        await store.close()
    assert (gang.members, gang.sent, gang.withdrawn) == (5, 1, 3)
