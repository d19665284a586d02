"""A hardware type of Ironic's whose sensors, health and power are what a file holds; the rest is fake hardware.

Ironic takes hardware types from any installed distribution that names them as entry points; this makes such a one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DRIVER = "bmc"
# Further lines of ironic.conf: the hardware type enabled, and everything looked at every second.
CONFIG = """\
[DEFAULT]
enabled_hardware_types = fake-hardware,bmc
enabled_management_interfaces = fake,noop,bmc
enabled_power_interfaces = fake,bmc
[conductor]
sync_power_state_interval = 1
power_state_sync_max_retries = 1
power_failure_recovery_interval = 1
[sensor_data]
send_sensor_data = true
enable_for_undeployed_nodes = true
interval = 1
"""
# Only its power, which Ironic looks at every few seconds, as it does for a repair of what it has lost.
POWER_CONFIG = """\
[DEFAULT]
enabled_hardware_types = fake-hardware,bmc
enabled_power_interfaces = fake,bmc
[conductor]
sync_power_state_interval = 3
power_state_sync_max_retries = 1
power_failure_recovery_interval = 3
"""
_MODULE = """\
import json
import os
from pathlib import Path

from ironic.common import exception, health_states, states
from ironic.drivers import fake_hardware
from ironic.drivers.modules import fake


def readings(task):
    return json.loads((Path(__file__).parent / "readings.json").read_text()).get(task.node.uuid, {})


class Management(fake.FakeManagement):
    def get_sensors_data(self, task):
        return readings(task).get("sensors", {})

    def get_node_health(self, task):
        health = readings(task).get("health")
        return health_states.HealthState(health) if health else None


def check_power(task):
    if readings(task).get("broken"):
        raise exception.IronicException("the power supply is broken")


def switched(task):
    return Path(__file__).parent / ("power-" + task.node.uuid)


class Power(fake.FakePower):
    # Whether a machine is on, the machine knows. The fake one answers what Ironic has noted, so that a power state
    # that Ironic dropped during a failure would be unknown for ever.
    def get_power_state(self, task):
        check_power(task)
        kept = switched(task)
        return kept.read_text() if kept.exists() else states.POWER_OFF

    def set_power_state(self, task, power_state, timeout=None):
        check_power(task)
        off = {states.POWER_OFF, states.SOFT_POWER_OFF}
        self.keep(task, states.POWER_OFF if power_state in off else states.POWER_ON)

    def reboot(self, task, timeout=None):
        check_power(task)
        self.keep(task, states.POWER_ON)

    def keep(self, task, power_state):
        kept = switched(task)
        fresh = kept.with_suffix(".new")
        fresh.write_text(power_state)
        os.replace(fresh, kept)
        task.node.power_state = power_state


class Hardware(fake_hardware.FakeHardware):
    @property
    def supported_power_interfaces(self):
        return [Power, *super().supported_power_interfaces]

    @property
    def supported_management_interfaces(self):
        return [Management, *super().supported_management_interfaces]
"""
_ENTRY_POINTS = """\
[ironic.hardware.types]
bmc = berth_bmc:Hardware
[ironic.hardware.interfaces.management]
bmc = berth_bmc:Management
[ironic.hardware.interfaces.power]
bmc = berth_bmc:Power
"""


class Bmc:
    """The distribution in a directory, and the readings of its nodes' sensors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._readings: dict[str, Any] = {}
        about = directory / "berth_bmc-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: berth-bmc\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(_ENTRY_POINTS)
        (directory / "berth_bmc.py").write_text(_MODULE)
        self._write()

    def set_readings(
        self, node: str, *, health: str = "OK", sensors: Mapping[str, Any] | None = None, broken: bool = False
    ) -> None:
        """Set one node's readings from now on. broken: its power cannot be read or changed."""
        self._readings[node] = {"health": health, "sensors": dict(sensors or {}), "broken": broken}
        self._write()

    def _write(self) -> None:
        fresh = self.directory / "readings.json.new"
        fresh.write_text(json.dumps(self._readings))
        os.replace(fresh, self.directory / "readings.json")
