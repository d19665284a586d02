"""`transport_url` of nova.conf as the address of a bus."""

from __future__ import annotations

import pytest

from bus.rabbitmq.address import BadBusUrl
from scheduler_worker.nova.app import as_amqp


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("rabbit://u:p@h:5672/nova", "amqp://u:p@h:5672/nova"),
        ("rabbit://u:p@h1:5672,u:p@h2:5673/nova", "amqp://u:p@h1:5672,h2:5673/nova"),
        ("rabbit://u:p@h1,h2/nova", "amqp://u:p@h1,h2/nova"),
        ("rabbit://h:5672/", "amqp://h:5672/"),
        ("rabbit://u:p%40q%2C@[::1]:5672//", "amqp://u:p%40q%2C@[::1]:5672//"),
        ("amqps://u:p@h1,h2/nova", "amqps://u:p@h1,h2/nova"),
        ("", ""),
    ],
)
def test_an_address(given: str, wanted: str) -> None:
    assert as_amqp(given) == wanted


def test_hosts_of_several_users_are_refused() -> None:
    with pytest.raises(BadBusUrl):
        as_amqp("rabbit://u:p@h1,v:p@h2/nova")
