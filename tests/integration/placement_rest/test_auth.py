"""Who may call the REST API, beside which health it is served, and the causes that its requests carry."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import structlog
from starlette.responses import JSONResponse, Response

from berth.config.ports import free_port
from berth.up.worker_processes import NO_TLS
from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.feed import Change, FeedChanges
from bus.memory import MemoryTransport
from bus.openstack.answers import MAX_BYTES
from bus.openstack.keystone import SignInRefused, SignInUnavailable
from bus.service.settings import SettingsError
from placement_worker.rest.auth import Caller, NoAuth2, TokenFile, local_auth
from placement_worker.rest.config import KeystoneConfig, PolicyConfig, RestConfig, with_oslo_conf
from placement_worker.rest.keystone import Keystone
from placement_worker.rest.policy import Policy
from placement_worker.rest.routes import RESHAPE, USAGES
from tests.integration.placement_rest.conftest import START_TIMEOUT_S, Placement, holding, on_postgres
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

# --- the permissions of callers: the three ways to know a caller, the policy, and when the API refuses to start

ADMIN = Caller(user_id="a", project_id="p", roles=("admin",))
READER = Caller(user_id="r", project_id="p", roles=("reader",))
SERVICE = Caller(user_id="n", project_id="s", roles=("service",))
LIST = "placement:resource_providers:list"


async def test_noauth2_trusts_the_caller() -> None:
    auth = NoAuth2()
    assert await auth.identify(b"admin", {}) == Caller(user_id="admin", project_id="admin", roles=("admin",))
    headers = {b"x-roles": b"member,reader", b"x-project-id": b"q"}
    assert await auth.identify(b"u:p", headers) == Caller(user_id="u", project_id="q", roles=("member", "reader"))
    scoped = await auth.identify(b"admin", {b"openstack-system-scope": b"all"})
    assert scoped is not None
    assert (scoped.project_id, scoped.system_scope) == (None, "all")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_noauth2_listens_on_loopback(host: str) -> None:
    assert isinstance(local_auth(RestConfig(), host), NoAuth2)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "placement.example.com"])
def test_noauth2_listens_elsewhere_only_when_set_twice(host: str) -> None:
    with pytest.raises(SettingsError, match="loopback"):
        local_auth(RestConfig(), host)
    assert isinstance(local_auth(RestConfig(noauth2_anywhere=True), host), NoAuth2)


async def test_a_token_file_holds_digests(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"open sesame").hexdigest()
    path.write_text(f'[[tokens]]\nsha256 = "{digest}"\nuser_id = "nova"\nproject_id = "s"\nroles = ["service"]\n')
    auth = TokenFile(path)
    assert await auth.identify(b"open sesame", {}) == Caller(user_id="nova", project_id="s", roles=("service",))
    assert await auth.identify(b"open barley", {}) is None
    path.write_text("")
    with pytest.raises(SettingsError):
        TokenFile(path)


@pytest.mark.parametrize(
    ("rule", "caller", "project", "old", "new"),
    [
        (LIST, ADMIN, "p", True, True),
        (LIST, SERVICE, "s", True, True),
        (LIST, READER, "p", False, False),
        (USAGES, READER, "p", True, True),
        (USAGES, READER, "q", False, False),
        (USAGES, ADMIN, "q", True, True),
        (RESHAPE, ADMIN, "p", True, False),
        (RESHAPE, SERVICE, "s", True, True),
        (LIST, Caller(user_id="a", roles=("admin",), system_scope="all"), None, False, False),
        (LIST, Caller(user_id="a", roles=("admin",), domain_id="d"), None, False, False),
    ],
)
def test_the_rules_are_placements(rule: str, caller: Caller, project: str | None, old: bool, new: bool) -> None:
    for enforce, allowed in ((False, old), (True, new)):
        policy = Policy(PolicyConfig(enforce_new_defaults=enforce), _Still())
        assert policy.allows(rule, caller, project) is allowed


class _Still(SystemClock):
    """A clock that can be moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_changed_policy_file_acts_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(json.dumps({LIST: "role:reader"}))
    clock = _Still()
    policy = Policy(PolicyConfig(policy_file=str(path)), clock)
    assert policy.allows(LIST, READER, "p")
    path.write_text(json.dumps({LIST: "!", RESHAPE: "@"}))
    clock.now = 10
    assert not policy.allows(LIST, READER, "p")
    with pytest.raises(SettingsError):
        Policy(PolicyConfig(policy_file=str(tmp_path / "none.yaml")), clock)


def test_a_placement_conf_is_read(tmp_path: Path) -> None:
    (tmp_path / "placement.conf").write_text(
        "[api]\nauth_strategy = keystone\n[keystone_authtoken]\nauth_url = http://keystone:5000\nusername = u\n"
        "password = a%b\ntoken_cache_time = 60\nregion_name = elsewhere\n"
        "[oslo_policy]\nenforce_new_defaults = False\npolicy_file = mine.yaml\n[cors]\nallowed_origin = http://a, http://b\n"
        "[placement]\nrandomize_allocation_candidates = true\nmax_allocation_candidates = 500\n"
    )
    config = with_oslo_conf(RestConfig(conf_dir=str(tmp_path)))
    assert config.auth == "keystone"
    assert (config.keystone.auth_url, config.keystone.password, config.keystone.cache_s) == (
        "http://keystone:5000",
        "a%b",
        60.0,
    )
    assert config.policy == PolicyConfig(policy_file=str(tmp_path / "mine.yaml"), enforce_new_defaults=False)
    assert config.cors.allowed_origin == ("http://a", "http://b")
    assert (config.randomize, config.default_limit) == (True, 500)
    (tmp_path / "placement.conf").write_text("[api]\nauth_strategy = kerberos\n")
    with pytest.raises(SettingsError):
        with_oslo_conf(RestConfig(conf_dir=str(tmp_path)))


def test_the_policy_beside_a_placement_conf_is_in_force_though_the_file_does_not_name_it(tmp_path: Path) -> None:
    (tmp_path / "placement.conf").write_text("[api]\nauth_strategy = keystone\n")
    (tmp_path / "policy.yaml").write_text(json.dumps({LIST: "role:reader"}))
    (tmp_path / "policy.d").mkdir()
    (tmp_path / "policy.d" / "more.yaml").write_text(json.dumps({RESHAPE: "role:reader"}))
    policy = Policy(with_oslo_conf(RestConfig(conf_dir=str(tmp_path))).policy, _Still())
    assert policy.allows(LIST, READER, "p")
    assert policy.allows(RESHAPE, READER, "p")
    assert not policy.allows(LIST, ADMIN, "p")


def test_an_unsupported_auth_strategy_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "placement.conf").write_text("[keystone_authtoken]\nauth_type = v3applicationcredential\n")
    with pytest.raises(SettingsError, match="v3applicationcredential"):
        with_oslo_conf(RestConfig(conf_dir=str(tmp_path)))


@pytest.fixture
async def stand_in() -> AsyncIterator[tuple[KeystoneStandIn, str]]:
    async with keystone_stand_in() as serving:
        yield serving


async def test_keystone_is_requested_once_and_its_answer_cached_until_it_expires(
    stand_in: tuple[KeystoneStandIn, str],
) -> None:
    keystone, url = stand_in
    keystone.add("good", timedelta(hours=1), roles=[{"id": "1", "name": "admin"}], project={"id": "p1", "name": "p"})
    keystone.add("old", timedelta(seconds=-1), project={"id": "p1", "name": "p"})
    keystone.add("whole", timedelta(hours=1), system={"all": True})
    auth = Keystone(KeystoneConfig(auth_url=f"{url}/v3/", password="right"), SystemClock())
    found = await asyncio.gather(*(auth.identify(b"good", {}) for _ in range(20)))
    assert set(found) == {Caller(user_id="u1", project_id="p1", roles=("admin",))}
    assert keystone.sign_ins == 1
    assert await auth.identify(b"old", {}) is None
    assert await auth.identify(b"unheard-of", {}) is None
    assert await auth.identify(b"unheard-of", {}) is None
    assert keystone.sign_ins == 3
    whole = await auth.identify(b"whole", {})
    assert whole is not None
    assert (whole.project_id, whole.system_scope) == (None, "all")
    keystone.services.clear()  # our own token is revoked
    keystone.add("later", timedelta(hours=1), project={"id": "p2", "name": "p"})
    later = await auth.identify(b"later", {})
    assert later is not None
    assert later.project_id == "p2"
    await auth.close()


async def test_a_keystone_that_cannot_answer_is_not_a_no(stand_in: tuple[KeystoneStandIn, str]) -> None:
    keystone, url = stand_in
    auth = Keystone(KeystoneConfig(auth_url=url, password="right"), SystemClock())
    unreadable = (b"{", b'{"more":' + b"[" * 100_000, b" " * (MAX_BYTES + 1))
    broken = JSONResponse({"token": {"user": {}, "expires_at": "?"}})
    for answer in (Response(status_code=503), *map(Response, unreadable), broken):
        keystone.answer = answer
        with pytest.raises(SignInUnavailable):
            await auth.identify(b"good", {})
    await auth.close()
    auth = Keystone(KeystoneConfig(auth_url=url, password="wrong"), SystemClock())
    with pytest.raises(SignInRefused):
        await auth.identify(b"good", {})
    await auth.close()
    auth = Keystone(KeystoneConfig(auth_url=f"http://127.0.0.1:{free_port()}", password="right"), SystemClock())
    with pytest.raises(SignInUnavailable):
        await auth.identify(b"good", {})
    await auth.close()


@pytest.mark.parametrize("token", [b"caf\xc3\xa9", b"\xff", b"a b", b"a\tb", b"a\x01b"])
async def test_what_can_be_no_token_is_refused_without_a_request_to_keystone(
    stand_in: tuple[KeystoneStandIn, str], token: bytes
) -> None:
    keystone, url = stand_in
    auth = Keystone(KeystoneConfig(auth_url=url, password="right"), SystemClock())
    assert await auth.identify(token, {}) is None
    assert keystone.sign_ins == 0
    await auth.close()


async def test_the_service_user_may_be_named_by_domain_ids(
    stand_in: tuple[KeystoneStandIn, str], tmp_path: Path
) -> None:
    keystone, url = stand_in
    keystone.add("good", timedelta(hours=1), project={"id": "p1", "name": "p"})
    (tmp_path / "placement.conf").write_text(
        f"[keystone_authtoken]\nauth_url = {url}\npassword = right\n"
        "user_domain_id = users\nproject_domain_id = projects\n"
    )
    config = with_oslo_conf(RestConfig(conf_dir=str(tmp_path))).keystone
    auth = Keystone(config, SystemClock())
    assert await auth.identify(b"good", {}) is not None
    sent = keystone.last_sign_in["auth"]
    assert sent["identity"]["password"]["user"]["domain"] == {"id": "users"}
    assert sent["scope"]["project"]["domain"] == {"id": "projects"}
    await auth.close()


@pytest.mark.postgres
async def test_credentials_that_keystone_refuses_are_no_callers_error(
    stand_in: tuple[KeystoneStandIn, str], postgres_url: str
) -> None:
    keystone = KeystoneConfig(auth_url=stand_in[1], password="wrong")
    placement = Placement(
        postgres_url, RestConfig(listen=f"127.0.0.1:{free_port()}", auth="keystone", keystone=keystone)
    )
    await placement.start()
    try:
        answer = await placement.call("GET", "/resource_providers", status=503)
        assert "wrong" not in answer.text, "the client does not learn what we sent"
    finally:
        await placement.stop()


# --- one port for the REST API, health and metrics: `berth run placement --http`


@pytest.fixture
async def both(postgres_url: str) -> AsyncIterator[Placement]:
    made = Placement(postgres_url, RestConfig(listen=f"127.0.0.1:{free_port()}"), health_with_rest=True)
    await made.start()
    yield made
    await made.stop()


async def opened(placement: Placement) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        await placement.service.ready.wait()


async def test_health_needs_no_token_and_the_api_at_the_root_path_does(both: Placement) -> None:
    await opened(both)
    answers = {path: await both.client.get(path) for path in ("/healthz", "/readyz?verbose", "/metrics", "/")}
    assert {answer.status_code for answer in answers.values()} == {200}
    assert answers["/readyz?verbose"].json() == {"ready": True, "not_ready": [], "pid": os.getpid()}
    assert "berth_placement_rest" in answers["/metrics"].text
    assert answers["/"].json()["versions"][0]["max_version"] == "1.39"
    assert (await both.client.head("/metrics")).content == b""
    assert (await both.client.post("/healthz")).status_code == 405
    assert (await both.client.get("/resource_providers")).status_code == 401
    host = await both.host(VCPU=4)
    assert (await both.call("GET", f"/resource_providers/{host}")).json()["uuid"] == host
    assert (await both.call("GET", "/healthz/more")).status_code == 404


async def test_before_placement_is_there_health_answers_and_the_api_answers_503() -> None:
    nowhere = f"postgresql://127.0.0.1:{free_port()}/none"
    waiting = Placement(nowhere, RestConfig(listen=f"127.0.0.1:{free_port()}"), health_with_rest=True)
    await waiting.start()
    assert (await waiting.client.get("/healthz")).json() == {"alive": True}
    ready = await waiting.client.get("/readyz")
    assert ready.status_code == 503 and "database" in ready.json()["not_ready"]
    for path in ("/", "/resource_providers"):
        answer = await waiting.call("GET", path, status=503)
        assert answer.json()["errors"][0]["status"] == 503 and answer.headers["retry-after"] == "1"
    await waiting.stop()
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(verify=NO_TLS, timeout=START_TIMEOUT_S) as client:
            await client.get(waiting.base_url)


async def test_without_health_the_port_is_the_apis_alone(placement: Placement) -> None:
    assert (await placement.call("GET", "/healthz")).status_code == 404


# --- a caller's own request id goes with its write: to the log, and to every follower of the change feed on the bus

PATIENCE_S = 60.0
OURS = "req-11111111-2222-4333-8444-555555555555"
HEADER = {"x_openstack_request_id": OURS}


async def changes(placement: Placement, after: int) -> list[Change]:
    return list((await placement.store.changes(after, 1000)).changes)


@pytest.mark.postgres
async def test_the_callers_id_is_on_every_change_of_its_write(placement: Placement) -> None:
    host, consumer = await placement.host(VCPU=4), new_uuid(placement.rng)
    child = new_uuid(placement.rng)
    start = (await placement.store.head()).sequence
    body = {"name": "child", "uuid": child, "parent_provider_uuid": host}
    await placement.call("POST", "/resource_providers", body, status=200, **HEADER)
    held = holding({host: {"resources": {"VCPU": 1}}}, None)
    await placement.call("PUT", f"/allocations/{consumer}", held, status=204, **HEADER)
    await placement.call("DELETE", f"/allocations/{consumer}", status=204, **HEADER)
    reshape = {
        "inventories": {
            host: {"resource_provider_generation": 2, "inventories": {}},
            child: {"resource_provider_generation": 0, "inventories": {"VCPU": {"total": 4}}},
        },
        "allocations": {},
    }
    await placement.call("POST", "/reshaper", reshape, status=204, x_roles="service", **HEADER)
    found = await changes(placement, start)
    assert len(found) == 5
    assert {change.causes for change in found} == {(OURS,)}


@pytest.mark.postgres
async def test_without_one_it_is_ours_and_what_is_no_id_goes_nowhere(placement: Placement) -> None:
    start = (await placement.store.head()).sequence
    body = {"name": "host", "uuid": new_uuid(placement.rng)}
    answer = await placement.call("POST", "/resource_providers", body, x_openstack_request_id="req-<script>")
    [change] = await changes(placement, start)
    assert change.causes == (answer.headers["x-openstack-request-id"],)


@asynccontextmanager
async def listening(placement: Placement) -> AsyncIterator[asyncio.Queue[Received]]:
    """The messages on the bus."""
    events: asyncio.Queue[Received] = asyncio.Queue()

    async def listen(batch: Sequence[Received]) -> list[Outcome]:
        for received in batch:
            events.put_nowait(received)
        return [Done() for _ in batch]

    bus = Bus(
        "api", MemoryTransport(placement.broker, "listener"), process="listener", clock=SystemClock(), rng=placement.rng
    )
    await bus.open()
    consumer = Consumer(bus, "scheduler.feed.{process}", listen)
    await consumer.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield events
    finally:
        await consumer.drain(1.0)
        await bus.close()


@pytest.mark.postgres
async def test_the_bus_carries_it_too(placement: Placement) -> None:
    async with listening(placement) as events:
        body = {"name": "host", "uuid": new_uuid(placement.rng)}
        await placement.call("POST", "/resource_providers", body, status=200, **HEADER)
        while not isinstance((received := await events.get()).message, FeedChanges):
            pass
        assert received.meta.cause == OURS


@on_postgres
@pytest.mark.postgres
async def test_the_log_carries_it_too(placement: Placement) -> None:
    async with placement.postgres.rows.database.raw() as connection:
        await connection.execute("ALTER TABLE traits RENAME TO gone")  # something to log
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await placement.call("GET", "/traits", status=500, **HEADER)
        await placement.call("GET", "/traits", status=500)
    async with placement.postgres.rows.database.raw() as connection:
        await connection.execute("ALTER TABLE gone RENAME TO traits")
    lines = [line for line in logs if line["event"] == "rest.failed"]
    assert [line.get("global_request_id") for line in lines] == [OURS, None]
    assert all(line["request_id"].startswith("req-") for line in lines)
