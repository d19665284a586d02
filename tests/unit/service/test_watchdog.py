"""Watchdog pings: who wants them is parsed from the environment, and the running loop sends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.commands.common import _watched
from bus.service.watchdog import MAX_LIMIT_S, Watchdog, watchdog_of, watched_loop

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
    """`berth web` is a service of systemd as the workers are."""
    monkeypatch.setenv("NOTIFY_SOCKET", address_of(supervisor))
    monkeypatch.setenv("WATCHDOG_USEC", "40000")

    async def body() -> int:
        async with asyncio.timeout(30):
            return len(await asyncio.get_running_loop().sock_recv(supervisor, 100))

    assert await _watched(body) == len(b"WATCHDOG=1")
