"""The cells' records of machines in quarantine and of breakers, and operators' decisions on them.

They are in the cells' schemas; every conductor follows them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import asyncpg
from msgspec import Struct

from berth.audit.repair import enter
from berth.config.site import cells_in_use
from bus.contracts.objects import AuditRepair
from bus.faults import DatabaseUnavailable, DatabaseUnprepared, Fault, RequestRefused
from bus.persistence.database import Database
from bus.service.environment import Environment
from bus.service.settings import SettingsError
from cell_conductor.rules.blocked_rules import adoption_blocker
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.desired_state import PURGEABLE, PURGEABLE_FAILED
from cell_conductor.state.instance import Instance
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import ADOPT, DecidedMachine, MachineKey, UnknownMachineRecord
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.tables import decode
from cell_conductor.store.unknown_machines import Safety

TIMEOUT_S = 10.0
OVER = PURGEABLE | PURGEABLE_FAILED  # in another cell: it has an instance of this uuid no more
_INSTANCES = "SELECT uuid::text, record::text FROM instances WHERE uuid = ANY($1::uuid[])"

T = TypeVar("T")
K = TypeVar("K")
TrippedBreaker = tuple[str, str, float | None]


class CellNeverStarted(Fault):
    """A cell has no tables on this database, by this release: it was never started here."""

    code = "cell.never_started"


SeenWith = Mapping[MachineKey, tuple[str, int]]  # {place: (cell, attempt)}


class InCells(Struct, frozen=True):
    """What was read of each cell's record. never_started: cells that have none."""

    found: dict[str, list[UnknownMachineRecord]]
    breakers: dict[str, list[Breaker]]
    never_started: tuple[str, ...] = ()

    def machines(self, *kinds: UnknownMachineKind) -> list[tuple[str, UnknownMachineRecord]]:
        """(cell, machine) of these kinds, by cell, host and instance."""
        return [(cell, one) for cell, records in self.found.items() for one in records if one.machine.kind in kinds]


async def read(env: Environment, cell: str | None = None) -> InCells:
    """The records of every cell, or of one. Raises SettingsError (no such cell), DatabaseUnavailable, Forbidden,
    NotConfigured, CellNeverStarted of the one, and DatabaseUnprepared where no cell was ever started here.
    """
    found: dict[str, list[UnknownMachineRecord]] = {}
    breakers: dict[str, list[Breaker]] = {}
    never: list[str] = []
    for name in await named_cells(env, cell):
        try:
            found[name] = await _in_cell(env, name, lambda safety: safety.records())
            breakers[name] = await _in_cell(env, name, lambda safety: safety.breakers())
        except CellNeverStarted:
            if cell is not None:
                raise
            never.append(name)
    if not found:  # rather the wrong database than a deployment without machines
        raise DatabaseUnprepared(f"no conductor of {', '.join(never)} has ever been started here with this release")
    return InCells(found, breakers, tuple(never))


async def decide(
    env: Environment, machines: Mapping[str, Sequence[DecidedMachine]], decision: str, by: str
) -> tuple[dict[str, list[MachineKey]], dict[str, Fault]]:
    """Have machines of cells destroyed, or left for good; returns those that are in quarantine, by cell, and the faults
    of the other cells. Raises as `read` where none has answered.
    """
    now = env.clock.time()

    async def in_cell(cell: str) -> list[MachineKey]:
        return await _in_cell(env, cell, lambda safety: safety.decide(machines[cell], decision, by, now))

    return await _each(machines, in_cell, [])


async def reset(
    env: Environment, breakers: Sequence[TrippedBreaker], by: str
) -> tuple[dict[TrippedBreaker, bool], dict[TrippedBreaker, Fault]]:
    """Allow what tripped these breakers, each (cell, service, when it tripped). False: it is not open, or tripped at
    another time. Returns the faults of the others beside. Raises as `read` where no cell has answered.
    """
    now = env.clock.time()

    async def in_cell(one: TrippedBreaker) -> bool:
        cell, service, tripped_at = one
        return await _in_cell(env, cell, lambda safety: safety.reset(service, by, now, tripped_at=tripped_at))

    return await _each(breakers, in_cell, False)


async def _each(items: Iterable[K], work: Callable[[K], Awaitable[T]], nothing: T) -> tuple[dict[K, T], dict[K, Fault]]:
    """What was done of each, and the faults of the others: what is committed in one cell stays when another one does
    not answer. Raises the first fault where nothing was done. nothing: of a cell that was never started.
    """
    done: dict[K, T] = {}
    faults: dict[K, Fault] = {}
    for one in items:
        try:
            done[one] = await work(one)
        except CellNeverStarted:
            done[one] = nothing
        except Fault as fault:
            faults[one] = fault
    if faults and not done:
        raise next(iter(faults.values()))
    return done, faults


async def adopt(
    env: Environment, places: Sequence[MachineKey], *, actor: str, reason: str, seen: SeenWith | None = None
) -> tuple[dict[MachineKey, str], dict[MachineKey, Fault]]:
    """Decide that machines in quarantine are their instances: checked against the cells' records, and put on record for
    the conductors, which check the hosts' own answers before they carry it out.

    seen: the cell and the attempt that each was seen with; None: by its place alone.

    Each that was decided is in the log of changes after. Returns the cells of those, and why the others were not: a
    refusal (`quarantine.` unknown, several, not_adoptable, recorded_elsewhere), or the fault of their cell. Raises as
    `read`.
    """
    records = await read(env)
    kept: dict[str, list[tuple[str, UnknownMachineRecord]]] = defaultdict(list)
    for cell, one in records.machines(UnknownMachineKind.QUARANTINED):
        kept[one.machine.uuid].append((cell, one))
    uuids = sorted({uuid for _, uuid in places})
    known = {cell: await _instances(env, cell, uuids) for cell in records.found}
    refused: dict[MachineKey, Fault] = {}
    chosen: dict[str, list[DecidedMachine]] = defaultdict(list)
    repairs: dict[str, AuditRepair] = {}
    cell_of: dict[MachineKey, str] = {}
    for host, uuid in places:
        of_instance = {cell: found[uuid] for cell, found in known.items() if uuid in found}
        try:
            cell, machine = _checked(kept[uuid], of_instance, uuid, host, None if seen is None else seen[host, uuid])
        except RequestRefused as refusal:
            refused[host, uuid] = refusal
            continue
        repairs[uuid] = _repair(machine, cell, of_instance[cell])
        chosen[cell].append(DecidedMachine(uuid, host, machine.machine.attempt))
        cell_of[host, uuid] = cell
    of_cells, faults = await decide(env, chosen, ADOPT, actor)
    decided = {place: cell for cell, of in of_cells.items() for place in of}
    refused |= {place: faults[cell] for place, cell in cell_of.items() if cell in faults}
    left = {(host, uuid): unknown(uuid, host) for host, uuid in places if (host, uuid) not in decided}
    if decided:
        await enter(env, {uuid: repairs[uuid] for _, uuid in decided}, actor, reason)
    return decided, left | refused


def _repair(machine: UnknownMachineRecord, cell: str, has: Instance) -> AuditRepair:
    where = f"{cell} has it as {has.state} on {has.current.host}"
    found = f"runs on {machine.machine.host_uuid}, in quarantine: {machine.machine.reason}; {where}"
    return AuditRepair(finding="quarantined", found=found, proof="by an operator's word")


def unknown(uuid: str, host: str) -> RequestRefused:
    """The refusal of a decision about a machine that is not in quarantine, or not as it was seen."""
    return RequestRefused(f"no such machine of {uuid} is in quarantine on {host}", code="quarantine.unknown")


def _checked(
    kept: Sequence[tuple[str, UnknownMachineRecord]],
    records: Mapping[str, Instance],
    uuid: str,
    host: str,
    seen: tuple[str, int] | None,
) -> tuple[str, UnknownMachineRecord]:
    here = [(cell, one) for cell, one in kept if one.machine.host_uuid == host]
    if not here or (seen is not None and seen not in [(cell, one.machine.attempt) for cell, one in here]):
        raise unknown(uuid, host)
    if len(kept) > 1:
        others = ", ".join(one.machine.host_uuid for _, one in kept if one.machine.host_uuid != host)
        reason = f"there are others of it, on {others}: destroy or protect these first (`berth quarantine`)"
        raise RequestRefused(reason, code="quarantine.several")
    cell, machine = here[0]
    if why := adoption_blocker(records.get(cell)):
        raise RequestRefused(f"{uuid} in {cell}: {why}", code="quarantine.not_adoptable")
    if elsewhere := [name for name, one in records.items() if name != cell and one.phase not in OVER]:
        reason = f"{uuid} is on record in {', '.join(elsewhere)} as well"
        raise RequestRefused(reason, code="quarantine.recorded_elsewhere")
    return cell, machine


async def _instances(env: Environment, cell: str, uuids: Sequence[str]) -> dict[str, Instance]:
    async def of(database: Database) -> dict[str, Instance]:
        async with database.raw() as connection:
            return {uuid: decode(record) for uuid, record in await connection.fetch(_INSTANCES, uuids)}

    return await on_database(env, cell, of)


async def named_cells(env: Environment, cell: str | None) -> tuple[str, ...]:
    """All cells, or the one that is named. Raises SettingsError."""
    names = tuple(await cells_in_use(env))
    if cell is None:
        return names
    if cell not in names:
        raise SettingsError("cell.unknown", f"there is no cell {cell!r}; there are {', '.join(names)}")
    return (cell,)


async def _in_cell(env: Environment, cell: str, work: Callable[[Safety], Awaitable[T]]) -> T:
    return await on_database(env, cell, lambda database: work(Safety(PostgresKeyed(database))))


async def on_database(env: Environment, cell: str, work: Callable[[Database], Awaitable[T]]) -> T:
    """The work on a cell's schema. Raises CellNeverStarted and DatabaseUnavailable."""
    database = env.database(f"cell_{cell}", pool_size=1)
    try:
        async with _in_time():
            return await work(database)
    except (asyncpg.UndefinedTableError, DatabaseUnprepared) as error:
        raise CellNeverStarted(f"cell {cell} has never been started here with this release") from error
    finally:
        await database.close()


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """A worker waits for a database without end; an operator does not. Raises DatabaseUnavailable."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise DatabaseUnavailable(f"no answer from the database within {TIMEOUT_S:g} s") from error
