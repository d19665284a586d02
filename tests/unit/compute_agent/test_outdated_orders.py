"""A compute service refuses what was decided by a lower incarnation of the cell's database than it knows of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.actions import ChangeMachine
from bus.contracts.base import ORDER_OUTDATED, DatabaseMark, Message, Meta
from bus.contracts.cell import (
    Destroy,
    HostsReleased,
    LookUpMachines,
    MachineLookupResult,
    QueueBarrier,
    ReportHosts,
    RescanHosts,
    ReserveMachines,
    RingMembers,
    ServiceSuperseded,
    Spawn,
)
from bus.contracts.listing import ListMachines, MachinesPage
from bus.contracts.placement import InventoryStale
from compute_agent.handlers import FROM_CONDUCTORS, ComputeHandlers
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import Records

UUID = "10000000-0000-4000-8000-000000000001"
DESTROY = Destroy(service="s", instance_uuid=UUID, attempt=1, host_uuid=UUID, database_id=UUID)
FIND = LookUpMachines(service="s", database_id=UUID, instance_uuids=(UUID,), on_hosts=(UUID,))
LIST = ListMachines(service="s", database_id=UUID)
MARKER = QueueBarrier(service="s", epoch=1)


class Service:
    """The handlers of a service and its records; what they carry out is noted."""

    def __init__(self, path: Path | None = None) -> None:
        self.records = Records(path, synced=False)
        self.records.open()
        self.done: list[object] = []
        note: Any = self.done.append

        async def nothing() -> None:
            return None

        async def asynchronously(message: object) -> Any:
            self.done.append(message)
            return MachineLookupResult() if isinstance(message, LookUpMachines) else MachinesPage()

        self.handlers = ComputeHandlers(
            self,  # type: ignore[arg-type]
            service="s",
            wait_for_capacity=nothing,
            on_report_requested=lambda: note("reports"),
            on_heartbeat=note,
            superseded=lambda **numbers: note(numbers),
            on_barrier=lambda marker, _owed: note(marker),
            pending_destroys=lambda: [],
            reserve=asynchronously,
            on_rescan=note,
            look_up=asynchronously,
            list_machines=asynchronously,
            sync=nothing,
            may_predate_restore=self.records.may_predate_restore,
            ring=self,  # type: ignore[arg-type]
            host_conflicts=self,  # type: ignore[arg-type]
        )

    def handle(self, commands: Sequence[object]) -> None:
        self.done += commands

    def apply(self, members: object) -> None:
        self.done.append(members)

    def on_released(self, message: object) -> None:
        self.done.append(message)

    async def receive(self, message: Message, incarnation: int) -> Outcome:
        """By the queue that takes it."""
        handlers = self.handlers
        commands = (Spawn, Destroy, ChangeMachine, LookUpMachines, ListMachines, QueueBarrier)
        handle = handlers.commands if isinstance(message, commands) else handlers.control
        handle = handlers.ring_members if isinstance(message, RingMembers) else handle
        (outcome,) = await handle([Received(message, Meta(id="m", database_incarnation=incarnation), "c", "q")])
        return outcome


OF_CONDUCTORS = (
    DESTROY,
    FIND,
    LIST,
    RescanHosts(service="s", hosts=(), rescans=()),
    ReserveMachines(service="s", epoch=1, sequence=1),
    HostsReleased(service="s", owner="t"),
    ServiceSuperseded(service="s", epoch=1),
    RingMembers(ring="r", term=1, number=1),
)


@pytest.mark.parametrize("message", OF_CONDUCTORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("known", "stated", "is_taken"),
    [(0, 0, True), (0, 1, True), (2, 2, True), (2, 3, True), (2, 1, False), (2, 0, False)],
)
async def test_an_order_is_taken_unless_it_is_by_a_lower_incarnation(
    message: Message, known: int, stated: int, *, is_taken: bool
) -> None:
    service = Service()
    if known:
        await service.receive(FIND, known)
        service.done.clear()
    outcome = await service.receive(message, stated)
    assert isinstance(outcome, Done) is is_taken
    assert isinstance(outcome, Done) or (isinstance(outcome, Refuse) and outcome.code == ORDER_OUTDATED)
    assert bool(service.done) is is_taken
    assert service.records.mark.database_incarnation == max(known, stated)


@pytest.mark.parametrize(
    "message", [MARKER, ReportHosts(), InventoryStale(reporter="compute-s", root_uuid=UUID, version=1)]
)
async def test_what_others_send_is_taken_whatever_it_states(message: Message) -> None:
    service = Service()
    await service.receive(FIND, 7)
    service.done.clear()
    assert isinstance(await service.receive(message, 0), Done)
    assert service.done and service.records.mark.database_incarnation == 7


async def test_of_one_batch_the_lower_ones_behind_a_higher_one_are_refused() -> None:
    service = Service()
    batch = [Received(DESTROY, Meta(id="m", database_incarnation=number), "c", "q") for number in (3, 2, 3, 4, 3)]
    outcomes = await service.handlers.commands(batch)
    assert [isinstance(one, Done) for one in outcomes] == [True, False, True, True, False]


async def test_the_highest_incarnation_survives_a_restart_and_the_rewriting_of_the_journal(tmp_path: Path) -> None:
    path, lines = tmp_path / "s.records", []
    service = Service(path)
    for number in (2, 5, 5, 4):
        await service.receive(DESTROY, number)
        lines.append(len(path.read_bytes().splitlines()))
    assert lines == [1, 2, 2, 2], "it is written when it rises, and not with each order"
    service.records.close()
    for _ in range(2):
        again = Service(path)
        assert isinstance(await again.receive(DESTROY, 4), Refuse)
        assert isinstance(await again.receive(DESTROY, 5), Done)
        assert again.records._journal is not None
        again.records._journal.rewrite(again.records._snapshot())
        again.records.close()


async def test_the_highest_mark_is_kept_with_what_an_order_writes_and_costs_no_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.records"
    service = Service(path)

    async def order(message: Message, tag: DatabaseMark) -> int:
        meta = Meta(id="m", database_incarnation=tag.database_incarnation, sent_sequences=tag.sent_sequences)
        await service.handlers.commands([Received(message, meta, "c", "q")])
        return len(path.read_bytes().splitlines())

    assert await order(FIND, DatabaseMark(2, (5,))) == 1, "the incarnation has risen"
    assert await order(FIND, DatabaseMark(2, (0, 7))) == 1
    assert service.records.mark == DatabaseMark(2, (5, 7))
    service.records.put((UUID, UUID), HostAttempt(1, AttemptPhase.RUNNING))
    assert len(path.read_bytes().splitlines()) == 3
    assert await order(FIND, DatabaseMark(2, (4, 6))) == 3 and service.records.mark == DatabaseMark(2, (5, 7))
    service.records.put((UUID, UUID), HostAttempt(2, AttemptPhase.RUNNING))
    assert len(path.read_bytes().splitlines()) == 4, "it was written before"
    service.records.close()
    assert Service(path).records.mark == DatabaseMark(2, (5, 7))


def test_every_command_of_a_conductor_is_an_order() -> None:
    assert {type(one) for one in OF_CONDUCTORS} | {Spawn, ChangeMachine} <= FROM_CONDUCTORS
    assert not FROM_CONDUCTORS & {QueueBarrier, ReportHosts, InventoryStale}
