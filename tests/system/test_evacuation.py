"""A host is killed and fenced: by their policy its instances are active elsewhere, once; and it returns."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from benchmarks.evacuation import Drill, plan_of
from tests.system.worker_processes import rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

HOSTS, INSTANCES = 4, 40


async def test_the_instances_of_a_dead_host_are_active_elsewhere_once_it_is_fenced() -> None:
    async with rig(replace(plan_of(HOSTS), durable=False)) as whole:
        figures = await Drill(whole.processes, whole.site, whole.client).run(HOSTS, INSTANCES, random.Random(1))
    assert figures.on_host > 0 and figures.evacuated == figures.on_host
    assert figures.broken == ()
