"""What the scheduler keeps, as its handlers see it: one unit of work commits state and outgoing messages together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from msgspec import Struct

from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest, BuildState, FunnelStep, StoryLine
from bus.outbox import Addressed, Relay, Rows
from scheduler_worker.domain.records import Standing

T = TypeVar("T")


class NewBuild(Struct, frozen=True, kw_only=True):
    """A request to be put on record. `digest`: of its whole content, so that a repeat is told from a clash."""

    request: BuildRequest
    digest: bytes
    state: BuildState
    sequence: int
    terminal: bool = False
    code: str = ""
    reason: str = ""
    story: tuple[StoryLine, ...] = ()


class OnRecord(Struct, frozen=True, kw_only=True):
    """What the record says of a request that came (again). cell: it was dispatched there, so what is claimed is too."""

    state: BuildState
    digest: bytes
    delete_requested: bool
    project_id: str
    cell: str | None = None
    code: str = ""


class Decided(Struct, frozen=True, kw_only=True):
    """The end of scheduling, one way or the other: dispatched to a cell, or failed with the funnel."""

    instance_uuid: str
    state: BuildState
    sequence: int
    terminal: bool = False
    cell: str | None = None
    host: str | None = None
    host_uuid: str | None = None
    code: str = ""
    reason: str = ""
    funnel: tuple[FunnelStep, ...] = ()
    story: tuple[StoryLine, ...] = ()


class Kept(Struct, frozen=True, kw_only=True):
    """A locked record: where it stands, and whether somebody asked to delete it while it was being scheduled."""

    standing: Standing
    delete_requested: bool


class Change(Struct, frozen=True, kw_only=True):
    """A locked record's new standing, with what is added to its story."""

    standing: Standing
    delete_requested: bool
    story: tuple[StoryLine, ...] = ()


class Forgotten(Struct, frozen=True):
    """How many records one statement dropped, and when the youngest of them was created."""

    count: int
    until: float


# A build that stands so has no machine and never will.
OVER = (BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED)


class Stale(Exception):
    """A unit believed wrong; nothing was written. The same with locks finds out how it is."""


class Unit(Protocol):
    """One transaction. What is said in it is published after it has committed, and only then."""

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """Put requests on record; returns those that were not there."""

    async def read(self, instances: Sequence[str]) -> dict[str, OnRecord]:
        """What is on record now."""

    async def decide(self, decided: Sequence[Decided], now: float) -> set[str]:
        """Write down the decisions on requests that still wait for one and were not deleted; returns those written.

        Dispatched ones are mapped to their cell, once and for all (C-4).
        """

    async def lock(self, instances: Sequence[str]) -> dict[str, Kept]:
        """Read records and hold them until the end of the unit."""

    async def change(self, changes: Sequence[Change], now: float) -> None:
        """Write locked records."""

    def say(self, message: Addressed) -> None:
        """Publish this after the commit."""


class SchedulerStore(Protocol):
    """Build requests and the instance-to-cell map. Adapters: `store.postgres`, `store.memory`."""

    @property
    def outbox(self) -> Rows:
        """The rows behind `Unit.say`, for the relay."""

    @property
    def ready(self) -> bool:
        """Whether it is open (for /readyz)."""

    async def open(self) -> None:
        """Connect and migrate; waits while the database is away."""

    async def close(self) -> None:
        """Disconnect."""

    def publish_through(self, relay: Relay) -> None:
        """Who publishes what units say, once they have committed. Before the first unit."""

    def unit(self, *, durable: bool = True, believing: bool = False) -> AbstractAsyncContextManager[Unit]:
        """A transaction. Not durable: for what a redelivered message would write again after a crash.

        believing: every request is new, every decided one still waits, every locked one is as this process left it;
        at its end the unit raises Stale when that is not so. For PostgreSQL this is one round trip instead of five.
        """

    async def forget(self, before: float, limit: int, start: float = 0.0) -> Forgotten:
        """Drop builds that ended without a machine and last changed before, oldest first from a time of creation on.

        With them goes where they were mapped to. What lives, or may still come to live, is kept whatever its age.
        """

    async def flush(self) -> None:
        """Return when all that was committed is on disk, what was in no hurry too."""

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build, or a page of them, newest first."""


async def quickly(store: SchedulerStore, work: Callable[[Unit], Awaitable[T]], *, durable: bool = True) -> T:
    """Do this work in a unit that believes; where it believes wrong, once more in one that locks."""
    try:
        async with store.unit(durable=durable, believing=True) as unit:
            return await work(unit)
    except Stale:
        async with store.unit(durable=durable) as unit:
            return await work(unit)
