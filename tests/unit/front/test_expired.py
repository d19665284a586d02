"""Dead letters that may not go back: a delete or a release of them may be forgotten."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from berth.commands.expired import is_expired, send_back
from berth.settings import Settings
from bus.clock import SystemClock
from bus.consuming.dead_letters import DeadLetter
from bus.contracts.catalogue import BY_QUEUE, DEAD
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Outgoing
from bus.wire import SENT_AT

NOW = 1_800_000_000.0
HOUR_S = 3600.0
BUILD, CLAIM, REQUEST, DELETE = "cell.build.v1", "placement.claim.v1", "build.request.v1", "cell.delete.v1"
QUEUE = "conductor.requests"


def letter(kind: str, age_s: float | None, *, body: bytes = b"{}", batch: bool = False, code: str = "c") -> DeadLetter:
    sent_at = None if age_s is None else NOW - age_s
    return DeadLetter(
        queue=QUEUE,
        position=0, id="m", code=code, reason="", type="" if batch else kind, exchange="", routing_key="", cause="",
        died_at=NOW, sent_at=sent_at, batch=batch, body=body, headers={},
    )  # fmt: skip


def items(*ages_s: float) -> bytes:
    return json.dumps([{"meta": {"id": "x", "sent_at": NOW - age}, "body": {"type": BUILD}} for age in ages_s]).encode()


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(letter(BUILD, 22 * HOUR_S), False, id="its delete is remembered for a day"),
        pytest.param(letter(BUILD, 23.5 * HOUR_S), True, id="clocks may be an hour off"),
        pytest.param(letter(BUILD, None), True, id="of any age"),
        pytest.param(letter(CLAIM, 30 * HOUR_S), True, id="a claim, whose fence is gone"),
        pytest.param(letter(CLAIM, HOUR_S), False, id="a claim, fenced if it was released"),
        pytest.param(letter(REQUEST, 900 * HOUR_S), False, id="the schedulers judge requests themselves"),
        pytest.param(letter(DELETE, 1.0, code="broker.expired"), True, id="its requester knows that it is not done"),
        pytest.param(letter(DELETE, 900 * HOUR_S), False, id="a delete never builds anything"),
        pytest.param(letter("", 30 * HOUR_S, body=b'{"type": "cell.build.v1"}'), True, id="named in its body only"),
        pytest.param(letter("", 1.0, body=items(HOUR_S, 30 * HOUR_S), batch=True), True, id="one old among many"),
        pytest.param(letter("", 90 * HOUR_S, body=items(HOUR_S, 2 * HOUR_S), batch=True), False, id="none old"),
        pytest.param(letter("", None, body=b"[" * 100_000, batch=True), False, id="unreadable: refused where it goes"),
        pytest.param(letter("", None, body=b'{"type": "\xff"}'), False, id="no text: refused where it goes"),
    ],
)
def test_what_is_older_than_what_is_remembered(one: DeadLetter, *, expected: bool) -> None:
    assert is_expired(one, Settings(), NOW) is expected


@pytest.mark.parametrize(("old", "sent"), [(False, ["young"]), (True, ["ancient", "young"])])
async def test_old_builds_are_replayed_only_on_request(old: bool, sent: list[str]) -> None:
    transport = MemoryTransport(MemoryBroker(SystemClock()), "cell1")
    await transport.open()
    row = BY_QUEUE[QUEUE]
    await transport.declare_shared()
    await transport.declare_queue(row, QUEUE, row.bindings)
    headers: Mapping[str, float]
    for name, age_s in (("ancient", 48 * HOUR_S), ("young", HOUR_S)):
        headers = {SENT_AT: (NOW - age_s) * 1000}
        await transport.publish(
            Outgoing(exchange=DEAD, routing_key=QUEUE, body=b"{}", type=BUILD, message_id=name, headers=headers)
        )
    back = await send_back(transport, QUEUE, None, Settings(), now=NOW, old=old)
    assert (back.sent, back.too_old) == (sent, [] if old else ["ancient"])
    assert await transport.depth(QUEUE) == len(sent)
    await transport.close()
