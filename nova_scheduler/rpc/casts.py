"""The casts of the topic and of its fanout, which nobody waits for: carried out one after the other."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from bus.faults import BrokenInvariant
from bus.rabbitmq.channels import RabbitDelivery
from bus.transport import BusError
from nova_scheduler.metrics import CALLS
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.rpc.deliveries import parse_delivery
from nova_scheduler.rpc.dispatcher import RetryingDispatcher
from nova_scheduler.stock.forwarder import Fallback
from nova_scheduler.wire.envelope import CALL_LIMIT_S, Call, RemoteFault
from nova_scheduler.wire.methods import check_method, label_of

log = structlog.get_logger("nova")


class CastQueue:
    """Casts that wait to be carried out."""

    def __init__(self, dispatcher: RetryingDispatcher, fallback: Fallback | None) -> None:
        self._dispatcher = dispatcher
        self._fallback = fallback
        self._waiting: asyncio.Queue[tuple[Call, RabbitDelivery]] = asyncio.Queue()
        self._next_offset: int | None = None  # of the stream

    def add(self, call: Call, delivery: RabbitDelivery) -> None:
        """Carry a cast out after those that wait."""
        self._waiting.put_nowait((call, delivery))

    def add_fanout(self, delivery: RabbitDelivery) -> None:
        """Carry out what the fanout delivers, if it is a cast."""
        offset = delivery.headers.get("x-stream-offset")
        if isinstance(offset, int):
            self._next_offset = offset + 1
        call = parse_delivery(delivery, fanout=True)
        if call is not None:
            self.add(call, delivery)

    def stream_offset(self) -> dict[str, str | int]:
        """Where in the stream the consumption begins: after what was received; at first with what comes from now on."""
        return {"x-stream-offset": "next" if self._next_offset is None else self._next_offset}

    async def run(self) -> None:
        """One after the other, in the order in which they came. Raises BrokenInvariant."""
        while True:
            call, delivery = await self._waiting.get()
            outcome = "handled"
            try:
                check_method(call)
                async with asyncio.timeout(CALL_LIMIT_S):
                    await self._dispatcher.call(call)
            except (RemoteFault, NotDecided):
                outcome = "refused"
            except BrokenInvariant:
                raise
            except Exception as error:  # of one cast, whose client does not wait for anything
                outcome = "failed"
                log.exception("nova.call_failed", method=call.method, code=getattr(error, "code", ""))
            if call.fanout and self._fallback is not None:
                with contextlib.suppress(BusError):  # the stock scheduler reads what it has missed by itself
                    await self._fallback.forward(call)
            CALLS.labels(label_of(call), outcome).inc()
            delivery.ack()
