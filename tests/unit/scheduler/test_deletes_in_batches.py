"""What one delete of a batch waits for keeps no other delete from being carried out."""

from __future__ import annotations

from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Wait
from bus.contracts.build import BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from scheduler_worker.claims import HeldClaims
from scheduler_worker.deletes import Deletes
from scheduler_worker.domain.builds import NewBuild
from scheduler_worker.domain.deletes import PendingDelete
from scheduler_worker.domain.requests import OVERTAKES, RequestDelivery
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.claims import BookClaims
from tests.kit.sent import Sent
from tests.unit.scheduler.test_deletes import UUID, recorded

UNKNOWN = "00000000-0000-4000-8000-000000000002"


async def test_a_delete_of_a_built_instance_goes_to_its_cell_while_placement_does_not_answer_for_another() -> None:
    store, sent, port = MemoryBuilds(MemoryBuildTable(SystemClock()).session()), Sent(), BookClaims()
    store.publish_through(sent)  # type: ignore[arg-type]
    build = replace(recorded(BuildState.ACTIVE, "c1"), sequence=12)
    request = BuildRequest(instance_uuid=UUID, project_id="p", flavor="f")
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, digest=b"1", build=build)], 1.0)
        await unit.lock([UUID])

    async def runs_on_record(_: object) -> dict[str, str]:
        return {}

    port.unavailable = True
    held = HeldClaims(port, lambda _: None, runs_on_record)
    deletes = [
        PendingDelete(
            position=at,
            request=DeleteRequest(instance_uuid=uuid, project_id="p"),
            delivery=RequestDelivery(attempt=OVERTAKES),
        )
        for at, uuid in enumerate((UUID, UNKNOWN))
    ]
    carry_out = Deletes(store, held, clock=SystemClock(), process="s1")
    for _ in range(2):
        outcomes, _ = await carry_out.delete(deletes)
        assert isinstance(outcomes[0], Done) and isinstance(outcomes[1], Wait)
    assert [type(one.message) for _, batch in sent.rows for one in batch] == [CellDelete]
    async with store.unit() as unit:
        assert (await unit.lock([UUID]))[UUID].state is BuildState.DELETING
