"""The rules of gangs as the simulation judges them: a part of a gang, and members that were deleted."""

from __future__ import annotations

import pytest

from bus.clock import SystemClock
from bus.contracts.build import BuildRecord, BuildState
from lab.simulation.gang_watch import GangWatch
from placement_worker.domain.values import ConsumerState
from placement_worker.store.memory_table import ConsumerRow, MemoryBookTable

HOST = "00000000-0000-4000-8000-000000000000"
MEMBERS = [f"00000000-0000-4000-9000-00000000000{n}" for n in range(5)]
STARTED = BuildRecord(
    instance_uuid=MEMBERS[1], project_id="red", flavor="m1.tiny", state=BuildState.ACTIVE, cell="cell0"
)


@pytest.mark.parametrize(("deletes", "breaks"), [((), True), (MEMBERS[:1], False), (MEMBERS[3:4], True)])
def test_a_member_that_was_deleted_after_its_claim_was_started(deletes: list[str], *, breaks: bool) -> None:
    """Two of five were claimed, and the client deleted one of them before it was sent to a cell (seed 1795404029)."""
    book = MemoryBookTable(SystemClock())
    watch = GangWatch(book, ())
    watch.requested(MEMBERS, 2)
    for uuid in MEMBERS[:2]:
        consumer = ConsumerState(1, 1, "red", "u", "INSTANCE", {HOST: {"VCPU": 1}})
        book.consumers[uuid] = ConsumerRow(consumer, None, 0.0, 0.0)
    watch()
    for uuid in deletes:
        watch.deleted(uuid)
    assert any(watch.unsettled({MEMBERS[1]: STARTED})) is breaks
