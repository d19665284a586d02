"""What others do in the simulated world, each kind drawn by itself."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from bus.contracts.placement import ProviderReport
from ironic_sync.domain.position import Position
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.ironic_sync_watch import IronicSyncWatch
from lab.simulation.plan import Action, Order, Plan, Rates
from lab.simulation.run import run
from lab.simulation.watch import Breach
from lab.simulation.widening import Widening
from placement_worker import book
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.replica.catch_up import PAGE

# --- the actions of others, in plans made for them: each holds. Its defects: `test_mutants_of_other_tenants.py`


NODE = "00000000-0000-4000-8000-000000000001"


def hosts_come_back(*, lost: bool) -> Plan:
    """One service's hosts are set back, with what was destroyed since; or, with its records, what was lost since."""
    plan = plan_of(1).without_faults()
    service, hosts = plan.cells[0].services[0]
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 35.0]
    copied = Order(at=40.0, action=Action.COPY, service=service, uuid="copy")
    back = replace(copied, at=75.0, action=Action.BRING_BACK, size=int(lost), seconds=1.0)
    if lost:
        between = [Order(at=40.1, action=Action.LOSE, service=service, host=host) for host in range(hosts)]
    else:
        between = [replace(order, at=45.0, action=Action.DELETE) for order in builds]
    return replace(plan, orders=(*builds, copied, *between, back), load_s=80.0)


def nodes_come_again() -> Plan:
    """Nodes are deleted and created again, on a network that lets messages overtake each other."""
    plan = plan_of(5, [Widening.NODES_AGAIN])
    again = [order for order in plan.orders if order.verb == "again"] * 4
    orders = tuple(replace(order, at=5.0 + 3 * number) for number, order in enumerate(again))
    calm = replace(plan, orders=orders, fault_events=(), cells=plan.cells[:1], schedulers=1, placements=1, skew_s=0.0)
    return replace(calm, rates=Rates(delay=0.5, delay_s=0.05), load_s=5.0 + 3 * len(orders))


def machines_are_lost_at_once() -> Plan:
    """A service loses all that its hosts run, and its conductors end one at most without an operator's word."""
    plan = plan_of(1).without_faults()
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < 35.0]
    losses = [
        Order(at=40.0, action=Action.LOSE, service=service, host=host)
        for cell in plan.cells
        for service, hosts in cell.services
        for host in range(hosts)
    ]
    return replace(plan, orders=(*builds, *losses), breaker_limit=1, load_s=45.0)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(hosts_come_back(lost=True), id="failed"),
        pytest.param(hosts_come_back(lost=False), id="undead"),
        pytest.param(machines_are_lost_at_once(), id="breaker"),
        pytest.param(nodes_come_again(), id="overtaken 404"),
    ],
)
def test_it_holds(plan: Plan) -> None:
    held = run(plan)
    assert held.breach == "", held.detail


@pytest.mark.parametrize(("listed_at", "breaks"), [(99.0, False), (101.0, True)])
def test_a_page_made_before_a_404_does_not_contradict_it(listed_at: float, *, breaks: bool) -> None:
    """Seed 1795400181: the page of a list arrived later than the 404, while the removal was saved a second time."""
    found: list[Breach] = []
    watch = IronicSyncWatch(lambda: 102.0, found.append)
    before = Position(uuid=NODE, version=1, report=ProviderReport(uuid=NODE, name=NODE, inventories={}))
    removed = Position(uuid=NODE, version=2)
    watch.missing(100.0, NODE)
    watch.saving([removed], {NODE: before})
    node = {"uuid": NODE, "provision_state": "manageable"}
    watch.answered(listed_at, json.dumps({"nodes": [node]}).encode())
    watch.saving([removed], {NODE: before})
    assert [one.name for one in found] == ["removed_on_fresh_word"] * breaks


# --- an operator of the REST API in the simulation: its run holds, and finds the defects that it is there for


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
    return replace(plan, orders=tuple(sorted((*builds, *acts), key=lambda one: one.at)), load_s=25.0, page=PAGE)


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
