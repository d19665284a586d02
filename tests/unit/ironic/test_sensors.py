"""Ironic's sensor data: what of it becomes a metric, and that nothing in it does harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.contracts.base import Message
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.port import BusUnavailable
from ironic_sync.domain.notification import MAX_BODY_BYTES, MAX_SENSOR_VALUES, Rejected, Sensors, parse
from ironic_sync.domain.sensors import metrics_of
from ironic_sync.measuring import Measurements
from tests.unit.ironic.world import VirtualClock

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

    measurements = Measurements(publish_all, clock=clock, max_nodes=2, source="ironic")
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
