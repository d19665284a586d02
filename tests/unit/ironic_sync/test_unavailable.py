"""The loop with its neighbours away, the end of a term, and sensor data."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.contracts.base import Message
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.faults import BrokenInvariant, DatabaseUnavailable
from bus.memory import MemoryTransport
from bus.transport import BusUnavailable
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Node
from ironic_sync.domain.notification import MAX_BODY_BYTES, MAX_SENSOR_VALUES, Rejected, Sensors, parse
from ironic_sync.domain.sensors import metrics_of
from ironic_sync.measuring import Measurements
from ironic_sync.source.port import IronicUnavailable
from ironic_sync.store.memory import MemoryTerm
from ironic_sync.sync_state import SyncState
from tests.unit.ironic_sync import world as worlds
from tests.unit.ironic_sync.world import (
    OTHER,
    Nodes,
    VirtualClock,
    World,
    notification,
    reserved,
    turns,
    world,
)

# --- the loop with its neighbours away: no exchange, a lost connection, Ironic, the bus, the database


async def test_a_notification_that_cannot_be_handled_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up and counted, its neighbours are handled, and a read of all nodes shows what it could not."""
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        with monkeypatch.context() as patched:
            patched.setattr("ironic_sync.listener.effect_of", lambda *_, **__: 1 / 0)
            nodes.put(maintenance=True)
            await here.notify(notification("node.maintenance_set.end", maintenance=True))
            await here.settle()
        assert nodes.lists > lists
        assert reserved(here) == 1
        nodes.put(maintenance=False)
        await here.notify(notification("node.maintenance_set.end", maintenance=False))
        await here.settle()
        assert reserved(here) == 0
        assert await here.transport.depth(here.config.queue) == 0


async def unsettled(here: World, seconds: float) -> None:
    """Let time pass while something goes on failing."""
    until = here.clock.now + seconds
    while here.clock.now < until:
        await turns(20)
        here.clock.advance(until)


async def test_the_exchange_may_come_later() -> None:
    """Ironic declares it at its first notification; until then nodes are read anyway."""
    nodes, here = world()
    here.broker = type(here.broker)(here.clock)
    here.transport, here.ironic = MemoryTransport(here.broker, "ironic_sync"), MemoryTransport(here.broker, "ironic")
    here.loop = here.make_loop()
    async with here.running():
        await turns(200)
        assert reserved(here) == 0
        assert here.loop.healthy, "a fresh Ironic has no exchange yet: that is no fault"
        here.broker.declare_exchange("ironic")
        await here.pass_time(5)
        assert here.loop.healthy
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await here.settle()
        assert reserved(here) == 1


async def test_after_a_reconnection_it_binds_and_reads_all() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        nodes.put(maintenance=True)
        here.broker.drop_connections()
        for _ in range(20):
            await turns()
            if nodes.lists > lists:
                break
            here.clock.advance()
        await here.settle()
        assert nodes.lists == lists + 1
        assert reserved(here) == 1
        nodes.put(maintenance=False)
        await here.notify(notification("node.maintenance_set.end"))
        await here.settle()
        assert reserved(here) == 0, "it consumes again"


async def test_ironic_unavailable() -> None:
    """A change that takes something away needs no Ironic; what gives back waits for it; reads come at longer and longer
    intervals.
    """
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.fault = IronicUnavailable("unavailable")
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
        assert reserved(here) == 1
        reads = nodes.reads
        await unsettled(here, 600)
        assert not here.loop.healthy
        assert nodes.reads - reads < 40
        nodes.fault = None
        nodes.put(maintenance=False)
        await here.pass_time(60)
        assert reserved(here) == 0
        assert here.loop.healthy


async def test_a_node_is_offered_within_two_seconds_of_ironics_first_answer() -> None:
    """It took 15 s and more: reads were retried ever later, with nothing that noticed Ironic's return."""
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.fault = IronicUnavailable("away")
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await unsettled(here, 300)
        assert reserved(here) == 1
        lists = nodes.lists
        assert nodes.pings > 100, "asked something small all the while"
        nodes.fault = None
        nodes.put(maintenance=False)
        await here.pass_time(2)
        assert reserved(here) == 0
        assert nodes.lists == lists + 1


async def test_a_list_that_ironic_refuses_is_not_requested_every_second() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        nodes.list_fault = IronicUnavailable("this is too much")
        here.loop.read_all()
        await unsettled(here, 600)
        assert nodes.lists - lists < 40


async def test_an_unavailable_bus_loses_nothing_and_piles_up_one_update_a_node() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.placement.fault = BusUnavailable("unavailable")
        for on in (True, False) * 20 + (True,):
            nodes.put(maintenance=on)
            await here.notify(notification("node.maintenance_set.end", maintenance=on))
            await turns()
        here.placement.fault = None
        reported_before = len(here.placement.updates)
        await here.settle()
        assert reserved(here) == 1
        assert len(here.placement.updates) == reported_before + 1


class UnavailableTerm(MemoryTerm):
    """A database that goes away in the middle of it."""

    unavailable = False

    async def save(self, positions: Sequence[Any]) -> None:
        if UnavailableTerm.unavailable:
            raise DatabaseUnavailable("unavailable")
        await super().save(positions)


async def test_a_notification_is_acknowledged_only_after_what_it_did_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, here = world()
    monkeypatch.setattr("ironic_sync.store.memory.MemoryTerm", UnavailableTerm)
    async with here.running():
        await here.settle()
        UnavailableTerm.unavailable = True
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
        assert here.loop.sync_state is not None
        assert len(here.loop.sync_state.deliveries) == 1
        assert reserved(here) == 0, "what is not saved is not published"
        UnavailableTerm.unavailable = False
        await here.settle()
        assert reserved(here) == 1
        assert here.loop.sync_state.deliveries == []


# --- the end of a term of the synchronisation when several of its tasks fail at once


async def test_a_broken_invariant_is_not_hidden_by_a_database_that_disconnects_in_the_same_moment() -> None:
    async def unavailable() -> None:
        raise DatabaseUnavailable("gone")

    async def broken() -> None:
        raise BrokenInvariant("two writers")

    async def load() -> tuple[()]:
        return ()

    term = SimpleNamespace(
        writer=SimpleNamespace(save=unavailable, publish=broken),
        reader=SimpleNamespace(run=unavailable, run_all=unavailable),
        listening=None,
        measurements=SimpleNamespace(run=unavailable),
        sync_state=SyncState({}, {}, clock=VirtualClock(), config=IronicSyncConfig()),
    )
    loop = World(Nodes()).loop
    loop._term_of = lambda *_: term  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(BrokenInvariant, match="two writers"):
        await loop._run_together(SimpleNamespace(load=load))  # type: ignore[arg-type]


async def test_a_process_that_stops_in_the_moment_in_which_its_term_ends_does_stop() -> None:
    """The end of the term hid that it was cancelled: it went on waiting for the lead, and was never done."""
    world = World(Nodes())
    leading = asyncio.Event()

    @asynccontextmanager
    async def become_leader() -> AsyncIterator[None]:
        leading.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            raise DatabaseUnavailable("gone while it was let go of")

    world.loop._positions = SimpleNamespace(become_leader=become_leader)  # type: ignore[assignment]
    running = asyncio.create_task(world.loop.run())
    await leading.wait()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=30.0)
    assert done and running.cancelled()


# --- ironic's sensor data: what of it becomes a metric, and that nothing in it does harm


NODE = "3d6ed1f1-0000-4000-8000-000000000001"

# As Ironic 39 shapes them; the values are made up.
REDFISH = {
    "Extra": {"Manufacturer": "Acme", "Model": "R1", "UUID": NODE},
    "Fan": {
        "fan1@1": {"identity": "fan1", "reading": 4200, "reading_units": "RPM", "state": "Enabled", "health": "OK"}
    },
    "Temperature": {
        "inlet@1": {"identity": "inlet", "reading_celsius": 24, "state": "Enabled", "health": "OK"},
        "cpu0@1": {"identity": "cpu0", "reading_celsius": 71.5, "state": "Enabled", "health": "Warning"},
        "absent@1": {"identity": "absent", "reading_celsius": None, "state": "Absent", "health": None},
    },
    "Power": {
        "psu0:p@1": {"power_capacity_watts": 800, "last_power_output_watts": 120, "health": "OK"},
        "psu1:p@1": {"power_capacity_watts": 800, "last_power_output_watts": 118.5, "health": "Critical"},
    },
    "Drive": {"d0:s@1": {"name": "d0", "capacity_bytes": 10**12, "state": "Enabled", "health": "OK"}},
}
IPMI = {
    "Temperature": {
        "Ambient (0x32)": {"Sensor Reading": "22 (+/- 1) degrees C", "Sensor ID": "Ambient (0x32)"},
        "CPU1 (0x3)": {"Sensor Reading": "55.5 (+/- 0.5) degrees C"},
    },
    "Current": {"Pwr Consumption (0x76)": {"Sensor Reading": "154 (+/- 0) Watts"}},
    "Voltage": {"12V (0x1)": {"Sensor Reading": "12 (+/- 0) Volts"}},
    "Fan": {"FAN 1 (0x41)": {"Sensor Reading": "3000 (+/- 0) RPM"}},
}


def body(sensors: Any, *, event: str = "hardware.redfish.metrics", **more: Any) -> bytes:
    message = {"node_uuid": NODE, "timestamp": "2026-11-21T10:00:00.250000", "payload": sensors, **more}
    inner = {"message_id": "m", "publisher_id": "ironic-conductor.x", "event_type": event, "payload": message}
    return json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(inner)}).encode()


def reading(sensors: Any, **more: Any) -> HostReading | None:
    parsed = parse(body(sensors, **more))
    assert isinstance(parsed, Sensors), parsed
    return parsed.reading


def test_redfish() -> None:
    found = reading(REDFISH)
    assert found is not None and (found.host_uuid, found.at) == (NODE, 1795255200.25)
    assert found.values == {
        "temperature.celsius": 71.5,
        "power.watts": 238.5,
        "sensors.warning": 1.0,
        "sensors.critical": 1.0,
    }


def test_ipmi() -> None:
    found = reading(IPMI, event="hardware.ipmi.metrics")
    assert found is not None and found.values == {"temperature.celsius": 55.5, "power.watts": 154.0}


@pytest.mark.parametrize(
    "sensors",
    [
        {},
        {"Temperature": []},
        {"Temperature": {"a": 5}},
        {"Temperature": {"a": {"reading_celsius": "71"}}},
        {"Temperature": {"a": {"reading_celsius": True}}},
        {"Temperature": {"a": {"reading_celsius": 1e300}}},
        {"Temperature": {"a": {"Sensor Reading": "9" * 100_000 + " degrees C"}}},
        {"Temperature": {"a": {"Sensor Reading": "No Reading"}}},
    ],
)
def test_what_is_not_understood_is_no_reading(sensors: Any) -> None:
    assert reading(sensors) is None


@pytest.mark.parametrize("more", [{"node_uuid": "x"}, {"node_uuid": None}, {"timestamp": "yesterday"}, {"payload": 5}])
def test_a_message_about_no_node_or_no_time_is_no_reading(more: dict[str, Any]) -> None:
    assert reading(REDFISH, **more) is None


def test_a_conductors_own_numbers_are_not_a_nodes() -> None:
    inner = {"event_type": "ironic.metrics", "payload": {"hostname": "c", "timestamp": "2026-11-21", "payload": {}}}
    parsed = parse(json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(inner)}).encode())
    assert parsed == Sensors(event="ironic.metrics")


def test_another_event_without_objects_is_still_rejected() -> None:
    parsed = parse(body(REDFISH, event="compute.metrics.update"))
    assert isinstance(parsed, Rejected) and parsed.code == "notification.invalid"


@pytest.mark.parametrize("many", [[[]] * 250_000, [{}] * 70_000, {f"{n:x}": 0 for n in range(70_000)}])
def test_item_16_sensor_data_of_very_many_values_are_not_built(many: Any) -> None:
    """A megabyte of empty lists took 69 ms of the loop; the words of sensor data are each hardware type's own."""
    sent = body({"Temperature": many})
    assert len(sent) <= MAX_BODY_BYTES
    got = parse(sent)
    assert isinstance(got, Rejected) and got.code == "notification.too_large" and str(MAX_SENSOR_VALUES) in got.reason


def test_the_data_of_as_many_sensors_as_are_read_are_taken() -> None:
    sensor = REDFISH["Temperature"]["cpu0@1"]
    got = reading({"Temperature": {f"cpu{n}@1": {**sensor, "more": [0] * 10} for n in range(2_000)}})
    assert got is not None and got.values["sensors.warning"] == 2_000


def test_so_many_sensors_are_looked_at_and_no_more() -> None:
    many = {"Temperature": {f"s{number}": {"reading_celsius": 20 + (number > 3000)} for number in range(5000)}}
    assert metrics_of(many) == {"temperature.celsius": 20.0}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("reading_celsius", "last_power_output_watts", "health", "Sensor Reading")


SENSOR = st.dictionaries(st.sampled_from(FIELDS), st.integers() | st.floats() | values)
GROUP = st.dictionaries(st.text(max_size=5), SENSOR | values, max_size=3)


@given(st.dictionaries(st.text(max_size=5), GROUP | values, max_size=2))
def test_nothing_in_it_raises_or_is_no_number(sensors: Any) -> None:
    for value in metrics_of(sensors).values():
        assert abs(value) <= 2e9


async def test_readings_are_published_together_and_lost_ones_are_not_kept() -> None:
    clock, published, down = VirtualClock(), [], [True]

    async def publish_all(messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        if down[0]:
            raise BusUnavailable("away")
        published.extend(message for message, _ in messages)

    measurements = Measurements(publish_all, clock=clock, max_nodes=2, reporter="ironic")
    running = asyncio.create_task(measurements.run())

    async def add(at: float, *nodes: int) -> None:
        for node in nodes:
            uuid = f"{NODE[:-1]}{node}"
            measurements.add(HostReading(host_uuid=uuid, at=at, values={"power.watts": at}))
        for _ in range(3):
            await asyncio.sleep(0)
        clock.advance()
        for _ in range(3):
            await asyncio.sleep(0)

    await add(1.0, 1)
    down[0] = False
    await add(2.0, 2, 3, 4, 2)
    (message,) = published
    assert isinstance(message, HostMetrics) and message.source == "ironic"
    assert [(one.host_uuid[-1], one.at) for one in message.readings] == [("2", 2.0), ("3", 2.0)]
    running.cancel()


# --- A node that has a parent node is not offered, as Nova never sees it


def test_a_child_node_is_not_offered() -> None:
    async def run() -> object:
        nodes, here = worlds.world()
        everything = nodes.list_nodes

        async def parents_only():
            async for page in everything():
                yield [node for node in page if node.uuid != OTHER]

        nodes.list_nodes = parents_only
        async with here.running():
            await here.settle()
            nodes.put(OTHER, parent_node=worlds.NODE)
            await here.notify(worlds.notification("node.provision_set.end", uuid=OTHER))
            await here.settle()
            await here.pass_time(7200)  # a list or two go by
            return here.placement.seen(OTHER)

    seen = asyncio.run(run())
    assert seen is None or seen["reserved"] == 1, f"a child node is on offer: {seen}"


# --- Nodes that are gone do not count against max_nodes


OLD = [f"0000000{n}-0000-4000-8000-000000000000" for n in range(3)]
NEW = [f"1000000{n}-0000-4000-8000-000000000000" for n in range(3)]

MORE = [f"2000000{n}-0000-4000-8000-000000000000" for n in range(2)]


def node(uuid: str) -> Node:
    return Node(uuid=uuid, provision_state="available", power_state="power off", resource_class="gold")


@pytest.mark.parametrize(("absent_retention_s", "old"), [(0.0, []), (30 * 86_400.0, OLD)])
def test_nodes_that_are_gone_leave_room_for_those_that_came(absent_retention_s: float, old: list[str]) -> None:
    async def run() -> list[str]:
        clock = VirtualClock()
        config = IronicSyncConfig(max_nodes=3, absent_retention_s=absent_retention_s)
        state = SyncState({}, {}, clock=clock, config=config)
        for one in OLD:
            state.apply_read(node(one), seq=state.next_seq())
        state.published.update({one: state.positions[one].version for one in OLD})
        for one in OLD:
            state.apply_removed(one, seq=state.next_seq())
        state.published.update({one: state.positions[one].version for one in OLD})
        clock.now += 6 * 86_400
        state.purge(clock.now - 7 * 86_400)
        for one in [*NEW, *MORE]:
            state.apply_read(node(one), seq=state.next_seq())
        assert set(state.problems()) == set(old)
        return state.known()

    assert asyncio.run(run()) == [*old, *NEW]


# --- A node that becomes free while a list runs is offered before that list has ended


LIST_S = 300.0
NODES = [str(uuid.UUID(int=number)) for number in range(1, 151)]


def test_a_node_that_becomes_free_is_offered_soon() -> None:
    async def run() -> float:
        nodes, here = worlds.world()
        for one in NODES:
            nodes.put(one)
        slow = False

        async def takes() -> None:
            if slow:
                await here.clock.sleep(LIST_S)

        nodes.list_takes = takes
        async with here.running():
            await here.settle()
            slow = True
            nodes.gate.clear()  # Ironic answers the first reads a moment later
            nodes.put(worlds.NODE, provision_state="cleaning")
            await here.notify(worlds.notification("node.provision_set.end", provision_state="cleaning"))
            for one in NODES:  # a rack's power or conductor: all of them change
                nodes.put(one, power_state="error")
                await here.notify(
                    worlds.notification("node.power_state_corrected.success", uuid=one, power_state="error")
                )
            await worlds.turns(500)
            here.loop.read_all()
            await worlds.turns(500)
            assert nodes.lists == 2
            nodes.gate.set()
            await worlds.turns(500)
            nodes.put(worlds.NODE, provision_state="available")
            await here.notify(worlds.notification("node.provision_set.end", provision_state="available"))
            await worlds.turns(500)
            began = here.clock.now
            while worlds.reserved(here) and here.clock.now < began + 5_000:
                here.clock.advance(here.clock.now + 1.0)
                await worlds.turns(200)
            return here.clock.now - began

    took = asyncio.run(run())
    assert took < LIST_S
