"""A conductor's metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram

from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.service.stages import STAGE_S

STEPS = Counter("berth_conductor_steps", "Events taken, by state before and event.", ["state", "event"])
STEPS_FAILED = Counter(
    "berth_conductor_steps_failed",
    "Steps that a defect prevents, by state and event: they are tried again.",
    ["state", "event"],
)
ANSWERS = Counter(
    "berth_conductor_placement_requests", "Questions to placement, by kind and outcome.", ["kind", "outcome"]
)
ENDED = Counter("berth_conductor_ended", "Instances that reached active, failed or deleted.", ["state"])
ALTERNATES = Counter("berth_conductor_alternates", "Attempts commanded on an alternate.")
SWEPT = Counter("berth_conductor_deadlines", "Deadlines that passed, by state.", ["state"])
REPAIRED = Counter("berth_conductor_report_differences", "Differences between hosts' reports and the record.", ["kind"])
UNKNOWN_MACHINES = Counter(
    "berth_conductor_unknown_machines", "Machines that no record explains, as each first appeared, by kind.", ["kind"]
)
QUARANTINED = Counter("berth_conductor_quarantined", "Machines put into quarantine, by service.", ["service"])
TRIPPED = Counter("berth_conductor_breaker_trips", "Breakers that stopped destruction, by service.", ["service"])
BREAKERS_OPEN = Gauge("berth_conductor_breakers_open", "Breakers of the cell that are open now.", ["cell"])
IN_QUARANTINE = Gauge(
    "berth_conductor_machines_in_quarantine",
    "Machines in quarantine in the cell now, less those that an operator keeps there.",
    ["cell"],
)
BLOCKED = Counter("berth_conductor_breaker_blocked", "Destructions and losses blocked by a breaker.", ["service"])
RESERVED = Counter(
    "berth_conductor_reserve_orders",
    "Orders to keep machines in quarantine out of an inventory, by service.",
    ["service"],
)
RESCANS = Counter(
    "berth_conductor_rescans_requested",
    "Instances whose host a service not on record for it was requested to scan again, by service.",
    ["service"],
)
HOST_CONFLICTS = Gauge(
    "berth_conductor_hosts_reported_twice",
    "Hosts of a compute service that another service which is up reports as well, by service.",
    ["service"],
)
DATABASE_RESTORES = Counter(
    "berth_conductor_database_restores", "How often the cell's database was found restored or promoted."
)
SILENT = Counter("berth_conductor_services_silent", "Compute services that fell silent, by service.", ["service"])
DOWN = Gauge(
    "berth_conductor_services_down", "Compute services that take no builds now: silent, or stopped on purpose."
)
BATCH_SECONDS = Histogram("berth_conductor_batch_seconds", "One batch: steps, transaction, requests.", ["source"])


def stages(messages: Iterable[Message]) -> None:
    """The stages that end in a cell, of the builds that these events end."""
    ended = [m.stage_times for m in messages if isinstance(m, BuildEvent) and m.stage_times is not None]
    if ended:
        STAGE_S.observe("dispatched", [stage_times.dispatched - stage_times.claimed for stage_times in ended])
        STAGE_S.observe("built", [stage_times.built - stage_times.dispatched for stage_times in ended])
