"""The load of a chaos run bounds itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from berth.client import BuildClient, Track
from bus.clock import SystemClock
from bus.contracts.build import BuildEvent, BuildRecord, BuildRequest, BuildState
from lab.chaos.churn import STUCK_S, Churn
from lab.chaos.plan import ChaosPlan


class HandClock(SystemClock):
    """Moved by the tasks that wait."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class StubClient:
    """Takes every build; `answers`: whether builds ever end. Each wait lasts as long as it may."""

    def __init__(self, clock: HandClock, *, answers: bool, events: int = 1) -> None:
        self.tracks: dict[str, Track] = {}
        self.deletes: list[str] = []
        self._events = events
        self._clock = clock
        self._answers = answers
        self._notify: Callable[[BuildEvent], None]

    @property
    def unfinished(self) -> int:
        return sum(track.ended_at is None for track in self.tracks.values())

    def on_event(self, notify: Callable[[BuildEvent], None]) -> None:
        self._notify = notify

    async def boot(self, requests: Sequence[BuildRequest], *, retry_for_s: float) -> None:
        for request in requests:
            self.tracks[request.instance_uuid] = Track(
                instance_uuid=request.instance_uuid,
                flavor=request.flavor,
                intended_at=0.0,
                published_at=self._clock.now,
            )

    async def until(self, there: Callable[[], bool], timeout_s: float) -> bool:
        self._clock.now += timeout_s
        waiting = [uuid for uuid, track in self.tracks.items() if track.ended_at is None]
        if self._answers and waiting:
            track = self.tracks[waiting[0]]
            track.ended_at = self._clock.now
            for sequence in range(9, 9 + self._events):
                self._notify(
                    BuildEvent(instance_uuid=waiting[0], project_id="p", state=BuildState.ACTIVE, sequence=sequence)
                )
        return True

    async def delete(self, builds: Sequence[BuildRecord], *, retry_for_s: float) -> list[Track]:
        self.deletes += [build.instance_uuid for build in builds]
        return [self.tracks[build.instance_uuid] for build in builds]


async def stormed(plan: ChaosPlan, *, answers: bool) -> tuple[Churn, HandClock]:
    clock = HandClock()
    client: BuildClient = StubClient(clock, answers=answers)  # type: ignore[assignment]
    churn = Churn(client, plan, clock=clock, rng=random.Random(1))
    await churn.run()
    return churn, clock


PLAN = ChaosPlan(boots=500, in_flight=10, in_flight_most=10, early_deletes=0.0, longest_s=100.0)


async def test_a_load_that_takes_too_long_ends_and_reports_it() -> None:
    churn, clock = await stormed(PLAN, answers=True)
    assert churn.stopped == "after 100 s"
    assert 100.0 < clock.now < 110.0
    assert 50 < len(churn.accepted) < 500


async def test_a_load_that_gets_nothing_through_ends_and_reports_it() -> None:
    churn, clock = await stormed(ChaosPlan(boots=500, in_flight=10, in_flight_most=10), answers=False)
    assert churn.stopped.startswith("nothing has ended")
    assert STUCK_S < clock.now < STUCK_S + 10.0


async def test_a_load_that_gets_through_is_whole() -> None:
    churn, _ = await stormed(ChaosPlan(boots=50, in_flight=10, in_flight_most=10, early_deletes=0.0), answers=True)
    assert (churn.stopped, len(churn.accepted)) == ("", 50)


async def test_an_instance_that_is_announced_as_active_twice_is_deleted_once() -> None:
    """A cell that forgot its announcement repeats it under a new number; nothing comes of a second delete."""
    clock = HandClock()
    stub = StubClient(clock, answers=True, events=2)
    client: BuildClient = stub  # type: ignore[assignment]
    plan = ChaosPlan(boots=60, in_flight=10, in_flight_most=10, early_deletes=0.0, population=5)
    await Churn(client, plan, clock=clock, rng=random.Random(1)).run()
    assert len(stub.deletes) > 20
    assert len(set(stub.deletes)) == len(stub.deletes)
