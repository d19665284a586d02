"""Counts what must be nothing: machines lost, doubled, leaked, overcommitted. Plain functions over gathered facts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from berth.audit.invariants import ALIVE, Facts, check_invariants, holders, settled_machines
from bus.contracts.build import TERMINAL_STATES, BuildState
from lab.chaos.churn import Ended
from lab.chaos.faults import Injected


class Tally(Struct, frozen=True, kw_only=True):
    """Instances that fared so, sorted.

    lost: accepted, and not on record, not ended, or its end was never published. doubled: runs twice, lives in two
    cells, or two different ends of its build were published. leaked: an allocation or a machine without an active
    instance. overcommitted: inventories with more in use than they hold.
    """

    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    leaked: tuple[str, ...]
    overcommitted: int


def tally(facts: Facts) -> Tally:
    """Count from the outside: databases, hosts' reports, the event stream."""
    capacity = next(verdict for verdict in check_invariants(facts) if verdict.name == "capacity")
    return Tally(
        lost=tuple(sorted(_lost(facts))),
        doubled=tuple(sorted(_doubled(facts))),
        leaked=tuple(sorted(_leaked(facts))),
        overcommitted=capacity.breaches,
    )


def lost_moves(facts: Facts, requested: Sequence[str]) -> tuple[str, ...]:
    """Accepted requests about instances that are not on record, or have not ended."""
    ended = {move.request_id for move in facts.moves or () if move.terminal}
    return tuple(sorted(set(requested) - ended))


def doubled_moves(ends: Mapping[str, Collection[tuple[str, str]]]) -> tuple[str, ...]:
    """Requests of which two different ends were published. ends: {request: its ends, as (state, code)}."""
    return tuple(sorted(request for request, different in ends.items() if len(different) > 1))


def _lost(facts: Facts) -> set[str]:
    with_end = {event.instance_uuid for event in facts.events or () if event.terminal}
    alive = {i.instance_uuid for i in facts.instances if i.state in ALIVE}
    lost = set()
    for uuid in facts.accepted:
        state = facts.requests.get(uuid)
        ended = state in TERMINAL_STATES and (facts.events is None or uuid in with_end)
        if not ended or (state == BuildState.ACTIVE and uuid not in alive):
            lost.add(uuid)
    return lost


def _doubled(facts: Facts) -> set[str]:
    machines = Counter(running.instance_uuid for running in settled_machines(facts))
    cells: dict[str, set[str]] = defaultdict(set)
    for instance in facts.instances:
        cells[instance.instance_uuid].add(instance.cell)
    ends: dict[str, set[int]] = defaultdict(set)
    for event in facts.events or ():
        if event.terminal and event.state is not BuildState.DELETED:
            ends[event.instance_uuid].add(event.sequence)
    twice = {uuid for uuid, count in machines.items() if count > 1}
    twice |= {uuid for uuid, places in cells.items() if len(places) > 1}
    return twice | {uuid for uuid, different in ends.items() if len(different - {0}) > 1}


def _leaked(facts: Facts) -> set[str]:
    held = set(facts.allocations) | {running.instance_uuid for running in settled_machines(facts)}
    return held - holders(facts).keys()


class Stall(Struct, frozen=True):
    """The longest time in which nothing ended, and the faults of that time."""

    seconds: float
    faults: tuple[str, ...]


def longest_stall(ended: Sequence[Ended], faults: Sequence[Injected]) -> Stall:
    """The longest gap between two ends while the load ran."""
    times = sorted(end.ended_at for end in ended)
    gaps = [(late - early, early, late) for early, late in pairwise(times)]
    if not gaps:
        return Stall(0.0, ())
    seconds, early, late = max(gaps)
    responsible = [f for f in faults if f.began_at < late and (f.over_at is None or f.over_at > early - 1.0)]
    return Stall(round(seconds, 3), tuple(sorted({fault.fault.label for fault in responsible})))


def recoveries(ended: Sequence[Ended], faults: Sequence[Injected]) -> dict[str, list[float]]:
    """Seconds from the end of each fault until the first build or delete requested after it had ended, by sort.

    Other faults go on meanwhile; so this is how soon the system works again, not how soon it would alone.
    """
    by_request_time = sorted(ended, key=lambda end: end.requested_at)
    requested = [end.requested_at for end in by_request_time]
    soonest: list[float] = [float("inf")]
    for end in reversed(by_request_time):
        soonest.append(min(soonest[-1], end.ended_at))
    soonest.reverse()  # soonest[n]: the first end among those requested n-th or later
    found: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        if fault.over_at is not None and (at := bisect_left(requested, fault.over_at)) < len(requested):
            found[fault.fault.label].append(round(soonest[at] - fault.over_at, 3))
    return dict(found)


def rates(ended: Sequence[Ended], every_s: float) -> list[int]:
    """How many ended in each stretch of time, from the first on: the course of the run."""
    times = sorted(end.ended_at for end in ended)
    if not times:
        return []
    count = int((times[-1] - times[0]) / every_s) + 1
    edges = [times[0] + every_s * n for n in range(count + 1)]
    places = [bisect_right(times, edge) if n else 0 for n, edge in enumerate(edges)]
    return [late - early for early, late in pairwise(places)]


def counts(faults: Sequence[Injected]) -> Mapping[str, int]:
    """How many faults of each sort, by name."""
    return dict(sorted(Counter(fault.fault.label for fault in faults).items()))
