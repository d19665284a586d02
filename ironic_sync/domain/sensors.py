"""Ironic's sensor data (`hardware.<type>.metrics`), parsed from hostile bytes into a few numbers about a node.

Each hardware type has its own values. Known are those of `redfish` and of `ipmi`; of another type what looks like them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Uuid
from bus.contracts.host_metrics import (
    POWER_WATTS,
    SENSORS_CRITICAL,
    SENSORS_WARNING,
    TEMPERATURE_CELSIUS,
    HostReading,
)

MAX_SENSORS: Final = 2000  # of one node; the rest is left out
SENSOR_EVENT: Final = re.compile(r"hardware\.[a-z0-9_\-]{1,40}\.metrics|ironic\.metrics")
CONDUCTOR_EVENT: Final = "ironic.metrics"  # a conductor's own numbers: of no node

# ipmitool's: "25 (+/- 1) degrees C", "110 (+/- 0) Watts"
_READING: Final = re.compile(r"\s*(-?[0-9]{1,7}(?:\.[0-9]{1,6})?)(?: \([^)]{0,40}\))? ?(degrees C|Watts)\s*")
MAX_TEXT: Final = 80
MAX_CELSIUS: Final = 1000.0
MAX_WATTS: Final = 1e6


class _SensorPayload(Struct):
    node_uuid: Uuid
    timestamp: Annotated[str, Bound(max_length=40)]
    payload: dict[str, Any]


class SensorMessage(Struct):
    """The oslo.messaging message around a node's sensor data."""

    payload: _SensorPayload


_message = msgspec.json.Decoder(SensorMessage)


def parse_sensors(text: str) -> HostReading | None:
    """The readings of one node's sensors; None: nothing that is understood. Never raises, whatever the text."""
    try:
        data = _message.decode(text).payload
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    at = _time_of(data.timestamp)
    values = metrics_of(data.payload)
    if at is None or not values:
        return None
    return HostReading(host_uuid=data.node_uuid, at=at, values=values)


def metrics_of(groups: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that these sensors give: {group: {sensor: {field: value}}}."""
    hottest: list[float] = []
    supplied = 0.0
    has_supplies = False
    drawn: list[float] = []
    counts = {"Warning": 0, "Critical": 0}
    judged = False
    for sensor in _sensors(groups):
        if (health := sensor.get("health")) is not None:
            judged = True
            if isinstance(health, str) and health in counts:
                counts[health] += 1
        if (celsius := _number(sensor.get("reading_celsius"), MAX_CELSIUS)) is not None:
            hottest.append(celsius)
        if (watts := _number(sensor.get("last_power_output_watts"), MAX_WATTS)) is not None:
            supplied, has_supplies = supplied + watts, True
        value, unit = _reading(sensor.get("Sensor Reading"))
        if unit == "degrees C" and abs(value) <= MAX_CELSIUS:
            hottest.append(value)
        elif unit == "Watts" and 0 <= value <= MAX_WATTS:
            drawn.append(value)
    found: dict[str, float] = {}
    if hottest:
        found[TEMPERATURE_CELSIUS] = max(hottest)
    if has_supplies:
        found[POWER_WATTS] = supplied
    elif drawn:
        found[POWER_WATTS] = max(drawn)  # a machine has sensors of its parts and of the whole: the whole is the most
    if judged:
        found[SENSORS_WARNING], found[SENSORS_CRITICAL] = float(counts["Warning"]), float(counts["Critical"])
    return found


def _sensors(groups: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    left = MAX_SENSORS
    for group in groups.values():
        if not isinstance(group, dict):
            continue
        for sensor in group.values():
            if left <= 0:
                return
            left -= 1
            if isinstance(sensor, dict):
                yield sensor


def _number(value: object, most: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and abs(value) <= most else None


def _reading(text: object) -> tuple[float, str]:
    if not isinstance(text, str) or len(text) > MAX_TEXT or (match := _READING.fullmatch(text)) is None:
        return 0.0, ""
    return float(match[1]), match[2]


def _time_of(text: str) -> float | None:
    """Ironic writes UTC without a zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    try:
        seconds = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        return None
    return seconds if 0 <= seconds <= 1e11 else None
