"""What others do in the simulated world, each kind drawn by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from placement_worker import service as book
from placement_worker.domain import allocations
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.replica.catch_up import PAGE
from placement_worker.rest import providers
from placement_worker.rest import write_batcher as groups
from placement_worker.store.memory_reads import MemoryReads
from tests.sim.mutants import Mutant
from tests.sim.plans import builds_of, held, in_order

# --- the actions of others, in plans made for them: each holds. Its defects: `test_mutants_of_cases.py`


NODE = "00000000-0000-4000-8000-000000000001"


def hosts_come_back(*, lost: bool) -> Plan:
    """One service's hosts are set back, with what was destroyed since; or, with its records, what was lost since."""
    plan = plan_of(1).without_faults()
    service, hosts = plan.cells[0].services[0]
    builds = builds_of(plan, before_s=35.0)
    copied = Order(at=40.0, action=Action.COPY, service=service, uuid="copy")
    back = replace(copied, at=75.0, action=Action.BRING_BACK, size=int(lost), seconds=1.0)
    if lost:
        between = [Order(at=40.1, action=Action.LOSE, service=service, host=host) for host in range(hosts)]
    else:
        between = [replace(order, at=45.0, action=Action.DELETE) for order in builds]
    return replace(plan, orders=(*builds, copied, *between, back), load_s=80.0)


def nodes_come_again() -> Plan:
    """Nodes are deleted and created again, on a network that lets messages overtake each other."""
    plan = plan_of(6, [Widening.NODES_AGAIN])
    again = [order for order in plan.orders if order.verb == "again"] * 24
    orders = tuple(replace(order, at=5.0 + 3 * number) for number, order in enumerate(again))
    calm = replace(plan, orders=orders, fault_events=(), cells=plan.cells[:1], schedulers=1, placements=1, skew_s=0.0)
    return replace(calm, rates=Rates(delay=0.5, delay_s=0.05), load_s=5.0 + 3 * len(orders))


def machines_are_lost_at_once() -> Plan:
    """A service loses all that its hosts run, and its conductors end one at most without an operator's word."""
    plan = plan_of(1).without_faults()
    builds = builds_of(plan, before_s=35.0)
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
    held(plan)


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


# --- a client and an operator of the REST API: each run holds, and finds the defects that it is there for


CLIENTS_ACTS = (
    *("reserve", "reserve-host", "change", "swap", "release", "host-aggregates"),
    *("inventories", "traits", "aggregates", "reserve", "release"),
)
OPERATORS_ACTS = (
    *("tree", "name", "equip", "race", "hold", "hold", "reshape", "reshape", "lists"),
    *("name", "equip", "rename-class", "rename-provider", "unname", "race", "reshape", "race", "fell"),
)


def acts(verbs: Sequence[str], at: float, series: str) -> list[Order]:
    """One a second."""
    act = Order(at=at, action=Action.REST)
    return [
        replace(act, at=at + n, verb=verb, host=n, uuid=f"00000000-0000-4000-{series}-{n:012}")
        for n, verb in enumerate(verbs)
    ]


def client() -> Plan:
    """Every act of the client, one after the other, beside builds on a good day."""
    plan = plan_of(1).without_faults()
    made = [Order(at=4.0 + number, action=Action.REST, verb="provider", host=number) for number in range(2)]
    return in_order(plan, *builds_of(plan, before_s=20.0), *made, *acts(CLIENTS_ACTS, 10.0, "8000"), load_s=25.0)


def operator() -> Plan:
    """Every act of the operator."""
    plan = plan_of(5).without_faults()
    orders = (*builds_of(plan, before_s=20.0), *acts(OPERATORS_ACTS, 4.0, "9000"))
    return in_order(plan, *orders, load_s=25.0, page=PAGE)


def set_back() -> Plan:
    """Placement is set back to before a reservation, which its client deletes afterwards."""
    plan, consumer = client(), "00000000-0000-4000-8000-00000000000a"
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
        return whole(ledger, [write for write in writes if write.allocations])

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


def reshape_leaves_the_holders() -> AbstractContextManager[Any]:
    """Inventory passes to another provider, and allocations stay."""
    whole = book.reshape

    def without(*arguments: Any, **named: Any) -> Any:
        outcome = whole(*arguments, **named)
        return outcome if isinstance(outcome, WriteRefusal) else replace(outcome, decision=book.NOTHING_DECIDED)

    return patch.object(book, "reshape", without)


def wrote(plan: Plan) -> list[tuple[str, str, str]]:
    """(method, resource, status) of each write of a run that holds."""
    result = held(plan, event_log=EventLog(keep=True))
    assert result.states["active"] > 0
    answers = [line.split("rest-answer ")[1].split() for line in result.lines if "rest-answer " in line]
    return [(method, path.split("/")[1], status) for method, path, status in answers if method != "GET"]


def test_every_act_of_the_client_is_carried_out() -> None:
    seen = {(method, status) for method, _, status in wrote(client())}
    assert {("PUT", "200"), ("PUT", "204"), ("POST", "204"), ("DELETE", "204")} <= seen


def test_every_act_of_the_operator_is_carried_out() -> None:
    seen = set(wrote(operator()))
    assert {("POST", "reshaper", "204"), ("PUT", "resource_classes", "200"), ("DELETE", "traits", "204")} <= seen
    assert {("PUT", "allocations", "204"), ("DELETE", "resource_classes", "204")} <= seen


def test_a_reservation_that_a_restore_took_is_not_missed_after_its_delete() -> None:
    result = held(set_back(), event_log=EventLog(keep=True))
    assert any("DELETE /allocations" in line and line.endswith("404") for line in result.lines)


@pytest.mark.parametrize(
    ("plan", "mutant", "breach"),
    [
        (client, swap_leaves_its_source, "rest_reads_writes"),
        (client, release_answered_unwritten, "rest_reads_writes"),
        (client, aggregates_never_written, "rest_reads_writes"),
        (client, read_fails, "rest_answers"),
        (operator, reshape_leaves_the_holders, "rest_reads_writes"),
    ],
)
def test_it_finds_a_defect(plan: Callable[[], Plan], mutant: Mutant, breach: str) -> None:
    with mutant():
        assert run(plan()).breach == breach
