"""A hung batch holds up only itself, also after a further batch has come and gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bus.consuming.outcome import Done, Outcome, Received
from bus.faults import DatabaseUnavailable
from bus.gather import SLOW_S
from tests.contract.house import KINDS, REQUESTS, House, boot
from tests.contract.rig import until

SOON_S = 3.0  # sixty times as long as a batch counts as slow after


@KINDS
@pytest.mark.parametrize("hangs", ["handler", "transient"])
async def test_a_hung_batch_does_not_hold_up_the_third_message(house: House, hangs: str) -> None:
    bus = await house.bus()
    go_on = asyncio.Event()
    done: list[str] = []

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        uuids = [one.message.instance_uuid for one in batch]  # type: ignore[attr-defined]
        if boot(1).instance_uuid in uuids and not go_on.is_set():
            if hangs == "transient":
                raise DatabaseUnavailable("a lock that is not to be had")
            await go_on.wait()
        done.extend(uuids)
        return [Done()] * len(batch)

    await house.consume(bus, REQUESTS, handle, concurrency=2)
    await bus.publish(boot(1))
    await asyncio.sleep(2 * SLOW_S)
    await bus.publish(boot(2))
    await until(lambda: boot(2).instance_uuid in done, SOON_S)  # the second passes the hung one
    await bus.publish(boot(3))
    try:
        await until(lambda: boot(3).instance_uuid in done, SOON_S)  # and so should the third
    except TimeoutError:
        pytest.fail(f"the third message was not handled within {SOON_S} s beside a hung batch")
    finally:
        go_on.set()
        await until(lambda: len(done) == 3)
