"""A message that no scheduler could settle, among a hundred good requests, on a real broker."""

from __future__ import annotations

import asyncio

import pytest

from berth.trial.servers import API_VHOST, SystemPlan
from bus.consuming import dead_letters
from bus.contracts.catalogue import COMMANDS
from compute_sim.config import ComputeConfig
from tests.contract.rig import until
from tests.kit.raw_amqp import raw_publisher
from tests.system.worker_processes import rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

BOOTS = 100
FOREIGN = ({"message_id": b"\xff" * 200}, {"type": b"\xff" * 255}, {"correlation_id": b"\xff" * 200})


async def test_two_schedulers_survive_a_message_whose_id_is_no_text_and_all_good_requests_end_once() -> None:
    """It ended every scheduler that took it: 21 deaths, and half of the good requests were given up unheard."""
    plan = SystemPlan(cells=("cell1",), placements=1, compute=ComputeConfig(hosts=50), durable=False)
    async with rig(plan) as whole:
        pids = {name: worker.process.pid for name, worker in whole.processes.workers.items()}
        async with raw_publisher(whole.servers.urls[API_VHOST]) as raw:
            for name in ("scheduler1", "scheduler2"):
                whole.processes.pause(name)  # so that good and bad wait side by side, and are prefetched together
            load = asyncio.create_task(whole.load(BOOTS))
            await until(lambda: len(whole.client.tracks) >= BOOTS // 2)
            for properties in (
                {"message_id": b"\xff" * 200},
                {"type": b"\xff" * 255},
                {"correlation_id": b"\xff" * 200},
            ):
                await raw.publish(COMMANDS, "build.request.17.p", b"{not json", **properties)
            for name in ("scheduler1", "scheduler2"):
                whole.processes.resume(name)
            report = await load
        assert (report.active + report.failed, report.unfinished, report.refused) == (BOOTS, 0, 0)
        ends = [event.instance_uuid for event in whole.client.events if event.terminal]
        assert sorted(ends) == sorted(whole.client.tracks), "exactly one terminal event each"
        bus = whole.site.bus("looks at letters")
        await bus.open()
        letters = await dead_letters.list_dead(bus.transport, "scheduler.requests")
        await bus.close()
        assert {letter.code for letter in letters} == {"message.malformed", "message.unknown_type"}
        assert {name: worker.process.pid for name, worker in whole.processes.workers.items()} == pids
        assert all(worker.process.running for worker in whole.processes.workers.values())
        await whole.assert_invariants()
