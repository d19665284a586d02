"""The course of a chaos run: how much load, which faults, how often. All of it drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct

from berth.config.settings import ComputeSettings
from berth.up.servers import SystemPlan
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.faults import Faults

BROKER = "broker"
DATABASE = "database"
SERVERS = (BROKER, DATABASE)
# Processes that stand still at once, and all that is broken at once: the rest must have a chance.
MAX_PAUSED = 2
MAX_BROKEN = 5
# A server that was unavailable gets no fault for this long: on a busy machine RabbitMQ takes ten seconds and more to
# start, and a broker that is never there shows nothing.
SERVER_RESTS_S = 12.0


class FaultKind(StrEnum):
    """The fault of a process or of connections."""

    KILL = "kill"
    STOP = "stop"
    PAUSE = "pause"
    CUT = "cut"
    DELAY = "delay"
    STALL = "stall"


class FaultSpec(Struct, frozen=True):
    """One sort of fault: how often it is in the deck, and how long it lasts (seconds)."""

    kind: FaultKind
    role: str
    copies: int
    shortest_s: float = 0.0
    longest_s: float = 0.0


class PlannedFault(Struct, frozen=True, kw_only=True):
    """One fault: `target` is a worker's name, "broker" or "database".

    lasts_s: until it is started again, goes on, or connections are left alone. share: of the connections that are
    hit. delay_s: added to each direction.
    """

    kind: FaultKind
    role: str
    target: str
    lasts_s: float
    share: float = 1.0
    delay_s: float = 0.0

    @property
    def label(self) -> str:
        """The sort of fault, as it is counted."""
        return f"{self.kind}_{self.role}"


# AMQP's heartbeat is 10 s and its loss noticed within 30; a compute service's is 1 s, and 10 s of silence mean "down"
# here. So a short pause is longer than the one, a long pause longer than both. Broker and database refuse everything
# while they are unavailable, so there are fewer of those.
DECK = (
    *(FaultSpec(FaultKind.KILL, role, 4, 0.0, 2.0) for role in ("scheduler", "placement", "conductor", "compute")),
    *(FaultSpec(FaultKind.STOP, role, 1, 0.0, 1.0) for role in ("scheduler", "placement", "conductor", "compute")),
    *(FaultSpec(FaultKind.PAUSE, role, 1, 2.0, 12.0) for role in ("scheduler", "placement", "conductor", "compute")),
    *(FaultSpec(FaultKind.PAUSE, role, 1, 31.0, 36.0) for role in ("scheduler", "placement", "conductor", "compute")),
    FaultSpec(FaultKind.KILL, BROKER, 1, 0.0, 1.5),
    FaultSpec(FaultKind.KILL, DATABASE, 2, 0.0, 1.5),
    *(FaultSpec(FaultKind.STOP, server, 1, 0.0, 1.5) for server in SERVERS),
    *(FaultSpec(FaultKind.PAUSE, server, 1, 2.0, 6.0) for server in SERVERS),
    *(FaultSpec(FaultKind.CUT, server, 3) for server in SERVERS),
    *(FaultSpec(FaultKind.DELAY, server, 1, 2.0, 8.0) for server in SERVERS),
    *(FaultSpec(FaultKind.STALL, server, 1, 2.0, 15.0) for server in SERVERS),
)
SHARES = (0.1, 0.3, 0.6, 1.0)
DELAYS_S = (0.01, 0.05, 0.2)


class FaultSchedule:
    """Deals faults in random order, each card as often as the deck has it before the next shuffle."""

    def __init__(self, cards: Sequence[FaultSpec], rng: random.Random) -> None:
        self._cards = [card for card in cards for _ in range(card.copies)]
        self._rng = rng
        self._left: list[FaultSpec] = []

    def deal(self, free: Mapping[str, Sequence[str]], *, paused: int = 0, broken: int = 0) -> PlannedFault | None:
        """The next fault for the parts that are `free` ({role: names that nothing is done to now}), or None: enough is
        broken.
        """
        if broken >= MAX_BROKEN:
            return None
        for _ in range(2):
            for at, card in enumerate(self._left):
                if not free.get(card.role) or (card.kind is FaultKind.PAUSE and paused >= MAX_PAUSED):
                    continue
                del self._left[at]
                return self._fault(card, free[card.role])
            self._left += self._rng.sample(self._cards, len(self._cards))
        return None

    def _fault(self, card: FaultSpec, names: Sequence[str]) -> PlannedFault:
        rng = self._rng
        return PlannedFault(
            kind=card.kind,
            role=card.role,
            target=rng.choice(names),
            lasts_s=round(rng.uniform(card.shortest_s, card.longest_s), 2),
            share=rng.choice(SHARES),
            delay_s=rng.choice(DELAYS_S),
        )


# Machines of one gang, and how many of them are enough.
GANG, GANG_MIN = 3, 2


class ChaosPlan(Struct, frozen=True, kw_only=True):
    """One run. population: machines kept before some are deleted.

    in_flight: builds and deletes at once, a closed loop. A request that has not ended for `stuck_after_s` (a paused
    process has it) no longer counts, up to `in_flight_most`: or everything would soon wait for one stopped process.

    longest_s: the load ends then, whatever is left of it, and the accepted requests are judged.
    actions: requests about active instances, beside the builds. gangs: share of builds that are requests for GANG
    machines that start together. drains: hosts that are emptied one after the other, and taken back.
    early_deletes: share of builds that are deleted while they are being built. retry_for_s: how long one publish is
    repeated while the broker is unavailable. rest_s: how long the system may take to come to rest once faults have
    stopped.
    """

    boots: int = 20_000
    fault_every_s: float = 2.0
    most_faults: int = 1_000_000
    seed: int = 1
    in_flight: int = 150
    in_flight_most: int = 1_500
    stuck_after_s: float = 5.0
    population: int = 1_500
    early_deletes: float = 0.03
    actions: int = 0
    actions_in_flight: int = 60
    gangs: float = 0.0
    drains: int = 0
    retry_for_s: float = 120.0
    rest_s: float = 180.0
    longest_s: float = 3_600.0
    mix: Mapping[str, float] = msgspec.field(
        default_factory=lambda: {"m1.tiny": 4.0, "m1.small": 4.0, "m1.medium": 2.0}
    )
    deck: tuple[FaultSpec, ...] = DECK
    processes: SystemPlan = SystemPlan(
        schedulers=2,
        placements=2,
        conductors_per_cell=2,
        computes_per_cell=2,
        durable=False,
        compute=ComputeSettings(
            simulated=SimulatedConfig(
                hosts=25,
                sizes=(HostSize(vcpus=16, memory_mb=65_536, disk_gb=2_000),),
                gpu_share=0.0,
                faults=Faults(delay_max_s=0.2, fail_rate=0.05, leftover_rate=0.3, duplicate_rate=0.05),
            )
        ),
    )
