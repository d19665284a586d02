"""URLs of brokers and databases: every form that is taken, and every other refused in a sentence that hides it."""

from __future__ import annotations

from pathlib import Path

import pytest

from berth.settings import BusSettings, CellSettings, DatabaseSettings, Settings, check_urls
from bus.faults import DatabaseForbidden
from bus.persistence.address import parse_database_url
from bus.rabbitmq import BadBusUrl, parse_bus_url
from bus.server_url import Endpoint
from bus.service.settings import SettingsError, hide_password

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
