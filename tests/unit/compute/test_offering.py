"""Hosts that a service offers again once what it owes there is destroyed."""

from __future__ import annotations

from typing import Any

from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome, QueueMarker
from compute_sim.domain.attempts import Phase
from compute_sim.offering import Offering
from tests.unit.compute.test_agent import HOSTS, INSTANCES, Scripted, Service, destroy, spawn

KEY = (HOSTS[0], INSTANCES[0])
TRIES = 3  # of one destruction


class Owing:
    """A service that has just started and owes a destruction, which its driver refuses."""

    def __init__(self) -> None:
        bus: Any = None
        self.driver = Scripted()
        self.service = Service(self.driver)
        self.offered: list[str] = []
        records = self.service.records
        self.offering = Offering(bus, service="s", records=records, clock=SystemClock(), on_offered=self.offered.extend)
        self.service.agent._on_settled = self.offering.on_settled

    async def gives_up(self) -> None:
        """The marker comes back while it tries, and then it has tried often enough."""
        await self.service.agent.resume()
        await self.service.carry_out(spawn(0))
        self.driver.failures = TRIES
        self.service.agent.take([destroy(0)])
        self.offering.on_marker(QueueMarker(service="s", epoch=0), self.service.agent.owed())
        await self.service.rest()
        assert self.service.results[-1].code == "destroy.failed"
        assert not self.offering.offers(HOSTS[0]) and self.offering.offers(HOSTS[1])


async def test_a_host_is_offered_when_what_was_given_up_is_destroyed_by_a_further_command() -> None:
    """The conductor was quicker with its second command than the service with its own, and no build came any more."""
    here = Owing()
    await here.gives_up()
    await here.service.carry_out(destroy(0))
    assert here.service.results[-1].outcome is ComputeOutcome.DESTROYED
    assert here.offering.offers(HOSTS[0]) and here.offered == [HOSTS[0]] and not here.service.agent.owed()


async def test_a_host_is_offered_when_a_newer_attempt_has_cleared_away_what_was_given_up() -> None:
    here = Owing()
    await here.gives_up()
    await here.service.carry_out(spawn(0, 2))
    assert here.driver.machines == {KEY: 2}
    assert here.offering.offers(HOSTS[0]) and not here.service.agent.owed()


async def test_a_host_is_offered_when_nothing_is_owed_there_any_more_though_nothing_was_cleared_away() -> None:
    """A newer attempt failed because it could not clear the older one away: that is its conductor's to undo."""
    here = Owing()
    await here.gives_up()
    here.driver.failures = TRIES
    await here.service.carry_out(spawn(0, 2))
    entry = here.service.records.get(KEY)
    assert entry is not None and entry.phase is Phase.FAILED
    here.service.agent.resume_destroys()
    await here.service.rest()
    assert here.offering.offers(HOSTS[0]) and not here.service.agent.owed()


async def test_a_host_is_offered_when_the_service_itself_has_destroyed_what_was_given_up() -> None:
    here = Owing()
    await here.gives_up()
    here.service.agent.resume_destroys()
    await here.service.rest()
    assert here.service.results[-1].outcome is ComputeOutcome.DESTROYED
    assert here.offering.offers(HOSTS[0]) and not here.service.agent.owed()
