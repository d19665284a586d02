"""Operators' objects in a scheduler: loaded at start and whenever they change, and changed on request.

A change is one transaction; then it is announced on the bus, and every scheduler loads the new revision. An
announcement that is lost is made up for by a look at the revision every RELOAD_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.base import MAX_REASON, Message, Refusal
from bus.contracts.objects import (
    ChangedObject,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    ObjectsRevision,
)
from bus.faults import DatabaseUnavailable
from bus.port import BusError
from bus.retrying import OBJECTS, Retrying
from bus.service.settings import SettingsError
from scheduler_worker import metrics, plugins
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.flavors import FlavorInvalid, ParsedFlavor, parse
from scheduler_worker.domain.fleet import zones_of
from scheduler_worker.domain.objects import (
    IN_USE,
    INVALID,
    ChangePlan,
    bodies_after,
    effective_config,
    plan,
    seeds,
    zones_that_move,
)
from scheduler_worker.domain.plugins import Filter, Weighing
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.view import HostsView, Membership
from scheduler_worker.store.objects import ObjectsOnRecord, ObjectStore

log = structlog.get_logger(__name__)

RELOAD_S = 10.0
MAX_BUILDS_COUNTED = 1000
SEEDED_BY = "settings"


class Configured(Struct, frozen=True):
    """A configuration with everything that is made from it."""

    config: SchedulerConfig
    flavors: dict[str, ParsedFlavor]
    filters: list[Filter]
    weighings: list[Weighing]


def configured(config: SchedulerConfig) -> Configured:
    """Parse flavors, load filters and weighers. Raises FlavorInvalid or SettingsError."""
    return Configured(
        config,
        {name: parse(name, flavor) for name, flavor in config.flavors.items()},
        plugins.filters(config),
        plugins.weighings(config),
    )


class ObjectRegistry:
    """Keeps a scheduler's configuration up to date with the objects on record. settings: its own, without objects."""

    def __init__(
        self, store: ObjectStore, selector: Selector, settings: SchedulerConfig, *, bus: Bus, clock: Clock
    ) -> None:
        self._store = store
        self._selector = selector
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._loading = asyncio.Lock()  # what was read first is not adopted last

    async def open(self) -> None:
        """Seed an empty system from the settings, and load the objects. Waits while the database is away."""
        await Retrying(OBJECTS, self._clock).call(
            self._seed_and_load, lambda error: isinstance(error, DatabaseUnavailable)
        )

    async def run(self) -> None:
        """Look at the revision every RELOAD_S."""
        while True:
            await self._clock.sleep(RELOAD_S)
            await self._reload()

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue `scheduler.objects.{process}`: a new revision was announced."""
        newest = max((one.message.revision for one in batch if isinstance(one.message, ObjectsRevision)), default=0)
        if newest > self._selector.revision:
            await self._reload()
        return [Done()] * len(batch)

    async def answer(self, message: Message) -> Outcome:
        """Carry out a change, or answer a query."""
        try:
            match message:
                case ObjectsChange():
                    changed = await self.change(message)
                    return Done(reply=changed) if isinstance(changed, ObjectsChanged) else _refuse(changed)
                case ObjectsQuery():
                    return Done(reply=await self._page(message))
                case ObjectLogQuery():
                    return Done(reply=ObjectLogPage(entries=tuple(await self._store.log(message))))
        except DatabaseUnavailable as fault:  # answered now: the requester does not wait until it is back
            return Refuse(fault.code, fault.reason)
        raise AssertionError(message)

    async def change(self, asked: ObjectsChange) -> ObjectsChanged | Refusal:
        """Change objects, all of them or none; in force here when this returns."""
        async with self._loading:
            return await self._change(asked)

    async def _change(self, asked: ObjectsChange) -> ObjectsChanged | Refusal:
        async with self._store.changing() as unit:
            present = unit.present
            planned = plan(asked, present.objects)
            if isinstance(planned, Refusal):
                return planned
            after = self._checked(present, planned)
            if isinstance(after, Refusal):
                return after
            stranded = None if asked.force else await self._stranded(planned, after.config)
            if stranded is not None:
                return Refusal(code=IN_USE, reason=stranded[:MAX_REASON])
            if asked.dry_run or not planned.changed:
                return ObjectsChanged(revision=present.revision, changed=planned.changed)
            revision = await unit.write(
                planned.changed, who=asked.who, why=asked.why, at=self._clock.time(), forced=asked.force
            )
        log.info("objects.changed", revision=revision, who=asked.who, objects=_named(planned.changed))
        self._adopt(after, revision)
        try:
            await self._bus.publish(ObjectsRevision(revision=revision))
        except BusError as error:  # the others look at the revision themselves
            log.warning("objects.not_announced", revision=revision, code=error.code)
        return ObjectsChanged(revision=revision, changed=planned.changed)

    async def _seed_and_load(self) -> None:
        async with self._store.changing() as unit:
            if unit.present.revision == 0 and (found := seeds(self._settings)):
                await unit.write(found, who=SEEDED_BY, why="the settings of the first scheduler", at=self._clock.time())
        await self._reload()

    async def _reload(self) -> None:
        """Load the objects if their revision is another. One that was set back (a restore) is another, too."""
        async with self._loading:
            await self._load()

    async def _load(self) -> None:
        try:
            found = await self._store.read(unless=self._selector.revision)
        except DatabaseUnavailable as fault:
            if self._selector.revision == 0:
                raise
            log.warning("objects.not_loaded", code=fault.code)
            return
        if found is None:
            return
        try:
            made = configured(effective_config(self._settings, bodies_after(found.objects, ())))
        except (ValueError, SettingsError) as error:
            # Another scheduler, of another version or with other plug-ins, has taken them: this one goes on as it is.
            log.error("objects.not_usable", revision=found.revision, reason=str(error))
            if self._selector.revision == 0:
                raise SettingsError(INVALID, f"the objects on record cannot be used here: {error}") from error
            return
        self._adopt(made, found.revision)
        log.info("objects.loaded", revision=found.revision, objects=len(found.objects))

    def _adopt(self, made: Configured, revision: int) -> None:
        self._selector.configure(
            made.config, flavors=made.flavors, filters=made.filters, weighings=made.weighings, revision=revision
        )
        metrics.OBJECTS_REVISION.set(revision)

    def _checked(self, present: ObjectsOnRecord, planned: ChangePlan) -> Configured | Refusal:
        """The configuration after a change: one that no scheduler could use is refused before it is written."""
        try:
            return configured(effective_config(self._settings, bodies_after(present.objects, planned.changed)))
        except FlavorInvalid as error:
            return Refusal(code=error.code, reason=str(error)[:MAX_REASON])
        except SettingsError as error:
            return Refusal(code=error.code, reason=error.reason[:MAX_REASON])
        except ValueError as error:
            return Refusal(code=INVALID, reason=str(error)[:MAX_REASON])

    async def _stranded(self, planned: ChangePlan, after: SchedulerConfig) -> str | None:
        """Why a change would leave instances outside of what they asked for; None: it does not."""
        if any(one.kind is ObjectKind.AGGREGATE for one in planned.changed):
            why = self._moved_zones(after)
            if why is not None:
                return why
        for name in planned.flavors_deleted:
            count = await self._store.builds_of(name, MAX_BUILDS_COUNTED)
            if count:
                some = f"{count} or more" if count == MAX_BUILDS_COUNTED else str(count)
                return f"flavor {name!r} is that of {some} instances"
        return None

    def _moved_zones(self, after: SchedulerConfig) -> str | None:
        view = self._selector.all_hosts()
        book = view.book
        used = np.zeros(len(view), dtype=np.bool_)
        for name in book.resource_classes():
            used |= book.usage(name, view.rows) > 0
        names = [book.name_of(row) for row in view.rows.tolist()]
        before = _zone_of_each(view, names, self._selector.config.default_availability_zone)
        changed = HostsView(
            book, view.table, Membership(after.aggregates), rows=view.rows, index=view.index, down=view.down
        )
        then = _zone_of_each(changed, names, after.default_availability_zone)
        return zones_that_move(before, then, [name for name, has in zip(names, used.tolist(), strict=True) if has])

    async def _page(self, query: ObjectsQuery) -> ObjectsPage:
        found = await self._store.read()
        assert found is not None
        wanted = [
            stored
            for key, stored in sorted(found.objects.items())
            if query.kind in (None, stored.kind)
            and query.name in (None, stored.name)
            and (query.after is None or key > query.after)
        ]
        return ObjectsPage(
            revision=found.revision, objects=tuple(wanted[: query.limit]), more=len(wanted) > query.limit
        )


def _refuse(refusal: Refusal) -> Refuse:
    return Refuse(refusal.code, refusal.reason)


def _named(changed: Sequence[ChangedObject], limit: int = 10) -> list[str]:
    return [f"{one.kind.value} {one.name}" for one in changed[:limit]]


def _zone_of_each(view: HostsView, names: Sequence[str], default_zone: str) -> dict[str, str]:
    zones, zone = zones_of(view, default_zone)
    return {name: zones[at] for name, at in zip(names, zone.tolist(), strict=True)}
