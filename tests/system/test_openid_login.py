"""`berth login` with an OpenID provider, and the commands, the page and a stream with its token, as one has them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from berth.config.oidc import OidcConfig
from berth.web.oidc import Oidc
from berth.web.sign_in_sessions import Access
from tests.kit.forks import run_berth
from tests.kit.issuer import CLIENT, Issuer, issuer_on_loopback
from tests.system.web_server import Web, running_web, server

pytestmark = pytest.mark.system

TIMEOUT_S = 120.0
NO, USAGE = 1, 2


class Provided:
    """A server that takes the tokens of a provider, and one who calls it."""

    def __init__(self, web: Web, directory: Path) -> None:
        self.web = web
        self.issuer = Issuer()
        self.url = ""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        self.env = {**kept, "XDG_CONFIG_HOME": str(directory), "BERTH_STATE_DIR": "/nonexistent"}
        self._closing = AsyncExitStack()

    async def open(self) -> None:
        self.issuer = await self._closing.enter_async_context(issuer_on_loopback())
        config = OidcConfig(issuer=self.issuer.url, client_id=CLIENT, operators=("ops",), project_claim="tenant")
        oidc = Oidc(config, self.web.site.clock)
        self._closing.push_async_callback(oidc.close)
        made = server(self.web.site, "web3", Access(None, self.web.site.clock, oidc=oidc))
        await made.open()
        self._closing.push_async_callback(made.close)
        self.url = made.url

    async def close(self) -> None:
        await self._closing.aclose()

    def berth(self, *words: str) -> tuple[int, str, str]:
        done = run_berth(*words, env=self.env, timeout_s=TIMEOUT_S)
        return done.returncode, done.stdout, done.stderr

    def code(self, *words: str) -> tuple[int, str]:
        status, _, error = self.berth(*words)
        return status, error.rpartition("(")[2].rstrip(")\n")


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with running_web() as found:
        yield found


@pytest.fixture
def provided(web: Web, tmp_path: Path) -> Iterator[Provided]:
    made = Provided(web, tmp_path)
    asyncio.run_coroutine_threadsafe(made.open(), web.loop).result(TIMEOUT_S)
    yield made
    asyncio.run_coroutine_threadsafe(made.close(), web.loop).result(TIMEOUT_S)


def test_a_person_of_a_project_logs_in_and_works(provided: Provided) -> None:
    provided.issuer.claims = {"sub": "alice@site", "tenant": "p-alice"}
    provided.issuer.pending = ["authorization_pending"]
    status, output, error = provided.berth("login", provided.url, "--oidc", "--name", "sso", "-o", "json")
    assert status == 0, error
    assert json.loads(output)["caller"] == {"name": "alice@site", "role": "project", "project": "p-alice"}
    assert "WDJB-MJHT" in error and f"{provided.issuer.url}/code" in error
    status, output, error = provided.berth("boot", "--flavor", "m1.tiny", "--wait", "-o", "json")
    assert status == 0, error
    status, output, error = provided.berth("show", json.loads(output)["items"][0]["instance_uuid"], "-o", "json")
    assert status == 0, error
    built = json.loads(output)
    assert built["project_id"] == "p-alice"
    assert {one.get("by") for one in built["timeline"]} >= {"alice@site"}
    assert provided.code("token", "list") == (USAGE, "role.forbidden")


def test_a_login_that_is_declined_leaves_no_context(provided: Provided) -> None:
    provided.issuer.pending = ["access_denied"]
    assert provided.code("login", provided.url, "--oidc") == (NO, "oidc.refused")
    assert provided.code("context", "show", "127.0.0.1") == (USAGE, "context.unknown")
    provided.issuer.pending = []
    provided.issuer.claims = {"sub": "nobody"}
    assert provided.code("login", provided.url, "--oidc") == (USAGE, "role.insufficient")
    assert provided.code("login", provided.web.tokens_url, "--oidc") == (NO, "oidc.not_offered")


def test_the_page_takes_the_token_until_it_ends(provided: Provided) -> None:
    issuer = provided.issuer
    issuer.claims = {"sub": "op", "roles": ["ops"]}
    with provided.web.client() as browser:
        done = browser.post(f"{provided.url}/login", data={"token": issuer.signed()})
        assert (done.status_code, done.headers["location"]) == (303, "/")
        assert browser.get(f"{provided.url}/api/v1/caller").json()["role"] == "operator"
        ended = browser.post(f"{provided.url}/login", data={"token": issuer.signed(exp=1)})
        assert (ended.status_code, ended.json()["code"]) == (401, "oidc.token_expired")
        offered = browser.get(f"{provided.url}/api/v1/login").json()
        assert offered["oidc"] == {
            "issuer": issuer.url, "client_id": CLIENT, "scopes": "openid", "by_access_token": False,
        }  # fmt: skip
