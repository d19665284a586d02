"""Ironic's REST API, behind Keystone, and the commands about bare metal."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import pytest_asyncio
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from berth.cli.fleet import baremetal
from berth.cli.main import app
from berth.client import ApiProblem
from berth.client.types import NodeMaintenance, NodeRecord, NodesView
from berth.config.settings import read_settings
from berth.web.operations import NodesReader
from berth.web.problems import Problem
from bus.clock import SystemClock
from bus.contracts.objects import ObjectKind, StoredObject
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError
from compute_sim.ironic_stand_in import IronicStandIn, Silent
from ironic_sync.app import rest_client
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Allocation, Node, Unreadable
from ironic_sync.source.port import IronicRefused, IronicUnavailable
from ironic_sync.source.rest import IronicRestClient
from scheduler_worker.config import DEFAULT_FLAVORS
from tests.integration.compute_agent.harness import guarded
from tests.kit.api_client import answered_by
from tests.kit.certificates import Authority
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

# --- ironic's REST API: against the stand-in over real HTTP, and against answers no Ironic should give


UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"


@pytest.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    ironic = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1))
    await ironic.start()
    yield ironic
    await ironic.stop()


def source(url: str, **settings: Any) -> IronicRestClient:
    return rest_client(IronicSyncConfig(url=url, **settings), SystemClock())


async def test_nodes_are_read(ironic: IronicStandIn) -> None:
    ironic.pool.plan(7)
    first = next(iter(ironic.pool.nodes.values()))
    first["allocation_uuid"] = UUID
    reading = source(ironic.url, page_size=3)
    pages = [page async for page in reading.list_nodes()]
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [node.uuid for page in pages for node in page] == list(ironic.pool.nodes)
    node = await reading.get_node(first["uuid"])
    assert isinstance(node, Node)
    assert (node.provision_state, node.resource_class, node.traits) == ("available", "baremetal-gold", ("CUSTOM_GOLD",))
    assert node.updated_at == first["updated_at"]
    assert await reading.get_node(UUID) is None
    assert await reading.get_allocation(UUID) == Allocation(uuid=UUID, state="active", node_uuid=first["uuid"])
    assert await reading.get_allocation(first["uuid"]) is None
    await reading.close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_is_taken_with_the_version_or_without(ironic: IronicStandIn, suffix: str) -> None:
    ironic.pool.plan(1)
    reading = source(ironic.url + suffix)
    assert [len(page) async for page in reading.list_nodes()] == [1]
    await reading.close()


async def test_a_microversion_that_ironic_does_not_support_is_answered_with_what_to_do() -> None:
    limits = {"X-OpenStack-Ironic-API-Minimum-Version": "1.1", "X-OpenStack-Ironic-API-Maximum-Version": "1.38"}
    reading = answering(lambda _: httpx.Response(406, headers=limits))
    with pytest.raises(IronicRefused) as caught:
        await reading.ping()
    advice = "Ironic supports microversions 1.1 to 1.38: set ironic_sync.microversion to one of them"
    assert (caught.value.code, caught.value.reason) == ("ironic.microversion", advice)
    await reading.close()


async def test_basic_sign_in() -> None:
    expected = b"Basic " + base64.b64encode(b"berth:secret")
    async with guarded(lambda headers: headers.get(b"authorization") == expected) as (pool, url):
        assert await count(source(url, username="berth", password="secret")) == len(pool.nodes)
        with pytest.raises(IronicRefused) as refused:
            await count(source(url, username="berth", password="other"))
    assert refused.value.code == "ironic.http_401"


async def test_tls_with_an_authority_of_the_operators(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with guarded(lambda _: True, authority.issue("ironic", "IP:127.0.0.1")) as (pool, url):
        assert await count(source(url, ca_file=str(authority.file))) == len(pool.nodes)
        assert await count(source(url, verify_tls=False)) == len(pool.nodes)
        with pytest.raises(IronicUnavailable):  # this system does not know the authority
            await count(source(url))
    async with guarded(lambda _: True, authority.issue("ironic", "DNS:ironic.example.org")) as (_, url):
        with pytest.raises(IronicUnavailable):
            await count(source(url, ca_file=str(authority.file)))


async def count(reading: IronicRestClient) -> int:
    try:
        return sum([len(page) async for page in reading.list_nodes()])
    finally:
        await reading.close()


async def test_an_unreachable_address() -> None:
    reading = source("http://127.0.0.1:1")
    with pytest.raises(IronicUnavailable):
        await reading.get_node(UUID)
    await reading.close()


def answering(answer: Callable[[httpx.Request], httpx.Response], microversion: str = "1.52") -> IronicRestClient:
    return IronicRestClient(
        "http://ironic",
        microversion=microversion,
        timeout_s=60.0,
        list_timeout_s=60.0,
        page_size=2,
        connections=2,
        transport=httpx.MockTransport(answer),
    )


@pytest.mark.parametrize(
    ("status", "content", "fault"),
    [
        (500, b"", IronicUnavailable),
        (503, b"", IronicUnavailable),
        (429, b"", IronicUnavailable),
        (401, b"", IronicRefused),
        (406, b"", IronicRefused),
        (404, b"<html>no such path</html>", IronicRefused),
        (404, b"{}", IronicRefused),
        (302, b"", IronicRefused),
        (200, b"not json", IronicUnavailable),
        (200, b"null", IronicUnavailable),
        (200, b"[]", IronicUnavailable),
        (200, b"x" * (5 * 1024 * 1024), IronicRefused),
    ],
)
async def test_odd_answers_are_faults_and_never_a_removal(status: int, content: bytes, fault: type[Exception]) -> None:
    reading = answering(lambda _: httpx.Response(status, content=content))
    with pytest.raises(fault):
        await reading.get_node(UUID)
    await reading.close()


OTHERS = {"uuid": "05dcdb28-1788-4480-9281-af335fc32c9f"}
UNSTORABLE = {"uuid": UUID, "provision_state": "active\0"}


@pytest.mark.parametrize("content", [OTHERS, {}, {"uuid": UUID, "traits": 1}, UNSTORABLE])
async def test_an_answer_that_is_not_this_node(content: object) -> None:
    reading = answering(lambda _: httpx.Response(200, json=content))
    assert isinstance(await reading.get_node(UUID), Unreadable)
    await reading.close()


async def test_a_hanging_ironic_is_given_up() -> None:
    def hang(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("hangs")

    reading = answering(hang)
    with pytest.raises(IronicUnavailable):
        await reading.get_node(UUID)
    await reading.close()


async def test_a_list_that_never_ends_and_one_that_is_none() -> None:
    endless = answering(lambda _: httpx.Response(200, json={"nodes": [], "next": f"http://elsewhere/?marker={UUID}"}))
    with pytest.raises(IronicRefused):
        [page async for page in endless.list_nodes()]
    none = answering(lambda _: httpx.Response(200, json=[1]))
    with pytest.raises(IronicUnavailable):
        [page async for page in none.list_nodes()]
    await endless.close()
    await none.close()


MOST = "X-OpenStack-Ironic-API-Maximum-Version"
VERSION = "X-OpenStack-Ironic-API-Version"


def of_version(newest: str, asked: list[str]) -> Callable[[httpx.Request], httpx.Response]:
    """An Ironic of this version; a child node shows its parent from 1.83 on."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(version := request.headers[VERSION])
        headers = {"X-OpenStack-Ironic-API-Minimum-Version": "1.1", MOST: newest}
        if int(version[2:]) > int(newest[2:]):
            return httpx.Response(406, headers=headers)
        child = {"parent_node": OTHERS["uuid"]} if int(version[2:]) >= 83 else {}
        return httpx.Response(200, headers=headers, json={"uuid": UUID, **child})

    return answer


@pytest.mark.parametrize(
    ("newest", "asked", "parent"),
    [
        ("1.109", ["1.83"] * 2, OTHERS["uuid"]),
        ("1.83", ["1.83"] * 2, OTHERS["uuid"]),
        ("1.58", ["1.83", "1.58", "1.58"], None),
    ],
)
async def test_an_older_ironic_is_asked_with_its_newest_version(
    newest: str, asked: list[str], parent: str | None
) -> None:
    seen: list[str] = []
    reading = answering(of_version(newest, seen), microversion="1.83")
    for _ in range(2):
        node = await reading.get_node(UUID)
        assert isinstance(node, Node) and node.parent_node == parent
    assert seen == asked
    await reading.close()


async def test_each_list_asks_with_the_newest_version_again() -> None:
    """Ironic may have been upgraded."""
    seen: list[str] = []
    of_node = of_version("1.58", seen)

    def answer(request: httpx.Request) -> httpx.Response:
        answered = of_node(request)
        is_list = answered.status_code == 200 and request.url.path.endswith("/nodes")
        return httpx.Response(200, json={"nodes": []}) if is_list else answered

    reading = answering(answer, microversion="1.83")
    await reading.get_node(UUID)
    for _ in range(2):
        assert [page async for page in reading.list_nodes()] == [[]]
    assert seen == ["1.83", "1.58"] * 3
    await reading.close()


@pytest.mark.parametrize("newest", ["1.38", "1.83", "1.x", "", "9" * 40])
async def test_an_ironic_that_offers_no_version_is_refused(newest: str) -> None:
    reading = answering(lambda _: httpx.Response(406, headers={MOST: newest}), microversion="1.83")
    with pytest.raises(IronicRefused):
        await reading.get_node(UUID)
    await reading.close()


def listing(nodes: list[str], most: int, gone: Sequence[str] = ()) -> Callable[[httpx.Request], httpx.Response]:
    """Ironic's list of so many nodes a page. These are deleted after the first page; no list goes on from them."""

    def answer(request: httpx.Request) -> httpx.Response:
        marker = request.url.params.get("marker")
        if marker in gone:
            text = {"error_message": {"faultstring": f"Node {marker} could not be found."}}
            return httpx.Response(404, headers={VERSION: "1.83"}, json=text)
        there = nodes if marker is None else [one for one in nodes[nodes.index(marker) + 1 :] if one not in gone]
        page = there[:most]
        more = {"next": f"http://ironic/v1/nodes?marker={page[-1]}"} if len(there) > most else {}
        return httpx.Response(200, json={"nodes": [{"uuid": one} for one in page], **more})

    return answer


MANY = [f"00000000-0000-4000-8000-{number:012x}" for number in range(10_001)]


async def test_a_list_of_very_many_small_pages_is_read_to_its_end() -> None:
    """Ironic's own [api]max_limit may be small: 10,000 pages of one list were its end."""
    reading = answering(listing(MANY, 1))
    assert [node.uuid async for page in reading.list_nodes() for node in page] == MANY
    await reading.close()


@pytest.mark.parametrize("gone", [MANY[2:3], MANY[1:3]])
async def test_a_list_goes_on_when_the_last_nodes_of_a_page_are_deleted(gone: list[str]) -> None:
    """It began again, and where nodes are deleted steadily none ever ended."""
    reading = answering(listing(MANY[:9], 3, gone))
    assert [node.uuid async for page in reading.list_nodes() for node in page] == MANY[:9]
    await reading.close()


async def test_a_next_link_cannot_lead_elsewhere() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        link = {} if len(requests) > 1 else {"next": f"http://evil/v1/nodes?marker={UUID}&limit=2"}
        return httpx.Response(200, json={"nodes": [{"uuid": "bad"}], **link})

    reading = answering(answer)
    pages = [page async for page in reading.list_nodes()]
    assert [request.url.host for request in requests] == ["ironic", "ironic"]
    assert requests[1].url.params["marker"] == UUID
    assert requests[0].headers["X-OpenStack-Ironic-API-Version"] == "1.52"
    assert all(isinstance(node, Unreadable) for page in pages for node in page)
    assert json.loads("{}") == {}
    await reading.close()


# --- ironic behind Keystone: signing in, renewing, and being turned down; Ironic and Keystone both over real HTTP


class Guarded(IronicStandIn):
    """An Ironic that takes only the tokens that its Keystone has given last."""

    keystone: KeystoneStandIn

    def app(self) -> Any:
        inner = super().app()

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            token = dict(scope["headers"]).get(b"x-auth-token", b"").decode()
            if token in self.keystone.services:
                await inner(scope, receive, send)
            else:
                await Response(status_code=401)(scope, receive, send)

        return guard


@pytest.fixture
async def keystone() -> AsyncIterator[tuple[KeystoneStandIn, str]]:
    async with keystone_stand_in() as serving:
        yield serving


@pytest.fixture
async def keystone_ironic(keystone: tuple[KeystoneStandIn, str]) -> AsyncIterator[IronicStandIn]:
    made = Guarded(Silent(), clock=SystemClock(), rng=random.Random(1))
    made.keystone = keystone[0]
    made.pool.plan(3)
    await made.start()
    yield made
    await made.stop()


def keystone_source(keystone_ironic: IronicStandIn, url: str, **login: Any) -> IronicRestClient:
    made = KeystoneLogin(auth_url=url, **{"username": "berth", "password": "right", **login})
    return rest_client(IronicSyncConfig(url=keystone_ironic.url, keystone=made), SystemClock())


async def keystone_count(reading: IronicRestClient) -> int:
    return sum([len(page) async for page in reading.list_nodes()])


async def test_many_requests_share_one_sign_in(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    reading = keystone_source(keystone_ironic, f"{url}/v3/")
    assert await asyncio.gather(*(keystone_count(reading) for _ in range(8))) == [3] * 8
    assert (there.signed_in, there.methods) == (1, ["password"])
    await reading.close()


async def test_a_token_that_is_turned_down_is_renewed(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    reading = keystone_source(keystone_ironic, url)
    assert await keystone_count(reading) == 3
    there.services.clear()  # revoked
    assert await asyncio.gather(*(keystone_count(reading) for _ in range(8))) == [3] * 8
    assert there.signed_in == 2
    await reading.close()


async def test_a_token_is_renewed_before_it_runs_out(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    there.lasts = timedelta(seconds=30)
    reading = keystone_source(keystone_ironic, url)
    assert [await keystone_count(reading) for _ in range(3)] == [3] * 3
    assert there.signed_in == 3
    await reading.close()


@pytest.mark.parametrize("named", [{"application_credential_id": "id"}, {"application_credential_name": "name"}])
async def test_an_application_credential_signs_in(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str], named: dict[str, str]
) -> None:
    there, url = keystone
    reading = keystone_source(keystone_ironic, url, application_credential_secret="right", **named)
    assert await keystone_count(reading) == 3
    assert there.methods == ["application_credential"]
    await reading.close()


@pytest.mark.parametrize("expires", ["0001-01-01T00:00:00", "tomorrow", None])
async def test_a_token_whose_end_cannot_be_read_is_used_until_it_is_turned_down(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str], expires: str | None
) -> None:
    """The first one ended the worker: it has no zone, and no time of the world is that early."""
    there, url = keystone
    there.services.add("odd")
    token = {"token": {"expires_at": expires}}
    there.sign_in_answer = JSONResponse(token, 201, headers={"X-Subject-Token": "odd"})
    reading = keystone_source(keystone_ironic, url)
    assert [await keystone_count(reading) for _ in range(2)] == [3, 3]
    assert there.signed_in == 1
    await reading.close()


async def test_keystones_answers_are_distinguished(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    reading = keystone_source(keystone_ironic, url, password="wrong")
    with pytest.raises(IronicRefused) as refused:
        await keystone_count(reading)
    assert refused.value.code == "keystone.http_401"
    there.sign_in_answer = Response(status_code=503)
    with pytest.raises(IronicUnavailable):
        await keystone_count(reading)
    await reading.close()


async def test_an_unreachable_keystone_is_not_taken_for_ironic(keystone_ironic: IronicStandIn) -> None:
    reading = keystone_source(keystone_ironic, "http://127.0.0.1:1")
    with pytest.raises(IronicUnavailable, match=r"^Keystone at http://127\.0\.0\.1:1/v3/auth/tokens: ") as unreachable:
        await keystone_count(reading)
    assert unreachable.value.code == "keystone.unavailable"
    await reading.close()


async def test_ironic_may_turn_down_a_good_token(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    """It is asked for anew once, not for ever."""
    there, url = keystone
    keystone_ironic.keystone = KeystoneStandIn()  # type: ignore[attr-defined]
    reading = keystone_source(keystone_ironic, url)
    with pytest.raises(IronicRefused) as refused:
        await keystone_count(reading)
    assert (refused.value.code, there.signed_in) == ("ironic.http_401", 2)
    await reading.close()


async def test_a_token_of_one_ironic_is_shown_to_no_other(
    keystone_ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    """Two Ironics behind a Keystone each, read by one process."""
    async with keystone_stand_in() as (there, url):
        there.issues = "another"
        other = Guarded(Silent(), clock=SystemClock(), rng=random.Random(2))
        other.keystone = there
        other.pool.plan(5)
        await other.start()
        readings = (keystone_source(keystone_ironic, keystone[1]), keystone_source(other, url))
        assert await asyncio.gather(*map(keystone_count, readings)) == [3, 5]
        assert (keystone[0].signed_in, there.signed_in) == (1, 1)
        for reading in readings:
            await reading.close()
        await other.stop()


@pytest.mark.parametrize("login", [{"username": ""}, {"username": "", "application_credential_name": "n"}])
def test_settings_without_a_user_are_refused(login: dict[str, str]) -> None:
    config = IronicSyncConfig(keystone=KeystoneLogin(auth_url="http://keystone", **login))  # type: ignore[arg-type]
    with pytest.raises(SettingsError):
        rest_client(config, SystemClock())


# --- `berth node` against the stand-in: which nodes serve nothing and why, and holding one back


FOREIGN = "90000000-0000-4000-8000-000000000000"


@pytest_asyncio.fixture
async def commands_ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1))
    await stand_in.start()
    yield stand_in
    await stand_in.stop()


@pytest.fixture
def berth(commands_ironic: IronicStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("BERTH_COMPUTE__IRONIC__URL", commands_ironic.url)
    monkeypatch.setenv("BERTH_STATE_DIR", str(tmp_path))
    flavors = [
        StoredObject(kind=ObjectKind.FLAVOR, name=name, body=msgspec.to_builtins(flavor), version=1)
        for name, flavor in sorted(DEFAULT_FLAVORS.items())
    ]

    class Objects:
        async def stored(self, _: ObjectKind) -> tuple[int, list[StoredObject]]:
            return 1, flavors

    class Api:
        """What the web server answers with, without the server."""

        async def show_nodes(self) -> NodesView:
            return await self._answer(lambda nodes: nodes.view())

        async def set_node_maintenance(self, node: str, body: NodeMaintenance) -> NodeRecord:
            return await self._answer(lambda nodes: nodes.set_maintenance(node, body.reason))

        async def end_node_maintenance(self, node: str) -> NodeRecord:
            return await self._answer(lambda nodes: nodes.set_maintenance(node, None))

        async def _answer(self, call: Callable[[NodesReader], Awaitable[Any]]) -> Any:
            try:
                return await call(NodesReader(read_settings(None), cast("Any", Objects()), SystemClock()))
            except Problem as problem:
                raise ApiProblem(problem.status, problem.code, problem.detail) from None

    answered_by(monkeypatch, Api(), baremetal)

    async def command(*arguments: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, ["node", *arguments])

    return command


async def test_what_is_wrong_with_each_node_is_printed_in_ironics_words(
    commands_ironic: IronicStandIn, berth: Any
) -> None:
    commands_ironic.pool.plan(2)  # gold and silver: both are served, and nothing is wrong with them
    wrong = {
        "classless": {"resource_class": None, "provision_state": "available"},
        "lead": {"resource_class": "lead", "provision_state": "available"},
        "dark": {"resource_class": "baremetal-gold", "provision_state": "available", "power_state": None},
        "broken": {
            "resource_class": "baremetal-gold",
            "provision_state": "clean failed",
            "last_error": "disk 0 is dead",
        },
        "away": {
            "resource_class": "baremetal-gold",
            "provision_state": "available",
            "maintenance": True,
            "maintenance_reason": "a new fan",
        },
    }
    for name, fields in wrong.items():
        commands_ironic.pool.add(**{"name": name, "power_state": "power off", **fields})
    result = await berth("check", "-o", "json")
    assert result.exit_code == 1, result.output
    answer = json.loads(result.output)
    assert {node["name"]: node["problems"] for node in answer["nodes"]} == {
        "classless": ["it has no resource class"],
        "lead": ["no flavor requests CUSTOM_LEAD"],
        "dark": ["its power state is not known"],
        "broken": ["it is in clean failed"],
        "away": ["it is in maintenance: a new fan"],
    }
    assert {node["name"]: node["ironic_reason"] for node in answer["nodes"]}["broken"] == "disk 0 is dead"
    assert answer["flavors"] == []
    assert "disk 0 is dead" in (await berth("check")).output
    assert "disk 0 is dead" in (await berth("show", "broken")).output


async def test_nothing_wrong_prints_nothing(commands_ironic: IronicStandIn, berth: Any) -> None:
    commands_ironic.pool.plan(2)
    result = await berth("check")
    assert (result.exit_code, result.output) == (0, "")


async def test_flavors_that_no_node_serves_are_named(commands_ironic: IronicStandIn, berth: Any) -> None:
    commands_ironic.pool.plan(1, ("baremetal-gold",))
    result = await berth("check", "-o", "json")
    assert result.exit_code == 1 and json.loads(result.output)["flavors"] == ["bm.silver"]


async def test_a_node_is_held_back_and_released_and_anothers_maintenance_is_left(
    commands_ironic: IronicStandIn, berth: Any
) -> None:
    node = commands_ironic.pool.add(
        name="one", provision_state="available", power_state="power off", resource_class="gold"
    )
    assert (await berth("maintenance", "one", "--reason", "it flaps")).exit_code == 0
    assert (node["maintenance"], node["maintenance_reason"]) == (True, "berth quarantine: it flaps")
    assert (await berth("enable", "one")).exit_code == 0
    assert node["maintenance"] is False
    node.update(maintenance=True, maintenance_reason="a new fan")
    result = await berth("enable", "one")
    assert result.exit_code == 1 and node["maintenance"] is True


async def test_a_foreign_instance_is_called_so(commands_ironic: IronicStandIn, berth: Any) -> None:
    commands_ironic.pool.add(
        name="theirs", provision_state="active", resource_class="baremetal-gold", instance_uuid=FOREIGN
    )
    assert f"{FOREIGN} (foreign)" in (await berth("show", "theirs")).output
    assert (await berth("show", "nobodys")).exit_code == 1


async def test_an_unreachable_ironic_is_exit_status_three(berth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_COMPUTE__IRONIC__URL", "http://127.0.0.1:9")
    assert (await berth("list")).exit_code == 3
