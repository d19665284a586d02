"""The order in which messages leave a connection to RabbitMQ, whatever its alarms and its channel do meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

from aiormq import Channel
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bus.rabbitmq import session as sessions
from bus.topology import QueueNames
from bus.transport import Outgoing
from tests.kit.waiting import PATIENCE_S


class Confirming:
    """A channel to publish on that confirms at once."""

    def __init__(self, channel: Any, _: QueueNames) -> None:
        self.usable = True
        self.channel = SimpleNamespace(is_closed=True)  # nothing of it is left to close
        self._sent = channel.sent

    async def publish(self, message: Outgoing) -> None:
        self._sent.append(message.body)


class OfOneConnection(RuleBasedStateMachine):
    """Alarms begin and end, the broker closes the channel, and messages come: each leaves once, in its order, and none
    in an alarm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patched = patch.object(sessions, "PublishChannel", Confirming)
        self.patched.start()
        self.tasks: list[asyncio.Task[None]] = []
        self.sent: list[bytes] = []
        self.blocked = False
        self.sent_before = 0  # this alarm
        self.loop.run_until_complete(self.opened())

    async def opened(self) -> None:
        closing = self.loop.create_future()
        connection: Any = SimpleNamespace(transport=SimpleNamespace(connection=SimpleNamespace(closing=closing)))
        with patch.object(sessions, "listen_for_alarms"):
            self.session = sessions.Session(connection, connection, QueueNames(""))
        self.session.channel = self.channel  # type: ignore[method-assign]

    async def channel(self, *, confirms: bool) -> Any:
        await asyncio.sleep(0)
        return Mock(spec=Channel, sent=self.sent)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    @rule()
    def alarm(self) -> None:
        self.session._alarmed("memory")
        self.blocked, self.sent_before = True, len(self.sent)

    @rule()
    def alarm_ends(self) -> None:
        self.session._alarmed("")
        self.blocked = False

    @rule()
    def channel_closed(self) -> None:
        if self.session._publisher is not None:
            self.session._publisher.usable = False  # type: ignore[misc]

    @rule()
    def publish(self) -> None:
        """A message of which the first step is done, as of one that is awaited."""
        message = Outgoing(exchange="e", routing_key="k", body=b"%d" % len(self.tasks))
        self.tasks.append(self.loop.create_task(self.session.publish(message)))
        self.loop.run_until_complete(self.turns(1))

    @rule()
    def time_passes(self) -> None:
        self.loop.run_until_complete(self.turns(3))

    @invariant()
    def in_order(self) -> None:
        assert self.sent == [b"%d" % number for number in range(len(self.sent))]
        assert not self.blocked or len(self.sent) == self.sent_before
        assert self.session.blocked == ("memory" if self.blocked else "")

    def teardown(self) -> None:
        try:
            self.alarm_ends()
            if self.tasks:
                self.loop.run_until_complete(asyncio.wait_for(asyncio.gather(*self.tasks), PATIENCE_S))
            assert len(self.sent) == len(self.tasks)
            assert self.session._unsent == 0, "what comes later waits for nobody"
            self.in_order()
        finally:
            self.patched.stop()
            self.loop.close()


TestOfOneConnection = OfOneConnection.TestCase


def test_an_alarm_that_begins_again_at_once_lets_nothing_through() -> None:
    """A message that waited for the end of the first had its turn in the second."""
    machine = OfOneConnection()
    for happens in (machine.alarm, machine.publish, machine.alarm_ends, machine.alarm, machine.time_passes):
        happens()
    sent = machine.sent[:]
    machine.teardown()
    assert sent == [] != machine.sent
