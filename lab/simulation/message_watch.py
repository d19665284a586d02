"""The checks of every message on every bus: the watches that it is handed to, and where it leads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
from msgspec import Struct

from bus.bus import API
from bus.codec import BATCH
from bus.contracts.actions import ActionEvent
from bus.contracts.base import MAX_AMOUNT, ORDER_OUTDATED, encode, tag_of
from bus.contracts.build import BuildEvent
from bus.contracts.cell import CellBuild, ComputeResult
from bus.contracts.placement import Claim, ClaimAll, Restate
from bus.persistence import memory_database
from bus.persistence.outbox import decode_row
from bus.published_key import CODE
from bus.transport import Outgoing
from lab.simulation.ironic import EXCHANGE
from lab.simulation.watch import Breach

if TYPE_CHECKING:
    from lab.simulation.world import World

ACTION_TAG = tag_of(ActionEvent)
EVENT_TAG, RESULT_TAG = tag_of(BuildEvent), tag_of(ComputeResult)
CLAIM_TAG, GANG_TAG, BUILD_TAG = tag_of(Claim), tag_of(ClaimAll), tag_of(CellBuild)
RESTATE_TAG = tag_of(Restate)


class _Item(Struct):
    body: msgspec.Raw


class _Tagged(Struct):
    type: str = ""


_event = msgspec.json.Decoder(BuildEvent)
_claim = msgspec.json.Decoder(Claim)
_restate = msgspec.json.Decoder(Restate)
_claim_all = msgspec.json.Decoder(ClaimAll)
_build = msgspec.json.Decoder(CellBuild)
_moved = msgspec.json.Decoder(ActionEvent)
_result = msgspec.json.Decoder(ComputeResult)
_items = msgspec.json.Decoder(list[_Item])
_tagged = msgspec.json.Decoder(_Tagged)


class MessageWatch:
    """Looks at what brokers take."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._decisions: set[tuple[str, float]] = set()  # (instance, time of the request) of each command to a cell

    def published(self, bus: str, message: Outgoing) -> None:
        """Look at one message on one bus, before anything may happen to it."""
        if message.exchange == EXCHANGE or message.body in self._world.strange:
            return
        batch = message.content_type == BATCH
        for body in [bytes(item.body) for item in _items.decode(message.body)] if batch else [message.body]:
            if body in self._world.strange:
                continue
            self._world.taken.add((bus, body))
            tag = _tagged.decode(body).type
            if tag == ACTION_TAG and (bus != API or self._world.plan.through_schedulers):
                self._moved(_moved.decode(body), bus)
            # What a cell commanded before its database was set back is refused, and nobody awaits it any more.
            if message.headers.get(CODE) != ORDER_OUTDATED:
                self._world.listener.message(bus, message.exchange, message.routing_key, tag)
            if tag == RESULT_TAG:
                self._world.machines.result(_result.decode(body))
            self._asked(tag, body)
            try:
                if tag == BUILD_TAG:
                    self._sent(_build.decode(body))
                if bus == API and tag == EVENT_TAG:
                    event = _event.decode(body)
                    self._world.listener.event(event)
                    self._world.peer_watch.event(event)
            except Breach as breach:
                self._world.fail(breach)

    def _asked(self, tag: str, body: bytes) -> None:
        if tag == RESTATE_TAG:
            restated = _restate.decode(body)
            self._world.placement_watch.restate(restated)
            self._world.peer_watch.restate(restated)
        if tag == CLAIM_TAG and self._world.probing:
            self._claimed(_claim.decode(body))
        if tag == GANG_TAG and self._world.probing:
            for claim in _claim_all.decode(body).claims:
                self._claimed(claim)

    def _moved(self, event: ActionEvent, bus: str) -> None:
        try:
            self._world.move_watch.on_event(event, bus)
        except Breach as breach:
            self._world.fail(breach)

    def _sent(self, build: CellBuild) -> None:
        # A scheduler whose database is what it was publishes commands of that time again; their cell knows the builds.
        decision = (build.spec.instance_uuid, build.requested_at)
        is_new = decision not in self._decisions
        self._decisions.add(decision)
        if self._world.probing and is_new:
            self._led(build.spec.instance_uuid, [selection.host_uuid for selection in build.selections])
        self._world.peer_watch.sent(build)

    def _claimed(self, claim: Claim) -> None:
        if claim.consumer in self._world.taken_back:  # rest does not wait for it: its hosts were chosen before
            return
        for option in claim.options:
            # A request that comes again checks with a claim that fits nowhere whether it holds something already: that
            # claim names any host of placement and leads no build there.
            if all(amount < MAX_AMOUNT for amounts in option.allocations.values() for amount in amounts.values()):
                self._led(claim.consumer, option.allocations)

    def _led(self, instance: str, providers: Iterable[str]) -> None:
        for uuid in providers:
            if uuid in self._world.left:
                self._world.fail(
                    Breach("left_for_good", f"{instance} is to go to {uuid}, which has left ({self._world.left[uuid]})")
                )


@contextmanager
def no_message_is_lost(world: World) -> Iterator[None]:
    """Meanwhile a row leaves an outbox when a broker has taken its messages. Progress that a later event of the same
    request replaces needs no broker.
    """
    drop = memory_database._drop

    def dropped(rows: dict[Any, Any], keys: Iterable[Any]) -> None:
        gone = list(keys)
        for row in [rows[key] for key in gone if isinstance(rows.get(key), memory_database.Row)]:
            for item in decode_row(row.body):
                is_progress = isinstance(item.message, BuildEvent | ActionEvent) and not item.message.terminal
                if not is_progress and (item.bus, encode(item.message)) not in world.taken:
                    what = f"{tag_of(type(item.message))} for {item.bus}"
                    world.fail(Breach("no_message_is_lost", f"{what} left its outbox, and no broker has taken it"))
        drop(rows, gone)

    with patch.object(memory_database, "_drop", dropped):
        yield
