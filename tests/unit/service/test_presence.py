"""A worker announces itself, again and again, and nothing gathers while its bus is unavailable."""

from __future__ import annotations

import asyncio
import random
from functools import partial

from bus.bus import API
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.workers import STOPPED, WorkerHeartbeat
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.service.presence import announce_presence
from bus.service.service import Service

PATIENCE_S = 30.0


def environment(broker: MemoryBroker, process: str, heartbeat_s: float | None) -> Environment:
    transports = partial(MemoryTransport, broker)
    return Environment(process, transports=transports, rng=random.Random(1), heartbeat_s=heartbeat_s)


async def test_heartbeats_carry_the_phase_what_is_waited_for_and_what_is_in_hand() -> None:
    broker = MemoryBroker(SystemClock())
    received: list[WorkerHeartbeat] = []
    enough = asyncio.Event()

    async def receive(batch: list[Received]) -> list[Outcome]:
        received.extend(one.message for one in batch if isinstance(one.message, WorkerHeartbeat))
        if sum(beat.phase == "ready" for beat in received) >= 2:
            enough.set()
        return [Done()] * len(batch)

    listening = environment(broker, "listener", None).bus(API)
    await listening.open()
    listener = listening.consumer("scheduler.control.{process}", receive)  # type: ignore[arg-type]
    await listener.start()
    running = asyncio.create_task(listener.run())

    env = environment(broker, "w1", 0.01)
    bus = env.bus(API)
    service = Service("w", clock=env.clock)
    service.add_resource(bus.open, bus.close)
    announce_presence(service, env, bus, "placement")
    is_fine = False
    service.add_check("book", lambda: is_fine)
    service.add_consumer(bus.consumer("placement.reads", receive))  # type: ignore[arg-type]
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(stop))
    async with asyncio.timeout(PATIENCE_S):
        await enough.wait()
    stop.set()
    await task
    beat = next(one for one in received if one.phase == "ready")
    assert (beat.role, beat.worker, beat.not_ready, beat.every_s) == ("placement", "w1", ("book",), 0.01)
    assert beat.in_hand == {"placement.reads": 0} and beat.pid > 0 and beat.version
    await listener.drain(1.0)
    await running
    await listening.close()


async def test_it_is_heard_at_once_that_a_worker_is_ready_and_that_it_has_stopped() -> None:
    broker = MemoryBroker(SystemClock())
    phases: list[str] = []
    heard = asyncio.Event()

    async def receive(batch: list[Received]) -> list[Outcome]:
        phases.extend(one.message.phase for one in batch if isinstance(one.message, WorkerHeartbeat))
        heard.set()
        return [Done()] * len(batch)

    async def until(phase: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while phases[-1:] != [phase]:
                await heard.wait()
                heard.clear()

    listening = environment(broker, "listener", None).bus(API)
    await listening.open()
    listener = listening.consumer("scheduler.control.{process}", receive)  # type: ignore[arg-type]
    await listener.start()
    running = asyncio.create_task(listener.run())
    env = environment(broker, "w1", 3600.0)
    bus = env.bus(API)
    service = Service("w", clock=env.clock)
    service.add_resource(bus.open, bus.close)
    announce_presence(service, env, bus, "placement")
    service.add_preparation(lambda: until("preparing"))
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(stop))
    await until("ready")
    stop.set()
    await task
    await until(STOPPED)
    await listener.drain(1.0)
    await running
    await listening.close()


async def test_without_an_interval_nothing_is_published() -> None:
    env = environment(MemoryBroker(SystemClock()), "w1", None)
    service = Service("w", clock=env.clock)
    announce_presence(service, env, env.bus(API), "placement")
    stop = asyncio.Event()
    stop.set()
    await service.run(stop)
    assert not [name for name, _ in service._task_makers]
