"""Traits that an operator gives a host outlast what the host's own service reports."""

from __future__ import annotations

import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.operations import export, export_store
from placement_worker.store.postgres_rows import PostgresBookRows
from tests.integration.placement_rest.conftest import Placement, on_postgres
from tests.kit.servers import fresh_database

pytestmark = pytest.mark.postgres

VMX, AVX = "HW_CPU_X86_VMX", "HW_CPU_X86_AVX"


async def report(placement: Placement, root: str, version: int, *traits: str) -> None:
    announced = ProviderReport(
        uuid=root, name="host", inventories={"VCPU": Inventory(total=4 + version)}, traits=traits
    )
    [result] = await placement.store.report(
        [InventoryUpdate(source="c1", version=version, root_uuid=root, providers=(announced,))]
    )
    assert getattr(result, "outcome", None) == "applied"


async def shown(placement: Placement, root: str) -> tuple[list[str], int]:
    data = (await placement.call("GET", f"/resource_providers/{root}/traits", status=200)).json()
    return sorted(data["traits"]), data["resource_provider_generation"]


async def give(placement: Placement, root: str, *traits: str) -> None:
    body = {"traits": traits, "resource_provider_generation": (await shown(placement, root))[1]}
    await placement.call("PUT", f"/resource_providers/{root}/traits", body, status=200)


async def test_what_an_operator_gave_a_host_outlasts_its_reports(placement: Placement) -> None:
    root = new_uuid(placement.rng)
    await report(placement, root, 1, VMX)
    await placement.call("PUT", "/traits/CUSTOM_RACK", status=201)
    await give(placement, root, VMX, "CUSTOM_RACK")
    replica = await placement.replica()
    await report(placement, root, 2, VMX)
    assert (await shown(placement, root))[0] == ["CUSTOM_RACK", VMX]
    book = await replica.fresh()
    row = book.row_of(root)
    assert row is not None
    assert set(book.trait_sets.values[book.traits[row]]) == {"CUSTOM_RACK", VMX}
    await report(placement, root, 3, AVX)
    assert (await shown(placement, root))[0] == ["CUSTOM_RACK", AVX], "what the service itself reported goes with it"
    await give(placement, root, "CUSTOM_RACK")
    await report(placement, root, 4, AVX)
    assert (await shown(placement, root))[0] == ["CUSTOM_RACK", AVX], "what the service reports comes back"
    await give(placement, root, AVX)
    await report(placement, root, 5, AVX)
    assert (await shown(placement, root))[0] == [AVX], "what an operator takes away stays away"
    await give(placement, root, AVX, "CUSTOM_RACK")
    await placement.call("DELETE", f"/resource_providers/{root}/traits", status=204)
    await report(placement, root, 6)
    assert (await shown(placement, root))[0] == []


@on_postgres
async def test_it_is_kept_in_a_book_that_goes_out_and_in_again(placement: Placement, postgres_server: str) -> None:
    root = new_uuid(placement.rng)
    await report(placement, root, 1, VMX)
    await placement.call("PUT", "/traits/CUSTOM_RACK", status=201)
    await give(placement, root, VMX, "CUSTOM_RACK")
    await placement.postgres.names.refresh()
    async with placement.postgres.rows.database.raw() as connection:
        lines = list(export.lines(await export_store.read(connection, placement.postgres.names)))
    with fresh_database(postgres_server) as url:
        rows = PostgresBookRows(Database(url, "placement"))
        other = ResourceBook(rows)
        await other.open()
        what = export.parse(lines)
        await other.names.ensure(what.classes, what.traits)
        for changed in (1, 0):
            async with rows.transaction() as transaction:
                assert await export_store.assign(transaction, what, other.names) == changed
        async with rows.database.raw() as connection:
            assert list(export.lines(await export_store.read(connection, other.names))) == lines
        await other.close()
