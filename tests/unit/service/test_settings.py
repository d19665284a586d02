"""Settings, log lines and watchdog pings of a process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import structlog
from msgspec import Struct

from berth.cli.site_process import _watched
from bus.service.settings import HIDDEN, Secret, SettingsError, hide_password, load, redact
from bus.service.telemetry import MAX_TEXT, configure_logging
from bus.service.watchdog import MAX_LIMIT_S, Watchdog, watchdog_of, watched_loop
from bus.tracing.context import CURRENT, Scope, TraceContext
from bus.tracing.tracer import Tracer

# --- settings: a file, variables over it, and errors a person can act on


class BusSettings(Struct, frozen=True):
    url: str = "memory://"
    prefetch: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 256
    token: Secret = ""


class Cell(Struct, frozen=True):
    url: str
    weight: float = 1.0


class Everything(Struct, frozen=True):
    bus: BusSettings = BusSettings()
    cells: dict[str, Cell] = {}
    filters: tuple[str, ...] = ()
    durable: bool | None = None
    note: str = ""
    secret: Secret | None = None


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "berth.toml"
    path.write_text(text)
    return path


def test_without_anything_the_defaults_hold() -> None:
    assert load(Everything, toml=None, env={"PATH": "/bin", "BERTH_CONFIG": "x.toml"}) == Everything()


def test_variables_override_the_file_at_any_depth(tmp_path: Path) -> None:
    path = written(tmp_path, '[bus]\nurl = "amqp://a"\nprefetch = 8\n[cells.Cell1]\nurl = "amqp://c"\n')
    env = {
        "BERTH_BUS__URL": "amqp://b",
        "BERTH_CELLS__CELL1__WEIGHT": "2.5",
        "BERTH_CELLS__CELL2__URL": "amqp://d",
        "BERTH_FILTERS": '["a", "b"]',
        "BERTH_DURABLE": "true",
        "BERTH_NOTE": "7",
    }
    assert load(Everything, toml=path, env=env) == Everything(
        bus=BusSettings(url="amqp://b", prefetch=8),
        cells={"Cell1": Cell("amqp://c", 2.5), "cell2": Cell("amqp://d")},
        filters=("a", "b"),
        durable=True,
        note="7",
    )


@pytest.mark.parametrize(
    ("text", "env", "code", "message"),
    [
        ("[buss]\n", {}, "settings.unknown", "did you mean bus?"),
        ("[cells.a]\nurl = 'x'\nwieght = 1\n", {}, "settings.unknown", "did you mean weight?"),
        ("", {"BERTH_BUS__URI": "x"}, "settings.unknown", "did you mean url?"),
        ("", {"BERTH_NOTE__X": "1"}, "settings.unknown", "note has no parts"),
        ("[bus]\nprefetch = '8'\n", {}, "settings.invalid", "$.bus.prefetch"),
        ("", {"BERTH_BUS__PREFETCH": "many"}, "settings.invalid", "BERTH_BUS__PREFETCH"),
        ("", {"BERTH_BUS__PREFETCH": "0"}, "settings.invalid", ">= 1"),
        ("", {"BERTH_FILTERS": "[1"}, "settings.invalid", "not JSON"),
        ("cells = 3\n", {}, "settings.invalid", "$.cells"),
        ("cells = 3\n", {"BERTH_CELLS__A__URL": "x"}, "settings.invalid", "cells is not a table"),
        ("[[", {}, "settings.file", "not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, env: dict[str, str], code: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Everything, toml=written(tmp_path, text), env=env)
    assert caught.value.code == code
    assert message in caught.value.reason


@pytest.mark.parametrize(
    "text",
    [f"note = {'9' * 5_000}", f"filters = {'[' * 5_000}", "note = '\x00'", "filters = " + "[" * 500 + "]" * 500],
    ids=["digits", "depth", "NUL", "closed depth"],
)
def test_a_file_that_no_parser_takes_is_a_settings_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Everything, toml=written(tmp_path, text), env={})
    assert caught.value.code in {"settings.file", "settings.invalid"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BERTH_FILTERS", "[" * 100_000),
        ("BERTH_FILTERS", '["\udcff"]'),
        ("BERTH_NOTE", "\udcff"),
        ("BERTH_BUS__URL", "\udcff"),
        ("BERTH_BUS__PREFETCH", "9" * 5_000),
    ],
    ids=["depth", "bytes in JSON", "bytes", "bytes of a part", "digits"],
)
def test_a_variable_that_is_no_value_is_a_settings_error(variable: str, text: str) -> None:
    with pytest.raises(SettingsError, match=variable) as caught:
        load(Everything, toml=None, env={variable: text})
    assert caught.value.code == "settings.invalid"


def test_a_missing_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Everything, toml=tmp_path / "none.toml", env={})
    assert caught.value.code == "settings.file"


def test_secrets_and_passwords_in_urls_are_hidden() -> None:
    settings = Everything(
        bus=BusSettings(url="amqp://me:hush@host:1/v", token="hush"),
        cells={"a": Cell("amqp://u:hush@h/%2F?x=1")},
        secret="hush",
    )
    shown = redact(settings)
    assert "hush" not in str(shown)
    assert shown["bus"] == {"url": f"amqp://me:{HIDDEN}@host:1/v", "prefetch": 256, "token": HIDDEN}
    assert shown["cells"]["a"]["url"] == f"amqp://u:{HIDDEN}@h/%2F?x=1"


@pytest.mark.parametrize("text", ["plain", "http://host/a:b@c", "amqp://user@h/", ""])
def test_what_holds_no_password_stays(text: str) -> None:
    assert hide_password(text) == text


# --- log lines as a terminal may have them


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.configure(**before)
    root.handlers, root.level = handlers, level


def test_a_value_forges_no_line_of_a_persons_log() -> None:
    stream = io.StringIO()
    configure_logging(process="p", role="r", style="pretty", stream=stream)
    structlog.get_logger().info("host.new", name="h1\n2026 [error] all hosts lost\x1b[2J\u202e")
    line = stream.getvalue()
    assert line.count("\n") == 1 and r"\n2026" in line
    assert line.rstrip("\n").isprintable()


@pytest.mark.parametrize("style", ["pretty", "json"])
def test_a_long_value_is_cut(style: Literal["pretty", "json"]) -> None:
    stream = io.StringIO()
    configure_logging(process="p", role="r", style=style, stream=stream)
    for length in (MAX_TEXT, MAX_TEXT + 1, 100 * MAX_TEXT):
        structlog.get_logger().info("host.new", name="x" * length)
    assert [line.count("x" * MAX_TEXT) for line in stream.getvalue().splitlines()] == [1, 1, 1]
    assert [line.count("…") for line in stream.getvalue().splitlines()] == [0, 1, 1]


@pytest.mark.parametrize("style", ["pretty", "json"])
def test_the_log_of_an_exception_has_no_values_of_variables(style: Literal["pretty", "json"]) -> None:
    """A request's headers were among them: tokens and cookies."""
    stream = io.StringIO()
    configure_logging(process="p", role="r", style=style, stream=stream)
    headers = {"authorization": "Bearer " + "operator's".upper()}
    try:
        headers["missing"]
    except KeyError:
        structlog.get_logger().exception("web.crashed")
    assert "KeyError" in stream.getvalue() and "OPERATOR'S" not in stream.getvalue()


def test_a_full_disk_costs_lines_and_ends_nothing(tmp_path: Path) -> None:
    """Each task that logged ended, that which connects to the broker again among them: the worker stayed deaf."""
    path = tmp_path / "log"
    with path.open("w", buffering=1) as stream, Path("/dev/full").open("w") as full:
        configure_logging(process="p", role="r", style="json", stream=stream)
        log, room = structlog.get_logger(), os.dup(stream.fileno())
        log.info("before")
        os.dup2(full.fileno(), stream.fileno())
        for _ in range(1000):
            log.warning("bus.unavailable", reason="x" * 1000)
        logging.getLogger("foreign").warning("logged by a library")
        os.dup2(room, stream.fileno())
        os.close(room)
        log.info("after")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert lines[0]["event"] == "before"
    assert lines[-1]["event"] == "after"
    assert any(line["event"] == "log.lines_lost" and line["lines"] > 0 for line in lines)


def test_a_line_about_a_sampled_build_has_its_trace_id() -> None:
    stream = io.StringIO()
    configure_logging(process="p", role="scheduler", style="json", stream=stream)
    tracer = Tracer(None, ratio=0.0, most_per_s=1.0)  # type: ignore[arg-type]  (nothing is exported)
    token = CURRENT.set(Scope(tracer.start, {"sampled": TraceContext("a" * 32, "b" * 16)}, None))
    for cause in ("sampled", "other"):
        structlog.get_logger().info("claimed", cause=cause)
    CURRENT.reset(token)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("trace_id") for line in lines] == ["a" * 32, None]


# --- watchdog pings: who wants them is parsed from the environment, and the running loop sends them


WANTED = {"NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": "60000000"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Watchdog("/run/systemd/notify", 60.0)),
        ({"NOTIFY_SOCKET": "@berth-1"}, Watchdog("@berth-1", 60.0)),
        ({"WATCHDOG_PID": "12"}, Watchdog("/run/systemd/notify", 60.0)),
        ({"WATCHDOG_PID": ""}, Watchdog("/run/systemd/notify", 60.0)),
        ({"WATCHDOG_PID": "13"}, None),  # inherited from a parent
        ({"WATCHDOG_PID": "x"}, None),
        ({"NOTIFY_SOCKET": ""}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "1e6"}, None),
        ({"WATCHDOG_USEC": "\u0662"}, None),
        ({"WATCHDOG_USEC": "9" * 400}, None),
        ({"WATCHDOG_USEC": str(int(MAX_LIMIT_S * 1e6))}, Watchdog("/run/systemd/notify", MAX_LIMIT_S)),
    ],
)
def test_the_environment_is_parsed_as_systemd_writes_it(changed: dict[str, str], expected: Watchdog | None) -> None:
    assert watchdog_of({**WANTED, **changed}, pid=12) == expected


def test_without_a_supervisor_there_is_none() -> None:
    assert watchdog_of({}, pid=12) is None


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        # By a short name: a path below a long TMPDIR is longer than a socket's address may be.
        receiver.bind(f"\0berth-test-{os.getpid()}-{tmp_path.name}")
        receiver.setblocking(False)
        yield receiver


def address_of(receiver: socket.socket) -> str:
    return "@" + receiver.getsockname()[1:].decode()


async def test_the_running_loop_sends_signs_until_the_block_ends(supervisor: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30), watched_loop(Watchdog(address_of(supervisor), 0.04)):
        assert [await loop.sock_recv(supervisor, 100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "watchdog" and not task.cancelling()]


async def test_a_supervisor_that_reads_nothing_or_is_gone_ends_no_worker(supervisor: socket.socket) -> None:
    address = address_of(supervisor)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
        other.setblocking(False)
        while True:
            other.sendto(b"full", "\0" + address[1:])
    async with watched_loop(Watchdog(address, 1e-6)):
        (sending,) = (task for task in asyncio.all_tasks() if task.get_name() == "watchdog")
        for _ in range(20):
            await asyncio.sleep(0.001)
        supervisor.close()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not sending.done()


async def test_a_command_that_runs_on_sends_them_too(
    supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`berth serve web` is a service of systemd as the workers are."""
    monkeypatch.setenv("NOTIFY_SOCKET", address_of(supervisor))
    monkeypatch.setenv("WATCHDOG_USEC", "40000")

    async def body() -> int:
        async with asyncio.timeout(30):
            return len(await asyncio.get_running_loop().sock_recv(supervisor, 100))

    assert await _watched(body) == len(b"WATCHDOG=1")
