"""The simulated Ironic's connection to a broker."""

from __future__ import annotations

import socket

import pytest

from berth.trial.ironic_stand_in.announcer import AmqpAnnouncer
from bus.port import BusUnavailable


async def test_a_broker_out_of_reach_is_a_fault_with_a_sentence() -> None:
    """`berth up --processes` beside a broker that was down ended with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    announcer = AmqpAnnouncer(f"amqp://berth:secret@127.0.0.1:{port}/berth")
    with pytest.raises(BusUnavailable, match="the simulated Ironic cannot announce") as caught:
        await announcer.open()
    assert "secret" not in str(caught.value)
