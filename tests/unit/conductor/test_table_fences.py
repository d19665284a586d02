"""A fence of a host: what waits for the host's word ends, what is active stays, and what it may have kept is a loss."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Spawn
from bus.contracts.moves import MoveKind
from bus.contracts.placement import Claim, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.fences import Fence, losses_of
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.move_scenario import (
    SERVICE_DOWN,
    Scenario,
    active,
    begun,
    claimed,
    request,
    selection,
)
from tests.unit.conductor.scenario import PATIENCE, UUID, host, queried


def fenced(*numbers: int) -> dict[str, Fence]:
    return {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}


def fence(n: int, at: float = 300.0) -> e.HostFenced:
    return e.HostFenced(at=at, host_uuid=host(n))


def lost(before: Instance, after: Instance, n: int) -> list[tuple[str, int]]:
    return [(one.host_uuid, one.attempt) for one in losses_of(before, after, host(n), 300.0)]


def test_nothing_is_commanded_on_a_fenced_host() -> None:
    context = replace(PATIENCE, fences=fenced(1, 2))
    stepped = step(Instance(uuid=UUID), queried(), context)
    claim = question_of(stepped.instance)
    assert not [one for one in stepped.commands if isinstance(one, Spawn)]
    assert isinstance(claim, Claim)
    assert [list(option.allocations) for option in claim.options] == [[host(3)]]
    alone = step(Instance(uuid=UUID), queried(hosts=2), context)
    assert (alone.instance.phase, alone.instance.code) == ((State.RELEASING, State.FAILED), "max_retries_exceeded")
    assert not alone.commands


def test_an_evacuation_on_a_clients_statement_is_undone_when_the_service_is_back() -> None:
    there = replace(selection(2), service="s2")
    made = Scenario(active(), SERVICE_DOWN)
    made.apply(request(MoveKind.EVACUATE, fenced=True, selections=(there,)), claimed())
    down = made.instance
    made.context = PATIENCE
    made.end(2, 2)
    assert made.instance.move is not None
    assert made.instance.move.lost_code == "evacuate.service_up"
    assert not made.spawns
    still = Scenario(down, SERVICE_DOWN)
    still.end(2, 2)
    assert still.instance.state is State.FINISHING


@pytest.mark.parametrize("is_last", [False, True])
def test_a_destination_that_is_fenced_is_given_up(is_last: bool) -> None:
    made = begun(MoveKind.MIGRATE, *((2,) if is_last else (2, 3)))
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.instance.state is State.FINISHING
    before = made.instance
    made.apply(fence(2))
    follows = (State.DESTROYING, State.REVERTING) if is_last else (State.CLAIMING, State.PREPARING)
    assert (made.instance.phase, made.destroys) == (follows, [(2, host(2))])
    if is_last:
        made.apply(fence(2))
        assert isinstance(question_of(made.instance), Revert)
    assert lost(before, made.instance, 2) == [(host(2), 2)]
