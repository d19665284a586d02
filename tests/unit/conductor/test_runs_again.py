"""A machine whose instance is over runs again: its host came back from a copy, or its destruction never happened."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, State
from tests.unit.conductor.scenario import (
    DELETE,
    RELEASED,
    destroys,
    failed,
    host,
    listed,
    missed,
    queried,
    run,
    spawned,
)

GONE = e.Destroyed(at=130.0, attempt=1, host_uuid=host(1), service="s1")
SEQUENCES = {
    State.FAILED: (queried(), failed(final=True), RELEASED),
    State.DELETED: (queried(), spawned(), DELETE, GONE, RELEASED),
}


def over(state: State) -> Instance:
    instance = run(*SEQUENCES[state]).instance
    assert instance.state is state
    return instance


@pytest.mark.parametrize("state", SEQUENCES)
def test_what_is_on_record_as_over_is_destroyed_where_it_runs_again(state: State) -> None:
    instance = over(state)
    found = run(listed(instance), start=instance)
    assert destroys(found) == [(1, host(1))]
    assert found.instance.state is state


@pytest.mark.parametrize("state", SEQUENCES)
def test_a_success_that_comes_when_all_is_over_is_destroyed(state: State) -> None:
    found = run(replace(spawned(), at=1000.0), start=over(state))
    assert destroys(found) == [(1, host(1))]
    assert found.instance.state is state


def test_a_lost_machine_that_runs_again_is_destroyed() -> None:
    """Its client was answered that it is lost, and its allocation was released."""
    up = run(queried(), spawned()).instance
    lost = run(missed(up), RELEASED, start=up).instance
    assert (lost.state, lost.code) == (State.FAILED, "instance.lost")
    assert destroys(run(listed(lost), start=lost)) == [(1, host(1))]
