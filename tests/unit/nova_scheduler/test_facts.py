"""Nova's hosts in the scheduler's host table, and the polls, casts and questions that keep them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from nova_scheduler.cloud import state as facts
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.cells import ConfiguredCells
from nova_scheduler.cloud.poller import ASK_LIMIT_S, MAX_ASKED, NovaStatePoller
from nova_scheduler.cloud.rest import NovaRefused, NovaUnavailable
from nova_scheduler.cloud.state import NovaAggregate, NovaService, NovaState, host_table, supported_instances
from scheduler_worker.hosts.service_directory import DOWN_HOLD_S
from tests.kit.virtual_time import on_virtual_time
from tests.unit.nova_scheduler.facts_kit import CELL1, CELL2, MemoryNova, World, down, node, up, uuid_of
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

# --- Nova's hosts in the scheduler's host table.


def test_a_nova_compute_is_a_service_and_its_nodes_are_hosts() -> None:
    world = World(node(1, "häst 1"), node(2, "häst 1"), node(3))
    assert world.states() == {
        uuid_of(1): ("häst 1", False, True),
        uuid_of(2): ("häst 1", False, True),
        uuid_of(3): ("host3", False, True),
    }
    assert world.facts.nodes_named("häst 1") == (uuid_of(1), uuid_of(2))
    assert world.facts.nodes_named("häst 1", "node2") == world.facts.nodes_named(None, "node2") == (uuid_of(2),)
    assert world.facts.nodes_named("HOST3") == (uuid_of(3),), "Nova compares the names of hosts in any case"
    assert world.facts.cell_of(uuid_of(3)) == CELL1 == world.table.last_cell_of(uuid_of(3))
    assert world.facts.unknown([uuid_of(3), uuid_of(4)]) == (uuid_of(4),)


def test_a_service_is_up_down_disabled_and_gone() -> None:
    world = World(node(1), node(2))
    for service, expected in (
        (down("host1"), (None, True, True)),
        (up("host1", is_disabled=True, reason="fan"), ("host1", False, False)),
        (up("host1"), ("host1", False, True)),
    ):
        world.facts.put_services([service, up("host2")], complete=True)
        world.facts.announce(1.0)
        assert world.states() == {uuid_of(1): expected, uuid_of(2): ("host2", False, True)}
    world.facts.put_services([NovaService(host="host1", is_up=False, is_read=False), up("host2")], complete=True)
    world.facts.announce(1.5)
    assert world.states()[uuid_of(1)] == ("host1", False, True), "a row that cannot be read changes nothing"
    world.facts.put_services([up("host2")], complete=True)
    world.facts.announce(2.0)
    assert world.states()[uuid_of(1)][0] is None
    world.facts.put_services([up("host1"), up("host2")], complete=True)
    world.facts.announce(3.0)
    assert world.states()[uuid_of(1)] == ("host1", False, True), "it is back"


def test_a_service_that_is_gone_does_not_come_back_with_its_compute_nodes() -> None:
    """A long list of these may have begun before it was deleted: a server built there would wait for nobody."""
    world = World(node(1))
    world.facts.put_services([], complete=True)
    for of in (1, 2):
        world.facts.put_services([up(f"host{of}")], complete=False)
        world.facts.put_nodes([node(of)], complete=False)
    world.facts.put_cells({"host1": CELL1, "host2": CELL1})
    world.facts.announce(1.0)
    assert [world.table.live_service_of(uuid_of(of)) for of in (1, 2)] == [None, "host2"], "a new host has its own"


def test_a_list_of_compute_nodes_that_began_earlier_brings_no_service_back_up() -> None:
    """The poll of states may know a host that was added before any of its nodes is known."""
    world = World(node(1))
    world.facts.put_services([up("host1"), down("host2")], complete=True)
    world.facts.put_services([up("host1"), up("host2")], complete=False)
    world.facts.put_nodes([node(1), node(2)], complete=True)
    world.facts.put_cells({"host1": CELL1, "host2": CELL1})
    world.facts.announce(1.0)
    assert world.states()[uuid_of(2)] == (None, True, True)


def test_the_descriptions_of_processors_that_are_shared_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "MAX_CPUS", 2)
    world = World()
    for number in range(10):
        world.facts.put_nodes([node(number, cpu_info={"model": str(number)})], complete=False)
    assert len(world.facts._cpus) <= 3


def test_a_service_that_was_down_for_long_has_its_hosts_again() -> None:
    """The host table takes them from one that is down for an hour, until they are announced again."""
    world = World(node(1), node(2))
    for now_s, one in ((1.0, down("host1")), (DOWN_HOLD_S + 2, down("host1")), (DOWN_HOLD_S + 3, up("host1"))):
        world.facts.put_services([one, up("host2")], complete=True)
        world.facts.announce(now_s)
    assert world.states() == {uuid_of(1): ("host1", False, True), uuid_of(2): ("host2", False, True)}


def test_what_has_not_changed_is_not_announced_again() -> None:
    """A revision of the host table makes every ranking anew."""
    world = World(node(1), node(2))
    before = world.table.revision, world.facts.version
    world.facts.put_services([up("host1"), up("host2")], complete=True)
    world.facts.put_nodes([node(2), node(1)], complete=True)
    world.facts.announce(1.0)
    assert (world.table.revision, world.facts.version) == before


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_nodes_change_places_between_services(first: str, second: str) -> None:
    """Ironic's nodes go from one nova-compute to another, which may be announced first."""
    world = World(node(1, first), node(2, second))
    world.facts.put_nodes([node(1, second), node(2, first)], complete=True)
    world.facts.announce(1.0)
    assert {uuid: state[0] for uuid, state in world.states().items()} == {uuid_of(1): second, uuid_of(2): first}


def test_a_host_without_a_cell_is_not_announced_and_one_may_change_it() -> None:
    world = World(node(1), node(2), cells={"host1": CELL1})
    assert world.states().keys() == {uuid_of(1)} and world.facts.without_cell() == ("host2",)
    world.facts.put_cells({"host1": CELL2, "host2": CELL2})
    world.facts.announce(1.0)
    assert {uuid: state[0] for uuid, state in world.states().items()} == {uuid_of(1): "host1", uuid_of(2): "host2"}
    assert world.table.last_cell_of(uuid_of(1)) == CELL2


def test_nodes_of_a_service_that_is_down_stay_although_nova_does_not_list_them() -> None:
    """Nova leaves out what is in a cell that it cannot reach."""
    world = World(node(1), node(2), node(3))
    world.facts.put_services([down("host1"), up("host2"), up("host3")], complete=True)
    world.facts.put_nodes([node(2)], complete=True)
    world.facts.announce(1.0)
    assert world.facts.nodes_named("host1") == (uuid_of(1),) and world.facts.nodes_named("host3") == ()
    assert world.states()[uuid_of(3)][0] is None and world.facts.without_nodes() == {"host3"}


def test_filters_run_on_nova_s_aggregates_by_nova_s_members() -> None:
    """Placement's provider aggregates may lag behind, or be missing."""
    hosts = Hosts([PLENTY] * 3, members={"ssd": [0]})
    uuids = [hosts.replica.uuid_of(row) for row in hosts.view().rows.tolist()]
    nodes = [node(1, "h1"), node(2, "h2"), node(3, "h3")]
    world = World()
    world.facts.put_nodes(
        [type(one)(uuid=uuid, host=one.host, nodename=one.nodename) for uuid, one in zip(uuids, nodes, strict=True)],
        complete=True,
    )
    ssd = NovaAggregate(uuid="ssd", name="ssd", metadata={"availability_zone": "z", "ssd": "true"}, hosts=("h2", "h9"))
    world.facts.put_aggregates([ssd], complete=True)
    hosts.selector.config.membership = world.facts.membership()
    view = hosts.selector.all_hosts()
    assert [bool(one) for one in view.member_of("ssd")] == [False, True, False]
    assert [one.name for one in view.membership.with_key("ssd")] == ["ssd"]
    before = world.facts.version
    world.facts.put_aggregates([ssd], complete=False)
    assert world.facts.version == before
    world.facts.drop_aggregate("ssd")
    assert world.facts.aggregates() == () and world.facts.version == before + 1


def test_capabilities_that_a_flavor_may_name() -> None:
    info = {"arch": "x86_64", "topology:cores": "8", "features": "['aes', 'avx']"}
    world = World(node(1, hypervisor_type="QEMU", hypervisor_version=8_000_000, host_ip="192.0.2.1", cpu_info=info))
    attributes = world.table.attributes[0]
    assert attributes == {
        "host": "host1",
        "nodename": "node1",
        "hypervisor_hostname": "node1",
        "hypervisor_type": "QEMU",
        "hypervisor_version": "8000000",
        "host_ip": "192.0.2.1",
        "supported_instances": "x86_64/kvm/hvm, x86_64/qemu/hvm, i686/kvm/hvm, i686/qemu/hvm",
        "cpu_info:arch": "x86_64",
        "cpu_info:topology:cores": "8",
        "cpu_info:features": "['aes', 'avx']",
    }
    assert np.all(world.table.project[:1] == -1)


@pytest.mark.parametrize(
    ("kind", "arch", "expected"),
    [
        ("QEMU", "x86_64", "x86_64/kvm/hvm, x86_64/qemu/hvm, i686/kvm/hvm, i686/qemu/hvm"),
        ("LXC", "s390x", "s390x/lxc/exe"),
        ("ironic", "", "*/baremetal/hvm"),
        ("of another", "AARCH64", "aarch64/*/*, armv7l/*/*"),
        ("", "", "*/*/*"),
    ],
)
def test_what_runs_on_a_host(kind: str, arch: str, expected: str) -> None:
    one = node(1, hypervisor_type=kind, cpu_info={"arch": arch} if arch else {})
    assert supported_instances(one) == expected
    assert World(one).facts.supported() == {expected}


# --- Polls, casts and questions: which of them counts when they cross, and what hostile casts do (nothing).


class Kept:
    """A keeper over a Nova in memory."""

    def __init__(self, nova: MemoryNova, **config: Any) -> None:
        self.nova = nova
        self.table = host_table()
        self.facts = NovaState(self.table)
        self.poller = NovaStatePoller(
            nova,
            self.facts,
            self.table,
            cells=ConfiguredCells({CELL1: ("*",)}),
            config=NovaApiConfig(**config),
            clock=SystemClock(),
        )

    async def after(self, seconds: float) -> None:
        """Run for so long, and stop."""
        running = asyncio.create_task(self.poller.run())
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
    assert kept.poller.first.is_set()


@on_virtual_time
async def test_whether_a_server_waits_for_a_host() -> None:
    kept = Kept(MemoryNova(node(1)))
    a, b, c, d = (uuid_of(number) for number in range(11, 15))
    kept.nova.tasks = {a: "", b: "deleting", c: "unshelving"}
    assert not await kept.poller.waits_for_host([a, b, d])
    assert await kept.poller.waits_for_host([d, c])
    kept.nova.calls.clear()
    assert not await kept.poller.waits_for_host([d] * 1000)
    assert len(kept.nova.calls) == 1
    kept.nova.fails = NovaRefused("a user that may not list them")
    assert await kept.poller.waits_for_host([d]), "it is not known"
    kept.nova.fails = NovaUnavailable("away")
    with pytest.raises(NovaUnavailable):
        await kept.poller.waits_for_host([d])


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
    assert await kept.poller.ask([uuid_of(9)]) is False
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
    assert await kept.poller.ask([uuid_of(1), uuid_of(2), uuid_of(3)]) is True
    assert kept.calls() == ["node", "node"], "the states were read within this second"
    assert kept.table.live_service_of(uuid_of(2)) == "host2"
    await asyncio.sleep(2)
    assert await kept.poller.ask([uuid_of(3)]) is False, "a sharing provider; it is no host"
    assert kept.calls() == ["services", "aggregates"]


@on_virtual_time
async def test_questions_at_the_same_time_share_one_read_and_many_hosts_are_listed() -> None:
    kept = Kept(MemoryNova(node(1)))
    kept.nova.of_hosts["host1"] = up("host1")
    answers = await asyncio.gather(*(kept.poller.ask([uuid_of(1)]) for _ in range(20)))
    assert kept.calls() == ["services", "aggregates", "node"] and all(answers)
    many = [uuid_of(number) for number in range(100, 100 + MAX_ASKED + 1)]
    kept.nova.fails = NovaUnavailable("away")
    await kept.poller.ask(many)
    assert kept.calls() == ["nodes"]
    kept.nova.fails = None
    await asyncio.gather(*(kept.poller.ask(many) for _ in range(20)))
    assert kept.calls() == ["nodes"]


@on_virtual_time
async def test_calls_are_decided_by_states_that_are_fresh_enough() -> None:
    kept = Kept(MemoryNova(node(1)), states_max_age_s=5, poll_interval_s=3600)
    await kept.after(1)
    kept.calls()
    await asyncio.sleep(3)
    await kept.poller.prepare()
    assert kept.calls() == []
    kept.nova.of_hosts["host1"] = down("host1")
    await asyncio.sleep(3)
    await asyncio.gather(*(kept.poller.prepare() for _ in range(20)))
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
    asked = [asyncio.create_task(kept.poller.ask())]
    await asyncio.sleep(0.05)
    await kept.poller.prepare()
    assert not asked[0].done(), "what is known is new enough"
    await asyncio.sleep(0.5)
    kept.nova.of_hosts["host1"] = down("host1")
    await kept.poller.prepare()
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
    first = asyncio.create_task(kept.poller.prepare())
    await asyncio.sleep(0.5)
    kept.nova.of_hosts["host1"] = down("host1")
    await asyncio.gather(first, *(kept.poller.prepare() for _ in range(20)))
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
    answers = await asyncio.gather(*(kept.poller.ask([uuid_of(3)]) for _ in range(40)))
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
    running = asyncio.create_task(kept.poller.run())
    await asyncio.sleep(40)
    kept.calls()
    # Meanwhile: states by polls and for a call, and a new host.
    kept.nova.of_hosts |= {"host1": up("host1"), "host2": down("host2"), "host3": up("host3")}
    kept.nova.listed[uuid_of(3)] = node(3)
    await asyncio.sleep(10)
    assert kept.calls() == ["services", "aggregates"] * 2 and kept.table.is_down(uuid_of(2))
    assert await kept.poller.ask([uuid_of(3)]) and kept.table.live_service_of(uuid_of(3)) == "host3"
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
        await asyncio.wait_for(kept.poller.run(), 60)


@on_virtual_time
async def test_a_read_that_fails_is_shared_as_well() -> None:
    kept = Kept(MemoryNova(node(1)))
    await kept.after(0.5)
    kept.nova.fails = NovaUnavailable("down")
    await asyncio.sleep(10)
    kept.calls()
    await asyncio.gather(*(kept.poller.ask() for _ in range(20)))
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
    cast = kept.poller.apply_cast
    zone = of_aggregate(uuid_of(7), hosts=["host1"], metadata={"availability_zone": "z"})
    assert cast("update_aggregates", {"aggregates": primitive("AggregateList", {"objects": [zone]})})
    assert kept.facts.membership().named == {uuid_of(7): {uuid_of(1)}}
    # as the API of Nova sends it
    assert cast("update_aggregates", {"aggregates": [of_aggregate(uuid_of(7), hosts=None, metadata=None)]})
    assert [one.metadata for one in kept.facts.aggregates()] == [{}]
    assert cast("delete_aggregate", {"aggregate": of_aggregate(uuid_of(7))})
    assert kept.facts.aggregates() == ()
    for method in ("update_instance_info", "delete_instance_info", "sync_instance_info"):
        assert cast(method, {"host_name": "host1"}), "no fact: placement tells where instances are"


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
            assert kept.poller.apply_cast(method, arguments) is False, (method, hostile)
            assert kept.poller.apply_cast(method, {}) is False
    for hostile in UNREADABLE_AGGREGATES:
        assert kept.poller.apply_cast("update_aggregates", {"aggregates": hostile}) is False
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
        kept.poller.apply_cast("delete_aggregate", {"aggregate": of_aggregate(gone)})
        kept.poller.apply_cast("update_aggregates", {"aggregates": of_aggregate(made)})

    nova.cast = casts
    await kept.after(1)
    assert [one.uuid for one in kept.facts.aggregates()] == [made]
    nova.cast = lambda: None
    await kept.after(1)
    assert [one.uuid for one in kept.facts.aggregates()] == [gone], "the next poll is newer than the casts"


@on_virtual_time
async def test_the_hosts_of_an_aggregate_that_cannot_be_read_take_nothing_and_others_do() -> None:
    """They were free for all where it came while the frontend ran, and kept one that starts from every call."""
    kept = Kept(MemoryNova(node(1), node(2)))
    isolated = NovaAggregate(uuid=uuid_of(7), name="isolated", metadata={"filter_tenant_id": "p"}, hosts=("host1",))
    kept.nova.groups, kept.nova.unreadable = {uuid_of(7): isolated}, {uuid_of(7)}
    await kept.after(1)
    assert kept.poller.first.is_set() and [bool(kept.table.enabled[at]) for at in range(2)] == [False, True]
    kept.nova.unreadable = set()
    await kept.after(1)
    assert [bool(kept.table.enabled[at]) for at in range(2)] == [True, True]
    kept.nova.unreadable = {uuid_of(7)}
    kept.nova.groups = {uuid_of(7): replace(isolated, hosts=("host1", "host2"))}
    await kept.after(1)
    (known,) = kept.facts.aggregates()
    assert known.metadata == isolated.metadata, "what is known of it counts"
    assert kept.facts.membership().named[uuid_of(7)] == {uuid_of(1), uuid_of(2)}


@on_virtual_time
async def test_an_aggregate_that_does_not_tell_its_hosts_leaves_what_is_known() -> None:
    kept = Kept(MemoryNova(node(1)))
    kept.nova.nameless = True
    await kept.after(1)
    assert not kept.poller.first.is_set(), "whom it keeps from which host is not known"
    kept.nova.nameless = False
    await kept.after(1)
    kept.nova.nameless = True
    kept.nova.of_hosts["host1"] = down("host1")
    await kept.after(1)
    assert kept.poller.first.is_set() and kept.table.is_down(uuid_of(1))


@on_virtual_time
async def test_a_host_of_no_cell_is_named_once() -> None:
    kept = Kept(MemoryNova(node(1)), poll_interval_s=5)
    kept.poller._cells = ConfiguredCells({CELL1: ("other*",)})
    with capture_logs() as lines:
        await kept.after(20)
    assert [one["count"] for one in lines if one["event"] == "nova.hosts_without_cell"] == [1]


@on_virtual_time
async def test_a_disabled_cell_is_known_with_its_hosts() -> None:
    kept = Kept(MemoryNova(node(1)))
    kept.poller._cells.disabled = frozenset({CELL1})
    await kept.after(1)
    assert kept.table.disabled_cells == {CELL1} and kept.facts.cell_of(uuid_of(1)) == CELL1


# --- Polls of states, and lists of compute nodes that began earlier, in any order.


HOSTS = [1, 2, 3]
found_up = st.dictionaries(st.sampled_from(HOSTS), st.booleans())


class InAnyOrder(RuleBasedStateMachine):
    """The model: a poll says all of the services; what comes with nodes is news of a host that nothing is known of. A
    list of nodes says all, but for the hosts that are down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.facts.put_cells({f"host{of}": CELL1 for of in HOSTS})
        self.services: dict[int, bool] = {}
        self.nodes: set[int] = set()
        self.now_s = 0.0

    def services_of(self, found: dict[int, bool]) -> list[NovaService]:
        return [up(f"host{of}") if is_up else down(f"host{of}") for of, is_up in found.items()]

    @rule(found=found_up)
    def poll(self, found: dict[int, bool]) -> None:
        self.world.facts.put_services(self.services_of(found), complete=True)
        self.services = found

    @rule(found=found_up)
    def services_of_nodes(self, found: dict[int, bool]) -> None:
        self.world.facts.put_services(self.services_of(found), complete=False)
        for of, is_up in found.items():
            if of not in self.nodes:
                self.services.setdefault(of, is_up)

    @rule(found=st.sets(st.sampled_from(HOSTS)))
    def list_of_nodes(self, found: set[int]) -> None:
        self.world.facts.put_nodes([node(of) for of in sorted(found)], complete=True)
        self.nodes = found | {of for of in self.nodes if self.services.get(of) is False}

    @rule(of=st.sampled_from(HOSTS))
    def one_node(self, of: int) -> None:
        self.world.facts.put_nodes([node(of)], complete=False)
        self.nodes = self.nodes | {of}

    @invariant()
    def announced(self) -> None:
        self.now_s += 1.0
        self.world.facts.announce(self.now_s)
        known = self.world.table.live_service_of, self.world.table.is_down
        assert {of: tuple(each(uuid_of(of)) for each in known) for of in self.nodes} == {
            of: (f"host{of}" if self.services.get(of) else None, self.services.get(of) is False) for of in self.nodes
        }
        assert self.world.facts.recorded_nodes() == {uuid_of(of) for of in self.nodes}
        assert self.world.facts.without_nodes() == {
            f"host{of}" for of, is_up in self.services.items() if is_up and of not in self.nodes
        }


TestInAnyOrder = InAnyOrder.TestCase
