"""One project of a gateway: its virtual host and its queue of events, for as long as the settings name it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import structlog

from bus.bus import Bus
from bus.codec import Malformed
from bus.consuming.consumer import Consumer
from bus.contracts.base import Message
from bus.contracts.build import EventsMissed
from bus.contracts.catalogue import destination, door_destination
from bus.fair_queue import Turns
from bus.faults import Transient
from bus.refused_requests import unreadable_events
from bus.retrying import UNTIL_AVAILABLE, Retrying
from bus.transport import BusError, Delivery, Subscription
from gateway import metrics
from gateway.forwarder import EventForwarder, RequestForwarder, end_of

log = structlog.get_logger(__name__)

# A gateway takes so many broker messages of a project ahead, of a megabyte at most.
PREFETCH = 16
# What of one project is under way at a time: what it requests is handled beside others', and so many cost these little.
MAX_BATCH = 16
REOPEN_S = 5.0  # the interval at which a virtual host is tried again that could not be entered


class ProjectLink:
    """Consumes the requests of a project and publishes its events. A fault of its virtual host ends no gateway."""

    def __init__(self, project: str, api: Bus, clients: Bus, turns: Turns) -> None:
        self.project = project
        self._api = api
        self._clients = clients
        self._requests = RequestForwarder(project, api, clients, door_destination, turns)
        self._queries = RequestForwarder(project, api, clients, destination, turns)
        self._consumers = [
            Consumer(
                clients,
                queue,
                handler,
                max_batch=MAX_BATCH,
                concurrency=1,  # the order of a project's requests is kept
                prefetch=PREFETCH,
                on_malformed=self._on_malformed,
            )
            for queue, handler in (
                (
                    "gateway.dead_letters",
                    EventForwarder(clients, partial(end_of, project=project)),
                ),  # first: letters go there
                ("gateway.requests", self._requests),
                ("gateway.queries", self._queries),
            )
        ]
        self._events = Consumer(
            api, "gateway.events.{project}", EventForwarder(clients), concurrency=1, prefetch=256, project=project
        )
        self._missed: Subscription | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self.opened = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled or drained. A virtual host that is not there, or refuses this user, is tried again."""
        while True:
            try:
                await self._run()
                return
            except (BusError, Transient) as fault:
                code = getattr(fault, "code", "bus.error")
                log.warning("gateway.project_away", project=self.project, code=code, reason=str(fault))
            self.opened.clear()
            await self._api.clock.sleep(REOPEN_S)

    async def _run(self) -> None:
        missed = await self._api.declare("gateway.missed.{project}", project=self.project)
        await self._api.declare("gateway.events.{project}", project=self.project)  # events wait from now on
        await self._clients.open()
        for consumer in (*self._consumers, self._events):
            if not consumer.started:
                await consumer.start()
        if self._missed is None:
            self._missed = await self._api.transport.consume(missed, self._on_missed, prefetch=1)
        self.opened.set()
        async with asyncio.TaskGroup() as running:
            for consumer in (*self._consumers, self._events):
                running.create_task(consumer.run())

    async def drain(self, grace_s: float) -> None:
        """Take nothing more, and finish what is under way within the grace time (seconds)."""
        if self._missed is not None:
            await self._missed.cancel()
        await asyncio.gather(*(consumer.drain(grace_s) for consumer in (*self._consumers, self._events)))
        await asyncio.gather(*(one.drain(grace_s) for one in (self._requests, self._queries)))

    async def close(self) -> None:
        """Close the connection. What is not acknowledged goes back."""
        await self.drain(0.0)
        for report in self._reports:
            report.cancel()
        await self._clients.close()
        for metric in (metrics.WAITING, metrics.OLDEST_S, metrics.CONNECTED):
            with suppress(KeyError):  # it was never measured
                metric.remove(self.project)

    async def refresh(self) -> None:
        """Set the metrics of the project."""
        is_connected = self.opened.is_set() and self._clients.transport.connected
        metrics.CONNECTED.labels(self.project).set(is_connected)
        metrics.OLDEST_S.labels(self.project).set(self._requests.oldest_s)
        if is_connected:
            try:
                waiting = await self._clients.transport.depth("gateway.requests")
                metrics.WAITING.labels(self.project).set(waiting + self._consumers[1].in_flight)
            except BusError as error:
                log.info("gateway.not_measured", project=self.project, code=error.code)

    def _on_malformed(self, malformed: Malformed) -> tuple[Message, ...]:
        return unreadable_events(malformed, self.project)

    def _on_missed(self, delivery: Delivery) -> None:
        """The queue of events was full: one of those that it dropped came here."""
        report = asyncio.get_running_loop().create_task(self._say_missed(delivery))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _say_missed(self, delivery: Delivery) -> None:
        missed = EventsMissed(project_id=self.project, at=self._api.clock.time())
        try:  # it stays here until its clients are told: one that is given back comes again at once
            await Retrying(UNTIL_AVAILABLE, self._api.clock, self._api.rng).call(
                lambda: self._clients.publish(missed),
                lambda error: isinstance(error, BusError) and not delivery.is_lost,
            )
        except BusError:  # its connection is lost, so it comes again
            return
        except BaseException:  # this link ends: another gateway says it
            delivery.nack(requeue=True)
            raise
        metrics.EVENTS_MISSED.labels(self.project).inc()
        log.warning("gateway.events_missed", project=self.project)
        delivery.ack()
