"""URLs of brokers and databases, side tasks on a cell's bus, one flush for many commits, and patches of libraries."""

from __future__ import annotations

import asyncio
import random
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from berth.config.settings import BusSettings, CellSettings, DatabaseSettings, Settings, check_urls
from bus.bus import API, Bus
from bus.cell_links import REOPEN_S, CellLink, CellLinks
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildRequest
from bus.contracts.objects import CellBus, LinkState
from bus.contracts.placement import Release, ReleaseResult
from bus.faults import BrokenInvariant, DatabaseForbidden, first_fault
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.address import parse_database_url
from bus.persistence.group_flush import GroupFlush
from bus.rabbitmq import patches
from bus.rabbitmq.address import BadBusUrl, parse_bus_url
from bus.rabbitmq.channels import WRITE_TIMEOUT_S
from bus.rabbitmq.patches import SUPPORTED, UnknownLibrary, install
from bus.rabbitmq.transport import RabbitTransport
from bus.server_url import Endpoint
from bus.service.settings import SettingsError, hide_password
from bus.transport import BusForbidden, BusUnavailable, Delivery, Subscription
from tests.kit.virtual_time import on_virtual_time

# --- URLs of brokers and databases: every form that is taken, and every other refused in a sentence that hides it.


SECRET = "hush"


@pytest.mark.parametrize(
    ("url", "hosts", "login", "vhost"),
    [
        ("amqp://h", (Endpoint("h"),), ("guest", "guest"), "/"),
        ("amqp://h/", (Endpoint("h"),), ("guest", "guest"), "/"),
        ("amqp://u:p@h:1/v", (Endpoint("h", 1),), ("u", "p"), "v"),
        ("amqp://u:p@h1,h2/v", (Endpoint("h1"), Endpoint("h2")), ("u", "p"), "v"),
        (
            "amqp://u:p@h1:1,[::1]:2,[::2]/%2F",
            (Endpoint("h1", 1), Endpoint("::1", 2), Endpoint("::2")),
            ("u", "p"),
            "/",
        ),
        ("amqps://u%40x:p%3A%2F%23@h/a%2Fb", (Endpoint("h"),), ("u@x", "p:/#"), "a/b"),
        ("amqp://u:p@x@h/v", (Endpoint("h"),), ("u", "p@x"), "v"),
        ("amqp://u:@h/v", (Endpoint("h"),), ("u", ""), "v"),
    ],
)
def test_a_bus_url(url: str, hosts: tuple[Endpoint, ...], login: tuple[str, str], vhost: str) -> None:
    found = parse_bus_url(url)
    assert (found.hosts, (found.user, found.password), found.vhost) == (hosts, login, vhost)
    node = found.url(hosts[0], heartbeat="10")
    assert (node.host, node.user, node.password or "") == (hosts[0].name, *login)
    assert node.port == hosts[0].port or hosts[0].port is None
    assert dict(node.query) == {"heartbeat": "10"}


@pytest.mark.parametrize(
    ("url", "hosts", "database"),
    [
        ("postgresql://u:p@h/d", (Endpoint("h"),), "d"),
        ("postgres://u:p@h/d", (Endpoint("h"),), "d"),
        ("postgresql+asyncpg://u:p@h/d", (Endpoint("h"),), "d"),
        ("postgresql://u:p@h1:1,h2:2/d", (Endpoint("h1", 1), Endpoint("h2", 2)), "d"),
        ("postgresql://u:p@h1,h2/d?port=7", (Endpoint("h1", 7), Endpoint("h2", 7)), "d"),
        ("postgresql://u:p@/d?host=h1,h2&port=7,8", (Endpoint("h1", 7), Endpoint("h2", 8)), "d"),
        ("postgresql://u@/d?host=/run/postgresql&port=5433", (Endpoint("/run/postgresql", 5433),), "d"),
        ("postgresql://%2Frun%2Fpostgresql/d", (Endpoint("/run/postgresql"),), "d"),
        ("postgresql:///d", (), "d"),
        ("postgresql://h?dbname=d&sslmode=require&target_session_attrs=read-write", (Endpoint("h"),), "d"),
    ],
)
def test_a_database_url(url: str, hosts: tuple[Endpoint, ...], database: str) -> None:
    found = parse_database_url(url)
    assert (found.hosts, found.database) == (hosts, database)
    assert ":p@" not in str(found)


HOSTILE = [
    "",
    "h",
    "://",
    "{}://",
    "{}://@",
    "{}://u:hush@/v",
    "{}://u:hush@:5672/v",
    "{}://u:hush@h:/v",
    "{}://u:hush@h:0/v",
    "{}://u:hush@h:65536/v",
    "{}://u:hush@h:-1/v",
    "{}://u:hush@h:" + "9" * 5_000 + "/v",
    "{}://u:hush@h:٣/v",
    "{}://u:hush@h:1:2/v",
    "{}://u:hush@h,/v",
    "{}://u:hush@,h/v",
    "{}://u:hush@" + ",".join(["h"] * 100) + "/v",
    "{}://u:hush@h1,u:hush@h2:x/v",
    "{}://u:hush@a..b/v",
    "{}://u:hush@" + "a" * 64 + "/v",
    "{}://u:hush@" + "a." * 200 + "a/v",
    "{}://u:hush@-h/v",
    "{}://u:hush@ho st/v",
    "{}://u:hush@hö/v",
    "{}://u:hush@[::1/v",
    "{}://u:hush@[hush]/v",
    "{}://u:hush@[::1]x/v",
    "{}://u:hush@::1/v",
    "{}://u:hush/x@h/v",
    "{}://u:hush?x@h/v",
    "{}://u:hush#x@h/v",
    "{}://u:hush\n@h/v",
    "{}://u:hush\x00@h/v",
    "{}://u:hush%00@h/v",
    "{}://u:hush%ff@h/v",
    "{}://u:hush%0a@h/v",
    "{}://u:hush\udcff@h/v",
    "{}://u:hush@h/v%00",
    "{}://u:hush@h/v?hush=1",
    "{}://u:hush@h/v?hush",
    "{}://u:hush@h/v?&",
    "{}://u:hush@h/v?" + "&".join(["x=1"] * 10_000),
    "{}://u:hush@h/v#x",
    "{}:u:hush@h/v",
    "x{}://u:hush@h/v",
    "http://u:hush@h/v",
    "host=h password=hush",
    "{}://u:hush@" + "h" * 20_000,
]


@pytest.mark.parametrize("url", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_url_is_one_coded_sentence_without_the_password(url: str) -> None:
    bus = url.replace("{}", "amqp")
    with pytest.raises(BadBusUrl) as refused:
        parse_bus_url(bus)
    assert refused.value.code == "bus.url"
    _is_one_sentence(str(refused.value))
    for settings in (Settings(bus=BusSettings(url=bus)), Settings(cells={"west": CellSettings(url=bus or "x")})):
        with pytest.raises(SettingsError) as error:
            check_urls(settings)
        assert error.value.code == "bus.url"
        _is_one_sentence(error.value.reason)


@pytest.mark.parametrize(
    "url",
    [
        *(url for url in HOSTILE if url not in {"{}://", "{}://@", "{}://u:hush@/v"}),
        "{}://u:hush@h1,h2,h3/d?port=1,2",
        "{}://u:hush@/d?port=1",
        "{}://u:hush@h/d?port=x",
        "{}://u:hush@/d?host=a..b",
        "{}://u:hush@h/d?sslmode=hush",
        "{}://u:hush@h/d?sslmode=require&sslmode=disable",
        "{}://u:hush@h/d?sslmode=verify-full",
        "{}://u:hush@h/d?sslmode=verify-full&sslrootcert=/nonexistent/hush",
        "{}://u:hush@h/d?sslcert=/dev/null",
        "{}://u:hush@h/d?target_session_attrs=standby",
        "{}://u:hush@h/d?options=-c%20x%3D1",
        "mysql://u:hush@h/d",
    ],
)
def test_what_is_no_database_url_is_one_coded_sentence_without_the_password(url: str) -> None:
    url = url.replace("{}", "postgresql")
    with pytest.raises(DatabaseForbidden) as refused:
        parse_database_url(url)
    assert refused.value.code == "database.url"
    _is_one_sentence(str(refused.value))
    with pytest.raises(SettingsError) as error:
        check_urls(Settings(database=DatabaseSettings(url=url)))
    assert error.value.code == "database.url"
    _is_one_sentence(error.value.reason)


@pytest.mark.parametrize(
    "query",
    ["cacertfile=/nonexistent", "cafile=/dev/null", "certfile=/nonexistent", "keyfile=/x", "verify=hush", "cacertfile"],
)
def test_tls_that_cannot_be_is_one_coded_sentence(query: str) -> None:
    with pytest.raises(BadBusUrl) as refused:
        parse_bus_url(f"amqps://u:hush@h/v?{query}")
    _is_one_sentence(str(refused.value))


def test_tls_is_for_amqps_only(tmp_path: Path) -> None:
    with pytest.raises(BadBusUrl, match="for amqps"):
        parse_bus_url("amqp://h/v?verify=verify_none")
    assert parse_bus_url("amqp://h/v").tls() is None
    assert parse_bus_url("amqps://h/v").tls() is not None


@pytest.mark.parametrize("url", [url for url in HOSTILE if "://u:hush" in url and "hush]" not in url])
def test_no_part_of_a_password_is_shown_of_what_is_no_url(url: str) -> None:
    shown = hide_password(url.replace("{}", "amqp"))
    assert SECRET not in shown.partition("?")[0]


def test_a_password_given_as_a_parameter_is_hidden() -> None:
    assert (
        hide_password("postgresql://h/d?user=u&password=hush&port=1") == "postgresql://h/d?user=u&password=***&port=1"
    )


def _is_one_sentence(text: str) -> None:
    assert SECRET not in text
    assert text and text.isprintable() and len(text) < 400


# --- A worker's side task on a cell's bus, when the cell goes away in the very moment in which it has been reached.


PATIENCE_S = 60.0
RELEASE = Release(consumer="00000000-0000-4000-8000-000000000001")


class Fickle(MemoryBroker):
    """Goes down when its queues are declared for the first time."""

    fell = False

    def declare(self, planned: object, owner: object) -> None:
        if not self.fell:
            self.fell = True
            self.stop()
        super().declare(planned, owner)  # type: ignore[arg-type]


async def test_a_cell_that_disconnects_again_at_once_is_served_when_it_comes() -> None:
    clock = SystemClock()
    broker = Fickle(clock)
    theirs = Bus("c1", MemoryTransport(broker, "c1"), process="worker", clock=clock, rng=random.Random(1))

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done(ReleaseResult(outcome="absent"))] * len(batch)

    link = CellLink(theirs, [Consumer(theirs, "placement.requests", answer)])
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(PATIENCE_S):
        while not broker.fell:  # noqa: ASYNC110  (a broker does not announce it)
            await asyncio.sleep(0)
        broker.start()
        await link.up.wait()
    asker = Bus("c1", MemoryTransport(broker, "c1"), process="conductor-asker", clock=clock, rng=random.Random(2))
    await asker.open()
    assert (await asker.request(RELEASE, ReleaseResult, timeout_s=PATIENCE_S)).outcome == "absent"
    await link.drain(1.0)
    await running
    await link.close()
    await asker.close()


class Refusing(MemoryTransport):
    """A bus whose broker refuses the credentials of the first connection to it."""

    connections = 0

    async def open(self) -> None:
        Refusing.connections += 1
        if Refusing.connections == 1:
            raise BusForbidden("vhost not found")
        await super().open()


@on_virtual_time
async def test_a_cell_of_the_settings_whose_broker_refuses_is_entered_when_it_no_longer_does() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done()] * len(batch)

    def reach(name: str, _: CellBus | None) -> Bus:
        return Bus(name, Refusing(broker, name), process="worker", clock=clock, rng=random.Random(1))

    links = CellLinks(
        lambda bus: CellLink(bus, [Consumer(bus, "placement.requests", answer)]), clock=clock, reach=reach
    )
    links.configure(reach("c1", None))
    running = asyncio.create_task(links.run())
    try:
        await clock.sleep(1.0)
        assert not running.done(), "it ended the worker"
        assert links.state_of("c1") == (LinkState.CONNECTING, "vhost not found")
        assert links.unavailable_reason("c1") == "vhost not found"
        await clock.sleep(REOPEN_S)
        assert links.state_of("c1") == (LinkState.UP, "")
        assert links.unavailable_reason("c1") == ""
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await links.close()


@on_virtual_time
async def test_an_invariant_that_breaks_while_its_cell_is_left_ends_the_worker() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    taken, go_on = asyncio.Event(), asyncio.Event()

    async def answer(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.set()
        await go_on.wait()
        raise BrokenInvariant("two owners")

    def reach(name: str, _: CellBus | None) -> Bus:
        return Bus(name, MemoryTransport(broker, name), process="worker", clock=clock, rng=random.Random(1))

    links = CellLinks(
        lambda bus: CellLink(bus, [Consumer(bus, "placement.requests", answer)]), clock=clock, reach=reach
    )
    links.configure(reach("c1", None))
    running = asyncio.create_task(links.run())
    try:
        await links.entered(PATIENCE_S)
        await links.buses["c1"].publish(RELEASE)
        await taken.wait()
        links.set_cells({})
        await clock.sleep(0.1)
        go_on.set()
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(asyncio.shield(running), PATIENCE_S)
        assert isinstance(first_fault(ended.value), BrokenInvariant)
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await links.close()


class Slow(MemoryTransport):
    """Each queue of it is consumed a turn of the loop after `go_on`."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "c1")
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        self.asked.set()
        await self.go_on.wait()
        return await super().consume(queue, on_delivery, prefetch=prefetch)


async def test_a_consumer_that_is_starting_when_its_link_is_drained_takes_nothing() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    transport = Slow(broker)
    bus = Bus("c1", transport, process="worker", clock=clock, rng=random.Random(1))
    taken: list[Received] = []

    async def take(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.extend(batch)
        return [Done()] * len(batch)

    link = CellLink(bus, [Consumer(bus, queue, take) for queue in ("placement.requests", "placement.inventory")])
    running = asyncio.create_task(link.run())
    await transport.asked.wait()
    await link.drain(1.0)
    transport.go_on.set()
    await asyncio.wait_for(running, PATIENCE_S)
    await bus.publish(RELEASE)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not taken and await transport.depth("placement.requests") == 1
    delivery = await transport.get("placement.requests")
    assert delivery is not None and not delivery.redelivered
    await link.close()


async def test_links_that_are_drained_take_nothing_more_and_no_further_cell() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    taken: list[Received] = []

    async def take(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.extend(batch)
        return [Done()] * len(batch)

    def reach(name: str, _: CellBus | None) -> Bus:
        return Bus(name, MemoryTransport(broker, name), process="worker", clock=clock, rng=random.Random(1))

    links = CellLinks(lambda bus: CellLink(bus, [Consumer(bus, "placement.requests", take)]), clock=clock, reach=reach)
    links.configure(reach("c1", None))
    running = asyncio.create_task(links.run())
    await links.entered(PATIENCE_S)
    bus = links.buses["c1"]
    await links.drain(1.0)
    links.set_cells({"c1": None, "c2": CellBus(prefix="c2.")})
    await bus.publish(RELEASE)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not taken and await bus.transport.depth("placement.requests") == 1
    assert set(links.buses) == {"c1"} and links.state_of("c2") == (LinkState.CLOSED, "")
    running.cancel()
    await asyncio.wait((running,))
    await links.close()
    never_drained = CellLinks(lambda bus: CellLink(bus, []), clock=clock, reach=reach)
    never_drained.set_cells({"c2": CellBus(prefix="c2.")})
    await never_drained.close()
    never_drained.set_cells({"c3": CellBus(prefix="c3.")})
    assert [never_drained.state_of(name)[0] for name in ("c2", "c3")] == [LinkState.CONNECTING, LinkState.CLOSED]


class Once(MemoryTransport):
    """A connection that is lost while the second queue is consumed for the first time."""

    asked = 0

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        self.asked += 1
        if self.asked == 1:
            raise BusUnavailable("lost")
        return await super().consume(queue, on_delivery, prefetch=prefetch)


async def test_a_consumer_whose_start_was_interrupted_starts_and_nothing_twice() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    bus = Bus(API, Once(broker, API), process="worker", clock=clock, rng=random.Random(1))
    await bus.open()
    taken: list[Received] = []

    async def take(batch: Sequence[Received]) -> Sequence[Outcome]:
        taken.extend(batch)
        return [Done()] * len(batch)

    consumer = Consumer(bus, "scheduler.requests", take)
    with pytest.raises(BusUnavailable):
        await consumer.start()
    assert not consumer.started
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    await bus.publish(BuildRequest(instance_uuid=str(UUID(int=1)), flavor="small", project_id="p"))
    async with asyncio.timeout(PATIENCE_S):
        while not taken:  # noqa: ASYNC110  (a broker does not announce it)
            await asyncio.sleep(0)
    assert len(broker.queue("scheduler.requests").consumers) == 1
    await consumer.drain(1.0)
    await running
    await bus.close()


# --- One flush for all commits that did not wait for the disk.


class Server:
    """It flushes at once."""

    connection_losses = 0

    async def flush(self) -> None: ...


async def test_a_commit_after_the_end_waits_for_no_flush() -> None:
    """Found by reading: nothing flushed it, and what waited for it never ended."""
    flushes = GroupFlush(Server())
    await flushes.close()
    flushed = flushes.after(0)
    await asyncio.wait({flushed}, timeout=PATIENCE_S)
    assert flushed.cancelled()


# --- What reaches into private parts of libraries works with the versions that it names, and states that of others.


PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture
def not_installed() -> None:
    install()
    install.cache_clear()


@pytest.mark.parametrize("library", SUPPORTED)
def test_a_library_of_an_unknown_version_is_a_coded_error(
    monkeypatch: pytest.MonkeyPatch, not_installed: None, library: str
) -> None:
    found = patches.version
    monkeypatch.setattr(patches, "version", lambda name: "99.0.1" if name == library else found(name))
    with pytest.raises(UnknownLibrary, match=rf"{library} 99\.0\.1") as refused:
        RabbitTransport("amqp://127.0.0.1", name="api")
    assert refused.value.code == "bus.library"


def test_a_library_without_a_part_that_is_reached_for_is_a_coded_error(
    monkeypatch: pytest.MonkeyPatch, not_installed: None
) -> None:
    monkeypatch.delattr(patches.Channel, "_on_deliver_frame")
    with pytest.raises(UnknownLibrary, match="_on_deliver_frame"):
        RabbitTransport("amqp://127.0.0.1", name="api")


def test_a_library_that_reads_frames_in_another_way_is_a_coded_error(
    monkeypatch: pytest.MonkeyPatch, not_installed: None
) -> None:
    """As of a version that calls no `unmarshal` of the properties, so that hostile ones end a connection."""
    monkeypatch.setattr(patches.ContentHeader, "unmarshal", lambda _header, _data: None)
    with pytest.raises(UnknownLibrary):
        RabbitTransport("amqp://127.0.0.1", name="api")


def test_the_known_versions_are_those_that_may_be_installed() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    bounds = {text.partition(">=")[0]: text.partition(">=")[2] for text in wanted}
    for name, known in SUPPORTED.items():
        lower, _, upper = bounds[name].partition(",<")
        assert lower.startswith(known.removesuffix(".")) and int(upper) == int(known.removesuffix(".")) + 1


# --- a connection that is given up, or takes nothing


async def test_an_open_that_is_given_up_connects_no_more() -> None:
    """Else each look at a broker that is away left a connection behind, for as long as the process lived."""
    running = asyncio.all_tasks()
    opening = asyncio.create_task(RabbitTransport("amqp://127.0.0.1:1/", name="api").open())
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks() - running) == 2, "it, and its keeper"
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert asyncio.all_tasks() == running


@on_virtual_time
async def test_what_is_bound_for_one_is_bound_for_many() -> None:
    """Forty subscriptions waited a second each for a connection that takes nothing, and were left behind."""
    flush = partial(asyncio.sleep, WRITE_TIMEOUT_S)
    session = SimpleNamespace(lost=asyncio.Event(), close=partial(asyncio.sleep, 0.0))
    transport = RabbitTransport("amqp://h", name="api")
    transport._session = session  # type: ignore[assignment]
    transport._subscriptions = [SimpleNamespace(flush=flush)] * 40  # type: ignore[list-item]
    await transport.close()
    assert asyncio.get_running_loop().time() == WRITE_TIMEOUT_S
