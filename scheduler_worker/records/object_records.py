"""The objects that operators define, as they are recorded: bodies, changes, and what each kind holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.base import Word, reason_of
from bus.contracts.drains import DrainRecord
from bus.contracts.objects import (
    SCHEDULING,
    AccessToken,
    Aggregate,
    AuditRepair,
    CellDecision,
    CellState,
    ChangedObject,
    DeletedService,
    FenceRecord,
    Flavor,
    GroupDefinition,
    HostDecision,
    ObjectKind,
    ProjectQuota,
    SchedulingRules,
    StoredObject,
    group_named,
)
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import ServerGroup
from bus.faults import RequestRefused
from scheduler_worker.records import fence_record

INVALID = "object.invalid"
MAX_ENTRY = 200  # characters of an entry that a refusal names
UNKNOWN = "object.unknown"

IN_USE = "object.in_use"
ZONE_CONFLICT = "aggregate.zone_conflict"

MAX_BODY_BYTES = 64 * 1024


class BodyInvalid(RequestRefused, ValueError):
    """A body that this scheduler cannot use: of a change, or on record by a scheduler of another version."""

    code = INVALID


BODIES: Mapping[ObjectKind, type[Struct]] = {
    ObjectKind.FLAVOR: Flavor,
    ObjectKind.AGGREGATE: Aggregate,
    ObjectKind.QUOTA: ProjectQuota,
    ObjectKind.SCHEDULING: SchedulingRules,
    ObjectKind.HOST: HostDecision,
    ObjectKind.FENCE: FenceRecord,
    ObjectKind.CELL: CellDecision,
    ObjectKind.DRAIN: DrainRecord,
    ObjectKind.GROUP: GroupDefinition,
    ObjectKind.REPAIR: AuditRepair,
    ObjectKind.SERVICE: DeletedService,
    ObjectKind.TOKEN: AccessToken,
}

Key = tuple[ObjectKind, str]
Objects = Mapping[Key, StoredObject]


class ChangeActor(Struct, frozen=True):
    """The entry that the log of changes keeps about a change beside the objects."""

    name: str
    reason: str
    at: float  # seconds since the epoch
    forced: bool = False


class RecordedObjects(Struct, frozen=True):
    """All objects, and the revision that they are of. Revision 0: none was ever written."""

    revision: int
    objects: Objects
    token: str = ""  # of this revision and no other, of whatever history; "": it is not on record


_encode = msgspec.json.Encoder(order="deterministic").encode


class ChangePlan(Struct, frozen=True):
    """The effect of a change: the objects to write under the new revision, and those to delete."""

    changed: tuple[ChangedObject, ...]

    @property
    def flavors_deleted(self) -> tuple[str, ...]:
        """The names of flavors that the change deletes."""
        return tuple(one.name for one in self.changed if one.kind is ObjectKind.FLAVOR and one.after is None)

    @property
    def flavors_remade(self) -> tuple[str, ...]:
        """The names of flavors whose machines would change: another size, or other extra specs.

        A move of an instance claims by its flavor at the time of the move, not of the build.
        """
        return tuple(
            one.name
            for one in self.changed
            if one.kind is ObjectKind.FLAVOR
            and one.before is not None
            and one.after is not None
            and _without_projects(one.before) != _without_projects(one.after)
        )

    @property
    def groups_changed(self) -> tuple[tuple[str, ServerGroup], ...]:
        """(name, group before the change) of the server groups that get another rule, another uuid, or are deleted."""
        found = []
        for one in self.changed:
            if one.kind is ObjectKind.GROUP and one.before is not None:
                was = _group(one.name, one.before)
                if one.after is None or _group(one.name, one.after) != was:
                    found.append((one.name, was))
        return tuple(found)

    @property
    def hosts_named(self) -> tuple[tuple[str, str], ...]:
        """(aggregate, host) of the hosts that aggregates name and did not name before."""
        return tuple(
            (one.name, host)
            for one in self.changed
            if one.kind is ObjectKind.AGGREGATE and one.after is not None
            for host in one.after.get("hosts") or ()
            if host not in ((one.before or {}).get("hosts") or ())
        )

    @property
    def cells_decided(self) -> tuple[ChangedObject, ...]:
        """The decisions about cells that are made, changed or taken back."""
        return tuple(one for one in self.changed if one.kind is ObjectKind.CELL)


def _without_projects(flavor: Mapping[str, Any]) -> Flavor:
    return replace(msgspec.convert(flavor, Flavor), projects=())


def _group(name: str, body: Mapping[str, Any]) -> ServerGroup:
    return group_named(name, msgspec.convert(body, GroupDefinition))


def is_fence(decision: Mapping[str, Any] | None) -> bool:
    """Whether the body of a decision about a host fences it."""
    return decision is not None and decision["state"] == AdminState.FENCED


def body_of(kind: ObjectKind, name: str, body: Mapping[str, Any]) -> Struct:
    """The struct of a body. Raises BodyInvalid with a sentence that names the object."""
    where = f"{kind.value} {name!r}"
    if not name.isprintable():
        raise BodyInvalid(f"{where}: a name has no control characters")
    try:
        if len(_encode(body)) > MAX_BODY_BYTES:
            raise BodyInvalid(f"{where} is larger than {MAX_BODY_BYTES} bytes")
        parsed = msgspec.convert(body, BODIES[kind])
    except RecursionError:
        raise BodyInvalid(f"{where}: its tables are nested too deeply") from None
    except msgspec.ValidationError as error:
        entry = _entry_of(kind, body, reason_of(error))
        raise BodyInvalid(f"{where}: {reason_of(error)}{f' ({entry})' if entry else ''}") from error
    _check_name(where, name, parsed)
    return parsed


def _check_name(where: str, name: str, parsed: Struct) -> None:
    """Raises BodyInvalid for a name that an object with this body cannot have."""
    if isinstance(parsed, SchedulingRules) and name != SCHEDULING:
        raise BodyInvalid(f"{where}: the scheduling rules are one object, of the name {SCHEDULING!r}")
    if isinstance(parsed, Aggregate):
        if parsed.name != name:
            raise BodyInvalid(f"{where}: its body has the name {parsed.name!r}")
        if _uuid(where, parsed.uuid) != parsed.uuid and parsed.hosts is not None:
            raise BodyInvalid(f"{where}: the uuid of an aggregate that names its hosts is in lower case with hyphens")
    if isinstance(parsed, HostDecision) and _uuid(where, name) != name:
        raise BodyInvalid(f"{where}: a host's uuid is written in lower case with hyphens")
    if isinstance(parsed, AccessToken):
        _word(where, name, "the name of a token has")
    if isinstance(parsed, CellDecision):
        _check_cell(where, name, parsed)
    if isinstance(parsed, GroupDefinition):
        project, _, own = name.partition("/")
        if not own:
            raise BodyInvalid(f"{where}: a server group is named PROJECT/NAME")
        _word(where, project, "the project of a server group's name has")


def _entry_of(kind: ObjectKind, body: Mapping[str, Any], reason: str) -> str:
    """The entry of a table that is refused for this reason, as FIELD.KEY: msgspec names the table only. "": none."""
    tables = ((field, table) for field, table in body.items() if isinstance(table, Mapping))
    for field, key, value in ((field, key, value) for field, table in tables for key, value in table.items()):
        try:
            msgspec.convert({field: {key: value}}, BODIES[kind])
        except msgspec.ValidationError as error:
            if reason_of(error) == reason:
                return f"{field}.{key}"[:MAX_ENTRY]
    return ""


def _check_cell(where: str, name: str, decision: CellDecision) -> None:
    _word(where, name, "a cell's name has")
    if name == API:
        raise BodyInvalid(f"{where}: {API!r} is the bus of clients")
    if decision.bus is not None and decision.bus.url_file and decision.bus.url_variable:
        raise BodyInvalid(f"{where}: the URL of its bus is in a file or in a variable, not in both")


def _word(where: str, name: str, what: str) -> None:
    try:
        msgspec.convert(name, Word)
    except msgspec.ValidationError:
        raise BodyInvalid(f"{where}: {what} letters, digits, - and _ only") from None


def _uuid(where: str, text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise BodyInvalid(f"{where}: {text!r} is no uuid") from None


def applied(present: RecordedObjects, changed: Iterable[ChangedObject], actor: ChangeActor) -> RecordedObjects:
    """The objects once these changes are made, under the next revision."""
    revision = present.revision + 1
    objects = dict(present.objects)
    for one in changed:
        if one.after is None:
            objects.pop((one.kind, one.name), None)
        else:
            objects[one.kind, one.name] = StoredObject(
                kind=one.kind,
                name=one.name,
                body=one.after,
                version=revision,
                changed_at=actor.at,
                changed_by=actor.name,
            )
    return RecordedObjects(revision, objects)


def as_stored(body: Struct) -> dict[str, Any]:
    """The body as it is read from the database, without tuples: equal ones compare equal on every scheduler."""
    stored: dict[str, Any] = msgspec.json.decode(_encode(body))
    return stored


def of_kind(present: Objects, wanted: ObjectKind) -> dict[str, StoredObject]:
    """The objects of a kind, by name."""
    return {name: stored for (kind, name), stored in sorted(present.items()) if kind is wanted}


def host_decisions(present: Objects) -> dict[str, HostAdminState]:
    """The decisions in force about each host: {uuid: decision}. Raises BodyInvalid."""
    decisions = {name: host_decision(stored) for name, stored in of_kind(present, ObjectKind.HOST).items()}
    for uuid, fence in fences_of(present).items():
        decisions[uuid] = fence_record.fenced(decisions.get(uuid), uuid, fence)
    return decisions


def cells_of(present: Objects) -> dict[str, StoredObject]:
    """The decisions about cells, by name. Raises BodyInvalid."""
    found = of_kind(present, ObjectKind.CELL)
    for stored in found.values():
        cell_decision(stored)
    return found


def cell_decision(stored: StoredObject) -> CellDecision:
    """The decision that an object of kind `cell` holds. Raises BodyInvalid."""
    body = body_of(stored.kind, stored.name, stored.body)
    assert isinstance(body, CellDecision), stored
    return body


def disabled_cells(present: Objects) -> frozenset[str]:
    """The cells that take no builds. Raises BodyInvalid."""
    return frozenset(
        name for name, stored in cells_of(present).items() if cell_decision(stored).state is not CellState.ENABLED
    )


def fences_of(present: Objects) -> dict[str, FenceRecord]:
    """The fences of hosts, by uuid. Raises BodyInvalid."""
    return {name: fence_of(stored) for name, stored in of_kind(present, ObjectKind.FENCE).items()}


def fence_of(stored: StoredObject) -> FenceRecord:
    """The fence that an object holds. Raises BodyInvalid."""
    body = body_of(stored.kind, stored.name, stored.body)
    assert isinstance(body, FenceRecord), stored
    return body


def drains_of(present: Objects) -> dict[str, DrainRecord]:
    """The drains, by their ids. Raises BodyInvalid."""
    return {name: drain_of(name, stored.body) for name, stored in of_kind(present, ObjectKind.DRAIN).items()}


def drain_of(drain: str, body: Mapping[str, Any]) -> DrainRecord:
    """The drain that a body holds. Raises BodyInvalid."""
    record = body_of(ObjectKind.DRAIN, drain, body)
    assert isinstance(record, DrainRecord), drain
    return record


def host_decision(stored: StoredObject) -> HostAdminState:
    """The decision that an object of kind `host` holds. Raises BodyInvalid."""
    body = body_of(stored.kind, stored.name, stored.body)
    assert isinstance(body, HostDecision), stored
    return HostAdminState(
        host_uuid=stored.name,
        host=body.host,
        state=body.state,
        reason=body.reason,
        by=stored.changed_by,
        at=stored.changed_at,
        version=stored.version,
        drain=body.drain,
    )
