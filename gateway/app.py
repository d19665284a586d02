"""Wiring of a gateway: the API bus, and a virtual host of each project."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from bus.bus import API
from bus.clock import Clock
from bus.contracts.queues import project_bus
from bus.fair_queue import Turns
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.worker_heartbeat import add_heartbeat
from gateway.config import GatewayConfig
from gateway.project import ProjectLink

log = structlog.get_logger(__name__)

READ_PROJECTS_S = 30.0
ENTERED_S = 5.0
DRAIN_S = 5.0  # the grace time for what is under way when a project is removed


def build(
    env: Environment, config: GatewayConfig, read_projects: Callable[[], Sequence[str]] | None = None
) -> WorkerRuntime:
    """One gateway process. Any number may run; each project is held by one of them at a time.

    read_projects: reads them anew, and raises SettingsError; None: they stay as they are.
    """
    bus = env.bus(API)
    bus.publishes_as("gateway")
    service = WorkerRuntime("gateway", clock=env.clock, log=log)
    service.add_resource(bus.open, bus.close)
    add_heartbeat(service, env, bus, "gateway")
    turns = Turns()
    projects = Projects(
        lambda name: ProjectLink(name, bus, env.bus(project_bus(name)), turns), config.projects, env.clock
    )
    service.add_task("projects", lambda: projects.run(read_projects))
    service.add_preparation(projects.entered)
    service.add_drain(projects.drain)
    service.add_refresh(projects.refresh)
    service.add_bus_check("bus", lambda: bus.unavailable_reason)
    return service


class Projects:
    """The projects of one gateway, which begin and end while it runs."""

    def __init__(self, link: Callable[[str], ProjectLink], names: Sequence[str], clock: Clock) -> None:
        self._link = link
        self._names = names
        self._clock = clock
        self._links: dict[str, tuple[ProjectLink, asyncio.Task[None]]] = {}
        self._is_draining = False

    async def run(self, read: Callable[[], Sequence[str]] | None) -> None:
        """Follow the settings until cancelled."""
        try:
            while True:
                if not self._is_draining:
                    await self._follow()
                await self._clock.sleep(READ_PROJECTS_S)
                if read is not None:
                    self._read(read)
        finally:
            await asyncio.gather(*map(self._end, list(self._links)))

    async def entered(self) -> None:
        """Wait a bounded time for the projects' virtual hosts, so that in a system whose processes start together all
        are served when it is ready.
        """
        await self._follow()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENTERED_S):
                await asyncio.gather(*(link.opened.wait() for link, _ in self._links.values()))

    async def drain(self, grace_s: float) -> None:
        """Take nothing more, and finish what is under way within the grace time (seconds)."""
        self._is_draining = True
        await asyncio.gather(*(link.drain(grace_s) for link, _ in self._links.values()))

    async def refresh(self) -> None:
        """Set the metrics of each project."""
        await asyncio.gather(*(link.refresh() for link, _ in self._links.values()))

    def _read(self, read: Callable[[], Sequence[str]]) -> None:
        """Read the names anew. None at all are none: the file may be just being written."""
        try:
            if names := read():
                self._names = names
            else:
                log.warning("gateway.projects_unread", reason="the settings name no project: those there were stay")
        except SettingsError as error:
            log.warning("gateway.projects_unread", code=error.code, reason=error.reason)

    async def _follow(self) -> None:
        await asyncio.gather(*map(self._remove, self._links.keys() - set(self._names)))
        for name in self._names:
            if name in self._links and self._links[name][1].done():  # a defect of one project ends no other
                await self._end(name)
            if name not in self._links:
                link = self._link(name)
                self._links[name] = link, asyncio.create_task(link.run(), name=f"project {name}")
                log.info("gateway.project_added", project=name)

    async def _remove(self, name: str) -> None:
        await self._links[name][0].drain(DRAIN_S)
        await self._end(name)
        log.info("gateway.project_removed", project=name)

    async def _end(self, name: str) -> None:
        link, task = self._links.pop(name)
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception):
            log.error("gateway.project_failed", project=name, exc_info=error)
        await link.close()
