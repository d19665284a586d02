"""The cost of boots in broker messages and commits, counted on the virtual clock: no other program can change that.

Below full load the cost of a boot is the number of its messages and batches (docs/concepts/performance.md).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from msgspec import Struct

from bus.clock import new_uuid
from bus.codec import BATCH
from bus.transport import Outgoing
from lab.simulation.draw import plan_of
from lab.simulation.message_watch import MessageWatch
from lab.simulation.plan import Action, Cell, Order, Plan
from lab.simulation.run import run
from lab.simulation.world import World

FIRST_S, ROUNDS, ROUND_S = 30.5, 8, 1.0
CELLS, HOSTS = 4, 60  # a third of the hosts are of the largest size, which weigh the same
# The messages that are sent whether or not anything is booted.
AT_REST = {
    "compute.heartbeat.v1",
    "compute.hosts.v1",
    "compute.report.v1",
    "conductor.service_states.v1",
    "placement.event.head.v1",
}


ALONE = (
    "build.event.v1",
    "build.request.v1",
    "cell.build.v1",
    "compute.result.v1",
    "compute.spawn.v1",
    "placement.claim.result.v1",
    "placement.claim.v1",
    "placement.event.changes.v1",
)
# Eight that the boot is made of, what deletes its confirmed outbox rows, and a second's record of a cell's mark.
MOST_COMMITS_ALONE = 13.5


class Round(Struct):
    """The mean of a round. messages: broker messages by the kind of what they carry; commits: beyond those at rest."""

    messages: dict[str, float]
    commits: float

    @property
    def all_messages(self) -> float:
        """Of any kind."""
        return sum(self.messages.values())


def plan(at_once: int, *, every_s: float = ROUND_S, rounds: int = ROUNDS, build_s: float = 0.0) -> Plan:
    """So many boots at the same moment, once in `every_s`, on a good day. build_s: how long a build takes its host."""
    rng = random.Random(4)
    orders = [
        Order(at=FIRST_S + every_s * number, action=Action.BUILD, uuid=new_uuid(rng), flavor="m1.tiny", project="red")
        for number in range(rounds)
        for _ in range(at_once)
    ]
    quiet = plan_of(1).without_faults()
    return Plan(
        seed=1,
        cells=tuple(Cell(name=f"c{at}", conductors=1, services=((f"c{at}-s", HOSTS),)) for at in range(CELLS)),
        placements=1,
        schedulers=1,
        subset=1,
        numa_share=0.0,
        skew_s=0.0,
        computes=msgspec.structs.replace(quiet.computes, delay_min_s=build_s, delay_max_s=build_s),
        orders=tuple(orders),
        fault_events=(),
        rates=quiet.rates,
        load_s=FIRST_S + every_s * rounds,
    )


def a_round(
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    every_s: float = ROUND_S,
    rounds: int = ROUNDS,
    build_s: float = 0.0,
) -> Round:
    """The cost of each round: counted from half a second before the first one on, and at rest for as long before."""
    messages: Counter[str] = Counter()
    commits: Counter[bool] = Counter()
    published, committed = MessageWatch.published, World._committed
    began, lasts_s = FIRST_S - 0.5, ROUND_S * ROUNDS

    def count(self: MessageWatch, bus: str, message: Outgoing) -> None:
        published(self, bus, message)
        body = msgspec.json.decode(message.body)
        kind = body[0]["body"]["type"] if message.content_type == BATCH else body.get("type")
        if began <= asyncio.get_running_loop().time() < began + lasts_s and kind not in AT_REST:
            messages[kind] += 1

    def count_commit(self: World, schema: str, look: Callable[[], None]) -> None:
        committed(self, schema, look)
        if began - lasts_s <= (now := self.now()) < began + lasts_s:
            commits[now >= began] += 1

    monkeypatch.setattr(MessageWatch, "published", count)
    monkeypatch.setattr(World, "_committed", count_commit)
    result = run(plan(at_once, every_s=every_s, rounds=rounds, build_s=build_s))
    assert result.breach == "" and set(result.states) == {"active"}
    per_round = {kind: count / rounds for kind, count in sorted(messages.items())}
    return Round(per_round, (commits[True] - commits[False]) / rounds)


def test_a_boot_alone_is_nine_broker_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = a_round(1, monkeypatch)
    assert cost.messages == dict.fromkeys(ALONE, 1.0) | {"build.event.v1": 2.0}, "the cell's event, and the client's"
    assert cost.all_messages == 9
    assert cost.commits <= MOST_COMMITS_ALONE, cost


def test_boots_that_come_together_share_the_batches_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread over four cells by chance they were 32.5 messages, five of them commands to cells, and 28.8 commits."""
    cost = a_round(16, monkeypatch)
    assert cost.messages["cell.build.v1"] <= 3.0, cost
    assert cost.all_messages <= 24.0, cost
    assert cost.commits <= 24.0, cost


def test_of_rounds_that_overlap_each_build_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress left with the next round's commands, apart from its end: 25.0 messages, 10.1 of them events, and 20.6
    commits.
    """
    cost = a_round(16, monkeypatch, every_s=0.15, rounds=40, build_s=0.2)
    assert cost.messages["build.event.v1"] <= 7.5, cost
    assert cost.all_messages <= 23.0, cost
    assert cost.commits <= 19.0, cost
