"""A record of an instance that cannot be read, or searched for."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from bus.clock import SystemClock
from cell_conductor.config import ConductorConfig
from cell_conductor.machine_search import SourceLookup
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.reports.listings import HostListings
from cell_conductor.state.instance import Instance, State
from cell_conductor.store import tables
from cell_conductor.store.port import DatabaseIdentity
from cell_conductor.store.postgres import PostgresTransaction
from lab.simulation.watch import failed_steps
from tests.unit.cell_conductor.records import record
from tests.unit.cell_conductor.scenario import UUID
from tests.unit.cell_conductor.world import opened

LONE = "00000000-0000-4000-8000-0000000000aa"


class Connection:
    """Rows whose deadlines have passed, and the statements that change some."""

    def __init__(self, *rows: tuple[str, str, str]) -> None:
        self.rows = rows
        self.changed: list[list[str]] = []

    async def fetch(self, *_: object) -> list[tuple[str, str, str]]:
        """All of them."""
        return list(self.rows)

    async def execute(self, _statement: str, uuids: list[str], _deadline: float) -> None:
        """Keep which."""
        self.changed.append(uuids)


def row(instance: Instance, text: str | None = None) -> tuple[str, str, str]:
    """With this for its record."""
    return instance.uuid, instance.state, tables.encode(instance) if text is None else text


async def due(*rows: tuple[str, str, str]) -> tuple[list[Instance], Connection]:
    """What is due of these rows."""
    connection: Any = Connection(*rows)
    nothing: Any = None
    transaction = PostgresTransaction(connection, nothing, DatabaseIdentity())
    return await transaction.lock_due(300.0, 10), connection


async def test_it_does_not_stop_the_deadlines_of_others_and_is_put_off() -> None:
    """All deadlines of the cell stopped, and its conductors ended at each start."""
    good, poisoned, before = record(State.BUILDING, uuid=LONE), record(State.BUILDING), failed_steps()
    for text in ('{"uuid": "x", "state": "of another version"}', "[]", '{"state": "building"}'):
        with capture_logs() as logged:
            found, connection = await due(row(poisoned, text), row(good))
        assert found == [good] and connection.changed == [[UUID]]
        assert [(one["event"], one["instance"], one["state"]) for one in logged] == [
            ("instance.unreadable", UUID, State.BUILDING)
        ]
    assert failed_steps() == before + 3
    found, connection = await due(row(good))
    assert found == [good] and not connection.changed, "nothing is written where all can be read"


async def test_a_machine_that_cannot_be_given_to_its_instance_ends_no_search() -> None:
    conductor = await opened()

    async def crashes(*_: Any) -> Any:
        raise ValueError

    conductor.engine._apply = crashes  # type: ignore[method-assign]
    pending = PendingLookups()
    pending.add_adoption(UUID)
    lookup = SourceLookup(
        conductor.engine, conductor.store, conductor.bus, clock=SystemClock(), config=ConductorConfig(),
        listings=HostListings(), pending=pending,
    )  # fmt: skip
    with capture_logs() as logged:
        await lookup.look_up()
    assert [(one["event"], one["instance"], one["code"]) for one in logged if one["log_level"] == "error"] == [
        ("instance.lookup_failed", UUID, "ValueError")
    ]
