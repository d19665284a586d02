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
from placement_worker.operations.export import PlacementReader
from placement_worker.operations.mirror import PlacementMirror
from placement_worker.operations.mirror_database import DatabaseSource
from placement_worker.operations.mirror_rest import RestSource
from placement_worker.replica.replica import Replica
from scheduler_worker.config import SchedulerConfig
from tests.integration.nova_scheduler.trial_world import NEEDS, Cloud, cloud_of, used_of
from tests.kit.answering import answering
from tests.kit.waiting import until
from tests.unit.nova_scheduler.world import CELLS, FLAVOR, group
from tests.unit.placement_worker.mirror_world import shown

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


async def test_both_sources_show_the_same(own_broker: RabbitMQ, empty_database: str, tmp_path: Path) -> None:
    """Trees, traits, aggregates and amounts, as Placement itself has written and answers them."""
    async with cloud_of(own_broker, empty_database, tmp_path, 3) as here:
        reader = PlacementReader(here.placement, token="admin")
        sources = RestSource(reader, interval_s=1.0, whole_s=1.0), DatabaseSource(here.database)
        mirrors = [PlacementMirror(one, Replica(), clock=SystemClock(), interval_s=1.0) for one in sources]
        await here.write("PUT", "/traits/CUSTOM_A", None)
        held: list[str] = []
        for host in here.hosts:
            child = new_uuid(here.rng)
            card = {"VGPU": {"total": 8, "reserved": 1, "allocation_ratio": 2.5, "step_size": 2}}
            await here.write(
                "POST", "/resource_providers", {"uuid": child, "name": child, "parent_provider_uuid": host}
            )
            parts: dict[str, dict[str, Any]] = {
                "inventories": {"inventories": card},
                "traits": {"traits": ["CUSTOM_A", "HW_CPU_X86_AVX"]},
                "aggregates": {"aggregates": [new_uuid(here.rng), new_uuid(here.rng)]},
            }
            for number, (part, body) in enumerate(parts.items()):
                body["resource_provider_generation"] = number
                await here.write("PUT", f"/resource_providers/{child}/{part}", body)
            held.append(new_uuid(here.rng))
            here.tasks[held[-1]] = ""
            await here.hold(held[-1], here.hosts.index(host))
            for one in mirrors:
                await one.read()
            assert shown(mirrors[0].replica) == shown(mirrors[1].replica) and len(shown(mirrors[0].replica)) > 3
            assert [one.hosts_of(held[-1]) for one in mirrors] == [(host,)] * 2
        await here.delete(held[0])
        for one in mirrors:
            await one.read()
        assert shown(mirrors[0].replica) == shown(mirrors[1].replica)
        await reader.close()
