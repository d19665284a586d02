"""The route /allocation_candidates: searches candidates and renders them directly from columns."""

from __future__ import annotations

import random
from functools import cache
from time import monotonic, thread_time

import msgspec

from placement_worker.replica.book import Book
from placement_worker.replica.candidates import CandidateSet, candidates
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.search import warm_up_search
from placement_worker.replica.tree_solver import TimeBudget, TooLong
from placement_worker.rest.api import Api
from placement_worker.rest.candidates_query import ParsedQuery, parse_candidates
from placement_worker.rest.faults import HttpFault, invalid_query
from placement_worker.rest.http import HttpRequest, QueryString, Response
from placement_worker.rest.summaries import summaries
from placement_worker.rest.versions import NEWEST

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

    def answer(book: Book, time_budget: TimeBudget) -> bytes:
        rng = None if seed is None else random.Random(seed)
        found = candidates(
            book, requested.request, limit=limit, rng=rng, budget=config.search_budget, time_budget=time_budget
        )
        return _rendered(book, found, requested, request.version, time_budget)

    book = api.replica.book
    try:
        # This does not await, so the book does not change. The budget is the CPU time of this thread, so that a search
        # is not started again because the machine is busy.
        body = answer(book, TimeBudget(thread_time, AT_ONCE_S, keeps_partial=False))
    except QueryTooWide as error:
        raise invalid_query(str(error)) from None
    except TooLong:
        body = await api.searches.run(
            lambda copy: answer(copy, TimeBudget(monotonic, config.search_timeout_s, keeps_partial=True)), book
        )
    return Response(200, body).set_modified(request, api.clock.time())


@cache
def warm_up() -> None:
    """Answer a search of a book of one host, once in a process: the first one compiles JSON schemas, among others, and
    takes 1 ms longer.
    """
    book = warm_up_search()
    requested = parse_candidates(QueryString(b"resources=VCPU:1&required=CUSTOM_WARM_UP&limit=1"), NEWEST)
    time_budget = TimeBudget(thread_time, AT_ONCE_S, keeps_partial=True)
    found = candidates(book, requested.request, limit=1, rng=None, budget=1_000, time_budget=time_budget)
    _rendered(book, found, requested, NEWEST, time_budget)


def _rendered(book: Book, found: CandidateSet, requested: ParsedQuery, version: int, time_budget: TimeBudget) -> bytes:
    """Return the whole body. Raises HttpFault 400 when no candidate was found before the budget ended; TooLong."""
    if not len(found) and not found.exhausted:
        raise invalid_query(
            "this many groups, or this many providers that could satisfy them, cannot be searched through within the "
            "bounds of time and steps, and no candidate was found so far. Ask for less, or for one tree (in_tree)."
        )
    if found.rows.size > CELLS_AT_ONCE and not time_budget.keeps_partial:
        raise TooLong
    parts = (b'{"allocation_requests":[', _requests(found, version), b'],"provider_summaries":{')
    return b"".join((*parts, summaries(book, found, requested.classes(), version), b"}}"))


async def _check_names(api: Api, requested: ParsedQuery, book: Book) -> None:
    seen = (book.epoch, len(book.resource_classes()))
    if seen != api.classes_seen:  # a class that this process does not know may have been renamed
        api.classes_seen = seen
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
    if found.single_provider:
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
