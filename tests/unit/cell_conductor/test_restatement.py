"""What a recovery has placement hold of an instance that has a machine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Selection
from cell_conductor.rules.recovered import restatement
from cell_conductor.rules.recovery_facts import KnownInstance, Reconciled
from cell_conductor.state.instance import State
from tests.unit.cell_conductor.records import record
from tests.unit.cell_conductor.scenario import host, selection

CHILD = "00000000-0000-4000-8000-0000000000ff"
MIGRATION = "00000000-0000-4000-8000-0000000000fe"
HERE, ELSEWHERE = selection(1), selection(2)
SAME_IN_A_CHILD = replace(HERE, allocations={CHILD: HERE.allocations[host(1)]})
MORE = replace(HERE, allocations={host(1): {name: 2 * one for name, one in HERE.allocations[host(1)].items()}})


@pytest.mark.parametrize(
    ("own", "of_migration", "wanted"),
    [
        pytest.param((HERE,), (), "nothing", id="as it is"),
        pytest.param((SAME_IN_A_CHILD,), (), "nothing", id="the same of another provider of the host"),
        pytest.param((HERE,), (ELSEWHERE,), None, id="only its migration is over"),
        pytest.param((ELSEWHERE,), (HERE,), HERE.allocations, id="its migration has what it is to have"),
        # Seed 7 of moves and cell-restored: the root of the host had no inventory of it any more.
        pytest.param((ELSEWHERE,), (SAME_IN_A_CHILD,), SAME_IN_A_CHILD.allocations, id="where the host has it now"),
        pytest.param((MORE,), (), HERE.allocations, id="other amounts"),
        pytest.param((), (), HERE.allocations, id="nothing there"),
    ],
)
def test_an_instance_is_to_hold_what_its_machine_has(
    own: tuple[Selection, ...], of_migration: tuple[Selection, ...], wanted: Any
) -> None:
    result = Reconciled(record(State.ACTIVE, attempt=1, selections=(HERE,), selection_index=0))
    known = KnownInstance(
        selections=(*own, *of_migration), own_count=len(own), migrations=(MIGRATION,) if of_migration else ()
    )
    told = restatement(result, known)
    if told is None:
        assert wanted == "nothing"
    else:
        assert told.allocations == (None if wanted == "nothing" else wanted)
