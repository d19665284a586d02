"""Commands under an alarm of a real broker, which then takes messages and confirms none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.bus import API
from bus.rabbitmq.transport import RabbitTransport
from tests.kit import lent
from tests.kit.forks import run_berth

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.timeout(300)]

UNKNOWN = "10000000-0000-4000-8000-000000000001"
MOST_S = 40.0  # of a command, with its start on a busy machine; it was 64 s


@pytest.fixture(scope="module")
def out_of_memory() -> Iterator[RabbitMQ]:
    """A broker with berth's topology and the alarm of `vm_memory_high_watermark`."""

    async def declare() -> None:
        transport = RabbitTransport(broker.url(), name=API)
        await transport.open()
        await transport.declare_shared()
        await transport.close()

    with lent.brokers.lend() as broker:
        asyncio.run(declare())
        broker.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.0000001).")
        yield broker


@pytest.mark.parametrize(
    "words",
    [
        ("boot", "--flavor", "m1.tiny", "--timeout", "1"),
        ("boot", "--flavor", "m1.tiny", "--timeout", "1", "--wait"),
        ("delete", UNKNOWN, "--timeout", "1"),
    ],
    ids=" ".join,
)
def test_a_command_ends_soon_after_its_timeout(out_of_memory: RabbitMQ, words: tuple[str, ...], tmp_path: Path) -> None:
    """`berth boot --timeout 20` took 64 s: it waited 30 s for a confirm, and 34 s for its farewell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env = {**kept, "BERTH_BUS__URL": out_of_memory.url(), "BERTH_STATE_DIR": str(tmp_path)}
    done = run_berth(*words, env=env, timeout_s=MOST_S)
    assert done.returncode == 4 and "request.timeout" in done.stderr, done.stderr
