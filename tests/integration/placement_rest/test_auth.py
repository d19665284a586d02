"""The permissions of callers: the three ways to know a caller, the policy, and when the API refuses to start."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, Response

from berth.trial.embedded.process import free_port
from bus.clock import SystemClock
from bus.service.settings import SettingsError
from placement_worker.rest.auth import Caller, NoAuth2, TokenFile, local_auth
from placement_worker.rest.config import KeystoneConfig, PolicyConfig, RestConfig
from placement_worker.rest.keystone import Keystone, KeystoneForbidden, KeystoneUnavailable
from placement_worker.rest.oslo_conf import with_oslo_conf
from placement_worker.rest.policy import RESHAPE, USAGES, Policy
from tests.integration.placement_rest.conftest import Placement
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

ADMIN = Caller(user_id="a", project_id="p", roles=("admin",))
READER = Caller(user_id="r", project_id="p", roles=("reader",))
SERVICE = Caller(user_id="n", project_id="s", roles=("service",))
LIST = "placement:resource_providers:list"


async def test_noauth2_trusts_the_caller() -> None:
    auth = NoAuth2()
    assert await auth.identify({}) is None
    assert await auth.identify({b"x-auth-token": b"admin"}) == Caller(
        user_id="admin", project_id="admin", roles=("admin",)
    )
    headers = {b"x-auth-token": b"u:p", b"x-roles": b"member,reader", b"x-project-id": b"q"}
    assert await auth.identify(headers) == Caller(user_id="u", project_id="q", roles=("member", "reader"))
    scoped = await auth.identify({b"x-auth-token": b"admin", b"openstack-system-scope": b"all"})
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
    assert await auth.identify({b"x-auth-token": b"open sesame"}) == Caller(
        user_id="nova", project_id="s", roles=("service",)
    )
    assert await auth.identify({b"x-auth-token": b"open barley"}) is None
    assert await auth.identify({}) is None
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
    found = await asyncio.gather(*(auth.identify({b"x-auth-token": b"good"}) for _ in range(20)))
    assert set(found) == {Caller(user_id="u1", project_id="p1", roles=("admin",))}
    assert keystone.sign_ins == 1
    assert await auth.identify({b"x-auth-token": b"old"}) is None
    assert await auth.identify({b"x-auth-token": b"unheard-of"}) is None
    assert await auth.identify({b"x-auth-token": b"unheard-of"}) is None
    assert keystone.sign_ins == 3
    whole = await auth.identify({b"x-auth-token": b"whole"})
    assert whole is not None
    assert (whole.project_id, whole.system_scope) == (None, "all")
    keystone.services.clear()  # our own token is revoked
    keystone.add("later", timedelta(hours=1), project={"id": "p2", "name": "p"})
    later = await auth.identify({b"x-auth-token": b"later"})
    assert later is not None
    assert later.project_id == "p2"
    await auth.close()


async def test_a_keystone_that_cannot_answer_is_not_a_no(stand_in: tuple[KeystoneStandIn, str]) -> None:
    keystone, url = stand_in
    auth = Keystone(KeystoneConfig(auth_url=url, password="right"), SystemClock())
    for answer in (Response(status_code=503), Response(b"{"), JSONResponse({"token": {"user": {}, "expires_at": "?"}})):
        keystone.answer = answer
        with pytest.raises(KeystoneUnavailable):
            await auth.identify({b"x-auth-token": b"good"})
    await auth.close()
    auth = Keystone(KeystoneConfig(auth_url=url, password="wrong"), SystemClock())
    with pytest.raises(KeystoneForbidden):
        await auth.identify({b"x-auth-token": b"good"})
    await auth.close()
    auth = Keystone(KeystoneConfig(auth_url=f"http://127.0.0.1:{free_port()}", password="right"), SystemClock())
    with pytest.raises(KeystoneUnavailable):
        await auth.identify({b"x-auth-token": b"good"})
    await auth.close()


@pytest.mark.parametrize("token", [b"caf\xc3\xa9", b"\xff", b"a b", b"a\tb", b"a\x01b"])
async def test_what_can_be_no_token_is_refused_without_a_request_to_keystone(
    stand_in: tuple[KeystoneStandIn, str], token: bytes
) -> None:
    keystone, url = stand_in
    auth = Keystone(KeystoneConfig(auth_url=url, password="right"), SystemClock())
    assert await auth.identify({b"x-auth-token": token}) is None
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
    assert await auth.identify({b"x-auth-token": b"good"}) is not None
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
