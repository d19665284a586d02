"""Acknowledgements of one channel that wait for others, as the broker takes them."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.rabbitmq.channels import ACK, GATHERED_SHARE, REJECT, Acks, answer_frame

FRAME = struct.Struct(">BHIHHQBB")  # type, channel, size, class, method, tag, bit, end
assert FRAME.size == len(answer_frame(1, ACK, 1, False))


class Broker:
    """What it has delivered on the channel and was not answered. An answer about anything else closes the channel."""

    def __init__(self) -> None:
        self.unsettled: set[int] = set()
        self.acked: set[int] = set()
        self.rejected: dict[int, bool] = {}

    def write(self, frame: bytes) -> None:
        *_, method, tag, bit, _end = FRAME.unpack(frame)
        settled = {one for one in self.unsettled if one <= tag} if method == ACK and bit else {tag}
        assert tag in self.unsettled, "PRECONDITION_FAILED: unknown delivery tag"
        self.unsettled -= settled
        if method == ACK:
            self.acked |= settled
        else:
            assert method == REJECT
            self.rejected[tag] = bool(bit)


class OfOneChannel(RuleBasedStateMachine):
    """Deliveries are acknowledged and rejected in any order: the broker is told of each once, and of nothing else."""

    PREFETCH = 4 * GATHERED_SHARE

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        channel: Any = SimpleNamespace(number=1)
        self.acks = Acks(channel, prefetch=self.PREFETCH)
        self.broker = Broker()
        self.acks._frames = self.broker  # type: ignore[assignment]
        self.tag = 0
        self.held: list[int] = []
        self.acked: set[int] = set()
        self.rejected: dict[int, bool] = {}

    @rule()
    def delivered(self) -> None:
        self.tag += 1
        self.held.append(self.tag)
        self.broker.unsettled.add(self.tag)
        self.acks.register(self.tag)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), now=st.booleans())
    def acknowledge(self, data: st.DataObject, now: bool) -> None:
        tag = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

        async def twice() -> None:
            self.acks.ack(tag, now=now)
            self.acks.ack(tag)

        self.loop.run_until_complete(twice())
        self.acked.add(tag)
        assert not now or tag in self.broker.acked

    @precondition(lambda self: self.held)
    @rule(data=st.data(), requeue=st.booleans())
    def reject(self, data: st.DataObject, requeue: bool) -> None:
        tag = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for _ in range(2):
            self.acks.nack(tag, requeue=requeue)
        self.rejected[tag] = requeue

    @rule()
    def time_passes(self) -> None:
        if self.acks._timer is not None:
            self.acks._send()
        assert self.broker.acked == self.acked

    @invariant()
    def what_the_broker_knows(self) -> None:
        assert self.broker.acked <= self.acked and self.broker.rejected == self.rejected
        assert set(self.acks._open) == self.broker.unsettled
        waiting = self.acked - self.broker.acked
        assert self.acks._acked == waiting and len(waiting) < self.PREFETCH // GATHERED_SHARE
        assert (self.acks._timer is not None) is bool(waiting)

    def teardown(self) -> None:
        for tag in self.held:
            self.acks.nack(tag, requeue=True)
        self.time_passes()
        assert not self.broker.unsettled and not self.acks._open
        if self.acks._timer is not None:
            self.acks._timer.cancel()
        self.loop.close()


TestOfOneChannel = OfOneChannel.TestCase
