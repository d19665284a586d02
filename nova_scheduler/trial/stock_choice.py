"""What the stock scheduler has chosen for a call, by what the call's instances then hold in its Placement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from bus.clock import Clock
from bus.contracts.placement import LocatePage, LocateRequest
from bus.contracts.placement_queries import ProjectUsagePage
from bus.faults import Fault
from nova_scheduler.cloud.poller import WAITING
from nova_scheduler.cloud.rest import NovaRefused, NovaUnavailable
from nova_scheduler.cloud.state import NovaState
from nova_scheduler.stock.comparison import Hosts, SchedulerAnswer
from scheduler_worker.placement_client import PlacementUnavailable

PATIENT_PASSES: Final = 3  # without a claim, after which Nova is asked whether the servers still wait for a host
NO_HOST: Final = "No valid host was found."
UNSEEN: Final = SchedulerAnswer(reason="its choice was not seen", is_decided=False)
GONE: Final = frozenset({None, "deleting", "soft-deleting"})  # of which no claim is left to be seen


class MirroredPlacement(Protocol):
    """A replica of Nova's Placement (`PlacementMirror`)."""

    async def next_pass(self) -> None:
        """Wait for the end of a complete read that begins from now on."""

    def hosts_of(self, consumer: str) -> tuple[str, ...]:
        """The roots of the trees in which a consumer holds something."""

    def is_left_out(self, consumer: str) -> bool:
        """Whether what it holds does not count."""

    def leave_out(self, consumers: Iterable[str]) -> None:
        """What these hold does not count until `count_again` was called as often."""

    def count_again(self, consumers: Iterable[str]) -> None:
        """The opposite of `leave_out`."""


class ServerTasks(Protocol):
    """What is asked of Nova (`NovaApi`)."""

    async def task_of(self, instance: str) -> str | None:
        """The task state of a server, "" for none; None: Nova has no such server."""


class MirroredInstances:
    """Where instances are by the mirror (`InstancesLocated`), without those that are being decided."""

    def __init__(self, mirror: MirroredPlacement) -> None:
        self._mirror = mirror

    async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        """Those that Nova names: its Placement knows no server groups."""
        return [LocatePage(hosts=self._hosts_of(one.consumers)) for one in requests]

    async def usage(self, projects: Sequence[str]) -> ProjectUsagePage | Fault:
        """Not known: quotas are Nova's."""
        return PlacementUnavailable(f"a trial counts no usage of {len(projects)} projects")

    def _hosts_of(self, consumers: Sequence[str]) -> dict[str, tuple[str, ...]]:
        counted = (one for one in consumers if not self._mirror.is_left_out(one))
        return {one: hosts for one in counted if (hosts := self._mirror.hosts_of(one))}


class StockChoices:
    """Reads the choices of a stock scheduler that is not asked."""

    def __init__(
        self,
        mirror: MirroredPlacement,
        nova_state: NovaState,
        servers: ServerTasks,
        *,
        clock: Clock,
        wait_s: float,  # that a choice is waited for
    ) -> None:
        self._mirror = mirror
        self._nova_state = nova_state
        self._servers = servers
        self._clock = clock
        self._wait_s = wait_s

    @asynccontextmanager
    async def left_out(self, instances: Sequence[str]) -> AsyncIterator[None]:
        """Within, the mirror is of a moment after the call came, and without what the call's instances hold. Raises
        TimeoutError: it was not read in time.
        """
        self._mirror.leave_out(instances)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._mirror.next_pass()
            yield
        finally:
            self._mirror.count_again(instances)

    async def choice(self, instances: Sequence[str], ignored: Sequence[str], heard_s: float) -> SchedulerAnswer:
        """The host of each instance, once two reads have shown it, or that there is none. ignored: hosts that the call
        rules out: an evacuated server still holds its source. heard_s: when the call came (monotonic); the answer took
        so long until a read had shown it.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._seen(instances, frozenset(ignored), heard_s)
        except TimeoutError:
            return UNSEEN

    async def _seen(self, instances: Sequence[str], ignored: frozenset[str], heard_s: float) -> SchedulerAnswer:
        before, seen_s = self._chosen(instances, ignored), self._clock.monotonic()
        passes, has_ended = 0, False
        while True:
            await self._mirror.next_pass()
            passes += 1
            chosen = self._chosen(instances, ignored)
            if chosen != before:
                before, seen_s = chosen, self._clock.monotonic()
            elif len(chosen) == len(instances):
                return SchedulerAnswer(hosts=chosen, took_s=seen_s - heard_s)
            elif has_ended:
                return UNSEEN if chosen else SchedulerAnswer(reason=NO_HOST, took_s=seen_s - heard_s)
            elif passes >= PATIENT_PASSES:
                seen_s = self._clock.monotonic()
                task = await self._task_of(instances)
                if task in GONE:
                    return UNSEEN
                has_ended = task not in WAITING

    def _chosen(self, instances: Sequence[str], ignored: frozenset[str]) -> Hosts:
        """The hosts of those instances that have one."""
        found = (self._host_of(one, ignored) for one in instances)
        return tuple(one for one in found if one is not None)

    def _host_of(self, instance: str, ignored: frozenset[str]) -> tuple[str, str] | None:
        for root in self._mirror.hosts_of(instance):
            node = self._nova_state.node(root)
            if node is None:
                return (root, root)
            if node.host not in ignored:
                return (node.host, node.nodename)
        return None

    async def _task_of(self, instances: Sequence[str]) -> str | None:
        """The task state of the first of these servers that there is; None: there is none."""
        try:
            for one in instances:
                if (task := await self._servers.task_of(one)) is not None:
                    return task
        except (NovaUnavailable, NovaRefused):
            return next(iter(WAITING))  # it may still wait
        return None
