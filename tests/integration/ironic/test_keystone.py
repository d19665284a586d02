"""Ironic behind Keystone: signing in, renewing, and being turned down; Ironic and Keystone both over real HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from berth.trial.ironic_stand_in import IronicStandIn, Silent
from bus.clock import SystemClock
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError
from ironic_sync.app import rest_source
from ironic_sync.config import IronicSyncConfig
from ironic_sync.source.port import SourceRefused, SourceUnavailable
from ironic_sync.source.rest import RestSource
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in


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
async def ironic(keystone: tuple[KeystoneStandIn, str]) -> AsyncIterator[IronicStandIn]:
    made = Guarded(Silent(), clock=SystemClock(), rng=random.Random(1))
    made.keystone = keystone[0]
    made.pool.plan(3)
    await made.start()
    yield made
    await made.stop()


def source(ironic: IronicStandIn, url: str, **login: Any) -> RestSource:
    made = KeystoneLogin(auth_url=url, **{"username": "berth", "password": "right", **login})
    return rest_source(IronicSyncConfig(url=ironic.url, keystone=made), SystemClock())


async def count(reading: RestSource) -> int:
    return sum([len(page) async for page in reading.list_nodes()])


async def test_many_requests_share_one_sign_in(ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]) -> None:
    there, url = keystone
    reading = source(ironic, f"{url}/v3/")
    assert await asyncio.gather(*(count(reading) for _ in range(8))) == [3] * 8
    assert (there.signed_in, there.methods) == (1, ["password"])
    await reading.close()


async def test_a_token_that_is_turned_down_is_renewed(
    ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    reading = source(ironic, url)
    assert await count(reading) == 3
    there.services.clear()  # revoked
    assert await asyncio.gather(*(count(reading) for _ in range(8))) == [3] * 8
    assert there.signed_in == 2
    await reading.close()


async def test_a_token_is_renewed_before_it_runs_out(
    ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    there.lasts = timedelta(seconds=30)
    reading = source(ironic, url)
    assert [await count(reading) for _ in range(3)] == [3] * 3
    assert there.signed_in == 3
    await reading.close()


@pytest.mark.parametrize("named", [{"application_credential_id": "id"}, {"application_credential_name": "name"}])
async def test_an_application_credential_signs_in(
    ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str], named: dict[str, str]
) -> None:
    there, url = keystone
    reading = source(ironic, url, application_credential_secret="right", **named)
    assert await count(reading) == 3
    assert there.methods == ["application_credential"]
    await reading.close()


async def test_keystones_answers_are_distinguished(
    ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    there, url = keystone
    reading = source(ironic, url, password="wrong")
    with pytest.raises(SourceRefused) as refused:
        await count(reading)
    assert refused.value.code == "keystone.http_401"
    there.sign_in_answer = Response(status_code=503)
    with pytest.raises(SourceUnavailable):
        await count(reading)
    await reading.close()


async def test_an_unreachable_keystone_is_not_taken_for_ironic(ironic: IronicStandIn) -> None:
    reading = source(ironic, "http://127.0.0.1:1")
    with pytest.raises(SourceUnavailable, match=r"^Keystone at http://127\.0\.0\.1:1/v3/auth/tokens: ") as unreachable:
        await count(reading)
    assert unreachable.value.code == "keystone.unavailable"
    await reading.close()


async def test_ironic_may_turn_down_a_good_token(ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]) -> None:
    """It is asked for anew once, not for ever."""
    there, url = keystone
    ironic.keystone = KeystoneStandIn()  # type: ignore[attr-defined]
    reading = source(ironic, url)
    with pytest.raises(SourceRefused) as refused:
        await count(reading)
    assert (refused.value.code, there.signed_in) == ("ironic.http_401", 2)
    await reading.close()


async def test_a_token_of_one_ironic_is_shown_to_no_other(
    ironic: IronicStandIn, keystone: tuple[KeystoneStandIn, str]
) -> None:
    """Two Ironics behind a Keystone each, read by one process."""
    async with keystone_stand_in() as (there, url):
        there.issues = "another"
        other = Guarded(Silent(), clock=SystemClock(), rng=random.Random(2))
        other.keystone = there
        other.pool.plan(5)
        await other.start()
        readings = (source(ironic, keystone[1]), source(other, url))
        assert await asyncio.gather(*map(count, readings)) == [3, 5]
        assert (keystone[0].signed_in, there.signed_in) == (1, 1)
        for reading in readings:
            await reading.close()
        await other.stop()


@pytest.mark.parametrize("login", [{"username": ""}, {"username": "", "application_credential_name": "n"}])
def test_settings_without_a_user_are_refused(login: dict[str, str]) -> None:
    config = IronicSyncConfig(keystone=KeystoneLogin(auth_url="http://keystone", **login))  # type: ignore[arg-type]
    with pytest.raises(SettingsError):
        rest_source(config, SystemClock())
