"""The invariants of `berth check` as plain functions over facts gathered from the outside.

`Facts` holds the contents of placement, the schedulers' and conductors' records, the hosts' own reports and the
client's event stream. `check_invariants` compares them. Gathering is `berth.audit.facts`; nothing here does any I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from math import floor

from msgspec import Struct

from bus.contracts.actions import Condition
from bus.contracts.build import ENDED_WITHOUT_MACHINE, TERMINAL_STATES, BuildEvent, BuildState
from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from cell_conductor.state import desired_state
from cell_conductor.state.desired_state import MachineTarget, phase_to_text, phases_matching

MAX_EXAMPLES = 5

TOMBSTONE, RESIZED, OFFLOADED = "tombstone", "resized", "offloaded"
# Another cell has it: this record is no instance.
ELSEWHERE = frozenset(map(phase_to_text, desired_state.IN_OTHER_CELL))
# Instance states in which nothing is under way: no host and no placement is to do anything, and no request is open.
_RESTS = phases_matching(lambda row: row.condition is not Condition.MOVING or row.in_other_cell)
_WAITS = phases_matching(
    lambda row: row.placement_call is not None or MachineTarget.DESTROYED in (row.current, row.source)
)
AT_REST = frozenset(map(phase_to_text, _RESTS - _WAITS))
# Of these only those hold an allocation and have a machine, whether it runs, is stopped, shelved or rescued.
ALIVE = frozenset(map(phase_to_text, phases_matching(lambda row: row.current is MachineTarget.RUNNING)))
# Its cell has proved that no machine and no allocation of it is left.
OVER = AT_REST - ALIVE - ELSEWHERE


class InventoryFact(Struct, frozen=True):
    """One inventory row of placement."""

    provider: str
    resource_class: str
    total: int
    reserved: int
    allocation_ratio: float
    capacity: float
    used: int

    @property
    def is_exceeded(self) -> bool:
        """Whether more is used than there is. Bare metal in use is taken out by reserving it (microversion 1.26)."""
        return self.used > self.capacity and self.used > floor(self.total * self.allocation_ratio)


class ReporterFact(Struct, frozen=True):
    """The source of a move that awaits its confirm. migration: the consumer that holds its allocation meanwhile."""

    migration: str
    host_uuid: str
    attempt: int
    service: str = ""


class InstanceFact(Struct, frozen=True):
    """One instance as its cell has it. service: that of its host ("": it has none). source: of a resized one."""

    instance_uuid: str
    cell: str
    state: str
    host_uuid: str | None
    attempt: int
    service: str = ""
    source: ReporterFact | None = None

    @property
    def consumers(self) -> tuple[tuple[str, str | None], ...]:
        """The consumers that hold something for it, each with its host, while it has a machine."""
        source = self.separate_source
        own = self.instance_uuid, self.host_uuid
        return (own,) if source is None else (own, (source.migration, source.host_uuid))

    @property
    def separate_source(self) -> ReporterFact | None:
        """The source, if it is another machine than the instance's own: not that of a resize in place."""
        return self.source if self.source is not None and self.source.host_uuid != self.host_uuid else None


class ServiceDownFact(Struct, frozen=True, kw_only=True):
    """A compute service that sends no report of its hosts. is_expected: it was stopped on purpose."""

    cell: str
    service: str
    reason: str
    is_expected: bool = False


class RunningFact(Struct, frozen=True):
    """One machine that a host reports. has_owner_tag: with that of its cell's database. is_stopped: it is there,
    and does not run.
    """

    instance_uuid: str
    attempt: int
    host_uuid: str
    has_owner_tag: bool = True
    is_stopped: bool = False


class BreakerFact(Struct, frozen=True, kw_only=True):
    """One service's breaker as its cell has it on record."""

    cell: str
    service: str
    is_open: bool
    tripped_at: float
    lost: int = 0
    quarantined: int = 0
    over: int = 0


class QuarantineFact(Struct, frozen=True):
    """One machine in quarantine. decision: an operator's, or "". is_protected: it may stay for good."""

    cell: str
    service: str
    host_uuid: str
    instance_uuid: str
    reason: str
    decision: str = ""
    is_protected: bool = False


class ActionFact(Struct, frozen=True):
    """One request about an instance by the schedulers' record."""

    request_id: str
    instance_uuid: str
    kind: str
    state: str
    terminal: bool


class GangFact(Struct, frozen=True, kw_only=True):
    """One request for several machines. members: all of them; min_count: how many start together at least.

    sent: those that a scheduler has dispatched to a cell; withdrawn: those that were deleted before.
    """

    uuid: str
    members: int
    min_count: int
    sent: int
    withdrawn: int


class Facts(Struct, frozen=True, kw_only=True):
    """Everything the invariants are judged by, all of it read from outside the workers.

    allocations: {consumer: {provider: {class: amount}}}. requests: {instance: state} by the schedulers' record; cells:
    {instance: cell} by the instance map. events: what clients received, in order of arrival, or None when there was no
    listener. changes: the change feed as a listener saw it. connections: (process, bus, whether the process belongs to
    a cell). feed: (lowest, highest, rows) kept. roots: {provider: root}, without those that share. audit: mismatches
    that placement's own audit found. breakers, quarantine: the cells' records. actions: requests about instances.
    gangs: of which every member is on record. services: (cell, service) of all on record. down: those that do not
    report what their hosts run, so that it is not judged. unheard: those that are up, were not waited for and have
    sent no whole report. unread: cells that could not be read; what may be of these is not judged. under_way: instances
    whose build, action or delete is within its time; they are not judged. duplicate_names: (host, name, whose it is)
    of reported hosts that placement refuses for their name. None, where it is allowed: unknown.
    """

    inventories: Sequence[InventoryFact]
    allocations: Mapping[str, Mapping[str, Mapping[str, int]]]
    roots: Mapping[str, str]
    requests: Mapping[str, str]
    cells: Mapping[str, str]
    instances: Sequence[InstanceFact]
    running: Sequence[RunningFact] | None
    feed: tuple[int, int, int]
    audit: Sequence[str] = ()
    accepted: Sequence[str] = ()
    events: Sequence[BuildEvent] | None = None
    changes: Sequence[Change] | None = None
    connections: Sequence[tuple[str, str, bool]] | None = None
    breakers: Sequence[BreakerFact] | None = None
    quarantine: Sequence[QuarantineFact] | None = None
    services: AbstractSet[tuple[str, str]] | None = None
    down: Sequence[ServiceDownFact] | None = None
    unheard: Sequence[tuple[str, str]] | None = None
    actions: Sequence[ActionFact] | None = None
    gangs: Sequence[GangFact] | None = None
    unread: AbstractSet[str] = frozenset()
    under_way: AbstractSet[str] = frozenset()
    duplicate_names: Sequence[tuple[str, str, str]] | None = None

    def hosts_of(self, consumer: str) -> set[str]:
        """The hosts of which a consumer holds something."""
        held = self.allocations.get(consumer, {})
        return {self.roots[provider] for provider in held if provider in self.roots}

    def may_wait(self) -> set[str]:
        """Instances of which something may be open: within its time, at a service that is down, in an unread cell."""
        silent = _down(self)
        at_silent = {one.instance_uuid for one in self.instances if (one.cell, one.service) in silent}
        return at_silent | self.in_unread_cells() | self.under_way

    def in_unread_cells(self) -> set[str]:
        """Instances on record, and consumers of placement, that may be of a cell which could not be read."""
        if not self.unread:
            return set()
        affected = {uuid for uuid in self.requests if self.cells.get(uuid) in self.unread}
        # The other end of a move may be there, whatever cell the request has now.
        affected |= {one.request_id for one in self.actions or ()}
        return affected | (self.allocations.keys() - self.requests.keys())


class InvariantResult(Struct, frozen=True, kw_only=True):
    """How one invariant stands. `examples`: the first few breaches; `checked`: how many things were looked at.

    not_judged: what could not be checked, and why, one line each.
    """

    name: str
    message: str
    holds: bool
    checked: int
    breaches: int = 0
    examples: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()


class _Invariant(Struct, frozen=True):
    """One row of the table. of: the facts that are looked at; None there: they are not known, and it is not judged."""

    name: str
    of: str
    message: str
    breaches: Callable[[Facts], Iterator[str]]
    not_judged: Callable[[Facts], Iterator[str]] = lambda _: iter(())


def check_invariants(facts: Facts) -> tuple[InvariantResult, ...]:
    """Judge every invariant that the facts suffice for, in the order of `berth check`'s output."""
    return tuple(_result(one, facts) for one in _INVARIANTS if getattr(facts, one.of) is not None)


def _result(one: _Invariant, facts: Facts) -> InvariantResult:
    found = list(one.breaches(facts))
    return InvariantResult(
        name=one.name,
        message=one.message,
        holds=not found,
        checked=facts.feed[2] if one.of == "feed" else len(getattr(facts, one.of)),
        breaches=len(found),
        examples=tuple(found[:MAX_EXAMPLES]),
        not_judged=tuple(one.not_judged(facts)),
    )


def _miscounted(facts: Facts) -> Iterator[str]:
    return iter(facts.audit)


def _silent_services(facts: Facts) -> Iterator[str]:
    return (f"{one.cell}: {one.service}: {one.reason}" for one in facts.down or () if not one.is_expected)


def _open_actions(facts: Facts) -> Iterator[str]:
    may_wait = facts.may_wait()
    for action in facts.actions or ():
        if not action.terminal and action.instance_uuid not in may_wait:
            yield f"{action.instance_uuid}: {action.kind} {action.request_id} is still {action.state}"


def _partial_gangs(facts: Facts) -> Iterator[str]:
    for gang in facts.gangs or ():
        enough = min(gang.min_count, gang.members - gang.withdrawn)
        if 0 < gang.sent < enough:
            yield f"{gang.uuid}: {gang.sent} of {gang.members} were started, and {enough} start together"


def _down(facts: Facts) -> set[tuple[str, str]]:
    return {(one.cell, one.service) for one in facts.down or ()}


def _unreported(facts: Facts) -> Iterator[str]:
    """The machines that services which are down do not report: one line each."""
    for one in facts.down or ():
        affected = [i for i in facts.instances if (i.cell, i.service) == (one.cell, one.service)]
        alive = sum(i.state in ALIVE for i in affected)
        yield f"what {one.service} of {one.cell} runs, {alive} active instances among it ({one.reason})"


def _unresolved_down_services(facts: Facts) -> Iterator[str]:
    for one in facts.down or ():
        stuck = sum(i.state not in AT_REST for i in facts.instances if (i.cell, i.service) == (one.cell, one.service))
        if stuck:
            yield f"{stuck} instances that are under way at {one.service} of {one.cell} ({one.reason})"


def _over_capacity(facts: Facts) -> Iterator[str]:
    for row in facts.inventories:
        if row.is_exceeded:
            yield f"{row.provider} {row.resource_class}: used {row.used} of {row.capacity:g}"


def _terminal(facts: Facts) -> Iterator[str]:
    for uuid in facts.accepted:
        if uuid not in facts.requests:
            yield f"{uuid}: accepted, but no scheduler has it on record"
    may_wait = facts.may_wait()
    for uuid, state in facts.requests.items():
        if state not in TERMINAL_STATES and uuid not in may_wait:
            yield f"{uuid}: still {state}"
    if facts.events is None:
        return
    terminals: dict[str, set[int]] = defaultdict(set)
    for event in facts.events:
        # A delete is a request of its own and has its own terminal event. Delivery is at least once: the same event
        # (by its sequence) may come again, a second one may not.
        if event.terminal and event.state is not BuildState.DELETED:
            terminals[event.instance_uuid].add(event.sequence)
    for uuid in facts.accepted:
        # A request that ends with 0 beside another end was another request under this uuid: a delete that was given up,
        # a clash.
        if (
            len(terminals[uuid] - {0} or terminals[uuid]) != 1
            and facts.requests.get(uuid) != BuildState.DELETED
            and uuid not in may_wait
        ):
            yield f"{uuid}: terminal events {sorted(terminals[uuid])}"


def confirmed_machines(facts: Facts) -> list[RunningFact]:
    """The machines that hosts report, less those that may exist beside the machine of an instance at rest.

    The latter are the stopped source of a move that awaits its confirm, and machines that an operator keeps in
    quarantine.
    """
    sources = {
        (one.instance_uuid, source.attempt, source.host_uuid)
        for one in facts.instances
        if (source := one.separate_source) is not None
    }
    kept = {(one.instance_uuid, one.host_uuid) for one in facts.quarantine or () if one.is_protected}
    return [
        one
        for one in facts.running or ()
        if not (one.is_stopped and (one.instance_uuid, one.attempt, one.host_uuid) in sources)
        and (one.instance_uuid, one.host_uuid) not in kept
    ]


def consumers_of_instance(facts: Facts) -> dict[str, InstanceFact]:
    """Consumers that may hold an allocation at rest: {the instance, or the migration that holds its source: it}."""
    alive = [one for one in facts.instances if one.state in ALIVE]
    return {
        **{one.source.migration: one for one in alive if one.source is not None},
        **{one.instance_uuid: one for one in alive},
    }


def _duplicates(facts: Facts) -> Iterator[str]:
    homes: dict[str, str] = {}
    for instance in facts.instances:
        other = homes.setdefault(instance.instance_uuid, instance.cell)
        if other != instance.cell:
            yield f"{instance.instance_uuid}: in {other} and in {instance.cell}"
    machines = Counter(running.instance_uuid for running in confirmed_machines(facts) if running.has_owner_tag)
    for uuid, count in machines.items():
        if count > 1:
            yield f"{uuid}: runs {count} times"


def _agreement(facts: Facts) -> Iterator[str]:
    unsettled = {i.instance_uuid for i in facts.instances if i.state not in AT_REST} | facts.under_way
    alive = {i.instance_uuid: i for i in facts.instances if i.state in ALIVE and i.instance_uuid not in unsettled}
    silent = _down(facts)
    down = {i.instance_uuid for i in facts.instances if (i.cell, i.service) in silent}
    for uuid in sorted(unsettled - facts.may_wait()):
        yield f"{uuid}: not at rest"
    yield from _held(facts, alive, unsettled)
    if facts.running is not None:
        yield from _running(facts, alive, unsettled, down)


def _held(facts: Facts, alive: Mapping[str, InstanceFact], unsettled: AbstractSet[str]) -> Iterator[str]:
    for uuid, instance in alive.items():
        for consumer, host in instance.consumers:
            what = f"{uuid}: {instance.state if consumer == uuid else f'{consumer} keeps its source'}"
            if consumer not in facts.allocations:
                yield f"{what}, but holds no allocation"
            elif host not in (hosts := facts.hosts_of(consumer)):
                yield f"{what} on {host}, allocated on {sorted(hosts)}"
    # A move under way has a consumer for its source as well: by the requests on record.
    under_way = {one.request_id for one in facts.actions or () if one.instance_uuid in unsettled}
    allowed = consumers_of_instance(facts).keys() | unsettled | under_way | facts.in_unread_cells()
    for uuid in facts.allocations:
        if uuid not in allowed:
            yield f"{uuid}: holds an allocation, but is no active instance"


def _running(
    facts: Facts, alive: Mapping[str, InstanceFact], unsettled: AbstractSet[str], down: AbstractSet[str]
) -> Iterator[str]:
    running = confirmed_machines(facts)
    # A machine without our tag is another's, unless it is the one on record (an operator may have removed its tag).
    foreign = [r for r in running if not r.has_owner_tag]
    places = {r.instance_uuid: r for r in foreign if r.instance_uuid in alive}
    places.update({r.instance_uuid: r for r in running if r.has_owner_tag})
    for uuid, instance in alive.items():
        machine = places.get(uuid)
        if machine is None:
            if uuid not in down:
                yield f"{uuid}: active, but no host runs it"
        elif machine.host_uuid != instance.host_uuid or machine.attempt != instance.attempt:
            yield f"{uuid}: runs on {machine.host_uuid} as attempt {machine.attempt}, not where its cell has it"
    explained = unsettled | {one.instance_uuid for one in facts.quarantine or ()} | facts.in_unread_cells()
    for uuid in places:
        if uuid not in alive and uuid not in explained:
            yield f"{uuid}: runs, but is no active instance"


def _open_breakers(facts: Facts) -> Iterator[str]:
    for one in facts.breakers or ():
        if one.is_open:
            since = datetime.fromtimestamp(one.tripped_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
            yield (
                f"{one.cell}: the breaker of {one.service} is open since {since} UTC ({one.lost} lost, "
                f"{one.quarantined} quarantined, {one.over} over): see `berth breaker list`"
            )


def _quarantined(facts: Facts) -> Iterator[str]:
    for one in facts.quarantine or ():
        if not one.is_protected:
            decided = f", released to {one.decision}, still there" if one.decision else ": see `berth quarantine list`"
            yield f"{one.cell}: {one.instance_uuid} on {one.host_uuid} of {one.service}: {one.reason}{decided}"


def _duplicate_names(facts: Facts) -> Iterator[str]:
    for host, name, other in facts.duplicate_names or ():
        yield f"{host}: {name} is the name of {other} in placement: rename one, or `berth host delete {other}`"


def _feed(facts: Facts) -> Iterator[str]:
    lowest, highest, rows = facts.feed
    if rows and highest - lowest + 1 != rows:
        yield f"numbers {lowest}..{highest}, but {rows} rows"


def _caused(facts: Facts) -> Iterator[str]:
    actions = {one.request_id for one in facts.actions or ()}
    explained = facts.requests.keys() | actions | consumers_of_instance(facts).keys() | facts.in_unread_cells()
    for consumer in sorted(facts.allocations.keys() - explained):
        yield f"{consumer}: holds an allocation that was not requested"
    for instance in facts.instances:
        if instance.state == TOMBSTONE:  # a delete that came before any build: it had no effect
            continue
        request = facts.requests.get(instance.instance_uuid)
        if request is None:
            yield f"{instance.instance_uuid}: an instance that was not requested"
        elif instance.state in ALIVE and request in ENDED_WITHOUT_MACHINE:
            yield f"{instance.instance_uuid}: {instance.state} in {instance.cell}, but its request is {request}"
        elif facts.cells.get(instance.instance_uuid, instance.cell) != instance.cell:
            yield f"{instance.instance_uuid}: mapped to another cell than {instance.cell}"


def _upward(facts: Facts) -> Iterator[str]:
    for process, bus, in_cell in facts.connections or ():
        if in_cell and bus == "api":
            yield f"{process} has a connection to the API bus"


def _generations(facts: Facts) -> Iterator[str]:
    last: dict[str, int] = {}
    used: dict[str, dict[str, int]] = {}  # by provider, of the classes that a change has named
    states: dict[str, ProviderState] = {}
    for change in facts.changes or ():
        provider, known = change.provider, last.get(change.provider, -1)
        if change.removed:
            last.pop(provider, None)
            used.pop(provider, None)
            states.pop(provider, None)
            continue
        may_stay = _is_freed(change, used.get(provider, {})) or _is_renamed(change.state, states.get(provider))
        if change.generation < known or (change.generation == known and not may_stay):
            yield f"{provider}: generation {change.generation} after {known} (number {change.sequence})"
        last[provider] = change.generation
        used.setdefault(provider, {}).update(change.used or {})
        if change.state is not None:
            states[provider], used[provider] = change.state, dict(change.state.used)


def _is_freed(change: Change, before: Mapping[str, int]) -> bool:
    """Whether usage falls and nothing else: DELETE /allocations leaves the generation, as the real Placement's does."""
    return change.used is not None and all(amount <= before.get(name, amount) for name, amount in change.used.items())


def _is_renamed(after: ProviderState | None, before: ProviderState | None) -> bool:
    """Whether the amounts and the traits are as before: a new name of a provider or class, a new parent, and aggregates
    below 1.19 leave the generation, as the real Placement's do.
    """
    if after is None or before is None:
        return after is not None
    amounts = [sorted(state.inventories.values()) for state in (before, after)]
    return amounts[0] == amounts[1] and sorted(after.traits) == sorted(before.traits)


_INVARIANTS = (
    _Invariant(
        "capacity",
        "inventories",
        "used <= capacity on every provider and class, unless its inventory shrank under it",
        _over_capacity,
    ),
    _Invariant("placement_adds_up", "inventories", "placement's usage is the sum of its allocations", _miscounted),
    _Invariant(
        "one_terminal_state",
        "requests",
        "every accepted request is on record and ends in exactly one terminal state",
        _terminal,
        _unresolved_down_services,
    ),
    _Invariant("built_once", "instances", "no instance runs twice, or in two cells", _duplicates, _unreported),
    _Invariant(
        "hosts_instances_allocations_agree",
        "instances",
        "at rest, hosts, instances and allocations agree on what runs",
        _agreement,
        _unreported,
    ),
    _Invariant("feed_has_no_hole", "feed", "the change feed has no hole", _feed),
    _Invariant("effects_have_a_cause", "allocations", "every effect traces back to one request", _caused),
    _Invariant(
        "services_there", "services", "every compute service reports, or was stopped on purpose", _silent_services
    ),
    _Invariant("actions_end", "actions", "every request about an instance has ended", _open_actions),
    _Invariant("gangs_whole", "gangs", "of machines that start together enough were started, or none", _partial_gangs),
    _Invariant("breakers_closed", "breakers", "no breaker is open", _open_breakers),
    _Invariant("quarantine_decided", "quarantine", "no machine in quarantine, unless it is protected", _quarantined),
    _Invariant(
        "hosts_in_placement", "duplicate_names", "no reported host is out of placement for its name", _duplicate_names
    ),
    _Invariant("generations_rise", "changes", "generations only rise", _generations),
    _Invariant("no_upcall", "connections", "no message from a cell to anything above it except announcements", _upward),
)
