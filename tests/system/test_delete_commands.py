"""Deletes through the command line, a client's and an operator's, before a whole running system."""

from __future__ import annotations

import asyncio
import json
import time
import uuid

import asyncpg
import pytest

from tests.system import command_line
from tests.system.command_line import NO, TIMEOUT_S, Berth, boot

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.timeout(600)]

berth = command_line.berth  # the fixture


def test_a_delete_ends_and_ends_again(berth: Berth) -> None:
    (build,) = boot(berth, "--project", "gone")
    found = build["instance_uuid"]
    assert berth("delete", found.upper(), "--wait").status == 0
    assert berth("show", found, "--json").data["state"] == "deleted"
    again = berth("delete", found, "--wait", "--json", "--timeout", "20")
    assert (again.status, again.data[0]["state"]) == (0, "deleted")
    assert berth("list", "--project", "gone", "--state", "active", "--json").data == []


def test_an_operator_deletes_in_its_cell_what_no_client_can_delete(berth: Berth) -> None:
    """A restore may leave an instance whose request has ended: a second delete of that changes nothing."""
    (build,) = boot(berth, "--project", "left")
    found, cell = build["instance_uuid"], build["cell"]
    refused = berth("delete", found, "--cell", cell)
    assert (refused.status, "delete it without --cell" in refused.err) == (NO, True)
    (runtime,) = berth.directory.rglob("runtime.json")
    end = "UPDATE build_requests SET state = 'deleted' WHERE instance_uuid = $1 RETURNING state"
    left = "SELECT state FROM instances WHERE uuid = $1"

    async def read(schema: str, statement: str) -> str:
        connection = await asyncpg.connect(
            json.loads(runtime.read_bytes())["database_url"].replace("+asyncpg", ""),
            server_settings={"search_path": schema},
        )
        try:
            return str(await connection.fetchval(statement, uuid.UUID(found)))
        finally:
            await connection.close()

    assert asyncio.run(read("scheduler", end)) == "deleted"
    (finding,) = [json.loads(line) for line in berth("audit", "--json").out.splitlines()]
    assert (finding["kind"], finding["repair"]) == ("unrequested", f"berth delete {found} --cell {cell}")
    assert berth("delete", found, "--cell", cell).status == 0
    until = time.monotonic() + TIMEOUT_S
    while asyncio.run(read(f"cell_{cell}", left)) != "deleted":
        assert time.monotonic() < until, "its cell has it"
        time.sleep(0.1)
    assert berth("audit").status == 0
