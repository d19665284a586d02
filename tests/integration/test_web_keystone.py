"""Keystone's tokens at `berth web`: what their roles allow, when they end, and what a Keystone that is away means."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from starlette.responses import Response

from berth.web.access import SESSION_COOKIE, Access, WebCaller, WebRole, check_listen
from berth.web.problems import Problem
from bus.clock import SystemClock
from bus.service.settings import SettingsError
from placement_worker.rest.config import KeystoneConfig
from placement_worker.rest.keystone import Keystone
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

HOUR = timedelta(hours=1)
PROJECT = {"id": "0c8f0c9e3f0d4d9f8b589c2f6f0f2a11", "name": "demo"}


class Later(SystemClock):
    """A clock that is moved past the time for which a token is trusted."""

    offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


class Rig:
    """A Keystone, and what `berth web` makes of its tokens."""

    def __init__(self, keystone: KeystoneStandIn, url: str) -> None:
        self.keystone = keystone
        self.clock = Later()
        self.auth = Keystone(KeystoneConfig(auth_url=url, password="right", cache_s=60.0), self.clock)
        self.access = Access(None, self.clock, self.auth)

    async def caller(self, token: str) -> WebCaller:
        return await self.access.caller({"authorization": f"Bearer {token}"}, {})

    async def refused(self, token: str) -> tuple[int, str]:
        with pytest.raises(Problem) as caught:
            await self.caller(token)
        return caught.value.status, caught.value.code


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with keystone_stand_in() as (keystone, url):
        made = Rig(keystone, url)
        yield made
        await made.auth.close()


@pytest.mark.parametrize(
    ("token", "caller"),
    [
        ({"roles": [{"name": "admin"}], "project": PROJECT}, WebCaller("u1", WebRole.OPERATOR)),
        ({"roles": [{"name": "reader"}], "system": {"all": True}}, WebCaller("u1", WebRole.READER)),
        ({"roles": [{"name": "member"}], "project": PROJECT}, WebCaller("u1", WebRole.PROJECT, PROJECT["id"])),
    ],
    ids=["admin", "reader of the system", "member of a project"],
)
async def test_roles_of_keystone_are_roles_here(rig: Rig, token: dict[str, Any], caller: WebCaller) -> None:
    rig.keystone.add("good", HOUR, **token)
    assert await rig.caller("good") == caller
    assert await rig.access.caller({"x-auth-token": "good"}, {}) == caller
    assert not rig.access.open


@pytest.mark.parametrize(
    "token",
    [
        {"roles": [{"name": "reader"}], "project": PROJECT},
        {"roles": [{"name": "member"}], "domain": {"id": "default"}},
        {"roles": [], "project": PROJECT},
    ],
    ids=["reader of a project", "member of a domain", "no role"],
)
async def test_a_token_whose_roles_allow_nothing_is_forbidden(rig: Rig, token: dict[str, Any]) -> None:
    rig.keystone.add("weak", HOUR, **token)
    assert await rig.refused("weak") == (403, "role.insufficient")


@pytest.mark.parametrize("token", ["unknown", "x" * 9000, "a b", "\u00e9"])
async def test_what_keystone_does_not_know_is_no_caller(rig: Rig, token: str) -> None:
    assert await rig.refused(token) == (401, "auth.required")


async def test_a_keystone_that_does_not_answer_lets_no_caller_in(rig: Rig) -> None:
    rig.keystone.add("good", HOUR, roles=[{"name": "admin"}])
    rig.keystone.answer = Response(status_code=500)
    assert await rig.refused("good") == (503, "rest.keystone_unavailable")
    rig.keystone.answer = None
    assert (await rig.caller("good")).role is WebRole.OPERATOR
    rig.clock.offset += 61.0
    rig.keystone.sign_in_answer = Response(status_code=401)
    rig.keystone.services.clear()
    assert await rig.refused("good") == (503, "rest.keystone_forbidden")


async def test_a_session_ends_with_the_token_that_it_was_begun_with(rig: Rig) -> None:
    rig.keystone.add("good", HOUR, roles=[{"name": "admin"}])
    session = {SESSION_COOKIE: rig.access.log_in("good")}
    assert (await rig.access.caller({}, session)).role is WebRole.OPERATOR
    del rig.keystone.tokens["good"]  # revoked
    rig.clock.offset += 61.0
    with pytest.raises(Problem) as caught:
        await rig.access.caller({}, session)
    assert caught.value.status == 401


async def test_with_keystone_it_may_listen_to_other_machines(rig: Rig) -> None:
    check_listen("0.0.0.0", rig.access)
    with pytest.raises(SettingsError, match="loopback"):
        check_listen("0.0.0.0", Access(None, rig.clock))
