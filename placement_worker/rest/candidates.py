"""The route /allocation_candidates: searches candidates and renders them directly from columns."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from time import monotonic, thread_time

import msgspec
import numpy as np

from placement_worker.domain.values import is_custom
from placement_worker.replica.candidates import CandidateSet, candidates
from placement_worker.replica.columns import CAPACITY, Amounts, ClassColumns, Rows
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.tree_solver import TimeBudget, TooLong
from placement_worker.replica.trees import NO_ROW
from placement_worker.rest.api import Api
from placement_worker.rest.candidates_query import ParsedQuery, parse_candidates
from placement_worker.rest.faults import HttpFault, invalid_query
from placement_worker.rest.http import HttpRequest, Response

# The time that a search may block the event loop before it is started again in a thread.
AT_ONCE_S = 0.01

# The bound of candidates times slots up to which an answer is rendered on the event loop: 8 ms.
CELLS_AT_ONCE = 8_000

SINCE_DICTS = 12
SINCE_MAPPINGS = 34


async def search(api: Api, request: HttpRequest) -> Response:
    """GET the allocation candidates of a request."""
    requested = parse_candidates(request.query, request.version)
    await _check_names(api, requested, await api.replica.fresh())
    config = api.config
    most = config.default_limit if config.default_limit > 0 else None
    limit = min((bound for bound in (requested.limit, most) if bound is not None), default=None)
    seed = api.rng.getrandbits(64) if config.randomize else None

    def answer(replica: Replica, time_budget: TimeBudget) -> bytes:
        rng = None if seed is None else random.Random(seed)
        found = candidates(
            replica, requested.request, limit=limit, rng=rng, budget=config.search_budget, time_budget=time_budget
        )
        return _rendered(replica, found, requested, request.version, time_budget)

    replica = api.replica.replica
    try:
        # This does not await, so the replica does not change. The budget is the CPU time of this thread, so that a
        # search is not started again because the computer is busy.
        body = answer(replica, TimeBudget(thread_time, AT_ONCE_S, keeps_partial=False))
    except QueryTooWide as error:
        raise invalid_query(str(error)) from None
    except TooLong:
        body = await api.searches.run(
            lambda copy: answer(copy, TimeBudget(monotonic, config.search_timeout_s, keeps_partial=True)), replica
        )
    return Response(200, body).set_modified(request, api.clock.time())


def _rendered(
    replica: Replica, found: CandidateSet, requested: ParsedQuery, version: int, time_budget: TimeBudget
) -> bytes:
    """Return the whole body. Raises HttpFault 400 when no candidate was found before the budget ended; TooLong."""
    if not len(found) and not found.exhausted:
        raise invalid_query(
            "this many groups, or this many providers that could satisfy them, cannot be searched through within the "
            "bounds of time and steps, and no candidate was found so far. Ask for less, or for one tree (in_tree)."
        )
    if found.rows.size > CELLS_AT_ONCE and not time_budget.keeps_partial:
        raise TooLong
    parts = (b'{"allocation_requests":[', _requests(found, version), b'],"provider_summaries":{')
    return b"".join((*parts, summaries(replica, found, requested.classes(), version), b"}}"))


async def _check_names(api: Api, requested: ParsedQuery, replica: Replica) -> None:
    if replica.epoch != api.epoch_seen:  # a class that this process does not know may have been renamed
        api.epoch_seen = replica.epoch
        await api.store.names.refresh()
    unknown = await api.store.unknown_classes(requested.classes())
    if unknown:
        words = f"No such resource class {sorted(unknown)[0]}."
        raise HttpFault(400, f"Invalid resource class in resources parameter: {words}")
    unknown = await api.store.unknown_traits(requested.traits())
    if unknown:
        raise HttpFault(400, f"No such trait(s): {', '.join(sorted(unknown))}.")


# --- allocation requests


def _requests(found: CandidateSet, version: int) -> bytes:
    """Return each candidate as text. Candidates in which the same slots share a provider differ only in their uuids."""
    if not len(found):
        return b""
    columns = found.columns()
    templates: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}
    parts: list[str] = []
    if (found.rows == found.rows[:, :1]).all():  # each of one provider, as on flat hosts: a column is the whole answer
        template, order = _template(found, (0,) * len(columns), version)
        once = tuple(0 for _ in order)
        parts = [template % tuple(uuid for _ in once) for uuid in columns[0]]
        return ",".join(parts).encode()
    for uuids in zip(*columns, strict=True):
        first: dict[str, int] = {}
        pattern = tuple(first.setdefault(uuid, number) for number, uuid in enumerate(uuids))
        known = templates.get(pattern)
        if known is None:
            known = templates[pattern] = _template(found, pattern, version)
        template, order = known
        parts.append(template % tuple(uuids[number] for number in order))
    return ",".join(parts).encode()


def _template(found: CandidateSet, pattern: tuple[int, ...], version: int) -> tuple[str, tuple[int, ...]]:
    """Return (the text with a placeholder for each uuid, the slot whose provider replaces each placeholder)."""
    given: dict[int, dict[str, int]] = {}
    groups: dict[str, dict[int, None]] = {}
    for number, slot in zip(pattern, found.slots, strict=True):
        groups.setdefault(slot.suffix, {})[number] = None
        if slot.resources:
            resources = given.setdefault(number, {})
            for name, amount in slot.resources.items():
                resources[name] = resources.get(name, 0) + amount
    places = list(given)
    texts = [msgspec.json.encode(resources).decode().replace("%", "%%") for resources in given.values()]
    if version < SINCE_DICTS:
        listed = ",".join(f'{{"resource_provider":{{"uuid":"%s"}},"resources":{text}}}' for text in texts)
        return f'{{"allocations":[{listed}]}}', tuple(places)
    listed = ",".join(f'"%s":{{"resources":{text}}}' for text in texts)
    if version < SINCE_MAPPINGS:
        return f'{{"allocations":{{{listed}}}}}', tuple(places)
    mapped = []
    for suffix, members in groups.items():
        mapped.append(f'"{suffix}":[{",".join(["%s"] * len(members))}]'.replace("%s", '"%s"'))
        places += members
    return f'{{"allocations":{{{listed}}},"mappings":{{{",".join(mapped)}}}}}', tuple(places)


SINCE_TRAITS = 17
SINCE_ALL_CLASSES = 27
SINCE_NESTED = 29

# The number of rows of a replica whose texts are cached, some 300 bytes each.
ROWS_KEPT = 1 << 18


def summaries(replica: Replica, found: CandidateSet, classes: Collection[str], version: int) -> bytes:
    """Return the summaries of every provider of the candidates. classes: the requested classes; below 1.27 only these
    are listed.
    """
    if not len(found):
        return b""
    rows = found.touched()
    if version < SINCE_NESTED or replica.top > ROWS_KEPT:
        return b",".join(_texts(replica, rows, None if version >= SINCE_ALL_CLASSES else classes, version)[1])
    return replica.cache(_Kept).of(replica, rows)


class _Kept:
    """The texts by row, with the stamp that the row had when the text was rendered."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._stamps: Amounts = np.zeros(0, dtype=np.int64)

    def of(self, replica: Replica, rows: Rows) -> bytes:
        """Return the texts of these rows, in the order of the rows."""
        if len(self._texts) < replica.size:
            self._texts += [b""] * (replica.size - len(self._texts))
            stage_times, self._stamps = self._stamps, np.zeros(replica.size, dtype=np.int64)
            self._stamps[: len(stage_times)] = stage_times
        texts = self._texts
        stale = rows[self._stamps[rows] != replica.stamp[rows]]
        if len(stale):
            order, fresh = _texts(replica, stale, None, SINCE_NESTED)
            for row, text in zip(order.tolist(), fresh, strict=True):
                texts[row] = text
            self._stamps[stale] = replica.stamp[stale]
        return b",".join([texts[row] for row in rows.tolist()])


def _texts(replica: Replica, rows: Rows, only: Collection[str] | None, version: int) -> tuple[Rows, list[bytes]]:
    """Return (the rows in another order, their texts). Providers with the same classes and traits share a template."""
    kinds = np.stack([replica.classes[rows], replica.traits[rows]], axis=1)
    distinct, which = np.unique(kinds, axis=0, return_inverse=True)
    by_number = {column.number: column for name in replica.resource_classes() if (column := replica.column(name))}
    order: list[Rows] = []
    parts: list[bytes] = []
    for number, (classes, traits) in enumerate(distinct.tolist()):
        columns = [by_number[each] for each in replica.class_sets.values[classes]]
        shown = [column for column in columns if only is None or column.name in only]
        for alike, present in _by_inventory(rows[which == number], shown):
            order.append(alike)
            parts += _alike(replica, alike, present, replica.trait_sets.values[traits], version)
    return np.concatenate(order), parts


def _by_inventory(rows: Rows, classes: Sequence[ClassColumns]) -> Iterator[tuple[Rows, list[ClassColumns]]]:
    """Group the rows by the classes that they have inventory of. A class that is used without inventory, or was
    removed, is not listed.
    """
    has = np.array([column.kind[rows] > 0 for column in classes], dtype=np.bool_).reshape(len(classes), len(rows))
    if has.all():
        yield rows, list(classes)
        return
    distinct, which = np.unique(has.T, axis=0, return_inverse=True)
    for number, present in enumerate(distinct.tolist()):
        yield rows[which == number], [column for column, there in zip(classes, present, strict=True) if there]


def _alike(
    replica: Replica, rows: Rows, classes: Sequence[ClassColumns], traits: Sequence[str], version: int
) -> list[bytes]:
    """Render the summaries of providers that have inventory of the same classes, and the same traits."""
    resources = ",".join(f'"{column.name}":{{"capacity":%s,"used":%s}}' for column in classes)
    template = f'"%s":{{"resources":{{{resources}}}'
    columns: list[Sequence[object]] = [replica.uuids_of(rows)]
    for column in classes:
        columns += column.kinds.columns()[CAPACITY][column.kind[rows]].tolist(), column.used[rows].tolist()
    if version >= SINCE_TRAITS:
        listed = sorted(traits, key=lambda trait: (is_custom(trait), trait))  # Placement lists standard traits first
        template += f',"traits":{msgspec.json.encode(listed).decode()}'
    if version >= SINCE_NESTED:
        template += ',"parent_provider_uuid":%s,"root_provider_uuid":"%s"'
        columns.append(
            ["null" if up == NO_ROW else f'"{replica.uuid_of(up)}"' for up in replica.parent[rows].tolist()],
        )
        columns.append(replica.uuids_of(replica.root[rows].astype(np.intp)))
    template += "}"
    return [(template % values).encode() for values in zip(*columns, strict=True)]
