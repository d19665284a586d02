"""A machine whose host is under another compute service by now: which service's word counts, and which is commanded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from bus.contracts.moves import MoveKind
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.steps import Step
from tests.unit.conductor.move_scenario import Scenario, active, begun, request, to_resized
from tests.unit.conductor.scenario import DELETE, PATIENCE, SILENT, host, orders, queried, reported, run


def changing() -> Instance:
    made = Scenario(active())
    made.apply(request(MoveKind.STOP))
    return made.instance


def offloading() -> Instance:
    made = Scenario(active())
    made.apply(request(MoveKind.SHELVE, offload=True))
    made.end(1, 1, done=True, image="image")
    return made.instance


def undoing() -> Instance:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(e.Claimed(at=201.0, attempt=2, option=0, consumer_generation=9))
    made.end(2, 2)
    made.end(1, 1)
    made.apply(e.SpawnFailed(at=210.0, attempt=2, host_uuid=host(2), service="s1", code="spawn.no_disk"))
    return made.instance


def confirming() -> Instance:
    made = to_resized(MoveKind.MIGRATE, auto_confirm_s=0.0)
    return made.instance


# (what follows when the host has destroyed it, the record that waits for that, the host, the attempt there)
AWAITED = [
    (State.DELETED, lambda: run(DELETE, start=active()).instance, 1, 1),
    (State.OFFLOADED, offloading, 1, 1),
    (State.REVERTING, undoing, 2, 2),
    (State.ACTIVE, confirming, 1, 1),
]


@pytest.mark.parametrize(("then", "made", "n", "attempt"), AWAITED, ids=[str(one[0]) for one in AWAITED])
def test_the_answer_of_a_service_that_had_the_host_before_proves_nothing_destroyed(
    then: State, made: Callable[[], Instance], n: int, attempt: int
) -> None:
    """Its machine runs under the service that has the host now: its allocation was released."""
    waiting = made()
    assert waiting.phase == (State.DESTROYING, then)
    moved = run(reported("s2", attempt, n), start=waiting).instance
    gone = e.Destroyed(at=300.0, attempt=attempt, host_uuid=host(n), service="s1")
    assert run(gone, start=moved) == Step(moved)
    assert run(replace(gone, service="s2"), start=moved).instance.state is not State.DESTROYING


def test_the_answer_of_a_service_that_had_the_host_before_ends_no_build() -> None:
    asking = run(queried(hosts=1), *SILENT[:1]).instance
    gone = e.Destroyed(at=180.0, attempt=1, host_uuid=host(1), service="s9")
    assert run(gone, start=asking) == Step(asking)
    assert run(replace(gone, service="s1"), start=asking).instance.phase == (State.RELEASING, State.FAILED)


def test_the_answer_of_a_service_that_had_the_host_before_ends_no_change() -> None:
    """It has stopped nothing: the machine runs under the service that has the host now."""
    moved = run(reported("s2"), start=changing()).instance
    assert moved.move is not None
    done = e.ChangeEnded(at=300.0, attempt=1, order=moved.move.order, host_uuid=host(1), service="s1", done=True)
    assert run(done, start=moved) == Step(moved)
    assert run(replace(done, service="s2"), start=moved).instance.state is State.ACTIVE


def test_the_orders_of_a_doubted_move_that_has_arrived_go_to_the_service_that_has_the_host_now() -> None:
    """Both machines ran: the confirm, and the revert, commanded the service that had the host before."""
    made = to_resized()
    made.instance = replace(made.instance, doubted=True)
    made.context = replace(PATIENCE, set_back_at=1_000.0)
    made.apply(reported("s2", 1, 1), reported("s3", 2, 2))
    move = made.instance.move
    assert move is not None and move.source is not None
    assert (made.instance.here.service, move.source.service) == ("s3", "s2")
    assert not made.instance.doubted, "both were seen"


@pytest.mark.parametrize("service", ["s1", "s2"])
def test_the_order_to_end_a_build_unless_it_is_complete_goes_to_the_service_that_has_the_host_now(service: str) -> None:
    asking = run(queried(hosts=1), *SILENT[:1])
    assert orders(asking) == [("s1", host(1), 1)]
    unbuilt = replace(reported(service), built=False)
    found = run(unbuilt, start=asking.instance)
    assert orders(found) == ([] if service == "s1" else [("s2", host(1), 1)])
    assert found.instance.here.service == service
