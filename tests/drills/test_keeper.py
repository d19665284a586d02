"""A server that cannot start for a while is tried again, with longer and longer pauses, and logged each time.

One that runs and does not work is ended and started again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from berth.trial import keeper as module
from berth.trial.broker_probe import probe
from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.rabbitmq import RabbitMQ
from berth.trial.keeper import kept_alive
from bus.rabbitmq import channels
from tests.kit.waiting import until

PATIENCE_S = 120.0

pytestmark = pytest.mark.postgres


async def test_a_server_that_cannot_start_is_tried_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk that is freed later: here its configuration cannot be read, until it can."""
    monkeypatch.setattr(module, "RESTART", replace(module.RESTART, first_s=0.1))
    logged: list[str] = []
    server = Postgres()
    async with kept_alive("PostgreSQL", server, notify=logged.append):
        broken = _hba(server)
        kept = broken.read_text()
        broken.write_text("nonsense\n")
        server.kill()
        await until(lambda: sum("does not start" in one for one in logged) >= 2, PATIENCE_S)
        assert "in 0.1 s" in logged[1] and "in 0.2 s" in logged[2], logged
        broken.write_text(kept)
        await until(lambda: bool(logged) and logged[-1] == "PostgreSQL is up again", PATIENCE_S)
        assert server.pid


async def test_a_keeper_that_is_stopped_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART", replace(module.RESTART, first_s=3_600.0, longest_s=3_600.0))
    logged: list[str] = []
    server = Postgres()
    async with asyncio.timeout(PATIENCE_S), kept_alive("PostgreSQL", server, notify=logged.append):
        _hba(server).write_text("nonsense\n")
        server.kill()
        await until(lambda: any("does not start" in one for one in logged), PATIENCE_S)
    assert server.pid == 0


@pytest.mark.rabbitmq
async def test_a_broker_that_confirms_nothing_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a full disk: the log of its quorum queues is gone, and connections are taken as before."""
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.2)
    monkeypatch.setattr(channels, "CONFIRM_TIMEOUT_S", 5.0)
    logged: list[str] = []
    broker = RabbitMQ()
    async with kept_alive("RabbitMQ", broker, notify=logged.append, probe=lambda: probe(broker.url())):
        await probe(broker.url())
        assert logged == []
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0.0000001")
        await probe(broker.url())  # an alarm ends by itself
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0.9")
        first = broker.pid
        await asyncio.to_thread(broker.control, "eval", "sys:suspend(ra_log_wal).")
        await until(lambda: bool(logged) and logged[-1] == "RabbitMQ is up again", PATIENCE_S)
        assert "did not work 3 times in a row" in logged[0] and "no confirm within" in logged[0], logged
        assert broker.pid not in (0, first)
        await probe(broker.url())


def _hba(server: Postgres) -> Path:
    return server._data / "pg_hba.conf"
