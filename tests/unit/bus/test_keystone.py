"""Signing in to Keystone: which logins there are, and what carries our token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from bus.clock import SystemClock
from bus.openstack.keystone import TOKEN, KeystoneAuth
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError
from tests.kit.keystone import keystone_stand_in

BOTH = ["service-1", "service-2"]


def auth_of(url: str = "http://h/v3", **login: Any) -> KeystoneAuth:
    return KeystoneAuth(KeystoneLogin(auth_url=url, **login), clock=SystemClock(), timeout_s=60.0)


@pytest.mark.parametrize(
    ("login", "method"),
    [
        ({}, None),
        ({"username": "u"}, "password"),
        ({"application_credential_id": "i"}, "application_credential"),
        ({"application_credential_name": "n"}, None),  # whose it is has to be said
        ({"application_credential_name": "n", "username": "u"}, "application_credential"),
    ],
)
def test_a_login_names_who_signs_in(login: dict[str, str], method: str | None) -> None:
    if method is None:
        with pytest.raises(SettingsError) as refused:
            auth_of(**login)
        assert refused.value.code == "keystone"
    else:
        assert msgspec.json.decode(auth_of(**login)._body)["auth"]["identity"]["methods"] == [method]


@pytest.mark.parametrize(
    ("statuses", "sent"),
    [((200,), ["service-1"]), ((401, 200), ["service-1", "service-2"]), ((401, 401), ["service-1", "service-2"])],
)
async def test_a_token_that_is_turned_down_is_renewed_once(statuses: Sequence[int], sent: list[str]) -> None:
    given: list[str] = []

    def answered(request: httpx.Request) -> httpx.Response:
        given.append(request.headers[TOKEN])
        return httpx.Response(statuses[len(given) - 1])

    async with keystone_stand_in() as (_, url):
        auth = auth_of(url, username="u", password="right")
        async with httpx.AsyncClient(auth=auth, transport=httpx.MockTransport(answered)) as client:
            answer = await client.get("http://ironic/v1/nodes")
        await auth.aclose()
    assert (answer.status_code, given) == (statuses[-1], sent)
