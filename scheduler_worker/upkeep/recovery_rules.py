"""What a cell whose database was restored is told of its instances, by the schedulers' map and by placement. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import DatabaseMark, encode
from bus.contracts.operations import CellFence
from bus.contracts.placement_queries import ConsumerRecord
from bus.contracts.recovery import (
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    MAX_PLACES,
    MAX_PROVIDERS,
    CellKnown,
    CellRecovering,
    KnownPlace,
    KnownRecord,
)
from scheduler_worker.build.decision import instance_spec
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext, RecordedAction, flavor_of, image_of, is_transferred_in


class UuidRange(Struct, frozen=True):
    """The uuids that a page is of, in their order."""

    uuids: tuple[str, ...]
    last: str = ""  # the range ends with this one ("": it has no end)

    def upto(self, last: str) -> UuidRange:
        """The part of it up to a uuid ("": all of it)."""
        if not last or (self.last and self.last <= last):
            return self
        return UuidRange(tuple(one for one in self.uuids if one <= last), last)

    def first(self, count: int) -> UuidRange:
        """The part of it that has so many, or all of it."""
        return self if len(self.uuids) <= count else self.upto(self.uuids[count - 1])


def joined(one: UuidRange, other: UuidRange) -> UuidRange:
    """What two ranges that begin alike have together, as far as both reach."""
    one, other = one.upto(other.last), other.upto(one.last)
    return UuidRange(tuple(sorted({*one.uuids, *other.uuids})), one.last).first(MAX_KNOWN)


class InstanceSources(Struct, frozen=True):
    """What is on record of one uuid."""

    known: ActionContext
    actions: Sequence[RecordedAction]  # of the instance, the newest first
    consumers: Mapping[str, ConsumerRecord]  # {uuid: what it holds}, of the instance and its migrations


def known_record(
    uuid: str, facts: InstanceSources, host_of: Callable[[str], KnownPlace | None], config: SchedulerConfig
) -> KnownRecord:
    """What the schedulers and placement have of one instance, or of a consumer that is none. host_of(uuid): a host with
    its name and service; None: it is a provider that shares with hosts.
    """
    build, own = facts.known.build, facts.consumers.get(uuid)
    others = (facts.consumers.get(one.request_id) for one in facts.actions)
    # An attempt: the id of a move is the uuid of an instance, too.
    own_consumers = [one for one in (own, *others) if one is not None and (one is own or not one.attempt)]
    record = KnownRecord(
        instance_uuid=uuid,
        project_id=own_consumers[0].project_id if own_consumers else "",
        attempt=0 if own is None else own.attempt,
        places=tuple(islice((place for one in own_consumers for place in _places(one, uuid, host_of)), MAX_PLACES)),
    )
    if build is None or facts.known.build_request is None:
        return record
    request, image = facts.known.build_request, image_of(facts.known)
    if image != request.image:
        request = replace(request, image=image, image_source=None)  # of another image its cell alone knows the source
    request = replace(request, flavor=flavor_of(facts.known))
    actions = (one for one in facts.actions if one.request_id == build.current.under_way)
    under_way = next(actions, None)
    return replace(
        record,
        project_id=record.project_id or build.project_id,
        state=build.state,
        condition=build.current.condition,
        cell=build.cell,
        attempt=max(record.attempt, build.attempt, build.current.first_attempt),
        sequence=build.sequence,
        spec=instance_spec(request, config),
        snapshot=build.current.snapshot,
        request_id=build.current.under_way or "",
        kind=None if under_way is None else under_way.kind,
        transferred_in=under_way is not None and is_transferred_in(under_way),
    )


def _places(
    consumer: ConsumerRecord, instance: str, host_of: Callable[[str], KnownPlace | None]
) -> Iterable[KnownPlace]:
    """The hosts of one consumer. No claim of berth's names more providers than a place may have."""
    allocations = dict(islice(sorted(consumer.allocations.items()), MAX_PROVIDERS))
    migration = None if consumer.consumer == instance else consumer.consumer
    for uuid in consumer.hosts:
        if (host := host_of(uuid)) is not None:
            yield replace(host, allocations=allocations, migration=migration)


class KnownPage:
    """A page that is filled in order. It ends where the next record would make it too large."""

    def __init__(
        self,
        question: CellRecovering,
        wanted: UuidRange,
        fences: Collection[CellFence],
        *,
        marks: tuple[DatabaseMark, ...] = (),
    ) -> None:
        there = () if question.asked else (one for one in fences if one.host_uuid > question.after)
        self._fences = sorted(there, key=lambda one: one.host_uuid)
        hosts = UuidRange(tuple(one.host_uuid for one in self._fences)).first(MAX_KNOWN)
        self.wanted = wanted.upto(hosts.last)
        self.is_full = False
        self._question = question
        self._marks = marks
        self._records: list[KnownRecord] = []
        self._bytes = 0

    def add(self, record: KnownRecord) -> None:
        """Add the next record, if there is room."""
        size = len(encode(record))
        self.is_full = self.is_full or (bool(self._records) and self._bytes + size > MAX_KNOWN_BYTES)
        if not self.is_full:
            self._records.append(record)
            self._bytes += size

    def message(self) -> CellKnown:
        """The page as it is sent."""
        asked, last = self._question, self._records[-1].instance_uuid if self.is_full else self.wanted.last
        return CellKnown(
            cell=asked.cell,
            process=asked.process,
            query_id=asked.query_id,
            instances=tuple(self._records),
            fences=tuple(one for one in self._fences if not last or one.host_uuid <= last),
            last=last,
            marks=self._marks,
        )
