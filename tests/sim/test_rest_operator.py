"""An operator of the REST API in the simulation: its run holds, and finds the defects that it is there for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.plan import Action, Order, Plan
from lab.simulation.run import run
from placement_worker import book
from placement_worker.domain.refusal import WriteRefusal

ACTS = (
    *("tree", "name", "equip", "race", "hold", "hold", "reshape", "reshape", "lists"),
    *("name", "equip", "rename-class", "rename-provider", "unname", "race", "reshape", "race", "fell"),
)


def calm() -> Plan:
    """Every act of the operator, one after the other, beside builds on a good day."""
    plan = plan_of(1).without_faults()
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 20.0]
    acts = [
        Order(at=4.0 + number, action=Action.REST, verb=verb, host=number, uuid=f"00000000-0000-4000-9000-{number:012}")
        for number, verb in enumerate(ACTS)
    ]
    return replace(plan, orders=tuple(sorted((*builds, *acts), key=lambda one: one.at)), load_s=25.0)


def reshape_leaves_the_holders() -> AbstractContextManager[Any]:
    """Inventory passes to another provider, and allocations stay."""
    whole = book.reshape

    def without(*arguments: Any, **named: Any) -> Any:
        outcome = whole(*arguments, **named)
        return outcome if isinstance(outcome, WriteRefusal) else replace(outcome, decision=book.NOTHING_DECIDED)

    return patch.object(book, "reshape", without)


def test_every_act_is_carried_out_and_every_invariant_holds() -> None:
    result = run(calm(), event_log=EventLog(keep=True))
    assert result.breach == "", result.detail
    answers = [line.split("rest-answer ")[1].split() for line in result.lines if "rest-answer " in line]
    wrote = {(method, path.split("/")[1], status) for method, path, status in answers if method != "GET"}
    assert {("POST", "reshaper", "204"), ("PUT", "resource_classes", "200"), ("DELETE", "traits", "204")} <= wrote
    assert {("PUT", "allocations", "204"), ("DELETE", "resource_classes", "204")} <= wrote
    assert result.states["active"] > 0


def test_it_finds_allocations_that_a_reshape_leaves_behind() -> None:
    with reshape_leaves_the_holders():
        assert run(calm()).breach == "rest_reads_writes"
