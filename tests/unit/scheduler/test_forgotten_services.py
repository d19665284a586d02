"""A compute service that an operator wants forgotten, at a scheduler: the book's hosts keep it."""

from __future__ import annotations

from typing import Any

from bus.clock import SystemClock
from bus.contracts.base import Message, Refusal
from bus.contracts.book import ServiceHostsPage, ServiceHostsQuery
from bus.contracts.cell import ForgetServiceInCell, ServiceDown, ServiceForgottenInCell, ServicesDigest
from bus.contracts.operations import ForgetService, ServiceForgotten
from scheduler_worker.domain import hosts
from scheduler_worker.forgetting import ServiceForgetter
from scheduler_worker.objects import MakeChange
from tests.unit.scheduler.hosts import PLENTY, Hosts

NAME = "compute-c1"
COMMAND = ForgetService(service=NAME, reason="burnt", by="ann", cell="c1")


class Answering:
    """A bus of placement and of the cell. hosts: that the book has of the service."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.removed = True
        self.ordered: list[Message] = []

    async def request(self, message: Message, *_: object, **__: object) -> Message:
        """Answer as placement and as the cell's conductor do."""
        if isinstance(message, ServiceHostsQuery):
            assert (message.service, message.cell) == (NAME, "c1")
            return ServiceHostsPage(hosts=self.hosts)
        assert isinstance(message, ForgetServiceInCell)
        self.ordered.append(message)
        return ServiceForgottenInCell(service=message.service, removed=self.removed, at=1.0)


class Log:
    """A registry that keeps the entries, and the messages that made them."""

    def __init__(self) -> None:
        self.handled: set[str] = set()
        self.entries: list[str] = []

    async def first_time(self, _handler: str, message_id: str) -> bool:
        """As the table of handled messages."""
        is_new = message_id not in self.handled
        self.handled.add(message_id)
        return is_new

    async def write(self, make: MakeChange) -> None:
        """Keep the names."""
        nothing: Any = None
        unit: Any = self
        made = await make(unit, nothing)
        assert not isinstance(made, Refusal)
        self.entries += [one.name for one in made[0]]


def forgetter(known: Hosts, bus: Answering, entries: Log | None = None) -> ServiceForgetter:
    any_log: Any = entries or Log()
    any_bus: Any = bus
    return ServiceForgetter(any_log, known.selector, any_bus, lambda: {"c1": any_bus}, clock=SystemClock())


def down(number: int) -> ServicesDigest:
    silent = ServiceDown(service=NAME, epoch=1, code="service.silent")
    return ServicesDigest(cell="c1", term=1, number=number, down=(silent,), up=0)


async def test_one_that_is_down_for_long_is_kept_by_the_hosts_that_it_announced() -> None:
    """Its hosts had no service any more, and it was forgotten with 100 of them in the book."""
    known, bus = Hosts([PLENTY] * 2), Answering()
    known.table.apply(down(1), 1.0)
    for number, now_s in enumerate((2.0, 2.0 + hosts.DOWN_HOLD_S), start=2):
        known.table.apply(down(number), now_s)
        refused = await forgetter(known, bus).forget(COMMAND, "m")
        assert isinstance(refused, Refusal) and refused.code == "service.has_hosts", now_s
    assert known.table.service[0] == hosts.NO_SERVICE and bus.ordered == []
    known.give_up()
    assert isinstance(await forgetter(known, bus).forget(COMMAND, "m"), ServiceForgotten), (
        "it lists none of them any more"
    )


async def test_of_one_that_was_never_announced_the_book_decides() -> None:
    known = Hosts([])
    bus = Answering(*(f"h{number:04}" for number in range(100)))
    refused = await forgetter(known, bus).forget(COMMAND, "m")
    assert isinstance(refused, Refusal) and refused.code == "service.has_hosts"
    assert "100, as h0000, h0001" in refused.reason and bus.ordered == []
    bus.hosts = ()
    done = await forgetter(known, bus).forget(COMMAND, "m")
    assert isinstance(done, ServiceForgotten) and done.removed, (
        "its hosts are forgotten, and nothing else of it is on record"
    )


async def test_who_forgot_it_is_on_record_though_the_first_answer_was_late() -> None:
    known, bus, entries = Hosts([]), Answering(), Log()
    bus.removed = False  # it has done so, and its answer did not come in time
    for message, expected in (("m", 1), ("m", 1), ("repeated by the operator", 2)):
        done = await forgetter(known, bus, entries).forget(COMMAND, message)
        assert isinstance(done, ServiceForgotten) and not done.removed
        assert entries.entries == [NAME] * expected, message
