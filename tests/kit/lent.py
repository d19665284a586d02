"""Brokers and databases that tests borrow, and the PostgreSQL clusters below them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar
from urllib.parse import quote

import asyncpg
from sqlalchemy.engine import make_url

from berth.config.ports import ServerFailed
from berth.up.embedded.postgres import SUPERUSER, Postgres
from berth.up.embedded.rabbitmq import ADMIN, RabbitMQ
from berth.up.servers import RealServers
from tests.kit.servers import fresh_database

# --- several servers that are one: a RabbitMQ cluster of three nodes, a PostgreSQL with a synchronous stand-by

NODES = 3
STAND_BY = "standby"
PATIENCE_S = 60.0
POLL_S = 0.1
# %s: nodes, of which the call reaches each: it connects to one to which there is no connection, as `nodes()` does not.
RUNNING = "[Node || Node <- [%s], rabbit:is_booted(Node)]."
SEEN = "{nodes(), rabbit:is_booted(), rabbit_nodes:all(), mnesia:system_info(running_db_nodes)}."
LOGGED = 30  # lines
NODE = re.compile(r"berth-[0-9a-f]{10}@localhost")


class BrokerCluster:
    """Nodes of one RabbitMQ cluster, each with its port on loopback."""

    def __init__(self, nodes: tuple[RabbitMQ, ...]) -> None:
        self.nodes = nodes

    def url(self, vhost: str) -> str:
        """One URL that names all the nodes."""
        login = f"{ADMIN}:{quote(self.nodes[0].password, safe='')}"
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"amqp://{login}@{hosts}/{quote(vhost, safe='')}"

    def make_whole(self) -> None:
        """Start the nodes that were killed; return when each node reports that all of them run."""
        for node in self.nodes:
            if not node.pid:
                node.start()
        running = RUNNING % ", ".join(f"'{node.node}'" for node in self.nodes)
        for node in self.nodes:
            until = time.monotonic() + PATIENCE_S
            while len(named_nodes(node.evaluate(running))) < len(self.nodes):
                assert time.monotonic() < until, self._described()
                time.sleep(POLL_S)

    def _described(self) -> str:
        """The nodes that each node knows, and the end of its log."""
        return "\n".join(
            "\n".join((f"{node.node} does not run with all the others", node.evaluate(SEEN), *_logged(node)))
            for node in self.nodes
        )

    def connections(self) -> Counter[str]:
        """How many clients each node serves, by the node's name."""
        return Counter(named_nodes(self.nodes[0].evaluate("[node(Pid) || Pid <- rabbit_networking:connections()].")))

    def busiest(self) -> RabbitMQ:
        """The node that serves the most clients."""
        name = self.connections().most_common(1)[0][0]
        return next(node for node in self.nodes if node.node == name)


def _logged(node: RabbitMQ) -> list[str]:
    """The end of what it has logged."""
    files = sorted((node.log.parent / "log").glob("*.log"))
    return [line for file in files for line in file.read_text(errors="replace").splitlines()[-LOGGED:]]


def named_nodes(term: str) -> list[str]:
    """The nodes in an Erlang term, as often as they are there."""
    return NODE.findall(term)


@contextlib.contextmanager
def broker_cluster() -> Iterator[BrokerCluster]:
    """Three nodes, joined, for as long as the block runs."""
    with RabbitMQ() as first, ThreadPoolExecutor(NODES) as pool, contextlib.ExitStack() as others:
        nodes = [RabbitMQ(peer=first) for _ in range(NODES - 1)]
        for node in nodes:
            others.callback(node.stop)
        for started in [pool.submit(node.start) for node in nodes]:
            started.result()
        for node in nodes:
            node.join()
        yield BrokerCluster((first, *nodes))


class StandBy(Postgres):
    """A copy of a running server that follows it; `promote` makes it take writes."""

    def __init__(self, primary: Postgres) -> None:
        conninfo = f"host={primary._sockets} port={primary.port} user={SUPERUSER} application_name={STAND_BY}"
        super().__init__(tcp=True, settings={"primary_conninfo": f"'{conninfo}'"})
        self._primary = primary

    def promote(self) -> None:
        """Leave the primary that is gone, and take writes."""
        done = self._account.run(self._binaries / "pg_ctl", "promote", "-D", str(self._data))
        if done.returncode != 0:
            raise ServerFailed(done.stdout + done.stderr)

    def _initialise(self) -> None:
        source = ("-h", str(self._primary._sockets), "-p", str(self._primary.port), "-U", SUPERUSER)
        command = (self._binaries / "pg_basebackup", "-D", str(self._data), *source, "-X", "stream", "-c", "fast")
        done = self._account.run(*command)
        if done.returncode != 0:
            raise ServerFailed(done.stdout + done.stderr)
        (self._data / "standby.signal").touch()
        shutil.copy(self._primary._password_file, self._password_file)


class DatabasePair:
    """A primary, and a stand-by that has each commit before it is confirmed."""

    def __init__(self, primary: Postgres, stand_by: StandBy) -> None:
        self.primary = primary
        self.stand_by = stand_by

    @property
    def url(self) -> str:
        """One URL that names both."""
        login, _, rest = self.primary.tcp_url().rpartition("@")
        first, _, name = rest.partition("/")
        return f"{login}@{first},127.0.0.1:{self.stand_by.port}/{name}"


@contextlib.contextmanager
def database_pair() -> Iterator[DatabasePair]:
    """Both, the stand-by synchronous, for as long as the block runs."""
    with Postgres(tcp=True) as primary, StandBy(primary) as stand_by:
        asyncio.run(_make_synchronous(primary.url()))
        yield DatabasePair(primary, stand_by)


async def _make_synchronous(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{STAND_BY}'")
        await connection.execute("SELECT pg_reload_conf()")
        until = time.monotonic() + PATIENCE_S
        while await connection.fetchval("SELECT sync_state FROM pg_stat_replication") != "sync":
            assert time.monotonic() < until, "the stand-by did not become synchronous"
            await asyncio.sleep(POLL_S)
    finally:
        await connection.close()


# --- the private servers of this process of pytest: one broker and one database server, lent to one test after the
# other
# Starting a broker takes three seconds of processor, a virtual host a hundredth of that. Faults are not shared: nothing
# else uses the server while a test has it. One that a test restarted is cleaned and lent again; one that a test left
# stopped, or that cannot be cleaned, is not.

# The content of a new broker: the administrator with its password, the virtual host `/`, its own limit of memory. The
# replicas of quorum queues end after their queues: one of the same name that was declared before that had none for ever
# (INTERNAL_ERROR).
AS_NEW = f"""
    By = <<"tests">>,
    [rabbit_vhost:delete(Name, By) || Name <- rabbit_vhost:list_names()],
    Ended = fun Ended(Left) ->
        case ra_directory:list_registered(quorum_queues) of
            [] -> ok;
            _ when Left > 0 -> timer:sleep(20), Ended(Left - 1)
        end
    end,
    ok = Ended(1000),
    [rabbit_auth_backend_internal:delete_user(Name, By)
        || User <- rabbit_auth_backend_internal:list_users(), Name <- [proplists:get_value(user, User)],
           Name =/= <<"{ADMIN}">>],
    vm_memory_monitor:set_vm_memory_high_watermark({{absolute, "2GB"}}),
    rabbit_vhost:add(<<"/">>, By),
    rabbit_auth_backend_internal:change_password(<<"{ADMIN}">>, <<"%s">>, By),
    rabbit_auth_backend_internal:set_permissions(<<"{ADMIN}">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, By).
"""

Server = TypeVar("Server", RabbitMQ, Postgres)


class Lender(Generic[Server]):
    """One server, started when first asked for. clean: makes it as new; a server that it cannot clean goes."""

    def __init__(self, make: Callable[[], Server], clean: Callable[[Server], object]) -> None:
        self._make = make
        self._clean = clean
        self._kept: Server | None = None  # and free

    @contextlib.contextmanager
    def lend(self) -> Iterator[Server]:
        """The server, for the block alone; another one while it is lent already."""
        server, self._kept = self._kept or self._make().start(), None
        try:
            yield server
        finally:
            if self._kept is None and server.pid and self._cleaned(server):
                self._kept = server
            else:
                server.stop()

    def keep(self, server: Server) -> None:
        """Lend this one next."""
        self._kept = server

    def close(self) -> None:
        """Stop it."""
        if self._kept is not None:
            self._kept.stop()
        self._kept = None

    def _cleaned(self, server: Server) -> bool:
        try:
            self._clean(server)
        except ServerFailed:
            return False
        return True


def as_new(broker: RabbitMQ) -> None:
    """Leave of a broker what a new one has. Raises ServerFailed."""
    broker.evaluate(AS_NEW % broker.password)


brokers = Lender(partial(RabbitMQ, schedulers=1), as_new)
# Each has a database of its own there, which is dropped: nothing is left to clean.
databases = Lender(Postgres, lambda _: None)


@contextlib.contextmanager
def lent_servers(cells: tuple[str, ...]) -> Iterator[RealServers]:
    """As `berth.up.servers.real_servers`, not durable: a virtual host per bus, and an empty database."""
    with brokers.lend() as broker, databases.lend() as postgres, fresh_database(postgres.url()) as url:
        yield RealServers(broker, postgres, cells, database=make_url(url).database or "")
