"""Settings of a compute service, parsed once and passed down."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Label
from bus.service.settings import Seconds, Secret
from compute_agent.drivers.ironic.config import MAX_NAME, IronicConfig


def default_service(cell: str, host: str) -> str:
    """A compute service's name when none is given: its cell and the computer's host name, so that no two are alike."""
    short = host.split(".", maxsplit=1)[0] or "localhost"
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{cell}-{short}")[:MAX_NAME]


class ComputeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compute service."""

    driver: Annotated[str, Bound(max_length=255)] = "simulated"
    """The manager of the machines: `simulated` (the simulated fleet), `ironic`, or the name of another entry point in
    group `berth.drivers`.
    """
    ironic: IronicConfig = IronicConfig()
    """For `driver` = `ironic`."""
    options: dict[Label, Secret] = {}
    """For other drivers, which may need a password: none is shown."""
    state_dir: str | None = None
    """The directory in which the service remembers its machines across processes. Not set: `machines` below the site's
    `state_dir`. Empty: in memory, and lost with the process (`compute.in_memory`, a warning at its start).
    Unless `driver` = `simulated` it is synced, to survive a power cut.
    """
    heartbeat_interval_s: Annotated[float, Bound(gt=0, le=3600)] = 1.0
    """Seconds between two heartbeats of the service. `conductor.missed_heartbeats` of them make it silent."""
    report_interval_s: Annotated[float, Bound(gt=0, le=86_400)] = 60.0
    """Seconds between two full reports of the machines, in case a change was not reported."""
    metrics_interval_s: Annotated[float, Bound(ge=0, le=86_400)] = 0.0
    """Seconds between two publications of the driver's measurements (docs/operate/host-metrics.md). 0: none."""
    max_builds_per_host: Annotated[int, Bound(ge=1, le=10_000)] = 10
    """Builds under way on one host. 10, as Nova's `max_concurrent_builds`."""
    max_builds: Annotated[int, Bound(ge=1, le=100_000)] = 5_000
    """Builds under way in the service."""
    max_accepted: Annotated[int, Bound(ge=1, le=1_000_000)] = 20_000
    """Builds that are accepted and not ended; a further one is refused and goes to another service."""
    max_build_s: Seconds = 3_600.0
    """Seconds after which the service gives a build up, whatever its conductor commands."""
    name_wait_s: Annotated[float, Bound(gt=0, le=3_600)] = 60.0
    """Seconds that a service waits for its name while another process holds it; then it ends."""
    destroy_tries: Annotated[int, Bound(ge=1, le=100)] = 8
    """Attempts to destroy a machine before the command has failed; its conductor repeats it."""
