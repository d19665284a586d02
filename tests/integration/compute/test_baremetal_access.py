"""How the bare-metal driver reaches Ironic: Keystone's tokens, HTTP basic, TLS with an operator's own authority."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, NodePool, Silent
from bus.clock import SystemClock
from bus.openstack.login import KeystoneLogin
from compute_sim.config import IronicConfig
from compute_sim.driver import DriverUnavailable
from compute_sim.drivers.ironic.driver import BareMetal
from tests.integration.compute.harness import DEPLOYMENT, PATIENCE_S
from tests.integration.compute.test_baremetal import bare_metal, build
from tests.kit.certificates import Authority, Certificate
from tests.kit.keystone import KeystoneStandIn, keystone_stand_in

INSTANCE = "20000000-0000-4000-8000-000000000000"
SLOW = Behaviour(deploy_s=0.3, undeploy_s=0.005, clean_s=0.01)


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def served(
    passes: Callable[[dict[bytes, bytes]], bool], certificate: Certificate | None = None
) -> AsyncIterator[tuple[NodePool, str]]:
    """An Ironic that answers requests whose headers pass, over TLS where it has a certificate; and its address."""
    ironic = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=SLOW)
    ironic.pool.plan(2)
    inner: ASGIApp = ironic.app()

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        answer = inner if passes(dict(scope["headers"])) else Response(status_code=401)
        await answer(scope, receive, send)

    how: dict[str, Any] = {"timeout_keep_alive": 75}  # a client that stood still finds its connection open
    if certificate is not None:
        how |= {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(guard, log_config=None, lifespan="off", loop="none", **how))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, not an event
                await asyncio.sleep(0.01)  # until it listens
        yield ironic.pool, f"{'http' if certificate is None else 'https'}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        await ironic.pool.stop()


@contextlib.asynccontextmanager
async def driver(url: str, **more: Any) -> AsyncIterator[BareMetal]:
    made = bare_metal(IronicConfig(url=url, poll_interval_s=0.005, **more))
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def deploy_and_delete(made: BareMetal, pool: NodePool) -> None:
    node = next(iter(pool.nodes))
    await made.spawn(build(node, INSTANCE))
    assert pool.nodes[node]["instance_uuid"] == INSTANCE
    await made.destroy(node, INSTANCE, 1, DEPLOYMENT)
    assert pool.nodes[node]["instance_uuid"] is None


def has_token_of(keystone: KeystoneStandIn) -> Callable[[dict[bytes, bytes]], bool]:
    return lambda headers: headers.get(b"x-auth-token", b"").decode() in keystone.services


async def test_a_deployment_outlives_its_token() -> None:
    """Keystone's tokens last for an hour, a deployment may; and any of them may be revoked."""
    async with keystone_stand_in() as (keystone, auth_url), served(has_token_of(keystone)) as (pool, url):
        login = KeystoneLogin(auth_url=auth_url, username="berth", password="right")
        async with driver(url, keystone=login) as made:
            node = next(iter(pool.nodes))
            building = asyncio.create_task(made.spawn(build(node, INSTANCE)))
            async with asyncio.timeout(PATIENCE_S):
                while pool.nodes[node]["provision_state"] != "deploying":  # noqa: ASYNC110  (what is asked is a server)
                    await asyncio.sleep(0.005)
            keystone.services.clear()
            await building
            assert keystone.signed_in == 2
            keystone.lasts = timedelta(seconds=1)  # from now on each is out of date when it comes
            await made.destroy(node, INSTANCE, 1, DEPLOYMENT)
            assert keystone.signed_in == 2


async def test_an_application_credential_deploys() -> None:
    async with keystone_stand_in() as (keystone, auth_url), served(has_token_of(keystone)) as (pool, url):
        login = KeystoneLogin(auth_url=auth_url, application_credential_id="id", application_credential_secret="right")
        async with driver(url, keystone=login) as made:
            await deploy_and_delete(made, pool)
        assert keystone.methods == ["application_credential"]


async def test_a_keystone_that_refuses_or_is_down_costs_no_build() -> None:
    """It is no fault of the node's: nothing was taken, and the service tries again."""
    async with keystone_stand_in() as (keystone, auth_url), served(has_token_of(keystone)) as (pool, url):
        for login in (
            KeystoneLogin(auth_url=auth_url, username="berth", password="wrong"),
            KeystoneLogin(auth_url="http://127.0.0.1:1", username="berth", password="right"),
        ):
            async with driver(url, keystone=login, outage_timeout_s=0.05) as made:
                with pytest.raises(DriverUnavailable, match="Keystone"):
                    await made.spawn(build(next(iter(pool.nodes)), INSTANCE))
        assert all(node["instance_uuid"] is None for node in pool.nodes.values())


async def test_basic_sign_in() -> None:
    expected = b"Basic " + base64.b64encode(b"berth:secret")
    async with served(lambda headers: headers.get(b"authorization") == expected) as (pool, url):
        async with driver(url, username="berth", password="secret") as made:
            await deploy_and_delete(made, pool)
        async with driver(url, username="berth", password="other") as made:
            with pytest.raises(DriverUnavailable, match="401"):
                await made.hosts()


async def test_tls_with_an_authority_of_the_operators(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("ironic", "IP:127.0.0.1")
    async with served(lambda _: True, certificate) as (pool, url):
        async with driver(url, ca_file=str(authority.file)) as made:
            await deploy_and_delete(made, pool)
        async with driver(url) as made:  # of which this system knows nothing
            with pytest.raises(DriverUnavailable):
                await made.hosts()
        async with driver(url, verify_tls=False) as made:
            assert len(await made.hosts()) == 2


async def test_tls_for_another_name_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("ironic", "DNS:ironic.example.org")
    async with served(lambda _: True, certificate) as (_, url), driver(url, ca_file=str(authority.file)) as made:
        with pytest.raises(DriverUnavailable):
            await made.hosts()
