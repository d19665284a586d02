"""`berth placement audit`, `export` and `import`: an operator's work on all of placement."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import asyncpg
import typer

from berth.audit.findings import is_proof, may_run
from berth.audit.invariants import ELSEWHERE, OVER
from berth.audit.missing_claims import IS_SETTLED, Unclaimed, catch_up, claim_again, find_unclaimed, reported_of
from berth.audit.passes import REQUESTS, UNDER_WAY
from berth.cli.common import (
    Exit,
    Stop,
    Yes,
    ask_first,
    by_cell,
    database_of,
    open_database_in_time,
)
from berth.cli.output import (
    As,
    Form,
    out,
    print_data,
    print_data_line,
    print_line,
    print_result,
)
from berth.config.settings import Settings
from berth.config.site import Site, with_added_cells
from berth.text import counted, printable
from bus.contracts.placement import ClaimOutcome, ConsumerAllocations, Release, ReleaseResult, Swap, SwapResult
from bus.faults import DatabaseUnprepared
from bus.persistence.database import Database
from cell_conductor.state.unknown_machine import UnknownMachineKind
from placement_worker.operations import audit as questions
from placement_worker.operations import export_store
from placement_worker.operations.audit import Duplicate, repair
from placement_worker.operations.audit import set_host_cell as set_host_cell_in_placement
from placement_worker.operations.export import MAX_LINE_BYTES, CopyReader, InvalidExport, PlacementExport, lines, parse
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows

Giving = Release | Swap  # what releases a consumer's allocations

# A claim younger than this may still be on its way to being an instance.
GRACE_S = 900.0
RELEASES_AT_ONCE = 200
MAX_PASSES = 50

# Consumers that have an allocation by the bus, have had it for a while, and are in no state that may have one, in any
# cell.
CONSUMERS = """
SELECT uuid::text, attempt, claim_owner FROM consumers
WHERE released_at IS NULL AND attempt > 0 AND updated_at < now() - make_interval(secs => $1) ORDER BY uuid
"""
HELD = """
SELECT uuid::text, attempt, claim_owner, generation, project_id, user_id FROM consumers c
WHERE released_at IS NULL AND updated_at <= now() - make_interval(secs => $1)
    AND EXISTS (SELECT FROM allocations a WHERE a.consumer = c.uuid) ORDER BY uuid
"""
# An instance that became active a moment ago, by an adoption after a restore for example, may still get its claim.
INSTANCES = f"""
SELECT uuid::text, state, host_uuid::text,
       {IS_SETTLED.format("$2")} AS settled
FROM instances WHERE uuid = ANY($1::uuid[])
"""
# Consumers that have the source of a move, by its instance: while it awaits its confirm, perhaps for days.
MIGRATIONS = "SELECT record #>> '{action,request_id}' FROM instances WHERE record #>> '{action,request_id}' = ANY($1)"
# The same of a move that no cell has on record: it was restored, and is commanded again.
OPEN_ACTIONS = "SELECT request_id::text FROM instance_actions WHERE NOT terminal AND request_id = ANY($1::uuid[])"
# Machines that a cell does not destroy by itself.
QUARANTINED = """
SELECT instance_uuid::text FROM unknown_machines WHERE record #>> '{machine,kind}' = $1 AND instance_uuid =
ANY($2::uuid[])
"""


async def audit(
    settings: Settings,
    repair: Annotated[bool, typer.Option("--repair", help="Repair the findings that can be repaired.")] = False,
    consumers: Annotated[
        Path | None, typer.Option(help="UUIDs of all that may have allocations, one a line: where Nova writes them.")
    ] = None,
    evict: Annotated[
        bool, typer.Option("--evict", help="With --repair: also release the newest allocations that exceed capacity.")
    ] = False,
    form: As = Form.TABLE,
    yes: Yes = False,
) -> int:
    """Find the problems of placement.

    Orphaned, missing, duplicate and miscounted allocations, and capacity exceeded.
    Orphaned: of the bus's consumers that no cell and no scheduler has as alive, and of which no machine is in
    quarantine, for 15 minutes; with --consumers, since 15 minutes before the file was last written, of consumers
    that are not named there. Duplicate: of an instance,
    on another host than its own; with --consumers, one class of two trees that do not share it (a move in progress
    looks so too). Unclaimed: active by its cell's record for 15 minutes without an allocation on its host, as after a
    restore.
    Repairing releases orphaned allocations, claims for unclaimed instances if they fit (where placement has a later
    attempt of one than its cell, only if the host reports its machine on the bus), releases duplicate allocations
    of an instance on hosts that are not its own, removes rows that no client can release and counts usage again.
    With --consumers nothing shows which host is whose own: duplicate ones are only reported. Exceeded capacity is
    reported, with the newest consumers without whom it would fit: they run, and an operator has to move them; --evict
    releases them all the same: for machines that are known to be destroyed. Exit status 1 while anything is wrong.
    """
    if evict and not repair:
        raise Stop(Exit.USAGE, "audit.evict", "--evict is a part of repairing: --repair --evict")
    here = database_of(settings)
    done: list[str] = []
    try:
        ask = partial(ask_first, yes=yes)
        found = await audited(here, repair=repair, evict=evict, consumers=consumers, ask=ask, done=done)
    except BaseException:
        if done:
            _print_found({"repaired": done}, form)
        raise
    _print_found(found, form)
    return Exit.NO if any(found[kind] for kind in found if kind != "repaired") else 0


async def audited(
    here: Site,
    *,
    repair: bool,
    evict: bool = False,
    consumers: Path | None = None,
    grace_s: float = GRACE_S,
    ask: Callable[[str], None] | None = None,
    done: list[str] | None = None,
) -> dict[str, list[str]]:
    """The problems of placement by kind, a line each. grace_s: a younger one may still be on its way. ask: called with
    what a repair would do. done: gets a line for each repair. Raises Stop."""
    done = [] if done is None else done

    async def read(database: Database) -> tuple[Sequence[Giving], list[str | Duplicate], list[Unclaimed]]:
        if consumers is not None:
            return *await _unnamed(database, consumers, grace_s), []
        return await _judged(here, database, grace_s)

    if consumers is None:
        here = await with_added_cells(here)  # allocations of a cell that is not read would count as orphaned
    async with _placement(here) as (store, database):
        orphans, doubled, bare = await read(database)
        if repair:
            if ask is not None:
                ask(await _intended(database, orphans, doubled, bare, evict))
            await _repair(store, database, orphans, doubled, evict, done)
            await _claim_again(here, store, bare, done)
            orphans, doubled, bare = await read(database)
        async with database.raw() as connection:
            wrong = await questions.findings(connection)
            over = await questions.find_over_capacity(connection)
    return {
        "orphaned": [*map(_consumer_of, orphans)],
        "doubled": [each if isinstance(each, str) else each.line() for each in doubled],
        "unclaimed": [each.line() for each in bare],
        "unsound": wrong,
        "over_capacity": [each.line() for each in over],
        "repaired": done,
    }


async def export(
    settings: Settings, file: Annotated[Path | None, typer.Argument(help="Else standard output.")] = None
) -> None:
    """Write all of placement at one moment as JSON lines."""
    with _explained():
        async with _placement(database_of(settings)) as (store, database), database.raw() as connection:
            found = await export_store.read(connection, store.names)
        with file.open("wb") if file is not None else contextlib.nullcontext(sys.stdout.buffer) as target:
            target.writelines(lines(found))


async def import_(
    settings: Settings,
    file: Annotated[Path | None, typer.Argument(help="A file that export wrote; else standard input.")] = None,
    from_url: Annotated[str | None, typer.Option(help="Copy a live OpenStack Placement instead.")] = None,
    token: Annotated[str, typer.Option(envvar="OS_TOKEN", help="An administrator's token there.")] = "admin",
    replace: Annotated[bool, typer.Option("--replace", help="Also over a placement that is not empty.")] = False,
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """Make placement equal to a file or to a Placement.

    A live Placement is copied; the feed has the changes for every replica.

    With --from-url it copies while both run, pass after pass, until a pass over everything finds nothing
    new: then the copy is equal, and the command prints that.
    """
    with _explained():
        async with _placement(database_of(settings)) as (store, database):
            await _check_replaceable(database, replace=replace, yes=yes)
            if from_url is not None:
                await _copy(store, database, from_url, token, form)
                return
            with file.open("rb") if file is not None else contextlib.nullcontext(sys.stdin.buffer) as source:
                changed = await _assign(store, database, parse(_bounded(source)))
            if form.is_data:
                print_data_line({"changed": changed}, form)
            else:
                print_line(f"imported: {changed} providers and consumers changed")


async def set_host_cell(
    settings: Settings,
    host: Annotated[str, typer.Argument(help="A provider's name or UUID; its whole tree is given.")],
    cell: Annotated[str, typer.Argument(help="The cell whose bus may report and claim it from now on.")],
    form: As = Form.TABLE,
) -> int:
    """Give an empty host to another cell. Stop its compute service first, start it on the new cell's bus afterwards.

    Exit status 1 while a consumer has an allocation there.
    """
    here = database_of(settings)
    async with _placement(here) as (_, database), database.raw() as connection:
        change = await set_host_cell_in_placement(connection, host, here.check_cell(cell))
    was = change.before or "no cell"
    if change.outcome == "unknown":
        raise Stop(Exit.NO, "host.unknown", f"placement has no provider {host!r}")
    if change.outcome == "in_use":
        raise Stop(Exit.NO, "host.in_use", f"{change.consumers} have allocations on {change.root}, of {was}")
    text = f"{was} -> {cell}" if change.outcome == "changed" else f"{cell} already"
    print_result({"provider": change.root, "before": change.before, "cell": cell}, form, f"{change.root}: {text}")
    return 0


# --- parts


@contextlib.asynccontextmanager
async def _placement(here: Site) -> AsyncIterator[tuple[PlacementService, Database]]:
    database = here.environment("book").database("placement", pool_size=2)
    store = PlacementService(PostgresPlacementRows(database))
    await open_database_in_time(store.open())
    try:
        yield store, database
    finally:
        await store.close()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises Stop for a file that cannot be used."""
    try:
        yield
    except InvalidExport as error:
        raise Stop(Exit.USAGE, "placement.export", str(error)) from error
    except OSError as error:
        reason = f"cannot use {error.filename}: {error.strerror}" if error.filename else str(error)
        raise Stop(Exit.USAGE, "placement.file", reason) from error


def _bounded(source: Any) -> Iterable[bytes]:
    while line := source.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise InvalidExport(f"a line of more than {MAX_LINE_BYTES} bytes")
        yield line


async def _check_replaceable(database: Database, *, replace: bool, yes: bool) -> None:
    """Raises Stop."""
    async with database.raw() as connection:
        counts = [await connection.fetchval(f"SELECT count(*) FROM {table}") for table in ("providers", "consumers")]
    if counts[0] and not replace:
        raise Stop(Exit.USAGE, "placement.not_empty", "placement is not empty; --replace replaces it by the import")
    if any(counts) and replace:
        what = f"{counted(counts[0], 'provider')}, {counted(counts[1], 'consumer')}"
        ask_first(f"Replace all of placement: {what}", yes=yes)


async def _assign(store: PlacementService, database: Database, what: PlacementExport) -> int:
    classes = {name for provider in what.providers.values() for name in provider.inventories}
    traits = {name for provider in what.providers.values() for name in provider.traits}
    await store.names.ensure(what.classes | classes, what.traits | traits)
    rows = store.rows
    assert isinstance(rows, PostgresPlacementRows)
    async with rows.transaction() as transaction:
        return await export_store.assign(transaction, what, store.names)


async def _copy(store: PlacementService, database: Database, url: str, token: str, form: Form) -> None:
    source = CopyReader(url, token)
    whole = True
    try:
        for number in range(1, MAX_PASSES + 1):
            found = await source.read(whole=whole)
            try:
                changed = await _assign(store, database, found)
            except InvalidExport as error:  # it moved while it was read
                _print_pass(form, number, f"{error}; again", error=str(error))
                continue
            held = f"{len(found.providers)} providers, {len(found.consumers)} consumers"
            equal, counts = not changed and whole, (len(found.providers), len(found.consumers))
            shown = f"equal: {held}" if equal else f"{held}; {changed} changed"
            _print_pass(form, number, shown, equal=equal, providers=counts[0], consumers=counts[1], changed=changed)
            if equal:
                return
            whole = not changed  # a whole pass verifies that a quick pass without differences is right
    finally:
        await source.close()
    raise Stop(Exit.NO, "placement.never_equal", f"still changing after {MAX_PASSES} passes; run it again")


def _print_pass(form: Form, number: int, text: str, **fields: object) -> None:
    if form.is_data:
        print_data_line({"pass": number, **fields}, form)
    else:
        print_line(f"pass {number}: {text}")


async def _judged(
    here: Site, database: Database, grace_s: float
) -> tuple[list[Release], list[str | Duplicate], list[Unclaimed]]:
    """(orphans, doubled, unclaimed). Requests under way are read before and after the rest, as `berth audit` does: a
    move has two hosts, or none that its cell's record names, until its cell has it on record.
    """
    busy = {*await _column(here, "scheduler", UNDER_WAY)}
    orphans, doubled = await _lost(here, database, grace_s)
    bare = await find_unclaimed(here, database, grace_s)
    busy.update(await _column(here, "scheduler", UNDER_WAY))
    return (
        orphans,
        [one for uuid, found in doubled.items() if uuid not in busy for one in found],
        [one for one in bare if one.instance.uuid not in busy],
    )


async def _lost(
    here: Site, database: Database, grace_s: float
) -> tuple[list[Release], dict[str, list[str | Duplicate]]]:
    """(releases of consumers that no worker knows as alive, those that also have allocations on another host than
    their own). A release is of the attempt and the claim owner that were read: what is claimed or transferred after
    that stays.
    """
    async with database.raw() as connection:
        holding = [_release(*row) for row in await connection.fetch(CONSUMERS, grace_s)]
        generations = await questions.generations(connection)  # first: a consumer that moves from now on is left alone
        held = await questions.allocations(connection)
        roots = dict(
            await connection.fetch(
                "SELECT p.uuid::text, r.uuid::text FROM providers p JOIN providers r ON r.id = p.root_id"
            )
        )
        sharing = await questions.sharing_providers(connection)
    if not holding:
        return [], {}
    holders = [each.consumer for each in holding]
    rows = await _rows(here, "scheduler", REQUESTS, holders, [each.owner or "" for each in holding])
    requests = {uuid: state for uuid, state, *_ in rows}
    recorded, quarantined = set[str](), set[str]()
    alive = {uuid for uuid, _, in_doubt, is_open, _ in rows if in_doubt or is_open}
    with_machine = {row["instance_uuid"] for row in rows if row["has_machine"]}
    alive.update(await _column(here, "scheduler", OPEN_ACTIONS, holders))
    doubled: dict[str, list[str | Duplicate]] = {}
    for cell in here.cells:
        alive.update(await _column(here, f"cell_{cell}", MIGRATIONS, holders))
        quarantined.update(
            await _column(here, f"cell_{cell}", QUARANTINED, UnknownMachineKind.QUARANTINED.value, holders)
        )
        for uuid, state, host, settled in await _rows(here, f"cell_{cell}", INSTANCES, holders, grace_s):
            if state in ELSEWHERE:
                continue
            if is_proof(state, uuid in with_machine):
                recorded.add(uuid)
            if state not in OVER:
                alive.add(uuid)
            if settled and host is not None:
                known = generations.get(uuid, 0)
                doubled[uuid] = questions.excess_of(uuid, host, held.get(uuid, {}), roots, sharing, known)
    alive.update(uuid for uuid in holders if may_run(uuid, requests.get(uuid), recorded, quarantined))
    return [each for each in holding if each.consumer not in alive], doubled


async def _unnamed(
    database: Database, path: Path, grace_s: float = GRACE_S
) -> tuple[list[Giving], list[str | Duplicate]]:
    """The same, by a list of all that may have allocations: what was claimed since it was written is not in it. Raises
    Stop.
    """
    age_s = _age_of(path)  # before it is read: it may be written again
    alive = uuids_of(path)
    async with database.raw() as connection:
        held = await _held(connection, older_than_s=age_s + grace_s)
        doubled: list[str | Duplicate] = [*await questions.duplicates(connection)]
    return [each for uuid, each in held.items() if uuid not in alive], doubled


def _release(consumer: str, attempt: int, claim_owner: str) -> Release:
    """The release of what a consumer has by this attempt of this claim owner."""
    return Release(consumer=consumer, attempt=attempt, owner=claim_owner or None)


async def _held(connection: asyncpg.Connection, older_than_s: float = 0.0) -> dict[str, Giving]:
    """By consumer that has not changed for so long, what releases what it has now and nothing later. What no build
    has claimed has no attempt: its generation shows that it has changed since.
    """
    return {
        row[0]: _release(*row[:3])
        if row[1]
        else Swap(
            consumers=(
                ConsumerAllocations(consumer=row[0], consumer_generation=row[3], project_id=row[4], user_id=row[5]),
            )
        )
        for row in await connection.fetch(HELD, older_than_s)
    }


def _consumer_of(giving: Giving) -> str:
    return giving.consumer if isinstance(giving, Release) else giving.consumers[0].consumer


def _age_of(path: Path) -> float:
    """Seconds since a file was written, by this computer's clock alone: a database's may differ. Raises Stop."""
    try:
        age_s = time.time() - path.stat().st_mtime
    except OSError as error:
        raise Stop(Exit.USAGE, "audit.consumers", f"cannot read {path}: {error.strerror or error}") from error
    if age_s < 0:
        raise Stop(Exit.USAGE, "audit.consumers", f"{path} is of the future: what it does not name yet is unknown")
    return age_s


def uuids_of(path: Path) -> frozenset[str]:
    """The UUIDs that a file names, one a line. Raises Stop."""
    found: set[str] = set()
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        found.add(str(UUID(line.strip())))
                    except ValueError:
                        raise Stop(Exit.USAGE, "audit.consumers", f"{path}, line {number}: not a UUID") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Stop(Exit.USAGE, "audit.consumers", f"cannot read {path}: {reason}") from error
    if not found:  # an empty list would make an orphan of every consumer
        raise Stop(Exit.USAGE, "audit.consumers", f"{path} names no consumer")
    return frozenset(found)


async def _rows(here: Site, schema: str, statement: str, *arguments: object) -> Sequence[Any]:
    database = here.environment("audit").database(schema, pool_size=1)
    await open_database_in_time(database.open())
    try:
        async with database.raw() as connection:
            rows: Sequence[Any] = await connection.fetch(statement, *arguments)
            return rows
    except (asyncpg.UndefinedTableError, DatabaseUnprepared) as error:
        # Without knowing every cell's instances their consumers would look orphaned.
        raise Stop(
            Exit.UNAVAILABLE, "audit.blind", f"{schema} has never been started here: which instances live is unknown"
        ) from error
    finally:
        await database.close()


async def _column(here: Site, schema: str, statement: str, *arguments: object) -> list[str]:
    return [row[0] for row in await _rows(here, schema, statement, *arguments)]


async def _intended(
    database: Database,
    orphans: Sequence[Giving],
    doubled: Sequence[str | Duplicate],
    bare: Sequence[Unclaimed],
    evict: bool,
) -> str:
    """What a repair would do, for a person."""
    held = {"orphaned": [*map(_consumer_of, orphans)]}
    twice = sum(isinstance(each, Duplicate) for each in doubled)
    parts = [
        f"release the allocations of {by_cell(held, 'consumer')}",
        f"release {twice} duplicate allocations",
        f"claim again for {counted(len(bare), 'instance')}",
        "mend what no client can",
    ]
    if evict:
        async with database.raw() as connection:
            over = {uuid for each in await _over(connection) for uuid, _ in each.newest}
        parts.append(f"release what exceeds capacity, of up to {counted(len(over), 'consumer')}")
    return f"Repair placement: {', '.join(parts)}"


async def _over(connection: asyncpg.Connection) -> list[Any]:
    """What exceeds capacity and can be evicted."""
    return [each for each in await questions.find_over_capacity(connection) if not each.orphaned]


async def _repair(
    store: PlacementService,
    database: Database,
    orphans: Sequence[Giving],
    doubled: Sequence[str | Duplicate],
    evict: bool,
    done: list[str],
) -> None:
    """done: gets a line for each repair."""
    await _carry_out(store, orphans, done)
    async with database.raw() as connection:
        done += await repair(connection)
    async with database.raw() as connection:
        twice = [each for each in doubled if isinstance(each, Duplicate)]
        done += await questions.reduce_allocations(store, connection, twice)
        held = await _held(connection) if evict else {}
        over = await _over(connection) if evict else []
    evicted = sorted({uuid for each in over for uuid, _ in each.newest} & held.keys())
    await _carry_out(store, [held[uuid] for uuid in evicted], done)


async def _claim_again(here: Site, store: PlacementService, bare: Sequence[Unclaimed], done: list[str]) -> None:
    known, left = await catch_up(here, bare, await reported_of(here, bare))
    done += left
    done += await claim_again(store, known)


async def _carry_out(store: PlacementService, releases: Sequence[Giving], done: list[str]) -> None:
    """Carry out releases; a line for each."""
    for start in range(0, len(releases), RELEASES_AT_ONCE):
        part = releases[start : start + RELEASES_AT_ONCE]
        for one, reply in zip(part, await store.apply(part), strict=True):
            outcome = reply.outcome if isinstance(reply, ReleaseResult | SwapResult) else "refused"
            text = "released" if outcome in {"released", ClaimOutcome.CLAIMED} else f"left alone, {outcome}"
            done.append(f"{_consumer_of(one)}: {text}")


def _print_found(found: dict[str, list[str]], form: Form) -> None:
    if form.is_data:
        print_data(found, form)
        return
    for kind, findings in found.items():
        for line in findings:
            out.print(printable(f"{kind.replace('_', ' ')}: {line}"), soft_wrap=True, markup=False)
    if not any(found.values()):
        out.print("placement is sound")
