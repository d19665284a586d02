"""`berth hosts --unknown`, `berth quarantine` and `berth breaker` on a cell's schema, as an operator runs them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.cell import InstanceSpec, Selection
from bus.persistence.database import Database
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.safety import DecidedMachine
from tests.kit.forks import run_berth

pytestmark = pytest.mark.postgres

CELL = "cell1"
COMMAND_TIMEOUT_S = 120.0
ADDED_CELL = (
    "INSERT INTO objects (kind, name, body, version, changed_at, changed_by) VALUES ('cell', 'added', $1, 1, 0, '')"
)
A, B, HOST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1")


async def berth(url: str, *words: str) -> tuple[int, Any]:
    env = {**os.environ, "BERTH_DATABASE__URL": url}
    done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
    text = done.stdout
    data = json.loads(text) if text[:1] in ("[", "{") else text + done.stderr
    return done.returncode, data


async def test_an_operator_sees_what_is_kept_and_decides(postgres_url: str) -> None:
    stores = [PostgresInstances(Database(postgres_url, f"cell_{name}")) for name in ("cell1", "cell2")]
    for store in stores:
        await store.open()
    safety = stores[0].safety
    ours = Unexplained(A, 3, HOST, UnexplainedKind.QUARANTINED, "no record")
    foreign = Unexplained(B, 0, HOST, UnexplainedKind.FOREIGN, "no mark of this deployment")
    await safety.record("s", [ours, foreign], 1.0)
    await safety.trip(Breaker(service="s", tripped_at=1.0, lost=6))

    status, listed = await berth(postgres_url, "hosts", "--unknown", "--cell", CELL, "--json")
    assert status == 0 and [one["record"]["machine"]["kind"] for one in listed] == ["quarantined", "foreign"]
    status, listed = await berth(postgres_url, "quarantine", "list", "--cell", CELL, "--json")
    assert status == 0 and [one["record"]["machine"]["uuid"] for one in listed] == [A]
    status, output = await berth(postgres_url, "quarantine", "release", B, "--destroy", "--cell", CELL)
    assert status == 1 and "quarantine" in output, "a foreign machine is not for berth to destroy"
    status, output = await berth(postgres_url, "quarantine", "release", A, "--cell", CELL)
    assert status == 2 and "--keep" in output
    status, _ = await berth(postgres_url, "quarantine", "release", A, "--destroy", "--by", "op", "--cell", CELL)
    assert status == 0 and {(one.verdict, one.decided_by) for one in await safety.records()} == {
        ("destroy", "op"),
        ("", ""),
    }

    status, listed = await berth(postgres_url, "breaker", "list", "--cell", CELL, "--json")
    assert status == 1 and listed[0]["breaker"]["lost"] == 6
    status, reset = await berth(postgres_url, "breaker", "reset", "s", "--by", "op", "--cell", CELL, "--json")
    assert (status, reset) == (0, {"service": "s", "cells": [CELL]})
    assert (await safety.breakers())[0].reset_by == "op"
    status, output = await berth(postgres_url, "breaker", "reset", "s", "--cell", CELL)
    assert (status == 1 and "not_open" in output) or "is open" in output
    for store in stores:
        await store.close()


async def test_all_undecided_machines_of_a_service_are_decided_about_by_one_command(postgres_url: str) -> None:
    """1,218 machines in quarantine were 1,218 commands; those of a cell that was added at run time were not listed."""
    schedulers = Database(postgres_url, "scheduler")
    await schedulers.open("scheduler_worker.store.migrations")
    added = {"state": "enabled", "bus": {"prefix": "added."}}
    async with schedulers.raw() as connection:
        await connection.execute(ADDED_CELL, json.dumps(added))
    store = PostgresInstances(Database(postgres_url, "cell_added"))
    await store.open()
    ours = [
        Unexplained(f"{n:08d}-0000-4000-8000-000000000000", 1, HOST, UnexplainedKind.QUARANTINED, "no record")
        for n in range(1_218)
    ]
    await store.safety.record("s", ours, 1.0)
    await store.safety.record("t", [replace(ours[0], uuid=A)], 1.0)
    await store.safety.decide([DecidedMachine(ours[0].uuid)], "destroy", "ann", 1.0)

    status, listed = await berth(postgres_url, "quarantine", "list", "--cell", "added", "--json")
    assert (status, len(listed)) == (0, 1_219)
    assert (await berth(postgres_url, "quarantine", "list"))[0] == 3, "the cells of the settings have no record here"
    assert (await berth(postgres_url, "quarantine", "release", "--keep"))[0] == 2
    words = ("quarantine", "release", "--service", "s", "--keep", "--by", "op", "--json")
    status, decided = await berth(postgres_url, *words)
    assert (status, decided["machines"]) == (0, 1_217)
    verdicts = {one.machine.uuid: one.verdict for one in await store.safety.records()}
    assert (verdicts.pop(A), verdicts.pop(ours[0].uuid), set(verdicts.values())) == ("", "destroy", {"keep"})
    assert (await berth(postgres_url, *words))[0] == 1, "none is undecided"
    status, decided = await berth(postgres_url, "quarantine", "release", A, ours[0].uuid, "--keep", "--json")
    assert (status, decided["instances"]) == (0, [ours[0].uuid, A])
    for one in (store, schedulers):
        await one.close()


async def test_a_machine_is_given_back_to_its_instance_by_an_operators_word(postgres_url: str) -> None:
    first, second = (PostgresInstances(Database(postgres_url, f"cell_{name}")) for name in ("cell1", "cell2"))
    schedulers = Database(postgres_url, "scheduler")
    await schedulers.open("scheduler_worker.store.migrations")
    for store in (first, second):
        await store.open()
    there = Unexplained(A, 3, HOST, UnexplainedKind.QUARANTINED, "newer than its record")
    home = Selection(host_uuid=B, host="home", service="s", allocations={B: {"VCPU": 1}})
    spec = InstanceSpec(instance_uuid=A, project_id="p")
    record = Instance(uuid=A, state=State.ACTIVE, spec=spec, selections=(home,), attempt=1)

    async def adopt(host: str = HOST) -> tuple[int, str]:
        status, output = await berth(
            postgres_url, "quarantine", "adopt", A, "--host", host, "--reason", "moved", "--by", "ann"
        )
        return status, str(output)

    assert (await adopt())[0] == 1
    await first.safety.record("s", [there], 1.0)
    assert "quarantine.unknown" in (await adopt(B))[1]
    assert "quarantine.not_adoptable" in (await adopt())[1], "the cell has no record of it"
    async with second.transaction() as transaction:
        await transaction.insert([replace(record, state=State.BUILDING)])
    async with first.transaction() as transaction:
        await transaction.insert([replace(record, state=State.DESTROYING, then=State.DELETED)])
    assert "it is destroying/deleted" in (await adopt())[1]
    async with first.transaction() as transaction:
        await transaction.lock([A])
        await transaction.update([record])
    assert "quarantine.recorded_elsewhere" in (await adopt())[1]
    async with second.transaction() as transaction:
        await transaction.lock([A])
        await transaction.update([replace(record, state=State.DELETED)])
    await second.safety.record("s", [Unexplained(A, 2, B, UnexplainedKind.QUARANTINED, "no record")], 1.0)
    status, output = await adopt()
    assert status == 1 and "quarantine.several" in output and B in output
    await second.safety.delete([(B, A)])
    assert {one.verdict for one in await first.safety.records()} == {""}
    status, output = await adopt()
    assert status == 0, output
    assert [(one.verdict, one.decided_by) for one in await first.safety.records()] == [("adopt", "ann")]
    async with schedulers.raw() as connection:
        logged = [tuple(row) for row in await connection.fetch("SELECT name, who, why FROM object_log")]
    assert logged == [(A, "ann", "moved")]
    for one in (first, second, schedulers):
        await one.close()
