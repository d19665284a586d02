"""Private servers: they recover from a kill, and nothing of them survives us, however we end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import asyncpg
import pytest

from berth.config import ports
from berth.config.ports import ServerFailed, free_port
from berth.up.embedded.postgres import Postgres, find_binaries
from berth.up.embedded.process import Account, DirectoryInaccessible, GuardedProcess, listening
from berth.up.embedded.rabbitmq import NOT_STARTED, RabbitMQ
from tests.kit.waiting import wait_until

PATIENCE_S = 60.0
LOWEST_GIVEN_OUT = 32_768

CHILD = """
import sys, time
from berth.up.embedded.postgres import Postgres
server = Postgres().start()
print(server.pid, server.url().split("host=")[1].split("&")[0], flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between the opening and the reading
        return False


@pytest.mark.postgres
async def test_a_killed_postgres_comes_back_with_what_was_committed() -> None:
    server = await asyncio.to_thread(Postgres(tcp=True).start)
    try:
        connection = await asyncpg.connect(server.tcp_url())
        await connection.execute("CREATE TABLE t AS SELECT 1 AS n")
        pid = server.pid
        server.kill()
        assert (alive(pid), server.pid) == (False, 0)
        connection.terminate()
        await asyncio.to_thread(server.start)
        connection = await asyncpg.connect(server.url())
        assert await connection.fetchval("SELECT n FROM t") == 1
        await connection.close()
    finally:
        server.stop()


@pytest.mark.postgres
def test_a_given_directory_is_kept_and_used_again() -> None:
    # Under the temporary directory itself: pytest's own one is closed to the account that PostgreSQL runs as.
    directory = Path(tempfile.mkdtemp(prefix="berth-kept-"))

    async def look(url: str) -> str | None:
        connection = await asyncpg.connect(url)
        found: str | None = await connection.fetchval("SELECT to_regclass('t')::text")
        await connection.execute("CREATE TABLE IF NOT EXISTS t ()")
        await connection.close()
        return found

    try:
        for wanted in (None, "t"):
            with Postgres(directory) as server:
                assert asyncio.run(look(server.url())) == wanted
            assert directory.exists()
    finally:
        shutil.rmtree(directory)


@pytest.mark.postgres
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_and_its_files_go_when_its_owner_is_killed(end: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    assert child.stdout is not None
    with child.stdout as output:
        pid, directory = output.readline().split()
    assert alive(int(pid))
    child.send_signal(end)
    child.wait()
    wait_until(lambda: not alive(int(pid)))
    wait_until(lambda: not Path(directory).exists())


@pytest.fixture
def hidden_binaries() -> Iterator[Path]:
    """The wheel's programs with the libraries beside its package, below a directory of mode 0700 as root's home is."""
    found = find_binaries().parent
    with tempfile.TemporaryDirectory(prefix="berth-hidden-") as name:
        for part in (found, found.parent.with_name(f"{found.parent.name}.libs")):
            shutil.copytree(part, Path(name) / part.relative_to(found.parent.parent), symlinks=True, copy_function=link)
        yield Path(name) / found.relative_to(found.parent.parent) / "bin"


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.mark.postgres
def test_a_server_starts_from_binaries_out_of_its_users_reach(
    hidden_binaries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs were copied for PostgreSQL's user, the libraries that they find by RPATH were not."""
    with tempfile.TemporaryDirectory(prefix="berth-tmp-") as temporary:
        Path(temporary).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        with Postgres(binaries=hidden_binaries) as server:
            assert server.pid
        copies = list(Path(temporary).iterdir())
        assert len(copies) == (os.geteuid() == 0), "the copy is kept for the next server, and nothing else"
        for copy in copies:
            (next(copy.glob("*.libs")) / "libpq.so").touch()  # not the wheel's
            next(copy.glob("*/*/bin/initdb")).unlink()  # a cleaner of temporary files took it
        with Postgres(binaries=hidden_binaries) as server:
            assert server.pid
        assert list(Path(temporary).iterdir()) == copies


@pytest.mark.postgres
def test_a_start_that_fails_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, status in (("initdb", 7), ("postgres", 0)):
        (binaries / name).write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such luck; exit {status}\n')
        (binaries / name).chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="berth-tmp-") as temporary:
        Path(temporary).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        with pytest.raises(ServerFailed, match="no such luck"):
            Postgres(binaries=binaries).start()
        assert not list(Path(temporary).glob("berth-pg-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's PostgreSQL runs as another user")
def test_a_directory_that_the_servers_user_may_not_enter_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="berth-closed-") as closed:  # mode 0700
        with pytest.raises(DirectoryInaccessible, match=rf"(postgres|nobody), who may not enter {closed},"):
            Postgres(Path(closed) / "state" / "postgres")
        Path(closed).chmod(0o711)
        Postgres(Path(closed) / "state" / "postgres").stop()


@pytest.mark.rabbitmq
def test_a_broker_that_does_not_start_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broker = RabbitMQ()
    monkeypatch.setattr(broker, "_start_epmd", lambda: (_ for _ in ()).throw(ServerFailed("no epmd")))
    with pytest.raises(ServerFailed, match="no epmd"):
        broker.start()
    assert not list(tmp_path.iterdir())


def test_a_server_that_cannot_start_gives_its_reason(tmp_path: Path) -> None:
    account = Account()
    process = GuardedProcess(
        ["/bin/sh", "-c", "echo no such luck; exit 3"], env={}, cwd=tmp_path, log=tmp_path / "log", account=account
    )
    with pytest.raises(ServerFailed, match=r"(?s)status 3.*no such luck"):
        process.wait_until("the server", lambda: False)
    process.stop()


@pytest.mark.rabbitmq
async def test_a_broker_made_again_on_its_directory_goes_on_with_its_messages(tmp_path: Path) -> None:
    """A request to `berth up --processes` that it has not carried out survives its end."""
    first = RabbitMQ(tmp_path)
    await asyncio.to_thread(first.start)
    try:
        async with await aio_pika.connect(await asyncio.to_thread(first.add_vhost, "berth")) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue("q", durable=True, arguments={"x-queue-type": "quorum"})
            await channel.default_exchange.publish(aio_pika.Message(b"kept", delivery_mode=2), queue.name)
        await asyncio.to_thread(first.wait_registered, "berth", "q")
    finally:
        await asyncio.to_thread(first.stop)
    again = RabbitMQ(tmp_path)
    assert (again.node, again.password) == (first.node, first.password)
    await asyncio.to_thread(again.start)
    try:
        async with await aio_pika.connect(await asyncio.to_thread(again.add_vhost, "berth")) as connection:
            message = await (await (await connection.channel()).get_queue("q")).get(timeout=PATIENCE_S)
            assert message is not None and message.body == b"kept"
            await message.ack()
    finally:
        await asyncio.to_thread(again.stop)
    assert not listening(again.port)


@pytest.mark.rabbitmq
async def test_a_killed_broker_comes_back_with_its_vhosts_users_and_messages(own_broker: RabbitMQ) -> None:
    broker = own_broker
    url = await asyncio.to_thread(broker.add_vhost, "cell-1")
    await asyncio.to_thread(broker.add_user, "cell", "secret", ["cell-1"])  # before: it is on disk when q is
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", durable=True, arguments={"x-queue-type": "quorum"})
        await channel.default_exchange.publish(aio_pika.Message(b"kept", delivery_mode=2), queue.name)
    await asyncio.to_thread(broker.wait_registered, "cell-1", "q")
    await asyncio.to_thread(broker.kill)
    assert not listening(broker.port)
    await asyncio.to_thread(broker.start)
    async with await aio_pika.connect(broker.url("cell-1", user="cell", password="secret")) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue("q")
        async with queue.iterator(timeout=PATIENCE_S) as messages:
            async for message in messages:
                assert message.body == b"kept"
                await message.ack()
                break
    assert "cell\t" not in await asyncio.to_thread(broker.control, "list_permissions", "-p", "/")


@pytest.mark.rabbitmq
def test_a_client_that_signs_in_slowly_is_not_disconnected(own_broker: RabbitMQ) -> None:
    """On a starved machine a test's connection was lost while it was opened: RabbitMQ's own limit is 10 s."""
    assert own_broker.evaluate("application:get_env(rabbit, handshake_timeout).") == "{ok, {ok, 120000}}"


@pytest.mark.rabbitmq
async def test_what_the_broker_confirms_is_on_disk_when_it_is_written(own_broker: RabbitMQ) -> None:
    connection = await aio_pika.connect(own_broker.url())
    async with connection, connection.channel() as channel:
        await channel.declare_queue("q", durable=True, arguments={"x-queue-type": "quorum"})
    mine = own_broker._work.path
    logs = [fd for fd, file in open_files() if file.suffix == ".wal" and file.is_relative_to(mine)]
    flags = [int((fd.parents[1] / "fdinfo" / fd.name).read_text().split()[3], 8) for fd in logs]
    assert flags and all(flag & os.O_SYNC == os.O_SYNC for flag in flags)


def open_files() -> Iterator[tuple[Path, Path]]:
    """Descriptor and file, of every process that may be looked at."""
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            file = Path(os.readlink(fd))
        except OSError:  # it is closed by now
            continue
        yield fd, file


def test_a_free_port_is_free() -> None:
    assert not listening(free_port())


def test_a_free_port_is_none_that_the_system_gives_to_a_client_meanwhile() -> None:
    """A broker binds its port seconds after it was chosen; a client's connection had taken it, once in a long while."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest - ports.PORTS >= ports.LOWEST_PORT:
        assert all(ports.LOWEST_PORT <= free_port() < lowest for _ in range(200))


def draw(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Let these be drawn for the next ports, and then what none of the tests draws."""
    drawn = itertools.chain(numbers, itertools.count(1000))
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
    monkeypatch.setattr(ports, "_lowest_allocated", lambda: LOWEST_GIVEN_OUT)


def test_no_port_is_given_twice_before_its_server_has_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fifteen servers two had the same port, once in a hundred starts: the second one died of it."""
    draw(monkeypatch, 7, 7, 7)
    assert free_port() != free_port()


GIVES = """
import itertools, sys
from berth.config import ports
drawn = itertools.count(11)
ports.secrets.randbelow = lambda _: next(drawn)
ports._lowest_allocated = lambda: 32_768
print(ports.free_port(), flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_process_gave_is_not_given_while_that_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two systems that start on one computer at once draw from the same ports."""
    other = subprocess.Popen([sys.executable, "-c", GIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None and other.stdin is not None
        theirs = int(other.stdout.readline())
        draw(monkeypatch, LOWEST_GIVEN_OUT - 1 - theirs)
        assert free_port() != theirs
        other.stdin.close()
        assert other.wait(PATIENCE_S) == 0
    draw(monkeypatch, LOWEST_GIVEN_OUT - 1 - theirs)
    assert free_port() == theirs, "who gave it is gone"


def bound_just_below(lowest: int) -> socket.socket:
    """A foreign server on a port that we might draw, and that we did not give."""
    for port in range(lowest - 1, 0, -1):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("there is no such port")


def test_a_port_in_use_is_not_given_and_another_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest, drawn = LOWEST_GIVEN_OUT, secrets.randbelow
    monkeypatch.setattr(ports, "_lowest_allocated", lambda: lowest)
    with bound_just_below(lowest) as server:
        taken = server.getsockname()[1]
        first = [lowest - 1 - taken]
        monkeypatch.setattr(ports.secrets, "randbelow", lambda below: first.pop() if first else drawn(below))
        given = free_port()
    assert not first and given != taken
    assert lowest - ports.PORTS <= given < lowest


def test_where_no_port_is_free_it_fails_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound_just_below(LOWEST_GIVEN_OUT) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_lowest_allocated", lambda: LOWEST_GIVEN_OUT)
        monkeypatch.setattr(ports.secrets, "randbelow", lambda _: LOWEST_GIVEN_OUT - 1 - taken)
        with pytest.raises(ServerFailed, match="no free port"):
            free_port()


def test_where_the_system_gives_out_all_ports_a_free_one_is_of_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_lowest_allocated", lambda: 1024)
    assert not listening(free_port())


def test_a_broker_that_takes_connections_before_it_has_started_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refused definitions, and the `rabbitmqctl` that asked again took over a minute beside four busy loops."""
    answers: list[str | Exception] = ["{ok, false}", "{ok, true}", ServerFailed("another cookie")]

    def evaluate(_broker: RabbitMQ, _expressions: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(RabbitMQ, "evaluate", evaluate)
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/erl_call")
    broker = RabbitMQ()
    try:
        assert not broker._ready()  # nothing listens
        with socket.create_server(("127.0.0.1", broker.port)):
            assert [broker._ready() for _ in range(3)] == [False, True, True]
            monkeypatch.setattr(shutil, "which", lambda _name: None)
            assert broker._ready() and not answers
    finally:
        broker.stop()


def test_a_broker_that_takes_connections_before_it_has_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = RabbitMQ()
    requested: list[str] = []

    def control(*arguments: str) -> str:
        requested.append(arguments[0])
        if len(requested) == 1:
            raise ServerFailed(
                f"rabbitmqctl {arguments[0]} failed:\nError: this command {NOT_STARTED} on the target node"
            )
        if len(requested) == 3:
            raise ServerFailed("something else")
        return ""

    monkeypatch.setattr(broker, "control", control)
    try:
        broker.add_vhosts(["one"])
        assert requested == ["import_definitions"] * 2
        with pytest.raises(ServerFailed, match="something else"):
            broker.add_vhosts(["two"])
    finally:
        broker.stop()
