"""Breakers and machines in quarantine over HTTP and on the pages: shown first, decided about in bulk."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.operations import Losses
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import UnknownMachineRecord
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.unknown_machines import Safety
from tests.kit.waiting import wait_until
from tests.system.web_server import TIMEOUT_S, Web, code_of, running_web

pytestmark = [pytest.mark.system, pytest.mark.postgres]

HOST = "b0000000-0000-4000-8000-000000000000"  # no host of this system reports it: nothing of these takes effect
MACHINES = 1_218
T = TypeVar("T")


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with running_web() as found:
        yield found


def on_record(web: Web, work: Callable[[Safety], Awaitable[T]]) -> T:
    """Do this with cell1's record, as its conductor would."""

    async def there() -> T:
        database = web.site.environment("test").database("cell_cell1", pool_size=1)
        try:
            return await work(Safety(PostgresKeyed(database)))
        finally:
            await database.close()

    return asyncio.run_coroutine_threadsafe(there(), web.loop).result(TIMEOUT_S)


@contextmanager
def recovering(web: Web, losses: str) -> Iterator[Callable[[], None]]:
    """Has cell1 wait for a decision about what a restored database would lose, each time it is called: the cell's own
    conductor runs, and finds out now and then that nothing would be lost.
    """

    async def put(state: str, lost: str) -> None:
        database = web.site.environment("test").database("cell_cell1", pool_size=1)
        try:
            async with database.raw() as connection:
                await connection.execute("UPDATE identity SET state = $1, losses = $2::text::json", state, lost)
        finally:
            await database.close()

    def there(state: str, lost: str) -> None:
        asyncio.run_coroutine_threadsafe(put(state, lost), web.loop).result(TIMEOUT_S)

    try:
        yield lambda: there("recovering", losses)
    finally:
        there("open", "{}")


def quarantined(web: Web, service: str, count: int) -> list[UnknownMachine]:
    machines = [
        UnknownMachine(str(uuid.uuid4()), 1, HOST, UnknownMachineKind.QUARANTINED, "no record") for _ in range(count)
    ]
    on_record(web, lambda safety: safety.record(service, machines, 1.0))
    return machines


def verdicts(web: Web, service: str) -> list[tuple[str, str]]:
    async def read(safety: Safety) -> list[UnknownMachineRecord]:
        return await safety.records()

    return [(one.decision, one.decided_by) for one in on_record(web, read) if one.service == service]


def listed(client: httpx.Client, **params: Any) -> list[dict[str, Any]]:
    """All machines, page after page."""
    found: list[dict[str, Any]] = []
    while True:
        page = client.get("/api/v1/quarantine", params=params).json()
        found += page["machines"]
        if page["next"] is None:
            assert len(found) == page["count"]
            return found
        params["after"] = page["next"]


def seen(machines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: one[name] for name in ("cell", "host_uuid", "instance_uuid", "attempt")} for one in machines]


def test_many_machines_are_decided_about_by_two_requests(web: Web) -> None:
    quarantined(web, "many", MACHINES)
    with web.client("op") as op, web.client("see") as see:
        found = listed(see, service="many", decided="false", limit=500)
        assert len(found) == MACHINES and {one["cell"] for one in found} == {"cell1"}
        too_many = {"decision": "protect", "machines": seen(found)}
        assert code_of(op.post("/api/v1/quarantine/decide", json=too_many), 400) == "request.invalid"
        for machines in (found[:1_000], found[1_000:]):
            answer = op.post("/api/v1/quarantine/decide", json={"decision": "destroy", "machines": seen(machines)})
            assert answer.status_code == 200, answer.text
            assert answer.json() == {"decided": [one["instance_uuid"] for one in machines], "undecided": []}
        assert set(verdicts(web, "many")) == {("destroy", "op")}
        assert listed(see, service="many", decided="false") == []
        assert len(listed(see, service="many", decided="true")) == MACHINES


def test_a_machine_that_is_not_as_it_was_seen_is_left(web: Web) -> None:
    (first, second) = quarantined(web, "changed", 2)
    with web.client("op") as op:
        found = seen(listed(op, service="changed"))
        on_record(web, lambda safety: safety.record("changed", [replace(first, attempt=2)], 2.0))
        elsewhere = {**found[0], "cell": "never"}
        answer = op.post("/api/v1/quarantine/decide", json={"decision": "destroy", "machines": [*found, elsewhere]})
        assert answer.status_code == 200 and answer.json()["decided"] == [second.uuid], answer.text
        assert {one["code"] for one in answer.json()["undecided"]} == {"quarantine.unknown"}
        assert sorted(verdicts(web, "changed")) == [("", ""), ("destroy", "op")]


def test_a_machine_without_an_instance_is_not_given_back(web: Web) -> None:
    quarantined(web, "strange", 2)
    with web.client("op") as op:
        body = {"decision": "adopt", "machines": seen(listed(op, service="strange"))}
        assert code_of(op.post("/api/v1/quarantine/decide", json=body), 400) == "request.invalid"
        answer = op.post("/api/v1/quarantine/decide", json={**body, "reason": "moved after the backup"}).json()
        assert answer["decided"] == []
        assert [one["code"] for one in answer["undecided"]] == ["quarantine.not_adoptable"] * 2
        for changed in ({"attempt": 77}, {"cell": "never"}):  # not as it was seen: nothing is judged of another machine
            stale = [{**one, **changed} for one in body["machines"]]
            answer = op.post("/api/v1/quarantine/decide", json={**body, "machines": stale, "reason": "late"}).json()
            assert [one["code"] for one in answer["undecided"]] == ["quarantine.unknown"] * 2


def test_breakers_are_reset_as_they_were_seen(web: Web) -> None:
    tripped = [Breaker(service=f"b{n}", tripped_at=5.0 + n, lost=6, machines=("x@y",)) for n in range(3)]
    for one in tripped:
        on_record(web, lambda safety, one=one: safety.trip(one))  # type: ignore[misc]
    with web.client("op") as op, web.client("see") as see:
        found = see.get("/api/v1/breakers", params={"open": "true"}).json()
        assert [(one["service"], one["lost"]) for one in found] == [("b0", 6), ("b1", 6), ("b2", 6)]
        assert see.get("/api/v1/breakers/cell1/b1").json()["machines"] == ["x@y"]
        assert code_of(see.get("/api/v1/breakers/cell1/none"), 404) == "breaker.unknown"
        assert code_of(see.get("/api/v1/breakers", params={"cell": "mars"}), 404) == "cell.unknown"
        on_record(web, lambda safety: safety.trip(replace(tripped[1], tripped_at=9.0)))
        known = [{name: one[name] for name in ("cell", "service", "tripped_at")} for one in found]
        answer = op.post("/api/v1/breakers/reset", json={"breakers": known}).json()
        assert [one["service"] for one in answer["reset"]] == ["b0", "b2"]
        assert [one["service"] for one in answer["not_open"]] == ["b1"]
        after = {one["service"]: (one["open"], one.get("reset_by")) for one in see.get("/api/v1/breakers").json()}
        assert after == {"b0": (False, "op"), "b1": (True, None), "b2": (False, "op")}


def test_the_first_page_has_what_waits_for_an_operator_before_all_else(web: Web) -> None:
    quarantined(web, "paged", 3)
    on_record(web, lambda safety: safety.trip(Breaker(service="paged", tripped_at=5.0, lost=6)))
    with web.client("op") as op, web.client("see") as see:

        def first_page() -> str:  # what it counts is some seconds old
            shown = op.get("/").text
            return shown if "destruction is stopped" in shown and "in quarantine" in shown else ""

        first = wait_until(first_page)
        assert first.index("Cell cell1: destruction is stopped") < first.index("in quarantine")
        assert "/quarantine?cell=cell1" in first
        page = op.get("/quarantine", params={"cell": "cell1", "service": "paged"}).text
        assert page.count("host_uuid") == 3 and 'data-path="/api/v1/quarantine/decide"' in page
        assert "data-item=" not in see.get("/quarantine").text
        assert code_of(op.get("/quarantine", params={"cell": "mars"}), 404) == "cell.unknown"
    with web.client("alice") as alice:
        assert code_of(alice.get("/quarantine"), 403) == "role.forbidden"


def test_the_losses_of_a_recovery_are_accepted_as_they_were_seen(web: Web) -> None:
    with web.client("op", accept="text/html") as op, web.client("see") as see:
        states = {one["cell"]: one for one in see.get("/api/v1/recoveries").json()}
        assert states["cell1"]["state"] == "open" and "Accept the loss" not in op.get("/operations").text
        incarnation = states["cell1"]["database_incarnation"]
        seen = {"database_incarnation": incarnation, "losses": 2, "reason": "the backup is older"}
        assert code_of(op.post("/api/v1/recoveries/cell1/accept", json=seen), 409) == "recovery.not_waiting"
        assert code_of(op.post("/api/v1/recoveries/mars/accept", json=seen), 404) == "cell.unknown"
        losses = msgspec.json.encode(Losses(count=2, instances=(str(uuid.uuid4()),), builds=1)).decode()
        other = {**seen, "losses": 1}
        with recovering(web, losses) as wait:

            def is_shown() -> bool:
                wait()
                page = op.get("/operations").text
                return "would lose 2 instances" in page and 'name="losses" data-number value="2"' in page

            def is_accepted() -> bool:
                wait()
                refused = op.post("/api/v1/recoveries/cell1/accept", json=other)
                assert code_of(refused, 409) == "recovery.not_waiting"
                return op.post("/api/v1/recoveries/cell1/accept", json=seen).status_code == 200

            wait_until(is_shown)
            wait_until(is_accepted)
