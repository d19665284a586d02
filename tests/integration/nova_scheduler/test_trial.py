"""A trial on a real RabbitMQ, beside a real OpenStack Placement, which it reads by its API or from its database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from berth.config.settings import Settings
from berth.config.site import Brokers, Site
from berth.up.embedded.rabbitmq import RabbitMQ
from bus.clock import SystemClock, new_uuid
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.config import NovaConfig, TrialSettings
from nova_scheduler.trial.app import Trial, build
from nova_scheduler.wire.versioned import versioned
from scheduler_worker.config import SchedulerConfig
from tests.integration.nova_scheduler.trial_world import NEEDS, Cloud, cloud_of, used_of
from tests.kit.answering import answering
from tests.kit.waiting import until
from tests.unit.nova_scheduler.world import CELLS, FLAVOR, group

pytestmark = list(NEEDS)
HOSTS = 20
# (hosts, where Placement is read): 1,000 by the API would be 4,000 requests before the first call.
SOURCES = ((HOSTS, "api"), (HOSTS, "database"), (1_000, "database"))


@contextlib.asynccontextmanager
async def trial(cloud: Cloud, source: str) -> AsyncIterator[Trial]:
    """A trial that listens."""
    of_api = {"placement_url": cloud.placement, "token": "admin", "interval_s": 0.2, "whole_s": 0.2}
    of_database = {"placement_database": cloud.database, "database_interval_s": 0.2}
    given: dict[str, Any] = of_api if source == "api" else of_database
    async with answering(cloud.answer) as nova:
        config = NovaConfig(
            transport_url=cloud.broker.url("nova"),
            api=NovaApiConfig(url=f"{nova}/v2.1", token="t", cells={CELLS[0]: ("*",)}),
            trial=TrialSettings(**given),
        )
        site = Site(Settings(), brokers=Brokers(SystemClock()), database_url="")
        made = build(site.environment("trial", takes_cells=False), config, SchedulerConfig())
        stop = asyncio.Event()
        running = asyncio.create_task(made.service.run(stop))
        try:
            await until(lambda: made.service.ready.is_set() or running.done())
            yield made
        finally:
            stop.set()
            await running


async def settled(here: Cloud, made: Trial) -> None:
    """Until each call is compared, and what was written before was read."""
    await until(lambda: sum(made.comparison.counts().values()) == len(here.taken))
    await made.mirror.next_pass()


@pytest.mark.parametrize(("hosts", "source"), SOURCES)
async def test_calls_among_deletes_and_moves_and_the_replica_after_each_pass(
    own_broker: RabbitMQ, empty_database: str, tmp_path: Path, hosts: int, source: str
) -> None:
    async with cloud_of(own_broker, empty_database, tmp_path, hosts) as here, trial(here, source) as made:
        await until(lambda: not made.service.not_ready())
        alive: list[str] = []
        for _ in range(3):
            await here.round(alive, partial(settled, here, made))
            assert used_of(made.mirror.replica, here.hosts) == await here.used()
        counts = made.comparison.counts()
        assert counts.keys() <= {"same", "other host"} and sum(counts.values()) == len(here.taken) == 18
        berth_s, stock_s = made.comparison.mean_s()
        assert 0 < berth_s < stock_s


@pytest.mark.parametrize("source", ["api", "database"])
async def test_what_would_have_been(own_broker: RabbitMQ, empty_database: str, tmp_path: Path, source: str) -> None:
    before = Counter[str]()

    async def told(here: Cloud, made: Trial) -> dict[str, int]:
        await settled(here, made)
        found = Counter(made.comparison.counts()) - before
        before.update(found)
        return dict(found)

    async with cloud_of(own_broker, empty_database, tmp_path, HOSTS) as here, trial(here, source) as made:
        first = await here.boot(3)
        members = group("anti-affinity", [first])
        await told(here, made)

        await here.boot(3, instance_group=members)
        assert await told(here, made) == {"rule broken": 1}

        refused = new_uuid(here.rng)
        await here.call(refused)
        here.tasks[refused] = ""  # an error: no valid host was found
        assert await told(here, made) == {"would fit": 1}

        lacking = versioned("Flavor", "1.2", {**FLAVOR, "extra_specs": {"trait:CUSTOM_GOLD": "required"}})
        await here.boot(4, flavor=lacking)
        assert await told(here, made) == {"would fail": 1}

        await here.call(first, ignore_hosts=["h3"])  # an evacuation: it holds its source until it has moved
        await here.hold(first, 3, 7)
        assert (await told(here, made)).keys() <= {"same", "other host"}

        deleted = new_uuid(here.rng)
        await here.call(deleted)
        del here.tasks[deleted]
        assert await told(here, made) == {"stock failed": 1}
