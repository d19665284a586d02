"""Another client of the REST API in the simulation: its run holds, and finds the defects that it is there for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.plan import Action, Order, Plan
from lab.simulation.run import run
from lab.simulation.widening import Widening
from placement_worker.domain import allocations
from placement_worker.rest import groups, providers
from placement_worker.store.memory_reads import MemoryReads
from tests.sim.mutants import Mutant

ACTS = (
    *("reserve", "reserve-host", "change", "swap", "release", "host-aggregates"),
    *("inventories", "traits", "aggregates", "reserve", "release"),
)


def calm() -> Plan:
    """Every act of the client, one after the other, beside builds on a good day."""
    plan = plan_of(1).without_faults()
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 20.0]
    acts = [
        Order(
            at=10.0 + number, action=Action.REST, verb=verb, host=number, uuid=f"00000000-0000-4000-8000-{number:012}"
        )
        for number, verb in enumerate(ACTS)
    ]
    made = [Order(at=4.0 + number, action=Action.REST, verb="provider", host=number) for number in range(2)]
    return replace(plan, orders=tuple(sorted((*builds, *made, *acts), key=lambda one: one.at)), load_s=25.0)


def set_back() -> Plan:
    """The book is set back to before a reservation, which its client deletes afterwards."""
    plan, consumer = calm(), "00000000-0000-4000-8000-00000000000a"
    backup = "e0000000-0000-4000-8000-000000000001"
    acts = (
        Order(at=11.0, action=Action.BACKUP, service="placement", uuid=backup),
        Order(at=12.0, action=Action.REST, verb="reserve", host=1, uuid=consumer),
        Order(at=14.0, action=Action.RESTORE, service="placement", uuid=backup, seconds=1.0),
        Order(at=18.0, action=Action.REST, verb="release", host=2, uuid=consumer),
    )
    made = [order for order in plan.orders if order.verb == "provider"]
    return replace(plan, orders=(*made, *acts), widenings=(Widening.BOOK_RESTORED,))


def swap_leaves_its_source() -> AbstractContextManager[Any]:
    """An amount that one consumer gives another in a swap is held by that one."""
    whole = allocations.replace

    def replaced(ledger: Any, writes: Any) -> Any:
        return whole(ledger, [write for write in writes if write.holding])

    return patch.object(allocations, "replace", replaced)


def release_answered_unwritten() -> AbstractContextManager[Any]:
    """DELETE /allocations is answered, and nothing is written."""
    submit = groups.Groups.submit

    async def unwritten(self: Any, item: Any) -> Any:
        return None if isinstance(item, allocations.Remove) else await submit(self, item)

    return patch.object(groups.Groups, "submit", unwritten)


def aggregates_never_written() -> AbstractContextManager[Any]:
    """PUT of aggregates moves the generation alone."""
    kind = providers.SetAggregates

    def without(uuid: str, aggregates: Any, generation: Any) -> Any:
        return kind(uuid, (), generation)

    return patch.object(providers, "SetAggregates", without)


def read_fails() -> AbstractContextManager[Any]:
    """A handler raises what no check foresaw."""

    async def failing(_self: Any, _uuid: str) -> Any:
        raise KeyError(_uuid)

    return patch.object(MemoryReads, "allocations_of_consumer", failing)


def test_every_act_is_carried_out_and_every_invariant_holds() -> None:
    event_log = EventLog(keep=True)
    result = run(calm(), event_log=event_log)
    assert result.breach == "", result.detail
    answers = [line.split("rest-answer ")[1].split() for line in result.lines if "rest-answer " in line]
    wrote = [(method, status) for method, _, status in answers if method != "GET"]
    assert {("PUT", "200"), ("PUT", "204"), ("POST", "204"), ("DELETE", "204")} <= set(wrote)
    assert result.states["active"] > 0


def test_a_reservation_that_a_restore_took_is_not_missed_after_its_delete() -> None:
    event_log = EventLog(keep=True)
    result = run(set_back(), event_log=event_log)
    assert result.breach == "", result.detail
    assert any("DELETE /allocations" in line and line.endswith("404") for line in result.lines)


@pytest.mark.parametrize(
    ("mutant", "breach"),
    [
        (swap_leaves_its_source, "rest_reads_writes"),
        (release_answered_unwritten, "rest_reads_writes"),
        (aggregates_never_written, "rest_reads_writes"),
        (read_fails, "rest_answers"),
    ],
)
def test_it_finds_a_defect(mutant: Mutant, breach: str) -> None:
    with mutant():
        assert run(calm()).breach == breach
