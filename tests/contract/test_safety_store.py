"""One suite for both keepers of unexplained machines and breakers."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.safety import ADOPT, DESTROY, KEEP, DecidedMachine, Safety

A, B, HOST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1")
OURS = Unexplained(A, 3, HOST, UnexplainedKind.QUARANTINED, "no record")
FOREIGN = Unexplained(B, 0, HOST, UnexplainedKind.FOREIGN, "no mark of this deployment")


@pytest.fixture
def safety(instances: InstanceStore) -> Safety:
    return instances.safety


async def test_the_identity_is_the_schemas_own(instances: InstanceStore) -> None:
    first = instances.deployment
    await instances.open()
    assert instances.deployment == first and len(first) == 36


async def test_what_is_recorded_again_keeps_when_it_was_first_seen(safety: Safety) -> None:
    first = await safety.record("s", [OURS, FOREIGN], 1.0)
    assert {(one.machine.uuid, one.is_new, one.first_seen) for one in first} == {(A, True, 1.0), (B, True, 1.0)}
    (again,) = await safety.record("t", [OURS], 2.0)
    assert (again.is_new, again.service, again.first_seen, again.last_seen) == (False, "t", 1.0, 2.0)
    assert [(one.machine.uuid, one.is_new) for one in await safety.records()] == [(A, False), (B, False)]
    await safety.delete([(HOST, A), (HOST, HOST)])
    assert [one.machine for one in await safety.records()] == [FOREIGN]


async def test_an_operators_word_is_for_one_attempt_of_a_quarantined_machine(safety: Safety) -> None:
    await safety.record("s", [OURS, FOREIGN], 1.0)
    assert await safety.decide([DecidedMachine(B)], DESTROY, "op", 2.0) == [], (
        "a foreign machine is not for berth to destroy"
    )
    assert await safety.decide([DecidedMachine(A)], KEEP, "op", 2.0) == [(HOST, A)]
    (kept,) = await safety.record("s", [OURS], 3.0)
    assert (kept.verdict, kept.decided_by, kept.decided_at) == (KEEP, "op", 2.0)
    (newer,) = await safety.record("s", [replace(OURS, attempt=4)], 4.0)
    assert newer.verdict == ""


async def test_an_operators_word_is_kept_while_reports_record_the_machine_again(safety: Safety) -> None:
    await safety.record("s", [OURS], 1.0)
    for number in range(20):
        verdict = DESTROY if number % 2 else KEEP
        async with asyncio.TaskGroup() as group:
            group.create_task(safety.record("s", [OURS, replace(OURS, uuid=B)], 3.0))
            decided = group.create_task(safety.decide([DecidedMachine(A)], verdict, "op", 2.0))
            group.create_task(safety.record("s", [OURS, replace(OURS, uuid=B)], 3.0))
        assert decided.result() == [(HOST, A)]
        assert {one.machine.uuid: one.verdict for one in await safety.records()} == {A: verdict, B: ""}


async def test_a_word_about_one_host_is_not_for_the_others(safety: Safety) -> None:
    other = replace(OURS, host_uuid=B)
    await safety.record("s", [OURS, other], 1.0)
    assert await safety.decide([DecidedMachine(A, A)], ADOPT, "op", 2.0) == [], "no machine of it is there"
    assert await safety.decide([DecidedMachine(A, HOST)], ADOPT, "op", 2.0) == [(HOST, A)]
    assert {one.machine.host_uuid: one.verdict for one in await safety.records()} == {HOST: ADOPT, B: ""}


async def test_a_breaker_is_reset_once(safety: Safety) -> None:
    assert await safety.breaker("s") is None and not await safety.reset("s", "op", 1.0)
    tripped = Breaker(service="s", tripped_at=1.0, lost=6, machines=("x@y",))
    await safety.trip(tripped)
    assert await safety.breaker("s") == tripped and await safety.breakers() == [tripped]
    assert await safety.reset("s", "op", 2.0) and not await safety.reset("s", "op", 3.0)
    assert await safety.breaker("s") == replace(tripped, reset_at=2.0, reset_by="op")


async def test_many_machines_are_decided_about_at_once_as_they_were_seen(safety: Safety) -> None:
    seen = [replace(OURS, uuid=f"{n:08d}-0000-4000-8000-000000000000") for n in range(1_218)]
    await safety.record("s", [*seen, FOREIGN], 1.0)
    newer = replace(seen[7], attempt=4)
    await safety.record("s", [newer], 2.0)
    named = [DecidedMachine(one.uuid, one.host_uuid, one.attempt) for one in (*reversed(seen), seen[3], FOREIGN)]
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(safety.record("s", [one for one in seen if one is not seen[7]], 3.0))
            decided = group.create_task(safety.decide(named, DESTROY, "op", 2.0))
    places = sorted((one.host_uuid, one.uuid) for one in seen if one is not seen[7])
    assert decided.result() == places
    assert {one.place for one in await safety.records() if one.verdict == DESTROY} == set(places)


async def test_a_breaker_that_tripped_again_is_not_reset_by_who_saw_the_first(safety: Safety) -> None:
    await safety.trip(Breaker(service="s", tripped_at=1.0, lost=6))
    assert await safety.reset("s", "op", 2.0, tripped_at=1.0)
    again = Breaker(service="s", tripped_at=3.0, lost=7)
    await safety.trip(again)
    assert not await safety.reset("s", "op", 4.0, tripped_at=1.0) and await safety.breakers() == [again]
    assert await safety.reset("s", "op", 4.0, tripped_at=3.0)
