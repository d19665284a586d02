"""The driver `ironic`."""

from __future__ import annotations

from compute_agent.driver_plugin import DriverContext, DriverParts, DriverPlugin
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import IronicDriver, ring_name
from compute_agent.hosts.hash_ring import Ring


def parts_of(driver: IronicDriver) -> DriverParts:
    """This driver with what it adds to its service."""
    return DriverParts(driver=driver, ring=driver.ring, tasks=(("nodes", driver.watch),))


def _make(context: DriverContext[IronicConfig]) -> DriverParts:
    driver = IronicDriver(
        context.config,
        cell=context.cell,
        service=context.service,
        clock=context.clock,
        records=context.records,
        ring=Ring(ring_name(context.config), context.service),
    )
    return parts_of(driver)


DRIVER = DriverPlugin(config_type=IronicConfig, make=_make)
