"""The driver `simulated`."""

from __future__ import annotations

from collections.abc import Callable

from bus.clock import Clock
from compute_agent.driver_plugin import DriverContext, DriverParts, DriverPlugin
from compute_sim.config import SimulatedConfig
from compute_sim.crash_plan import CrashPlan
from compute_sim.driver import SimulatedDriver
from compute_sim.faulty_results import FaultyResultSender
from compute_sim.fleet import Fleet


def parts_of(
    driver: SimulatedDriver,
    fleet: Fleet,
    config: SimulatedConfig,
    *,
    clock: Clock,
    die: Callable[[], None] | None = None,
) -> DriverParts:
    """This driver of a fleet with what it adds to its service: the planned faults, and the fleet's file."""
    crash_plan = CrashPlan(config, fleet, die)
    result_sender = FaultyResultSender(fleet, config.faults, seed=config.seed, clock=clock)

    def close() -> None:
        result_sender.stop()
        fleet.close()

    return DriverParts(
        driver=driver,
        tasks=(("crash plan", crash_plan.wait),),
        wrap_sender=result_sender.before,
        on_accepted=crash_plan.accepted,
        open=fleet.open,
        close=close,
    )


def _make(context: DriverContext[SimulatedConfig]) -> DriverParts:
    config, fleet = context.config, context.state
    if fleet is None:
        fleet = Fleet.planned(config, context.cell, context.service, context.records, context.state_dir)
    assert isinstance(fleet, Fleet)
    driver = SimulatedDriver(fleet, config.faults, seed=config.seed, clock=context.clock, nested=config.nested)
    return parts_of(driver, fleet, config, clock=context.clock, die=context.die)


DRIVER = DriverPlugin(config_type=SimulatedConfig, make=_make, synced=False)
