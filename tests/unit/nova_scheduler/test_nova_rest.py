"""What is read of Nova: its answers over HTTP, and which cell a host is in."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy
from prometheus_client import REGISTRY
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError
from starlette.responses import JSONResponse

from bus.clock import SystemClock
from bus.faults import Fault
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError
from nova_scheduler.cloud import cells
from nova_scheduler.cloud import rest as nova_rest
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.cells import ConfiguredCells, DatabaseCells, cells_of
from nova_scheduler.cloud.rest import NovaRefused, NovaRest, NovaUnavailable, flattened
from nova_scheduler.cloud.state import NovaAggregate, NovaService
from tests.kit.keystone import keystone_stand_in
from tests.kit.waiting import until
from tests.unit.nova_scheduler.facts_kit import CELL1, CELL2, uuid_of

# --- Nova's answers over HTTP: paged, bounded, negotiated, and hostile.


Answer = Callable[[httpx.Request], httpx.Response]


def rest(answer: Answer, newest: str = "2.104", **config: Any) -> NovaRest:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/compute/v2.1/":
            return httpx.Response(200, json={"version": {"version": newest, "min_version": "2.1"}})
        return answer(request)

    config = {"url": "http://nova/compute/v2.1", "token": "t", **config}
    return NovaRest(NovaApiConfig(**config), clock=SystemClock(), setting="nova", transport=httpx.MockTransport(handle))


def hypervisor(number: int, **more: object) -> dict[str, object]:
    service = {"id": uuid_of(900 + number), "host": f"host{number}", "disabled_reason": None}
    known = {"id": uuid_of(number), "hypervisor_hostname": f"node{number}", "state": "up", "status": "enabled"}
    return {**known, "service": service, "hypervisor_type": "QEMU", "cpu_info": {"arch": "x86_64"}, **more}


async def test_services() -> None:
    rows = [
        {"binary": "nova-conductor", "host": "c", "state": "up", "status": "enabled"},
        {"binary": "nova-compute", "host": "a b", "state": "up", "status": "disabled", "disabled_reason": "fan"},
        {"binary": "nova-compute", "host": "forced", "state": "down", "status": "enabled", "forced_down": True},
        {"binary": "nova-compute", "host": "away", "status": "UNKNOWN"},
        {"binary": "nova-compute", "host": "odd", "state": 7},
        {"binary": "nova-compute", "host": ""},
        7,
    ]
    before = unreadable("services")
    nova = rest(lambda request: httpx.Response(200, json={"services": rows}))
    assert await nova.services() == [
        NovaService(host="a b", is_up=True, is_disabled=True, reason="fan"),
        NovaService(host="forced", is_up=False),
        NovaService(host="away", is_up=False, reason="its cell is out of reach"),
        NovaService(host="odd", is_up=False, is_read=False),
    ]
    assert unreadable("services") == before + 3


def unreadable(name: str) -> float:
    return REGISTRY.get_sample_value("berth_nova_unreadable_rows_total", {"list": name}) or 0.0


async def test_a_version_that_nova_has_no_more_is_negotiated_anew() -> None:
    """It was rolled back, or another process of it is older."""
    newest = "2.104"

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/compute/v2.1/":
            return httpx.Response(200, json={"version": {"version": newest, "min_version": "2.1"}})
        is_known = request.headers["OpenStack-API-Version"] == f"compute {newest}"
        return httpx.Response(200, json={"aggregates": []}) if is_known else httpx.Response(406)

    config = NovaApiConfig(url="http://nova/compute/v2.1", token="t")
    nova = NovaRest(config, clock=SystemClock(), setting="nova", transport=httpx.MockTransport(handle))
    assert await nova.aggregates() == []
    newest = "2.96"
    with pytest.raises(NovaRefused) as refused:
        await nova.aggregates()
    assert refused.value.code == "nova.http_406"
    assert await nova.aggregates() == []


@pytest.mark.parametrize(
    ("newest", "asked"), [("2.104", "2.104"), ("2.110", "2.104"), ("2.96", "2.96"), ("2.88", "2.88")]
)
async def test_the_newest_version_that_both_know(newest: str, asked: str) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["OpenStack-API-Version"])
        assert request.headers["X-Auth-Token"] == "t"
        return httpx.Response(200, json={"aggregates": [], "hypervisors": []})

    nova = rest(answer, newest)
    assert await nova.aggregates() == [] and await nova.nodes() == []
    assert seen == [f"compute {asked}", "compute 2.87"]


@pytest.mark.parametrize(
    ("newest", "code"), [("2.87", "nova.microversion"), ("2.1", "nova.microversion"), ("", "nova.not_nova")]
)
async def test_what_is_too_old_or_no_nova(newest: str, code: str) -> None:
    with pytest.raises(NovaRefused) as refused:
        await rest(lambda request: httpx.Response(200, json={}), newest).services()
    assert refused.value.code == code


async def test_pages_until_one_is_empty() -> None:
    """Nova leaves out the nodes of deleted services, and then gives no link to the next page."""
    markers: list[str | None] = []
    pages = {None: [1, 2], uuid_of(2): [3], uuid_of(3): [4, 5], uuid_of(5): []}

    def answer(request: httpx.Request) -> httpx.Response:
        marker = request.url.params.get("marker")
        markers.append(marker)
        assert request.url.params["limit"] == "2"
        return httpx.Response(200, json={"hypervisors": [hypervisor(one) for one in pages[marker]]})

    found = await rest(answer, page_size=2).nodes()
    assert [node.uuid for node, _ in found] == [uuid_of(number) for number in (1, 2, 3, 4, 5)]
    assert markers == [None, uuid_of(2), uuid_of(3), uuid_of(5)]
    assert found[0][0].cpu_info == {"arch": "x86_64"} and found[0][1] == NovaService(host="host1", is_up=True)


async def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"hypervisors": [hypervisor(1)]}
    with pytest.raises(NovaRefused) as refused:
        await rest(lambda request: httpx.Response(200, json=page)).nodes()
    assert refused.value.code == "nova.endless_list"
    monkeypatch.setattr(nova_rest, "MAX_ROWS", 4)
    numbers = iter(range(1, 100))
    with pytest.raises(NovaRefused) as refused:
        await rest(lambda request: httpx.Response(200, json={"hypervisors": [hypervisor(next(numbers))]})).nodes()
    assert refused.value.code == "nova.endless_list"


async def test_one_node() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        known = request.url.path.endswith(uuid_of(1))
        return httpx.Response(200, json={"hypervisor": hypervisor(1)}) if known else httpx.Response(404, json={})

    nova = rest(answer)
    found = await nova.node(uuid_of(1))
    assert found is not None and found[0].nodename == "node1"
    assert await nova.node(uuid_of(2)) is None
    other = rest(lambda request: httpx.Response(200, json={"hypervisor": hypervisor(3)}))
    assert await other.node(uuid_of(1)) is None, "an answer about another node"


async def test_aggregates() -> None:
    rows = [
        {"id": 1, "uuid": uuid_of(7), "name": "ssd", "hosts": ["h 1"], "metadata": {"availability_zone": "z"}},
        {"id": 2, "uuid": uuid_of(8), "name": "bare", "hosts": None, "metadata": None},
        {"id": 3, "uuid": uuid_of(9), "name": 7, "hosts": ["h2"], "metadata": {}},
        {"id": 4, "uuid": "nothing"},
    ]
    nova = rest(lambda request: httpx.Response(200, json={"aggregates": rows}))
    known = [
        NovaAggregate(uuid=uuid_of(7), name="ssd", metadata={"availability_zone": "z"}, hosts=("h 1",)),
        NovaAggregate(uuid=uuid_of(8), name="bare"),
        NovaAggregate(uuid=uuid_of(9), name=uuid_of(9), hosts=("h2",), is_read=False),
    ]
    with pytest.raises(NovaRefused):
        await nova.aggregates()
    rows.pop()
    assert await nova.aggregates() == known


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], None),
        ([{"id": uuid_of(1), "OS-EXT-STS:task_state": None}], ""),
        ([{"id": uuid_of(1), "OS-EXT-STS:task_state": "scheduling"}], "scheduling"),
        ([{"id": uuid_of(1), "status": "UNKNOWN"}], NovaUnavailable),
        ([{"id": uuid_of(2), "OS-EXT-STS:task_state": None}], NovaRefused),
        ([{"id": uuid_of(1), "OS-EXT-STS:task_state": 7}], NovaRefused),
        (None, NovaRefused),
    ],
)
async def test_the_task_of_a_server(answer: list[Any] | None, expected: str | type[Exception] | None) -> None:
    nova = rest(lambda request: httpx.Response(200 if answer is not None else 403, json={"servers": answer}))
    if isinstance(expected, type):
        with pytest.raises(expected):
            await nova.task_of(uuid_of(1))
    else:
        assert await nova.task_of(uuid_of(1)) == expected


@pytest.mark.parametrize(
    ("answer", "fault", "code"),
    [
        (httpx.Response(503), NovaUnavailable, "nova.unavailable"),
        (httpx.Response(429), NovaUnavailable, "nova.unavailable"),
        (httpx.Response(401, json={}), NovaRefused, "nova.http_401"),
        (httpx.Response(403, json={"forbidden": {"message": "no"}}), NovaRefused, "nova.http_403"),
        (httpx.Response(200, text="<html>"), NovaUnavailable, "nova.not_json"),
        (httpx.Response(200, content=b"[" * 100_000), NovaUnavailable, "nova.not_json"),
        (httpx.Response(200, json=[]), NovaRefused, "nova.not_json"),
        (httpx.Response(200, json={"services": {}}), NovaRefused, "nova.not_a_list"),
        (httpx.Response(200, content=b" " * 300), NovaRefused, "nova.too_large"),
    ],
)
async def test_answers_that_are_none(
    answer: httpx.Response, fault: type[Fault], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nova_rest, "MAX_PAGE_BYTES", 200 if code == "nova.too_large" else 2**20)
    with pytest.raises(fault) as raised:
        await rest(lambda request: answer).services()
    assert getattr(raised.value, "code") == code  # noqa: B009  (of either fault)


async def test_nova_out_of_reach() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(NovaUnavailable):
        await rest(answer).services()


@pytest.mark.parametrize("fault", [httpx.ReadTimeout(""), httpx.PoolTimeout("")])
async def test_a_request_without_an_answer_says_how_long_it_was_waited_for(fault: Exception) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise fault

    with pytest.raises(NovaUnavailable) as unavailable:
        await rest(answer, request_timeout_s=7.5).services()
    assert "no answer within 7.5 s" in str(unavailable.value)


async def test_a_silent_keystone_is_told_as_such() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        while await reader.read(1000):
            """No answer."""
        writer.close()

    served: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        login = KeystoneLogin(auth_url=url, username="u", password="p")
        config = NovaApiConfig(url=url, keystone=login, request_timeout_s=0.2)
        nova = NovaRest(config, clock=SystemClock(), setting="nova")
        with pytest.raises(NovaUnavailable) as unavailable:
            await nova.services()
        await nova.close()
        await asyncio.gather(*(one for one in served if one is not None))
    assert unavailable.value.code == "keystone.unavailable" and "no answer within" in str(unavailable.value)


@pytest.mark.parametrize("ends", ["0001-01-01T00:00:00", "soon"])
async def test_a_token_whose_end_is_none_is_used_until_it_is_refused(ends: str) -> None:
    async with keystone_stand_in() as (keystone, url):
        token = {"token": {"expires_at": ends}}
        keystone.sign_in_answer = JSONResponse(token, 201, headers={"X-Subject-Token": "signed"})
        login = KeystoneLogin(auth_url=url, username="u", password="p")
        nova = rest(lambda request: httpx.Response(200, json={"services": []}), token="", keystone=login)
        assert await nova.services() == await nova.services() == []
        assert keystone.signed_in == 1
        await nova.close()


async def test_an_answer_that_does_not_end_is_not_waited_for() -> None:
    async def endless() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(NovaUnavailable) as unavailable:
        await rest(lambda request: httpx.Response(200, content=endless()), request_timeout_s=0.01).services()
    assert "no answer within 0.01 s" in str(unavailable.value)


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (None, {}),
        ("Nehalem", {}),
        (
            {"arch": "x86_64", "topology": {"cores": 8}, "features": ["aes", "avx"], "none": None},
            {"arch": "x86_64", "topology:cores": "8", "features": "['aes', 'avx']"},
        ),
        ({"a": {"b": {"c": {"d": {"e": 1}}}}}, {}),
    ],
)
def test_a_processor_as_nova_compares_it(tree: object, found: dict[str, str]) -> None:
    assert flattened(tree) == found


def test_a_processor_is_bounded() -> None:
    found = flattened({str(number): {"x" * 9: "y" * 100_000} for number in range(1000)})
    assert len(found) == nova_rest.MAX_VALUES and len(json.dumps(found)) < nova_rest.MAX_VALUES * 10_000


# --- Which cell a host is in: by patterns, or by two queries to Nova's API database.


SYNCHRONOUS = SimpleNamespace(is_async=False)


class MovedClock(SystemClock):
    """It is moved by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


async def test_the_first_pattern_that_names_a_host_counts() -> None:
    found = ConfiguredCells({CELL1: ("edge-*", "h1"), CELL2: ("*.example",)})
    hosts = ["edge-1", "h1", "h2", "edge-1.example", "a.example"]
    assert await found.of_hosts(hosts) == {
        "edge-1": CELL1,
        "h1": CELL1,
        "edge-1.example": CELL1,
        "a.example": CELL2,
    }


def database(path: Path) -> str:
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE cell_mappings (id INTEGER, uuid TEXT, name TEXT, disabled BOOLEAN)")
        made.execute("CREATE TABLE host_mappings (id INTEGER, cell_id INTEGER, host TEXT)")
        made.execute("INSERT INTO cell_mappings VALUES (1, ?, 'cell1', 0), (2, ?, 'off', 1)", (CELL1, CELL2))
        made.execute("INSERT INTO host_mappings VALUES (1, 1, 'h1'), (2, 2, 'h2'), (3, 9, 'h3')")
    return f"sqlite:///{path}"


def test_a_map_is_made_before_any_loop_runs() -> None:
    assert isinstance(cells_of(NovaApiConfig(cells_database="sqlite://"), SystemClock()), DatabaseCells)


async def test_two_queries_and_another_read_only_for_a_new_host(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1", "h2", "h3"]) == {"h1": CELL1, "h2": CELL2}
    assert found.disabled == {CELL2}, "what is there moves within it"
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("INSERT INTO host_mappings VALUES (4, 1, 'h4')")
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    assert await found.of_hosts(["h1", "h4"]) == {"h1": CELL1, "h4": CELL1}, "a new host is read for at once"
    assert await found.of_hosts(["h5"]) == {}
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("INSERT INTO host_mappings VALUES (5, 1, 'h5')")
    assert await found.of_hosts(["h5"]) == {}, "it was not found a moment ago"
    clock.now += cells.AGAIN_S
    assert await found.of_hosts(["h5"]) == {"h5": CELL1}


async def test_a_disabled_cell_has_the_database_read_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hosts are in the list of every request. Enabled again, it is found all the same."""
    clock, reads = MovedClock(), []
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    real = found._read
    monkeypatch.setattr(found, "_read", lambda: reads.append(1) or real())
    for _ in range(5):
        assert await found.of_hosts(["h1", "h2"]) and found.disabled == {CELL2}
        clock.now += cells.AGAIN_S
    assert len(reads) == 1
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("UPDATE cell_mappings SET disabled = 0")
    clock.now += cells.RARELY_S
    assert await found.of_hosts(["h1", "h2"]) and found.disabled == frozenset()


async def test_a_cell_that_is_disabled_later_takes_no_more_builds(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("UPDATE cell_mappings SET disabled = 1")
    clock.now += cells.RARELY_S
    assert await found.of_hosts(["h1"]) == {"h1": CELL1} and found.disabled == {CELL1, CELL2}


async def test_a_database_that_fails_takes_nothing_away_that_is_known(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    (tmp_path / "nova_api").unlink()
    (tmp_path / "nova_api").mkdir()
    clock.now += cells.RARELY_S
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}


async def test_a_database_that_fails_is_left_alone_for_a_while(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    (tmp_path / "nova_api").rename(tmp_path / "away")
    with pytest.raises(NovaUnavailable):
        await found.of_hosts(["h1", "h4"])
    clock.now += cells.AGAIN_S
    assert await found.of_hosts(["h1", "h4"]) == {"h1": CELL1}, "what is known counts"
    clock.now += cells.RARELY_S
    with pytest.raises(NovaUnavailable):
        await found.of_hosts(["h1", "h4"])


class Hanging:
    """An engine whose connections hang at first."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, most: int = 1_000) -> None:
        self.threads: list[threading.Thread] = []
        self.dialect, self.url, self.over = SYNCHRONOUS, make_url(url), threading.Event()
        self._real, self._most = sqlalchemy.create_engine(url), most
        monkeypatch.setattr(cells.sqlalchemy, "create_engine", lambda *_, **__: self)

    def connect(self) -> sqlalchemy.Connection:
        self.threads.append(threading.current_thread())
        if len(self.threads) <= self._most:
            self.over.wait()
        return self._real.connect()


async def test_a_read_that_hangs_is_left_alone_and_the_next_one_has_a_connection_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database's address has moved, and nothing tells the driver that the connection is dead."""
    url, clock = database(tmp_path / "nova_api"), MovedClock()
    engine = Hanging(url, monkeypatch, most=2)
    found = DatabaseCells(url, clock)
    try:
        monkeypatch.setattr(cells, "READ_S", 0.0)
        for _ in range(2):
            with pytest.raises(NovaUnavailable):
                await found.of_hosts(["h1"])
        await until(lambda: len(engine.threads) == 2)
        monkeypatch.setattr(cells, "MAX_LEFT", 2)
        with pytest.raises(NovaUnavailable, match="2 reads"):
            await found.of_hosts(["h1"])
        assert all(one.daemon for one in engine.threads), "a process that stops does not wait for it"
        monkeypatch.undo()
        assert await found.of_hosts(["h1"]) == {"h1": CELL1} and len(engine.threads) == 3
    finally:
        engine.over.set()


async def test_a_read_goes_on_when_who_waits_for_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for less time than the database may take: cut, no later one would come further."""
    url = database(tmp_path / "nova_api")
    engine = Hanging(url, monkeypatch)
    found, reads = DatabaseCells(url, MovedClock()), engine.threads
    try:
        for _ in range(3):
            asked = asyncio.create_task(found.of_hosts(["h1"]))
            await until(lambda: reads)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    finally:
        engine.over.set()
    assert await found.of_hosts(["h1"]) == {"h1": CELL1} and len(reads) == 1


async def test_a_database_that_is_away(tmp_path: Path) -> None:
    """Until it was read once each question fails: a frontend that went on would answer that no host is valid."""
    (tmp_path / "away").mkdir()
    found = DatabaseCells(f"sqlite:///{tmp_path}/there/nova_api", SystemClock())
    for _ in range(2):
        with pytest.raises(NovaUnavailable) as unavailable:
            await found.of_hosts(["h1"])
        assert unavailable.value.code == "nova.cells_unavailable"
    database(tmp_path / "away" / "nova_api")
    (tmp_path / "away").rename(tmp_path / "there")
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}


@pytest.mark.parametrize("url", ["sqlite:////tmp/nova_api?timeout=long", "sqlite:////tmp/a\0b"])
async def test_an_address_that_its_driver_does_not_take(url: str) -> None:
    """Drivers raise what they like, and the process goes on: an operator reads the code in its log."""
    try:
        await DatabaseCells(url, SystemClock()).of_hosts(["h1"])
    except (SettingsError, NovaUnavailable) as fault:
        assert fault.code in {"nova.cells_database", "nova.cells_unavailable"}
    else:
        raise AssertionError


async def test_what_the_driver_says_is_told_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OperationalError("SELECT", {}, Exception("access of 'u' with 's3cret' is denied\nfor good"))

    engine = SimpleNamespace(url=make_url("mysql://u:s3cret@h/nova_api"), connect=refused, dialect=SYNCHRONOUS)
    monkeypatch.setattr(cells.sqlalchemy, "create_engine", lambda *_, **__: engine)
    with pytest.raises(NovaUnavailable) as unavailable:
        await DatabaseCells("", SystemClock()).of_hosts(["h1"])
    assert "denied" in str(unavailable.value) and "s3cret" not in str(unavailable.value)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (NovaApiConfig(), "nova.cells_unset"),
        (NovaApiConfig(cells_database="nonsense"), "nova.cells_database"),
        (NovaApiConfig(cells_database="mysql+nothing://x"), "nova.cells_database"),
        (NovaApiConfig(cells_database="postgresql+psycopg://u:p@h:port/nova_api"), "nova.cells_database"),
        (NovaApiConfig(cells_database="postgresql+asyncpg://u:p@h/nova_api"), "nova.cells_database"),
    ],
)
async def test_settings_that_name_no_cells(config: NovaApiConfig, code: str) -> None:
    with pytest.raises(SettingsError) as refused:
        cells_of(config, SystemClock())
    assert refused.value.code == code
