"""Dead letters older than the records that would make them harmless: replayed they would undo later changes.

A build's delete is remembered by its cell for `conductor.deleted_retention_s`, a release of its claim by placement for
`placement.ended_attempt_retention_s`. A request for a build needs no check here: the schedulers refuse it
(`request.too_old`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec import Struct

from berth.config.settings import Settings
from bus.consuming import dead_letters
from bus.consuming.dead_letters import DeadLetter
from bus.consuming.outcome import EXPIRED
from bus.contracts.base import tag_of
from bus.contracts.catalogue import queues_taking
from bus.contracts.cell import CellBuild
from bus.contracts.placement import Claim, Swap
from bus.contracts.queues import BY_QUEUE
from bus.faults import Transient
from bus.transport import BusError, Transport
from scheduler_worker.upkeep.purge import CLOCK_SLACK_S

KEPT_S: Mapping[str, Callable[[Settings], float]] = {
    tag_of(CellBuild): lambda settings: settings.conductor.deleted_retention_s,
    tag_of(Claim): lambda settings: settings.placement.ended_attempt_retention_s,
    tag_of(Swap): lambda settings: settings.placement.ended_attempt_retention_s,
}


class SentBack(Struct, frozen=True):
    """Which dead letters were sent back, and which stayed: those that are too old, and those that are never sent back,
    with the code for it. fault: the reason why those behind the last one that was sent were not read.
    """

    sent: list[str]
    too_old: list[str]
    blocked: dict[str, str]
    fault: BusError | Transient | None = None


class _Meta(Struct):
    sent_at: float = 0.0


class _Body(Struct):
    type: str = ""


class _Item(Struct):
    meta: _Meta
    body: _Body


_items = msgspec.json.Decoder(list[_Item]).decode
_body = msgspec.json.Decoder(_Body).decode


async def send_back(
    transport: Transport, queue: str, ids: Collection[str] | None, settings: Settings, *, now: float, old: bool
) -> SentBack:
    """Send dead letters (those named, or all) back to their queue; the too old ones only with `old`. A dead letter that
    `blocks_replay` stays. Raises BusError, Transient where none was sent before.
    """
    sent: list[str] = []
    kept: list[str] = []
    blocked: dict[str, str] = {}

    def may_go(dead_letter: DeadLetter) -> bool:
        if dead_letter.blocks_replay:
            blocked[dead_letter.id] = dead_letter.blocks_replay
            return False
        if old or not is_expired(dead_letter, settings, now):
            return True
        kept.append(dead_letter.id)
        return False

    fault = None
    try:
        async for ident in dead_letters.send_each(transport, queue, ids, may_go=may_go):
            sent.append(ident)  # noqa: PERF401  (those before a fault stay)
    except (BusError, Transient) as error:
        if not sent:
            raise
        fault = error
    return SentBack(sent, kept, blocked, fault)


def is_expired(dead_letter: DeadLetter, settings: Settings, now: float) -> bool:
    """Whether something in it is so old that the record of its delete or release may be purged. Without a time it is.

    A message that expired in its queue was to be handled by then or not at all; its requester got that answer.
    """
    if dead_letter.code == EXPIRED:
        return True
    for names, sent_at in _messages(dead_letter):
        for name in KEPT_S.keys() & names:
            keep_s = KEPT_S[name](settings)
            # The clock that stamped it may be off; as when the schedulers judge a request.
            longest_s = max(keep_s - CLOCK_SLACK_S, keep_s / 2)
            if not sent_at or now - sent_at > longest_s:
                return True
    return False


def _messages(dead_letter: DeadLetter) -> list[tuple[Collection[str], float | None]]:
    """(what it may be read as, when it was sent) of each message in a dead letter. What is not named is read by its
    key.
    """
    any_of_queue = _kinds_of(dead_letter.queue)
    try:
        if dead_letter.batch:
            found = _items(dead_letter.body)
            return [({one.body.type} - {""} or any_of_queue, one.meta.sent_at or dead_letter.died_at) for one in found]
        return [({dead_letter.type, _body(dead_letter.body).type} - {""} or any_of_queue, dead_letter.sent_at)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # its queue refuses it
        return [({dead_letter.type}, dead_letter.sent_at)]


def _kinds_of(queue: str) -> Collection[str]:
    return {tag_of(row.message) for row in queues_taking(queue)} if queue in BY_QUEUE else KEPT_S.keys()
