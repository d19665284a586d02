"""The driver `ironic`."""

from __future__ import annotations

from compute_sim.config import IronicConfig
from compute_sim.driver_plugin import DriverContext, DriverParts, DriverPlugin
from compute_sim.drivers.ironic.driver import IronicDriver, ring_name
from compute_sim.ring import Ring


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
