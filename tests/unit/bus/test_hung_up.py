"""Found by chaos: a broker's end that hangs up before its first frame must not end the wish to connect."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import uvloop
from msgspec import structs

from bus.port import BusUnavailable
from bus.rabbitmq import RabbitTransport
from bus.rabbitmq import transport as module
from bus.rabbitmq.errors import translated

ATTEMPTS = 60


class HangsUp:
    """Accepts and closes at once, in a thread of its own: sometimes before the client has looked for a first byte."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self.enough = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.close()
            self.accepted += 1
            if self.accepted >= ATTEMPTS:
                self._loop.call_soon_threadsafe(self.enough.set)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def test_a_broker_that_hangs_up_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On uvloop, as the workers run: there the end can be read before the first frame is asked for."""
    monkeypatch.setattr(module, "RECONNECT", structs.replace(module.RECONNECT, longest_s=0.001))

    async def scenario() -> None:
        broker = HangsUp()
        transport = RabbitTransport(f"amqp://a:b@127.0.0.1:{broker.port}/x", name="api")
        opening = asyncio.create_task(transport.open())
        try:
            async with asyncio.timeout(20):
                await broker.enough.wait()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await transport.close()
            broker.close()

    uvloop.run(scenario())


@pytest.mark.parametrize("raised", [Exception(), StopAsyncIteration(), asyncio.IncompleteReadError(b"", 1)])
def test_what_aiormq_raises_when_a_connection_ends_is_an_unavailable_bus(raised: Exception) -> None:
    with pytest.raises(BusUnavailable), translated():
        raise raised


def test_a_bug_of_our_own_is_not_taken_for_an_outage() -> None:
    with pytest.raises(KeyError), translated():
        raise KeyError("a bug")
