"""The heartbeat of every worker, and a scheduler's list of workers by their heartbeats."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Count, Label, Message, Word

Phrase = Annotated[str, Bound(max_length=255)]


STOPPED = "stopped"  # the phase in a worker's last heartbeat: it has drained, and no other follows


class WorkerHeartbeat(Message, frozen=True, kw_only=True, tag="worker.heartbeat.v1"):
    """A worker's heartbeat: published every `every_s` seconds on its own bus, and lost without harm."""

    role: Word
    worker: Label  # the process's name, unique at one time
    host: Phrase
    pid: Count
    version: Phrase
    started_at: float  # seconds since the epoch
    phase: Word  # of its life (`ready`, `draining`, ...)
    not_ready: Annotated[tuple[Phrase, ...], Bound(max_length=16)] = ()  # the servers that it waits for
    # {queue: deliveries that it has taken and not answered}
    in_flight: Annotated[dict[Phrase, Count], Bound(max_length=64)] = {}
    every_s: Annotated[float, Bound(gt=0, le=3600)] = 5.0
    # what its role counts since its start; of a nova-scheduler's shadow {difference: calls}
    counts: Annotated[dict[Phrase, Count], Bound(max_length=64)] = {}
    # how old the copies are that it decides by, in seconds
    ages_s: Annotated[dict[Phrase, Annotated[float, Bound(ge=0)]], Bound(max_length=16)] = {}


class WorkersQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="workers.query.v1"):
    """Query a scheduler for the workers whose heartbeats it has received."""

    role: Word | None = None  # only this one
    limit: Annotated[int, Bound(ge=1, le=100_000)] = 1000


class WorkerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker's newest heartbeat."""

    heartbeat: WorkerHeartbeat
    bus: str  # where it was received
    last_seen_s: float  # seconds since then
    silent: bool = False  # too many heartbeats were missed


class WorkersPage(Message, frozen=True, kw_only=True, tag="workers.page.v1"):
    """Reply to a WorkersQuery, by role, bus and name."""

    workers: tuple[WorkerRecord, ...] = ()
    since_s: float = 0.0  # how long the scheduler that answers has listened
