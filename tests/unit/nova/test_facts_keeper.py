"""Polls, casts and questions: which of them counts when they cross, and what hostile casts do (nothing)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from bus.clock import SystemClock
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.nova.api_config import NovaApiConfig
from scheduler_worker.nova.cells import ConfiguredCells
from scheduler_worker.nova.facts import NovaAggregate, NovaFacts, NovaService
from scheduler_worker.nova.facts_keeper import ASK_LIMIT_S, MAX_ASKED, MAX_WAITING, FactsKeeper
from scheduler_worker.nova.nova_rest import NovaRefused, NovaUnavailable
from tests.kit.virtual_time import on_virtual_time
from tests.unit.nova.facts_kit import CELL1, MemoryNova, down, node, up, uuid_of


class Kept:
    """A keeper over a Nova in memory."""

    def __init__(self, nova: MemoryNova, **config: Any) -> None:
        self.nova = nova
        self.table = HostTable()
        self.facts = NovaFacts(self.table)
        self.keeper = FactsKeeper(
            nova,
            self.facts,
            self.table,
            cells=ConfiguredCells({CELL1: ("*",)}),
            config=NovaApiConfig(**config),
            clock=SystemClock(),
        )

    async def after(self, seconds: float) -> None:
        """Run for so long, and stop."""
        running = asyncio.create_task(self.keeper.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def calls(self) -> list[str]:
        made, self.nova.calls = self.nova.calls, []
        return made


@on_virtual_time
async def test_states_are_read_often_and_nodes_seldom() -> None:
    kept = Kept(MemoryNova(node(1)), poll_interval_s=5, hosts_interval_s=60)
    await kept.after(602)
    assert [kept.nova.calls.count(name) for name in ("services", "aggregates", "nodes")] == [121, 121, 11]
    assert kept.keeper.first.is_set()


@on_virtual_time
async def test_whether_a_server_waits_for_a_host() -> None:
    kept = Kept(MemoryNova(node(1)))
    a, b, c, d = (uuid_of(number) for number in range(11, 15))
    kept.nova.tasks = {a: "", b: "deleting", c: "unshelving"}
    assert not await kept.keeper.waits_for_host([a, b, d])
    assert await kept.keeper.waits_for_host([d, c])
    kept.nova.calls.clear()
    assert not await kept.keeper.waits_for_host([d] * 1000)
    assert len(kept.nova.calls) == MAX_WAITING
    kept.nova.fails = NovaRefused("a user that may not list them")
    assert await kept.keeper.waits_for_host([d]), "it is not known"
    kept.nova.fails = NovaUnavailable("away")
    with pytest.raises(NovaUnavailable):
        await kept.keeper.waits_for_host([d])


@on_virtual_time
async def test_a_service_without_nodes_has_them_read_at_once_and_once() -> None:
    """A nova-compute for Ironic may have none for ever."""
    kept = Kept(MemoryNova(node(1)), hosts_interval_s=86_400)
    kept.nova.of_hosts["host2"] = up("host2")
    await kept.after(100)
    assert kept.calls().count("nodes") == 1
    kept.nova.of_hosts["host3"] = up("host3")
    kept.nova.listed[uuid_of(3)] = node(3)
    await kept.after(100)
    assert kept.calls().count("nodes") == 1 and kept.facts.cell_of(uuid_of(3)) == CELL1


@on_virtual_time
async def test_an_outage_leaves_what_is_known_and_ends() -> None:
    kept = Kept(MemoryNova(node(1)))
    await kept.after(1)
    kept.nova.fails = NovaUnavailable("it is away")
    await kept.after(100)
    assert kept.table.live_service_of(uuid_of(1)) == "host1"
    assert await kept.keeper.ask([uuid_of(9)]) is False
    kept.nova.fails = None
    kept.nova.of_hosts["host1"] = down("host1")
    await kept.after(1)
    assert kept.table.is_down(uuid_of(1))


@on_virtual_time
async def test_an_unknown_host_is_asked_for_by_its_uuid() -> None:
    kept = Kept(MemoryNova(node(1)))
    await kept.after(0.5)
    kept.calls()
    kept.nova.listed[uuid_of(2)] = node(2)
    kept.nova.of_hosts["host2"] = up("host2")
    assert await kept.keeper.ask([uuid_of(1), uuid_of(2), uuid_of(3)]) is True
    assert kept.calls() == ["node", "node"], "the states were read within this second"
    assert kept.table.live_service_of(uuid_of(2)) == "host2"
    await asyncio.sleep(2)
    assert await kept.keeper.ask([uuid_of(3)]) is False, "a sharing provider; it is no host"
    assert kept.calls() == ["services", "aggregates"]


@on_virtual_time
async def test_questions_at_the_same_time_share_one_read_and_many_hosts_are_listed() -> None:
    kept = Kept(MemoryNova(node(1)))
    kept.nova.of_hosts["host1"] = up("host1")
    answers = await asyncio.gather(*(kept.keeper.ask([uuid_of(1)]) for _ in range(20)))
    assert kept.calls() == ["services", "aggregates", "node"] and all(answers)
    many = [uuid_of(number) for number in range(100, 100 + MAX_ASKED + 1)]
    kept.nova.fails = NovaUnavailable("away")
    await kept.keeper.ask(many)
    assert kept.calls() == ["nodes"]
    kept.nova.fails = None
    await asyncio.gather(*(kept.keeper.ask(many) for _ in range(20)))
    assert kept.calls() == ["nodes"]


@on_virtual_time
async def test_calls_are_decided_by_states_that_are_fresh_enough() -> None:
    kept = Kept(MemoryNova(node(1)), states_max_age_s=5, poll_interval_s=3600)
    await kept.after(1)
    kept.calls()
    await asyncio.sleep(3)
    await kept.keeper.prepare()
    assert kept.calls() == []
    kept.nova.of_hosts["host1"] = down("host1")
    await asyncio.sleep(3)
    await asyncio.gather(*(kept.keeper.prepare() for _ in range(20)))
    assert kept.calls() == ["services", "aggregates"] and kept.table.is_down(uuid_of(1))


@on_virtual_time
async def test_a_call_that_comes_during_a_read_is_not_decided_by_older_states(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(MemoryNova(node(1)), states_max_age_s=5, poll_interval_s=3600)
    await kept.after(1)
    read = kept.nova.services

    async def slowly() -> Any:
        await asyncio.sleep(1)
        return await read()

    monkeypatch.setattr(kept.nova, "services", slowly)
    await asyncio.sleep(3.9)
    asked = [asyncio.create_task(kept.keeper.ask())]
    await asyncio.sleep(0.05)
    await kept.keeper.prepare()
    assert not asked[0].done(), "what is known is new enough"
    await asyncio.sleep(0.5)
    kept.nova.of_hosts["host1"] = down("host1")
    await kept.keeper.prepare()
    assert kept.table.is_down(uuid_of(1))


@on_virtual_time
async def test_each_call_may_have_a_read_that_began_after_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came during a read may be about a host that went down since."""
    kept = Kept(MemoryNova(node(1)), states_max_age_s=0, poll_interval_s=3600)
    await kept.after(1)
    kept.calls()
    read = kept.nova.services

    async def slowly() -> Any:
        found = await read()
        await asyncio.sleep(1)
        return found

    monkeypatch.setattr(kept.nova, "services", slowly)
    first = asyncio.create_task(kept.keeper.prepare())
    await asyncio.sleep(0.5)
    kept.nova.of_hosts["host1"] = down("host1")
    await asyncio.gather(first, *(kept.keeper.prepare() for _ in range(20)))
    assert kept.calls().count("services") == 2 and kept.table.is_down(uuid_of(1))


@on_virtual_time
async def test_a_nova_that_does_not_answer_holds_questions_up_once_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question read anew after the one before: calls without a host held up the topic for minutes."""
    kept = Kept(MemoryNova(node(1)))
    await kept.after(0.5)
    hanging = asyncio.Event()
    monkeypatch.setattr(kept.nova, "services", hanging.wait)
    await asyncio.sleep(10)
    kept.calls()
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*(kept.keeper.ask([uuid_of(3)]) for _ in range(40)))
    assert not any(answers) and asyncio.get_running_loop().time() - began <= ASK_LIMIT_S


@on_virtual_time
async def test_a_long_list_of_nodes_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large cloud it takes longer than a call waits."""
    kept = Kept(MemoryNova(node(1), node(2)), hosts_interval_s=30)
    list_nodes, listed = kept.nova.nodes, asyncio.Event()

    async def slowly() -> Any:
        found = await list_nodes()
        await listed.wait()
        return found

    await kept.after(1)
    monkeypatch.setattr(kept.nova, "nodes", slowly)
    kept.nova.of_hosts["host1"] = down("host1")
    running = asyncio.create_task(kept.keeper.run())
    await asyncio.sleep(40)
    kept.calls()
    # Meanwhile: states by polls and for a call, and a new host.
    kept.nova.of_hosts |= {"host1": up("host1"), "host2": down("host2"), "host3": up("host3")}
    kept.nova.listed[uuid_of(3)] = node(3)
    await asyncio.sleep(10)
    assert kept.calls() == ["services", "aggregates"] * 2 and kept.table.is_down(uuid_of(2))
    assert await kept.keeper.ask([uuid_of(3)]) and kept.table.live_service_of(uuid_of(3)) == "host3"
    listed.set()
    await asyncio.sleep(1)
    assert not kept.table.is_down(uuid_of(1)) and kept.table.is_down(uuid_of(2)), "the list was older"
    assert kept.facts.node(uuid_of(3)) is not None, "and did not have it yet"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@on_virtual_time
async def test_what_breaks_in_a_list_of_nodes_ends_the_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks() -> Any:
        raise RuntimeError("planted")

    kept = Kept(MemoryNova(node(1)))
    monkeypatch.setattr(kept.nova, "nodes", breaks)
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(kept.keeper.run(), 60)


@on_virtual_time
async def test_a_read_that_fails_is_shared_as_well() -> None:
    kept = Kept(MemoryNova(node(1)))
    await kept.after(0.5)
    kept.nova.fails = NovaUnavailable("down")
    await asyncio.sleep(10)
    kept.calls()
    await asyncio.gather(*(kept.keeper.ask() for _ in range(20)))
    assert kept.calls() == ["services"]


def primitive(name: str, data: object) -> dict[str, object]:
    return {
        "nova_object.name": name,
        "nova_object.namespace": "nova",
        "nova_object.version": "1.3",
        "nova_object.data": data,
    }


def of_aggregate(uuid: str, **data: object) -> dict[str, object]:
    return primitive("Aggregate", {"id": 7, "uuid": uuid, "name": "a", "hosts": [], "metadata": {}, **data})


@on_virtual_time
async def test_casts_are_taken_in() -> None:
    kept = Kept(MemoryNova(node(1), node(2)))
    await kept.after(1)
    cast = kept.keeper.apply_cast
    zone = of_aggregate(uuid_of(7), hosts=["host1"], metadata={"availability_zone": "z"})
    assert cast("update_aggregates", {"aggregates": primitive("AggregateList", {"objects": [zone]})})
    assert kept.facts.membership().named == {uuid_of(7): {uuid_of(1)}}
    # as the API of Nova sends it
    assert cast("update_aggregates", {"aggregates": [of_aggregate(uuid_of(7), hosts=None, metadata=None)]})
    assert [one.metadata for one in kept.facts.aggregates()] == [{}]
    assert cast("delete_aggregate", {"aggregate": of_aggregate(uuid_of(7))})
    assert kept.facts.aggregates() == ()
    for method in ("update_instance_info", "delete_instance_info", "sync_instance_info"):
        assert cast(method, {"host_name": "host1"}), "no fact: the book tells where instances are"


HOSTILE: list[Any] = [
    None, 1, "x", [], {}, {"nova_object.name": 1}, primitive("Aggregate", None), primitive("AggregateList", {}),
    primitive("AggregateList", {"objects": 1}), primitive("AggregateList", {"objects": [1, None]}),
    primitive("Instance", {"uuid": 3}), primitive("InstanceList", {"objects": [primitive("Aggregate", {})]}),
    of_aggregate("no uuid"), primitive("Instance", {}), [uuid_of(1), 7], {"a": {"b": {}}},
]  # fmt: skip
UNREADABLE_AGGREGATES = [
    of_aggregate(uuid_of(7), name=7), of_aggregate(uuid_of(7), metadata={"a": {}}), of_aggregate(uuid_of(7), hosts=[1]),
    of_aggregate(uuid_of(7), hosts=["x" * 300]),
]  # fmt: skip


@on_virtual_time
async def test_hostile_casts_change_nothing() -> None:
    kept = Kept(MemoryNova(node(1)))
    kept.nova.groups = {uuid_of(7): NovaAggregate(uuid=uuid_of(7), name="a", hosts=("host1",))}
    await kept.after(1)
    before = kept.facts.version, kept.table.revision
    for method in ("update_aggregates", "delete_aggregate"):
        for hostile in HOSTILE:
            arguments = dict.fromkeys(("aggregates", "aggregate"), hostile)
            assert kept.keeper.apply_cast(method, arguments) is False, (method, hostile)
            assert kept.keeper.apply_cast(method, {}) is False
    for hostile in UNREADABLE_AGGREGATES:
        assert kept.keeper.apply_cast("update_aggregates", {"aggregates": hostile}) is False
    assert (kept.facts.version, kept.table.revision) == before


class _Crossing(MemoryNova):
    """While a list is under way, a cast comes that is newer than it."""

    def __init__(self) -> None:
        super().__init__(node(1))
        self.cast = lambda: None

    async def services(self) -> list[NovaService]:
        found = await super().services()
        self.cast()
        return found


@on_virtual_time
async def test_a_cast_that_crosses_a_poll_is_newer_than_its_answer() -> None:
    nova = _Crossing()
    kept = Kept(nova)
    gone, made = uuid_of(7), uuid_of(8)
    nova.groups = {gone: NovaAggregate(uuid=gone, name="gone")}
    await kept.after(1)

    def casts() -> None:
        kept.keeper.apply_cast("delete_aggregate", {"aggregate": of_aggregate(gone)})
        kept.keeper.apply_cast("update_aggregates", {"aggregates": of_aggregate(made)})

    nova.cast = casts
    await kept.after(1)
    assert [one.uuid for one in kept.facts.aggregates()] == [made]
    nova.cast = lambda: None
    await kept.after(1)
    assert [one.uuid for one in kept.facts.aggregates()] == [gone], "the next poll is newer than the casts"


@on_virtual_time
async def test_a_host_of_no_cell_is_named_once() -> None:
    kept = Kept(MemoryNova(node(1)), poll_interval_s=5)
    kept.keeper._cells = ConfiguredCells({CELL1: ("other*",)})
    with capture_logs() as lines:
        await kept.after(20)
    assert [one["count"] for one in lines if one["event"] == "nova.hosts_without_cell"] == [1]
