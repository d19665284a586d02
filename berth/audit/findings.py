"""An audit's findings about placement, the records and the hosts, as plain functions over gathered facts.

A system at work is never at rest: requests under way are not judged, and a finding of one pass counts only when the
next pass finds it, too (`Confirmed`). Gathering is `berth.audit.passes`; nothing here does any I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from berth.audit.invariants import (
    ALIVE,
    AT_REST,
    OFFLOADED,
    TOMBSTONE,
    Facts,
    InstanceFact,
    InventoryFact,
    RunningFact,
    confirmed_machines,
    consumers_of_instance,
)
from bus.contracts.build import ENDED_WITHOUT_MACHINE, BuildState


class FindingKind(StrEnum):
    """The finding in words."""

    ORPHANED = "orphaned"  # an allocation without an instance
    IN_DOUBT = "in_doubt"  # an allocation that the request on record for its instance is not known to have made
    MISSING = "missing"  # an active instance without an allocation on its host
    DOUBLED = "doubled"  # an instance in two cells, on two hosts, or with an allocation on another host than its own
    OVER_CAPACITY = "over_capacity"
    MACHINE_WITHOUT_INSTANCE = "machine_without_instance"
    INSTANCE_WITHOUT_MACHINE = "instance_without_machine"
    UNREQUESTED = "unrequested"  # an instance of a cell that no request led to, or whose request has ended
    MISCOUNTED = "miscounted"  # placement's usage is not the sum of its allocations
    OUTSIDE_ZONE = "outside_zone"  # an instance whose host is not in the availability zone that its request names
    MOVING_UNREQUESTED = "moving_unrequested"  # an instance that is moving by the schedulers' record, by no request


Kind = FindingKind
# The findings that can be repaired once they have lasted: `berth placement audit --repair` looks at that once.
REPAIRABLE = frozenset({Kind.ORPHANED, Kind.MISSING, Kind.DOUBLED, Kind.MISCOUNTED})
_BY_AUDIT = "berth audit --watch --repair, once it has lasted"
_PROPOSED: Mapping[FindingKind, str] = {
    Kind.ORPHANED: f"release it: {_BY_AUDIT}",
    Kind.IN_DOUBT: "look whether it runs: berth show, berth quarantine list; then decide: berth delete has its cell"
    " destroy it and release this",
    Kind.MISSING: f"claim it again where there is room: {_BY_AUDIT}",
    Kind.DOUBLED: f"release allocations that are not on its own host: {_BY_AUDIT}",
    Kind.OVER_CAPACITY: "move instances away: berth instance migrate, berth host drain",
    Kind.MACHINE_WITHOUT_INSTANCE: "its cell destroys or quarantines it by itself: berth quarantine list",
    Kind.INSTANCE_WITHOUT_MACHINE: "its cell takes it for lost with the host's reports: berth show; else berth delete",
    Kind.UNREQUESTED: "look where it comes from (a restore?), and have its client request it again: berth show",
    Kind.MISCOUNTED: f"recount: {_BY_AUDIT}",
    Kind.MOVING_UNREQUESTED: "request what changes nothing: berth instance start; its cell answers with its state",
    Kind.OUTSIDE_ZONE: "put its host back into the zone's aggregate, or move it there: berth instance migrate",
}
# `berth placement audit` judges no instance with an unconfirmed move.
_DECIDE = "decide: berth quarantine destroy|protect|adopt {}"
_UNCONFIRMED = f"berth instance confirm, and then: {_BY_AUDIT}"
DELETED = "deleted"
# Of a request: a cell has its instance, and lets it go only with an announcement.
WITH_INSTANCE = frozenset({BuildState.ACTIVE, BuildState.DELETING})
_FOREIGN = "left alone: it is not of this database"


class AuditFinding(Struct, frozen=True):
    """One thing that is wrong. subject: an instance, a consumer or a provider. repair: the proposed repair.

    proof: why that repair can harm nothing ("": this is not known, and only a person may have it carried out).
    """

    kind: FindingKind
    subject: str
    reason: str
    repair: str
    proof: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """By which the same finding of two passes is recognised."""
        return self.kind.value, self.subject


class AuditFacts(Struct, frozen=True, kw_only=True):
    """The facts that one pass has read.

    held_by_bus: consumers that hold something by a claim of the bus; others are foreign. busy: instances about which
    something is under way. migrations: {a move's request: its instance}, which holds the source meanwhile. zones: of
    instances whose host is in another availability zone than their request names, {instance: (named, its host's)}.
    in_doubt: instances whose request ended and that hold what another claim owner claimed. with_machine: those that
    have one by the schedulers' record. moving: active ones that are moving, and have no request under way; these are
    busy, too.
    """

    facts: Facts
    held_by_bus: AbstractSet[str]
    busy: AbstractSet[str]
    migrations: Mapping[str, str]
    zones: Mapping[str, tuple[str, str]] = {}
    in_doubt: AbstractSet[str] = frozenset()
    with_machine: AbstractSet[str] = frozenset()
    moving: AbstractSet[str] = frozenset()


class Confirmed:
    """Findings that two passes in a row have had."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], AuditFinding] = {}
        self.proven: list[AuditFinding] = []  # of `found`, those whose proof these two passes had
        self._since_s: dict[tuple[str, str], float] = {}
        self.found: dict[tuple[str, str], AuditFinding] = {}

    def apply(self, findings: list[AuditFinding], now_s: float) -> tuple[list[AuditFinding], list[AuditFinding]]:
        """(those that are confirmed by this pass, those that were and are gone)."""
        seen = {one.key: one for one in findings}
        self._since_s = {key: self._since_s.get(key, now_s) for key in seen}
        new = [one for key, one in seen.items() if key in self._last and key not in self.found]
        gone = [one for key, one in self.found.items() if key not in seen]
        self.found = {key: one for key, one in seen.items() if key in self._last or key in self.found}
        self.proven = [one for key, one in seen.items() if one.proof and key in self._last and self._last[key].proof]
        self._last = seen
        return new, gone

    def lasting(self, kinds: AbstractSet[FindingKind], seconds: float, now_s: float) -> bool:
        """Whether one of these kinds has been there for this long."""
        return any(one.kind in kinds and now_s - self._since_s[key] >= seconds for key, one in self.found.items())


def findings(audited: AuditFacts) -> list[AuditFinding]:
    """Everything that one pass finds, in a stated order."""
    return sorted(_all(audited), key=lambda one: (one.kind, one.subject, one.reason))


def _all(audited: AuditFacts) -> Iterator[AuditFinding]:
    facts = audited.facts
    unsettled = {one.instance_uuid for one in facts.instances if one.state not in AT_REST} | audited.busy
    alive = {one.instance_uuid: one for one in facts.instances if one.state in ALIVE}
    settled = {uuid: one for uuid, one in alive.items() if uuid not in unsettled}
    yield from of_placement(facts.inventories, facts.audit)
    yield from _holdings(audited, alive, settled, unsettled)
    yield from _records(facts, unsettled)
    for uuid in audited.moving - facts.in_unread_cells():
        yield _finding(Kind.MOVING_UNREQUESTED, uuid, "moving by the schedulers' record, and no request is under way")
    for uuid, (named, zone) in audited.zones.items():
        if uuid in settled:
            reason = f"requested in zone {named}, and {settled[uuid].host_uuid} is in {zone}: no move takes it there"
            yield _finding(Kind.OUTSIDE_ZONE, uuid, reason)
    if facts.running is not None:
        yield from _machines(facts, alive, settled, unsettled)


def _finding(kind: FindingKind, subject: str, reason: str, repair: str | None = None) -> AuditFinding:
    return AuditFinding(kind, subject, reason, _PROPOSED[kind] if repair is None else repair)


def of_placement(inventories: Sequence[InventoryFact], audit: Sequence[str]) -> Iterator[AuditFinding]:
    """What placement's own tables show. audit: where its usage is not the sum of its allocations."""
    for row in inventories:
        if row.is_exceeded:
            reason = f"{row.resource_class}: used {row.used} of {row.capacity:g}"
            yield _finding(Kind.OVER_CAPACITY, f"{row.provider} {row.resource_class}", reason)
    for line in audit:
        yield _finding(Kind.MISCOUNTED, line.partition(":")[0], line)


def _holdings(
    audited: AuditFacts,
    alive: Mapping[str, InstanceFact],
    settled: Mapping[str, InstanceFact],
    unsettled: AbstractSet[str],
) -> Iterator[AuditFinding]:
    facts = audited.facts
    for instance, (consumer, host) in ((one, holder) for one in settled.values() for holder in one.consumers):
        hosts = facts.hosts_of(consumer)
        others = ", ".join(sorted(hosts - {host or ""}))
        repair = None if instance.source is None else _UNCONFIRMED
        what = "active" if consumer == instance.instance_uuid else f"the source of {instance.instance_uuid}, kept"
        if host not in hosts:
            reason = f"{what} on {host} of {instance.cell}, and holds nothing there{others and f', but on {others}'}"
            yield _finding(Kind.MISSING, consumer, reason, repair)
        elif others:
            yield _finding(Kind.DOUBLED, consumer, f"{what} on {host}, and holds something of {others}", repair)
    allowed = consumers_of_instance(facts)
    recorded = {
        one.instance_uuid for one in facts.instances if is_proof(one.state, one.instance_uuid in audited.with_machine)
    }
    quarantined = {one.instance_uuid for one in facts.quarantine or ()}
    for consumer in facts.allocations:
        owner = audited.migrations.get(consumer, consumer)
        if consumer in allowed:
            continue
        if owner in unsettled or consumer not in audited.held_by_bus:
            continue
        providers = ", ".join(sorted(facts.allocations[consumer]))
        why = may_run(consumer, facts.requests.get(consumer), recorded, quarantined)
        if why or consumer in audited.in_doubt:
            reason = (
                f"claim.in_doubt: {why or 'its request has ended'}, and what was claimed may be in use, on {providers}"
            )
            yield _finding(Kind.IN_DOUBT, consumer, reason)
            continue
        what = "of a move that is over" if consumer in audited.migrations else "of no instance"
        orphaned = _finding(Kind.ORPHANED, consumer, f"an allocation {what}, on {providers}")
        yield replace(orphaned, proof=_proof_of_end(facts, consumer))


def is_proof(state: str, has_machine: bool) -> bool:
    """Whether a cell's record in this state proves what is left of an instance. has_machine: by the schedulers' record:
    what is offloaded has been unshelved since, and its cell was set back.
    """
    return state != OFFLOADED or not has_machine


def may_run(consumer: str, request: str | None, recorded: AbstractSet[str], quarantined: AbstractSet[str]) -> str:
    """Why a machine of a consumer may run that no cell has as alive; "": no record shows one.

    request: its state by the schedulers' record. recorded: instances that a cell has on record, in any state: a cell
    that has one as over has proved that nothing of it is left, and one without a record may have been set back.
    """
    if consumer in quarantined:
        return "a machine of it is in quarantine"
    if request in WITH_INSTANCE and consumer not in recorded:
        return f"its request is {request}, and no cell has a record of its machine"
    return ""


def _proof_of_end(facts: Facts, consumer: str) -> str:
    """Why an orphaned allocation may be released: its instance was deleted by all records, and no host runs it.

    A consumer that no record knows has no proof: the records may have been set back to before its request. Neither has
    one while a compute service sends no report, or a cell cannot be read.
    """
    if (
        facts.requests.get(consumer) != DELETED
        or facts.running is None
        or facts.down is None
        or facts.down
        or facts.unheard is None
        or facts.unheard
        or facts.unread
    ):
        return ""
    records = [one for one in facts.instances if one.instance_uuid == consumer]
    if any(one.state not in (DELETED, TOMBSTONE) for one in records):
        return ""
    if any(machine.instance_uuid == consumer for machine in facts.running):
        return ""
    cells = f" and in {', '.join(sorted(one.cell for one in records))}" if records else ""
    return f"deleted by the schedulers' record{cells}, and no host runs it"


def _records(facts: Facts, unsettled: AbstractSet[str]) -> Iterator[AuditFinding]:
    homes: dict[str, str] = {}
    for one in facts.instances:
        if one.state == TOMBSTONE or one.instance_uuid in unsettled:
            continue
        other = homes.setdefault(one.instance_uuid, one.cell)
        if other != one.cell:
            yield _finding(Kind.DOUBLED, one.instance_uuid, f"on record in {other} and in {one.cell}")
        request = facts.requests.get(one.instance_uuid)
        if one.state in ALIVE and request is None:
            reason = f"{one.state} in {one.cell}, and no request is on record"
            yield _finding(Kind.UNREQUESTED, one.instance_uuid, reason)
        elif one.state in ALIVE and request in ENDED_WITHOUT_MACHINE:
            reason = f"{one.state} in {one.cell}, and its request is {request}"
            yield _finding(
                Kind.UNREQUESTED, one.instance_uuid, reason, f"berth delete {one.instance_uuid} --cell {one.cell}"
            )


def _machines(
    facts: Facts,
    alive: Mapping[str, InstanceFact],
    settled: Mapping[str, InstanceFact],
    unsettled: AbstractSet[str],
) -> Iterator[AuditFinding]:
    silent = {(one.cell, one.service) for one in facts.down or ()}
    quarantined = {(one.instance_uuid, one.host_uuid): one for one in facts.quarantine or ()}
    places: dict[str, list[RunningFact]] = defaultdict(list)
    assert facts.running is not None
    for machine in confirmed_machines(facts):
        places[machine.instance_uuid].append(machine)
    for uuid, instance in settled.items():
        if (instance.cell, instance.service) in silent:
            continue
        at_home = [one for one in places.get(uuid, ()) if one.host_uuid == instance.host_uuid]
        if not at_home:
            reason = f"active on {instance.host_uuid} of {instance.cell}, which does not run it"
            kept_on = [host for one, host in quarantined if one == uuid]
            repair = f"decide: berth quarantine adopt {uuid} --host {kept_on[0]}" if len(kept_on) == 1 else None
            if kept_on:
                reason = f"{reason}; in quarantine on {', '.join(kept_on)}"
            yield _finding(Kind.INSTANCE_WITHOUT_MACHINE, uuid, reason, repair)
    for uuid, machines in places.items():
        if uuid in unsettled:
            continue
        marked = [one for one in machines if one.has_owner_tag]
        if uuid in alive and len(marked) > 1:
            hosts = ", ".join(sorted(one.host_uuid for one in marked))
            yield _finding(Kind.DOUBLED, uuid, f"runs on {hosts}", _PROPOSED[Kind.MACHINE_WITHOUT_INSTANCE])
        if uuid not in alive:
            for one in machines:
                kept = quarantined.get((uuid, one.host_uuid))
                why = f"runs on {one.host_uuid}, and no cell has it as active"
                repair = None if one.has_owner_tag else _FOREIGN
                if kept is not None:
                    why, repair = (
                        f"{why}; in quarantine: {kept.reason}",
                        _DECIDE.format(uuid),
                    )
                yield _finding(Kind.MACHINE_WITHOUT_INSTANCE, uuid, why, repair)
