"""A redelivered call, and an address with a password in an error."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from bus.clock import SystemClock
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.poller import NovaStatePoller
from nova_scheduler.cloud.rest import NovaRefused, NovaRest, NovaUnavailable

INSTANCES = tuple(f"11111111-2222-4333-8444-{n:012d}" for n in range(9))


async def test_a_redelivered_call_of_nine_waits_for_its_ninth() -> None:
    """The users deleted the first eight; the ninth still has the task state `scheduling`. The call is refused whole."""

    class Api:
        async def task_of(self, instance: str) -> str | None:
            return "scheduling" if instance == INSTANCES[8] else None

    poller = NovaStatePoller.__new__(NovaStatePoller)
    poller._api = cast(Any, Api())
    assert await poller.waits_for_host(INSTANCES)


async def test_an_address_with_a_password_is_not_in_an_error() -> None:

    config = NovaApiConfig(url="http://nova:s3cret-pw@controller:8774/v2.1")
    rest = NovaRest(
        config,
        clock=SystemClock(),
        transport=httpx.MockTransport(lambda request: httpx.Response(403)),
        setting="nova.api",
    )
    try:
        with pytest.raises((NovaRefused, NovaUnavailable)) as refused:
            await rest.services()
    finally:
        await rest.close()
    assert "s3cret-pw" not in str(refused.value)
