"""The process of `berth web`."""

from __future__ import annotations

import asyncio
import gc
import signal

import pytest
from typer.testing import CliRunner

from berth.cli import app
from berth.commands import serving
from bus.service.main import GC_THRESHOLD, STOP_SIGNALS


class Server:
    """A web server that records what the garbage collector has to do while it serves."""

    url = "http://127.0.0.1:1"
    serving: tuple[int, ...] = ()

    def __init__(self, *_: object, **__: object) -> None: ...

    async def open(self) -> None: ...

    async def serve_until(self, stop: asyncio.Event) -> None:
        Server.serving = gc.get_threshold()
        stop.set()

    async def close(self) -> None: ...


def test_the_garbage_collector_does_not_traverse_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 2,000 hosts is 10,000 objects: with the thresholds of Python each triggers whole collections."""
    monkeypatch.setattr(serving, "WebServer", Server)
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = gc.get_threshold()
    try:
        result = CliRunner().invoke(app, ["web", "--listen", "127.0.0.1:0"])
    finally:
        gc.set_threshold(*before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert result.exit_code == 0, result.output
    assert frozen == [True]
    assert Server.serving == GC_THRESHOLD
