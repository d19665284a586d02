"""Tokens of an OpenID provider at `berth serve web`, and `berth login` by the device flow: over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from berth.client import ApiAddressInvalid
from berth.client.login import OidcOffer
from berth.client.oidc import MAX_ANSWER_BYTES, DeviceCode, LoginFault, ProviderUnavailable, token_by_device
from berth.config.oidc import OidcConfig
from berth.web.oidc import KEPT_S, MAX_AGE_S, MAX_KEYS, MAX_TOKEN_BYTES, MIN_AGE_S, Oidc, caller_by_claims
from berth.web.problems import Problem
from berth.web.sign_in_sessions import Access, WebCaller, WebRole
from bus.clock import SystemClock
from bus.faults import Fault
from bus.service.settings import SettingsError
from tests.kit.issuer import CLIENT, Issuer, issuer_on_loopback

ALICE = WebCaller("alice", WebRole.OPERATOR)
DISCOVERY = "/.well-known/openid-configuration"


class Later(SystemClock):
    """A clock that is moved; the provider's stays."""

    offset = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.offset


class Rig:
    """A provider, and what `berth serve web` makes of its tokens."""

    def __init__(self, issuer: Issuer, **options: Any) -> None:
        self.issuer = issuer
        self.clock = Later()
        fields = {"operators": ("berth-admin",), "project_claim": "tenant", "timeout_s": 2.0, **options}
        self.oidc = Oidc(OidcConfig(issuer=issuer.url, client_id=CLIENT, **fields), self.clock)
        self.access = Access(None, self.clock, oidc=self.oidc)

    async def caller(self, token: str) -> WebCaller:
        return await self.access.caller({"authorization": f"Bearer {token}"}, {})

    async def refused(self, token: str) -> tuple[int, str]:
        with pytest.raises(Problem) as caught:
            await self.caller(token)
        return caught.value.status, caught.value.code


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    async with issuer_on_loopback() as found:
        yield found


@pytest.fixture
async def rig(issuer: Issuer) -> AsyncIterator[Rig]:
    made = Rig(issuer)
    yield made
    await made.oidc.close()


async def test_a_token_is_its_users_and_keys_are_read_once(rig: Rig, issuer: Issuer) -> None:
    assert await asyncio.gather(*(rig.caller(issuer.signed()) for _ in range(20))) == [ALICE] * 20
    assert (issuer.asked_for(DISCOVERY), issuer.asked_for("/keys")) == (1, 1)
    assert not rig.access.open
    assert await rig.access.by_token("a token of another kind") is None


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"aud": "another"}, "oidc.token_invalid"),
        ({"aud": None}, "oidc.token_invalid"),
        ({"aud": [CLIENT, "another"], "azp": "another"}, "oidc.token_invalid"),
        ({"exp": 1}, "oidc.token_expired"),
        ({"exp": None}, "oidc.token_invalid"),
        ({"exp": "never"}, "oidc.token_invalid"),
        ({"nbf": 2**40}, "oidc.token_invalid"),
        ({"iat": 2**40}, "oidc.token_invalid"),
        ({"sub": None}, "oidc.token_invalid"),
        ({"iss": "https://another.example"}, "auth.required"),
    ],
)
async def test_a_token_whose_claims_are_not_for_berth_is_refused(
    claims: dict[str, Any], code: str, rig: Rig, issuer: Issuer
) -> None:
    assert await rig.refused(issuer.signed(**claims)) == (401, code)


async def test_a_token_that_the_provider_did_not_sign_is_refused(rig: Rig, issuer: Issuer) -> None:
    signed = issuer.signed()
    header, body, signature = signed.split(".")
    _, other_body, _ = issuer.signed(sub="mallory").split(".")
    stranger = Issuer()
    stranger.url = issuer.url
    hostile = [
        issuer.unsigned(),
        issuer.signed_by_public_key(),
        stranger.signed(),  # the same key id
        f"{header}.{other_body}.{signature}",
        f"{header}.{body}.",
        issuer.signed({"alg": "RS512"}),  # by the provider, but not in web.oidc.algorithms
    ]
    for token in hostile:
        assert await rig.refused(token) == (401, "oidc.token_invalid"), token
    too_long = issuer.signed(more="x" * MAX_TOKEN_BYTES)
    for token in (too_long, "..", "a.b.c", f"{header}.{'Ww' * 2000}.{signature}", f"é.{body}.{signature}"):
        assert await rig.refused(token) == (401, "auth.required")
    assert await rig.caller(signed) == ALICE


async def test_a_rotated_key_is_known_soon_and_guesses_ask_seldom(rig: Rig, issuer: Issuer) -> None:
    old = issuer.signed()
    assert await rig.caller(old) == ALICE
    issuer.rotate("k2", keeps=True)
    new = issuer.signed()
    assert await rig.refused(new) == (401, "oidc.token_invalid")
    rig.clock.offset += MIN_AGE_S + 1
    assert [await rig.caller(new), await rig.caller(old)] == [ALICE, ALICE]
    for number in range(50):
        assert await rig.refused(issuer.signed({"kid": f"guess{number}"})) == (401, "oidc.token_invalid")
    assert issuer.asked_for("/keys") == 2
    issuer.published = [issuer.key]
    rig.clock.offset += MAX_AGE_S + 1
    assert await rig.refused(old) == (401, "oidc.token_invalid"), "its key was withdrawn"


HOSTILE = {
    "no JSON": Response("<html>"),
    "deep": Response("[" * 100_000),
    "huge": Response(b" " * (MAX_ANSWER_BYTES + 1)),
    "an error": Response(status_code=500),
    "elsewhere": Response(status_code=302, headers={"location": "/keys2"}),
    "too many keys": JSONResponse({"keys": [{}] * (MAX_KEYS + 1)}),
    "another issuer": JSONResponse({"issuer": "https://another.example", "jwks_uri": "https://another.example/keys"}),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_provider_that_answers_badly_lets_nobody_in_and_known_keys_go_on(
    name: str, rig: Rig, issuer: Issuer
) -> None:
    good = issuer.signed()
    for path in (DISCOVERY, "/keys"):
        issuer.answers = {path: HOSTILE[name]}
        assert await rig.refused(good) == (503, "oidc.unavailable")
        issuer.answers = {}
        assert await rig.refused(good) == (503, "oidc.unavailable"), "it is asked again too soon"
        rig.clock.offset += MIN_AGE_S + 1
    assert await rig.caller(good) == ALICE
    issuer.answers = {"/keys": HOSTILE[name]}
    rig.clock.offset += KEPT_S - 1
    assert await rig.caller(good) == ALICE
    rig.clock.offset += MIN_AGE_S + 1
    assert await rig.refused(good) == (503, "oidc.unavailable")


async def test_keys_for_something_else_are_none(rig: Rig, issuer: Issuer) -> None:
    keys = [one.as_dict(private=False) for one in issuer.published]
    others = [{}, {"kty": "oct", "k": "AAAA", "kid": "k1"}, {"kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "k0"}]
    others += [{"kty": "RSA", "n": 1, "e": None, "kid": "k3"}, {**keys[0], "use": "enc", "kid": "k4"}]
    issuer.answers = {"/keys": JSONResponse({"keys": [*others, *keys]})}
    assert await rig.caller(issuer.signed()) == ALICE
    assert await rig.refused(issuer.signed({"kid": "k4"})) == (401, "oidc.token_invalid")


async def test_an_access_token_is_taken_where_an_audience_is_set(issuer: Issuer) -> None:
    rig = Rig(issuer, audience="berth-api")
    assert await rig.caller(issuer.signed(aud=["x", "berth-api"], azp="another")) == ALICE
    assert await rig.refused(issuer.signed()) == (401, "oidc.token_invalid")
    await rig.oidc.close()


OF_KEYCLOAK = {"role_claim": "realm_access.roles", "operators": ("admin",), "readers": ("auditor",)}


@pytest.mark.parametrize(
    ("options", "claims", "expected"),
    [
        ({}, {"roles": "berth-admin", "tenant": "p"}, WebCaller("alice", WebRole.OPERATOR)),
        ({}, {"tenant": "p"}, WebCaller("alice", WebRole.PROJECT, "p")),
        ({}, {"tenant": ["p"]}, WebCaller("alice", WebRole.PROJECT, "p")),
        ({}, {"tenant": ["p", "q"]}, "role.insufficient"),
        ({}, {"tenant": {"p": 1}}, "role.insufficient"),
        ({}, {"tenant": "p.*"}, "oidc.claim_invalid"),
        ({}, {"roles": ["berth-admin-not"]}, "role.insufficient"),
        ({}, {"roles": {"berth-admin": True}}, "role.insufficient"),
        ({"members": ("m",)}, {"tenant": "p"}, "role.insufficient"),
        ({"members": ("m",)}, {"tenant": "p", "roles": ["m"]}, WebCaller("alice", WebRole.PROJECT, "p")),
        (OF_KEYCLOAK, {"realm_access": {"roles": ["auditor"]}}, WebCaller("alice", WebRole.READER)),
        (OF_KEYCLOAK, {"realm_access": {"roles": ["auditor", "admin"]}}, WebCaller("alice", WebRole.OPERATOR)),
        (OF_KEYCLOAK, {"realm_access": ["roles"]}, "role.insufficient"),
        ({"role_claim": "https://x.example/roles"}, {"https://x.example/roles": ["berth-admin"]}, ALICE),
        ({"name_claim": "email"}, {"roles": "berth-admin", "email": "a@x"}, WebCaller("a@x", WebRole.OPERATOR)),
        ({"name_claim": "email"}, {"roles": "berth-admin"}, "oidc.claim_invalid"),
        ({"name_claim": "email"}, {"roles": "berth-admin", "email": "a\nb"}, "oidc.claim_invalid"),
    ],
)
def test_claims_are_a_role_and_a_project(options: dict[str, Any], claims: dict[str, Any], expected: object) -> None:
    fields = {"operators": ("berth-admin",), "project_claim": "tenant", **options}
    try:
        found: object = caller_by_claims({"sub": "alice", **claims}, OidcConfig(**fields))
    except Problem as problem:
        assert problem.status == 403
        found = problem.code
    assert found == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"issuer": "http://idp.example"},
        {"issuer": "idp"},
        {"client_id": ""},
        {"operators": ()},
        {"ca_file": "/nowhere"},
    ],
)
def test_settings_that_would_let_everyone_or_nobody_in_are_refused(fields: dict[str, Any]) -> None:
    sound = {"issuer": "https://idp.example", "client_id": CLIENT, "operators": ("a",)}
    with pytest.raises(SettingsError) as refused:
        Oidc(OidcConfig(**{**sound, **fields}), SystemClock())
    assert refused.value.code == "web.oidc"


# --- `berth login`


class Person:
    """What the command shows, and its waits."""

    def __init__(self, issuer: Issuer, **offer: Any) -> None:
        self.offer = OidcOffer(issuer=issuer.url, client_id=CLIENT, scopes="openid", **offer)
        self.shown: list[DeviceCode] = []
        self.slept: list[float] = []

    async def token(self) -> str:
        return await asyncio.to_thread(
            token_by_device,
            self.offer,
            self.shown.append,
            sleep=self.slept.append,
            monotonic=lambda: sum(self.slept),
        )

    async def fault(self) -> str:
        with pytest.raises(Fault) as caught:
            await self.token()
        assert isinstance(caught.value, LoginFault | ProviderUnavailable | ApiAddressInvalid)
        return caught.value.code


async def test_the_token_of_the_device_flow_is_taken(rig: Rig, issuer: Issuer) -> None:
    issuer.pending = ["authorization_pending", "slow_down", "authorization_pending"]
    person = Person(issuer)
    assert await rig.caller(await person.token()) == ALICE
    assert [one.user_code for one in person.shown] == ["WDJB-MJHT"]
    assert person.slept == [2.0, 2.0, 7.0, 7.0]
    assert issuer.forms[0] == {"client_id": CLIENT, "scope": "openid"}


async def test_the_access_token_is_taken_where_berth_takes_it(issuer: Issuer) -> None:
    rig = Rig(issuer, audience="berth-api")
    assert await rig.caller(await Person(issuer, by_access_token=True).token()) == ALICE
    await rig.oidc.close()


@pytest.mark.parametrize(
    ("pending", "code"),
    [
        (["access_denied"], "oidc.refused"),
        (["invalid_client\x1b[31m"], "oidc.refused"),
        (["authorization_pending", "expired_token"], "oidc.not_confirmed"),
        (["authorization_pending"] * 100, "oidc.not_confirmed"),
    ],
)
async def test_a_login_that_is_not_confirmed_ends(pending: list[str], code: str, issuer: Issuer) -> None:
    issuer.pending = pending
    assert await Person(issuer).fault() == code


@pytest.mark.parametrize("path", [DISCOVERY, "/device", "/token"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_provider_is_a_coded_fault(path: str, name: str, issuer: Issuer) -> None:
    issuer.answers = {path: HOSTILE[name]}
    waits = path == "/token" and name == "an error"  # it may come back
    away = "oidc.not_confirmed" if waits else "oidc.unavailable"
    assert await Person(issuer).fault() == (away if name == "an error" else "oidc.provider_invalid")


@pytest.mark.parametrize(
    "fields",
    [
        {"token_endpoint": "http://idp.example/token"},
        {"token_endpoint": ""},
        {"device_authorization_endpoint": "file:///etc/passwd"},
    ],
)
async def test_a_code_is_sent_to_nobody_in_the_clear(fields: dict[str, str], issuer: Issuer) -> None:
    known = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys", "token_endpoint": f"{issuer.url}/token"}
    known |= {"device_authorization_endpoint": f"{issuer.url}/device", **fields}
    issuer.answers = {DISCOVERY: JSONResponse(known)}
    assert await Person(issuer).fault() == "oidc.provider_invalid"
    assert issuer.forms == []


async def test_a_provider_that_is_away_is_a_coded_fault(issuer: Issuer) -> None:
    away = Issuer()
    away.url = "http://127.0.0.1:1"
    assert await Person(away).fault() == "oidc.unavailable"
    away.url = "http://idp.example"
    assert await Person(away).fault() == "api.plain_http"
