"""TLS to real servers with certificates made here: the right CA and name, the wrong ones, and none."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from berth.config.ports import free_port
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.rabbitmq import ADMIN, RabbitMQ
from bus.faults import DatabaseForbidden
from bus.persistence.address import parse_database_url
from bus.persistence.database import Database
from bus.rabbitmq.address import parse_bus_url
from bus.rabbitmq.session import Session
from bus.rabbitmq.transport import RabbitTransport
from bus.topology import QueueNames
from bus.transport import BusForbidden, BusUnavailable
from nova_scheduler.config import as_amqp
from nova_scheduler.wire.queues import RabbitOptions
from tests.kit.certificates import Authority
from tests.kit.documents import ROOT, blocks

WAIT_S = 60.0
HOWTO = ROOT / "docs" / "operate" / "tls.md"
USAGE = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(directory: Path) -> Authority:
    return Authority(directory)


@pytest.fixture(scope="module")
def foreign_authority(directory: Path) -> Authority:
    return Authority(directory, "foreign_authority")


class TlsBroker:
    """A broker as docs/operate/tls.md configures it: at `localhost`, for clients with our authority's certificate."""

    def __init__(self, authority: Authority) -> None:
        self.port = free_port()
        made = authority.issue("broker", "DNS:localhost")
        (documented,) = blocks("ini", HOWTO.read_text())
        config = documented
        for shown, real in (
            ("listeners.ssl.default = 5671", f"listeners.ssl.default = 127.0.0.1:{self.port}"),
            ("/etc/rabbitmq/ca.pem", str(authority.file)),
            ("/etc/rabbitmq/broker.pem", str(made.file)),
            ("/etc/rabbitmq/broker.key", str(made.key)),
        ):
            assert shown in config
            config = config.replace(shown, real)
        self.server = RabbitMQ(config=config)
        client = authority.issue("client")
        self.own = f"certfile={client.file}&keyfile={client.key}"
        self.of_nova = RabbitOptions(ssl=True, ssl_cert_file=str(client.file), ssl_key_file=str(client.key))

    def url(self, query: str, host: str = "localhost") -> str:
        return f"amqps://{ADMIN}:{quote(self.server.password)}@{host}:{self.port}/%2F?{query}"


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[TlsBroker]:
    made = TlsBroker(authority)
    with made.server:
        yield made


@pytest.fixture(scope="module")
def postgres(authority: Authority) -> Iterator[Postgres]:
    made = authority.issue("postgres", "DNS:localhost")
    # The wheel's is built without TLS; scripts/test installs the distribution's.
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    assert installed, "apt-get install postgresql"
    server = Postgres(tcp=True, binaries=installed[-1])
    for name, file in (("ssl_cert_file", made.file), ("ssl_key_file", made.key)):
        copy = server._work.path / name
        shutil.copy(file, copy)
        copy.chmod(0o600)
        server._account.own(copy)
        server.settings[name] = f"'{copy}'"
    server.settings["ssl"] = "on"
    with server:
        yield server


def at_postgres(server: Postgres, query: str, host: str = "localhost") -> str:
    return f"{server.tcp_url().replace('127.0.0.1', host)}?{query}"


@pytest.mark.rabbitmq
@pytest.mark.parametrize("name", ["cacertfile", "cafile"])
async def test_a_bus_with_our_ca_and_our_certificate(broker: TlsBroker, authority: Authority, name: str) -> None:
    transport = RabbitTransport(broker.url(f"{name}={authority.file}&{broker.own}"), name="api")
    async with asyncio.timeout(WAIT_S):
        await transport.open()
    try:
        assert transport.connected
    finally:
        await transport.close()


@pytest.mark.rabbitmq
async def test_a_broker_of_nova_by_the_options_of_nova_conf(
    broker: TlsBroker, authority: Authority, foreign_authority: Authority
) -> None:
    of_nova = f"rabbit://{ADMIN}:{quote(broker.server.password)}@localhost:{broker.port}//"
    options = replace(broker.of_nova, ssl_ca_file=str(authority.file))
    transport = RabbitTransport(as_amqp(of_nova, options), name="nova.transport_url")
    async with asyncio.timeout(WAIT_S):
        await transport.open()
    try:
        assert transport.connected
    finally:
        await transport.close()
    wrong = replace(broker.of_nova, ssl_ca_file=str(foreign_authority.file))
    transport = RabbitTransport(as_amqp(of_nova, wrong), name="nova.transport_url")
    with pytest.raises(BusForbidden):
        async with asyncio.timeout(WAIT_S):
            await transport.open()
    await transport.close()


@pytest.mark.rabbitmq
async def test_a_broker_of_another_ca_or_name_is_refused(
    broker: TlsBroker, authority: Authority, foreign_authority: Authority
) -> None:
    for url in (
        broker.url(f"cacertfile={foreign_authority.file}&{broker.own}"),
        broker.url(f"cacertfile={authority.file}&{broker.own}", "127.0.0.1"),
        broker.url(broker.own),  # the machine's authorities
    ):
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(BusForbidden, match="certificate") as refused:
                await RabbitTransport(url, name="api").open()
        assert refused.value.code == "bus.certificate"
        assert broker.server.password not in str(refused.value)
    url = broker.url(f"cacertfile={foreign_authority.file}&{broker.own}&verify=verify_none", "127.0.0.1")
    await (await connected(url)).close()


@pytest.mark.rabbitmq
async def test_a_client_without_a_certificate_and_a_port_without_tls_are_an_unavailable_bus(
    broker: TlsBroker, authority: Authority
) -> None:
    """The fault may be mended on the other side, so a worker waits; the reason is in its log."""
    with pytest.raises(BusUnavailable) as unavailable:
        await connected(broker.url(f"cacertfile={authority.file}"))
    assert str(unavailable.value)
    plain = broker.url(f"cacertfile={authority.file}").replace(f":{broker.port}/", f":{broker.server.port}/")
    with pytest.raises(BusUnavailable):
        await connected(plain)


@pytest.mark.rabbitmq
def test_a_command_prints_it_in_a_sentence(broker: TlsBroker, foreign_authority: Authority, tmp_path: Path) -> None:
    url = broker.url(f"cacertfile={foreign_authority.file}&{broker.own}")
    env = {"BERTH_BUS__URL": url, "BERTH_STATE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for arguments in (("bus", "list"), ("run", "compute", "--cell", "cell1")):
        command = (sys.executable, "-m", "berth", *arguments)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
        output = done.stdout + done.stderr
        assert (done.returncode, "bus.certificate" in output) == (USAGE, True), output
        assert "Traceback" not in output
        assert broker.server.password not in output


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("query", "host"),
    [
        ("sslmode=require", "127.0.0.1"),
        ("sslmode=verify-ca&sslrootcert={ca}", "127.0.0.1"),
        ("sslmode=verify-full&sslrootcert={ca}", "localhost"),
    ],
)
async def test_a_database_with_tls(postgres: Postgres, authority: Authority, query: str, host: str) -> None:
    database = Database(at_postgres(postgres, query.format(ca=authority.file), host), "tls")
    async with asyncio.timeout(WAIT_S):
        await database.open()
    try:
        async with database.raw() as connection:
            mine = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert await connection.fetchval(mine) is True
    finally:
        await database.close()


@pytest.mark.postgres
async def test_a_database_that_requires_tls_is_not_used_without_it() -> None:
    with Postgres(tcp=True) as plain:
        address = parse_database_url(at_postgres(plain, "sslmode=require"))
        with pytest.raises(ConnectionError, match="SSL"):
            await address.connect(timeout_s=WAIT_S, command_timeout_s=None, settings={})


@pytest.mark.postgres
async def test_a_database_of_another_ca_or_name_is_refused(
    postgres: Postgres, authority: Authority, foreign_authority: Authority
) -> None:
    for query, host in (
        (f"sslmode=require&sslrootcert={foreign_authority.file}", "localhost"),
        (f"sslmode=verify-ca&sslrootcert={foreign_authority.file}", "localhost"),
        (f"sslmode=verify-full&sslrootcert={authority.file}", "127.0.0.1"),
    ):
        url = at_postgres(postgres, query, host)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(DatabaseForbidden, match="certificate") as refused:
                await Database(url, "tls").open()
        assert refused.value.code == "database.certificate"


async def connected(url: str) -> Session:
    async with asyncio.timeout(WAIT_S):
        return await Session.connect(parse_bus_url(url), QueueNames(""), "test")
