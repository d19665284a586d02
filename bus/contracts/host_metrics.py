"""Numbers about hosts: measured by a compute service, ironic_sync or an operator's program, with host and time.

A number counts by its time. Schedulers keep the newest one of each host and name, and one that is too old is
unknown. Names are free; those below are published by berth's own workers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Label, Message, Uuid, Word, matching

MAX_READINGS = 1000  # hosts in one message
MAX_NAMES = 32  # metrics of one host in one message

# Dotted, the unit last.
MetricName = Annotated[
    str,
    matching(
        r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+)*$(?!\n)",
        "a name of a to z, 0 to 9 and _, in parts with dots between",
        max_length=64,
    ),
]
# As a Word; a compute service's is `compute-<its name>`.
MetricSource = Annotated[str, matching(r"^[A-Za-z0-9_\-]{1,80}$(?!\n)", "1 to 80 letters, digits, _ and -")]
MetricValue = Annotated[float, Bound(ge=-1e15, le=1e15)]
Time = Annotated[float, Bound(ge=0, le=1e11)]  # seconds since the epoch

POWER_WATTS = "power.watts"  # drawn now, all supplies together
TEMPERATURE_CELSIUS = "temperature.celsius"  # of the hottest sensor
SENSORS_WARNING = "sensors.warning"  # how many sensors report a warning
SENSORS_CRITICAL = "sensors.critical"
# Of Nova's hosts, as their cell's database has them:
NUM_INSTANCES = "num_instances"
NUM_IO_OPS = "num_io_ops"  # instances that are built, moved, resized, snapshotted, rescued or unshelved now


class HostReading(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one host at one time."""

    host_uuid: Uuid  # the root provider
    at: Time  # seconds since the epoch
    values: Annotated[dict[MetricName, MetricValue], Bound(min_length=1, max_length=MAX_NAMES)]


class HostMetrics(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="host.metrics.v1"):
    """Numbers about hosts. On a cell's bus they count for hosts of that cell only. Of two numbers with one name for one
    host the newer counts, whichever its source. An unknown field is refused by name.
    """

    source: MetricSource  # who measured (`compute-<service>`, `ironic`, a name of the operator's)
    readings: Annotated[tuple[HostReading, ...], Bound(max_length=MAX_READINGS)]


class HostMetricsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hosts.metrics.query.v1"):
    """Query a scheduler for the numbers that it knows of a host, by name or uuid."""

    host: Label


class HostMetric(Struct, frozen=True, kw_only=True):
    """One number about a host."""

    name: MetricName
    value: float
    at: Time  # seconds since the epoch
    source: MetricSource
    fresh: bool  # it is recent enough to count


class HostMetricsRecord(Struct, frozen=True, kw_only=True):
    """The numbers known of one host, by name of the metric."""

    host_uuid: Uuid
    host: Label
    cell: Word
    metrics: tuple[HostMetric, ...]


class HostMetricsPage(Message, frozen=True, kw_only=True, tag="hosts.metrics.page.v1"):
    """Reply to a HostMetricsQuery: one entry for each host of that name; none: no compute service announces one."""

    hosts: tuple[HostMetricsRecord, ...] = ()
