"""Instances that run on a host and hold nothing there in placement: its database was restored to before their claim.

Their room is offered to others. The cell's record has what each should hold, so it can be claimed again. A
placement that has carried out a claim of the forgotten history is ahead of the record: it has a later attempt, which
the record takes over first, on proof by the host's own report that the machine is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from berth.audit.facts import REPORT_TIMEOUT_S, reported
from berth.audit.invariants import RunningFact
from berth.config.site import Site
from bus.contracts.placement import ClaimOutcome, ConsumerAllocations, Swap, SwapResult
from bus.faults import DatabaseUnprepared, Transient
from bus.persistence.database import Database
from bus.transport import BusError
from cell_conductor.state.instance import Instance
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.tables import decode
from placement_worker.domain.values import ProviderAllocations
from placement_worker.operations import audit
from placement_worker.operations.audit import generations, swap_occupied
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows

log = structlog.get_logger(__name__)

# Without the bus no host reports, and nothing is proved. Longer than the wait for the reports.
PROOF_S = REPORT_TIMEOUT_S + 30.0
ATTEMPTS = "SELECT uuid::text, attempt FROM consumers WHERE attempt > 0 AND uuid = ANY($1::uuid[])"
ROOTS = """
SELECT p.uuid::text, r.uuid::text FROM providers p JOIN providers r ON r.id = p.root_id WHERE p.uuid = ANY($1::uuid[])
"""
# A moving instance holds allocations on two hosts for good reasons, and its own record carries it to an end.
IS_SETTLED = "state = 'active' AND source_host_uuid IS NULL AND since < extract(epoch FROM now()) - {}"
SETTLED = f"SELECT record::text FROM instances WHERE {IS_SETTLED.format('$1')} ORDER BY uuid"


class Unclaimed(Struct, frozen=True, kw_only=True):
    """One such instance as its cell's record has it. generation: of what it holds elsewhere; None: it holds nothing.

    attempt: the last of it that placement has (0: none). elsewhere: the hosts that it holds something of.
    """

    cell: str
    instance: Instance
    generation: int | None
    attempt: int = 0
    elsewhere: tuple[str, ...] = ()

    @property
    def is_ahead(self) -> bool:
        """Whether placement has a later attempt than the record: of a history that the record has lost, or a delete."""
        return self.attempt > max(self.instance.last_attempt, 1)

    def line(self) -> str:
        """For people."""
        chosen = self.instance.selections[self.instance.selection_index]
        holds = "holds nothing" if self.generation is None else "holds something elsewhere only"
        return f"{self.instance.uuid}: active on {chosen.host} ({chosen.host_uuid}) of {self.cell}, {holds}"


async def find_unclaimed(site: Site, placement: Database, grace_s: float) -> list[Unclaimed]:
    """All instances that have been active for `grace_s` seconds and hold nothing of their host.

    Each cell is read before placement and after it: what was active both times was so when placement was read, so it
    is not one that was deleted in between.
    """
    before = {cell: await _settled(site, cell, grace_s) for cell in site.cells}
    async with placement.raw() as connection:
        known = await generations(connection)
        held = await audit.allocations(connection)
        uuids = [uuid for instances in before.values() for uuid in instances]
        attempts = dict(await connection.fetch(ATTEMPTS, uuids))
        roots = dict(await connection.fetch(ROOTS, [one for uuid in uuids for one in held.get(uuid, ())]))
    found: list[Unclaimed] = []
    for cell, instances in before.items():
        bare = {uuid: one for uuid, one in instances.items() if not _holds_its_own(one, held.get(uuid, {}))}
        if not bare:
            continue
        after = await _settled(site, cell, grace_s)
        found += [
            Unclaimed(
                cell=cell,
                instance=one,
                generation=known[uuid] if uuid in held else None,
                attempt=attempts.get(uuid, 0),
                elsewhere=tuple(sorted({roots.get(provider, provider) for provider in held.get(uuid, ())})),
            )
            for uuid, one in bare.items()
            if after.get(uuid) == one and (uuid not in held or uuid in known)
        ]
    return found


class HostReports(Struct, frozen=True):
    """The reports of the hosts now. answered: the hosts that sent one."""

    machines: Collection[RunningFact] = ()
    answered: Collection[str] = ()

    def prove(self, each: Unclaimed) -> bool:
        """Whether the instance runs where its record has it and nowhere else.

        A machine that a move has stopped and kept is not where the instance runs, and of a host that does not answer
        nothing is known: placement may have the instance there because it runs there.
        """
        record = each.instance
        found = [one for one in self.machines if one.instance_uuid == record.uuid]
        there = [(one.host_uuid, one.attempt) for one in found if one.has_owner_tag and not one.is_stopped]
        is_alone = len(found) == 1 and there == [(record.current.host_uuid, record.attempt)]
        return is_alone and set(each.elsewhere) <= set(self.answered)


async def reported_of(site: Site, found: Sequence[Unclaimed]) -> HostReports:
    """The hosts' reports, if there are instances of which placement has a later attempt."""
    ahead = [one for one in found if one.is_ahead]
    if not ahead:
        return HostReports()
    places = {(one.cell, one.instance.current.host_uuid): one.instance.current.service for one in ahead}
    try:
        async with asyncio.timeout(PROOF_S):
            return HostReports(*await reported(site, places, {host for one in ahead for host in one.elsewhere}))
    except (TimeoutError, Transient, BusError) as error:
        log.warning("audit.hosts_not_heard", instances=len(places), reason=str(error))
        return HostReports()


async def catch_up(site: Site, found: Sequence[Unclaimed], reports: HostReports) -> tuple[list[Unclaimed], list[str]]:
    """Records that placement is ahead of take over its attempt if the hosts prove that their machines are there: their
    next attempt is a later one. The others are left alone, with a line for each.

    A machine that the forgotten history has made under the same number is no part of the record, and stays.
    """
    caught_up: list[Unclaimed] = []
    lines: list[str] = []
    for each in found:
        record = each.instance
        if not each.is_ahead:
            caught_up.append(each)
        elif not reports.prove(each):
            lines.append(f"{record.uuid}: left alone, placement has a later attempt and its host does not report it")
        elif (later := await _take_over(site, each)) is None:
            lines.append(f"{record.uuid}: left alone, its record has changed")
        else:
            caught_up.append(replace(each, instance=later))
    return caught_up, lines


async def claim_again(store: PlacementService, found: Sequence[Unclaimed]) -> list[str]:
    """Give each what is on its cell's record, where there is room, and the node that it runs on. A line for each.

    An instance that was deleted or moved meanwhile is left alone: placement has a newer attempt of it, or another
    generation.
    """
    rows = store.rows
    assert isinstance(rows, PostgresPlacementRows)
    lines = []
    for each in found:
        swap = _swap(each)
        [reply] = await store.apply([swap])
        if isinstance(reply, SwapResult) and reply.outcome is ClaimOutcome.NO_CAPACITY:
            async with rows.transaction() as transaction:
                reply = await swap_occupied(transaction, swap)
        outcome = str(reply.outcome) if isinstance(reply, SwapResult) else "refused"
        lines.append(f"{each.instance.uuid}: {'claimed again' if outcome == 'claimed' else f'left alone, {outcome}'}")
    return lines


async def _take_over(site: Site, each: Unclaimed) -> Instance | None:
    """The record with placement's attempt, if it is still as it was read. It may have been given out twice."""
    database = site.environment("audit").database(f"cell_{each.cell}", pool_size=1)
    try:
        store = PostgresInstances(database)
        await store.identify()
        async with store.transaction() as transaction:
            record = each.instance
            if (await transaction.lock([record.uuid])).get(record.uuid) != record:
                return None
            later = replace(record, highest_attempt=each.attempt, proves_from=max(record.proves_from, each.attempt + 1))
            await transaction.update([later])
    finally:
        await database.close()
    log.warning(
        "audit.attempt_taken_over", instance=record.uuid, attempt=later.highest_attempt, before=record.last_attempt
    )
    return later


def _swap(each: Unclaimed) -> Swap:
    """The machine's resources, for the last attempt that its cell has on record: a later one is a
    deletion or a move.
    """
    instance = each.instance
    assert instance.spec is not None
    entry = ConsumerAllocations(
        consumer=instance.uuid,
        attempt=max(instance.last_attempt, 1),
        consumer_generation=each.generation,
        allocations={
            provider: dict(resources)
            for provider, resources in instance.selections[instance.selection_index].allocations.items()
        },
        project_id=instance.spec.project_id,
        user_id=instance.spec.user_id,
    )
    return Swap(consumers=(entry,))


def _holds_its_own(instance: Instance, holding: ProviderAllocations) -> bool:
    """Whether it holds something of a provider that its record names; what was changed by hand since is no matter."""
    return any(provider in holding for provider in instance.selections[instance.selection_index].allocations)


async def _settled(site: Site, cell: str, grace_s: float) -> Mapping[str, Instance]:
    database = site.environment("audit").database(f"cell_{cell}", pool_size=1)
    try:
        async with database.raw() as connection:
            instances = [decode(row["record"]) for row in await connection.fetch(SETTLED, grace_s)]
    except DatabaseUnprepared:  # a cell that was never started has no instances
        return {}
    finally:
        await database.close()
    return {one.uuid: one for one in instances if one.action is None and one.spec is not None and one.selections}
