"""Whence the routing key of a message comes, and whether it is trusted: each way by which one can arrive."""

from __future__ import annotations

from typing import Any

import pytest

from bus import wire
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, DeleteRequest
from bus.key_trust import BROKERS_OWN, letters_code, letters_key, published_key
from bus.port import UNREAD, Delivery, Outgoing

UUID = "00000000-0000-0000-0000-000000000001"
MINE, VICTIMS = "build.delete.19.mine", "build.delete.9.victim"
REQUESTS = "scheduler.requests"
CODEC = wire.Codec([BuildRequest, DeleteRequest], queue=REQUESTS)


class Arrived:
    """An Outgoing as the other side sees it."""

    def __init__(self, exchange: str, key: str, headers: dict[str, Any], body: bytes = b"") -> None:
        message = Outgoing(exchange=exchange, routing_key=key, body=body)
        for name in message.__struct_fields__:
            setattr(self, name, getattr(message, name))
        self.headers = headers


def arrived(exchange: str, key: str, body: bytes = b"", **headers: Any) -> Delivery:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Arrived(exchange, key, named, body)  # type: ignore[return-value]


def death(queue: str, reason: str = "expired", exchange: str = "berth", key: str = MINE) -> dict[str, Any]:
    return {"count": 1, "queue": queue, "reason": reason, "exchange": exchange, "routing-keys": [key]}


PRIVATE = death("amq.gen-TwFY9rzBoMgsQd2aCAsNlQ", exchange="berth.events", key="build.event.refused.mine")
OWN = death(REQUESTS)
DELAYED = death("berth.delayed.200", exchange="berth.delay.200", key=REQUESTS)
FORGED = death(REQUESTS, key=VICTIMS)

COMMAND = "berth"
ARRIVALS: dict[str, tuple[Delivery, str | None]] = {
    "a client's": (arrived(COMMAND, MINE), MINE),
    "with a header of its own for the key": (arrived(COMMAND, MINE, berth_key=VICTIMS), MINE),
    "dead-lettered by a private queue": (arrived(COMMAND, VICTIMS, x_death=[PRIVATE]), None),
    "the same, hidden behind many headers": (arrived(COMMAND, VICTIMS, **{UNREAD: True}), None),
    "the same, with a forged second death": (arrived(COMMAND, VICTIMS, x_death=[PRIVATE, OWN]), None),
    "with a forged record": (arrived(COMMAND, MINE, x_death=[OWN]), None),
    "with half of a forged record": (arrived(COMMAND, MINE, x_first_death_queue=REQUESTS), None),
    "by a second key": (arrived(COMMAND, "placement.release", CC=[VICTIMS]), None),
    "by a second key, shown": (arrived(COMMAND, MINE, CC=[VICTIMS]), MINE),
    "an event's": (arrived("berth.events", "build.event.active.p"), "build.event.active.p"),
    "an event that was dead-lettered": (arrived("berth.events", "build.event.active.p", x_death=[PRIVATE]), None),
    "from another program's exchange": (arrived("ironic", "notifications.info"), "notifications.info"),
    "expired unread": (arrived("berth.given-up", MINE, x_death=[OWN]), MINE),
    "expired unread, with a forged key": (arrived("berth.given-up", MINE, x_death=[FORGED]), MINE),
    "expired unread, with a prefix": (arrived("berth.given-up", MINE, x_death=[death(f"site.{REQUESTS}")]), MINE),
    "a private queue's, expired unread": (arrived("berth.given-up", VICTIMS, x_death=[OWN, PRIVATE]), None),
    "the same, hidden": (arrived("berth.given-up", VICTIMS, x_death=[OWN], **{UNREAD: True}), None),
    "given up without a record": (arrived("berth.given-up", VICTIMS), None),
    "given up with no real record": (arrived("berth.given-up", VICTIMS, x_death=[True]), None),
    "given up after a delay": (arrived("berth.given-up", REQUESTS, x_death=[OWN, DELAYED]), ""),
    "parked by a worker": (arrived("berth.dead", REQUESTS, berth_key=MINE), MINE),
    "parked by a worker, key unknown": (arrived("berth.dead", REQUESTS), ""),
    "a worker's, given up by the broker": (
        arrived("berth.dead", "conductor.requests", x_death=[death("conductor.requests", key="cell.build")]),
        "cell.build",
    ),
    "a worker's, given up after a delay": (
        arrived("berth.dead", "conductor.requests", x_death=[death("conductor.requests"), DELAYED]),
        "",
    ),
    "a private queue's, given up by a worker's": (
        arrived("berth.dead", "placement.inventory", x_death=[death("placement.inventory"), PRIVATE]),
        None,
    ),
    "back from a delay": (arrived("berth.return", REQUESTS, x_death=[DELAYED], berth_key=VICTIMS), ""),
    "a letter that goes back": (arrived("", REQUESTS, berth_key=MINE), MINE),
    "the same, given up by the broker": (
        arrived("berth.given-up", REQUESTS, x_death=[death(REQUESTS, exchange="", key=REQUESTS)], berth_key=MINE),
        MINE,
    ),
    "a reply": (arrived("", "berth.reply.p"), ""),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_the_key_of_each_arrival(name: str) -> None:
    delivery, key = ARRIVALS[name]
    assert published_key(delivery, REQUESTS) == key


@pytest.mark.parametrize("name", sorted(BROKERS_OWN | {UNREAD}))
@pytest.mark.parametrize("body", [b"{", b'{"instance_uuid": "%s", "project_id": "victim"}' % UUID.encode()])
def test_a_message_that_was_dead_lettered_elsewhere_is_not_read(name: str, body: bytes) -> None:
    """As a malformed request it made a `refused` in the stream of the project that its key named."""
    delivery = arrived(COMMAND, VICTIMS, body, **{name: [PRIVATE]})
    assert CODEC.read(delivery, "new") == []
    assert len(CODEC.read(arrived(COMMAND, VICTIMS, body), "new")) == 1


def test_a_retry_that_the_broker_has_delayed_is_read() -> None:
    packed = wire.pack(DeleteRequest(instance_uuid=UUID, project_id="p"), Meta(id="m", attempt=1))
    delivery = arrived("berth.return", REQUESTS, packed.body, x_death=[DELAYED])
    (got,) = CODEC.read(delivery, "new")
    assert isinstance(got, wire.Read)


@pytest.mark.parametrize(
    "queue", ["placement.requests", "placement.inventory", "scheduler.changes", "scheduler.records"]
)
def test_a_second_key_opens_no_door_to_another_queue(queue: str) -> None:
    """RabbitMQ 3.10 checks a publisher's permission for the first key only."""
    assert published_key(arrived(COMMAND, MINE, CC=["x"]), queue) is None


@pytest.mark.parametrize(
    ("queue", "key"), [("compute.{service}", "compute.spawn.c1"), ("placement.inventory", f"inventory.update.{UUID}")]
)
def test_keys_that_a_binding_takes_are_trusted(queue: str, key: str) -> None:
    assert published_key(arrived(COMMAND, key), queue) == key


def test_the_code_of_a_letter() -> None:
    assert letters_code(arrived("berth.given-up", MINE, x_death=[OWN])) == "broker.expired"
    assert letters_code(arrived("berth.dead", REQUESTS, berth_code="message.malformed")) == "message.malformed"
    assert letters_key(arrived("berth.given-up", VICTIMS, x_death=[OWN, PRIVATE])) is None
