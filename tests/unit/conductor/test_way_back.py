"""No move that has arrived is undone before its source was seen, and what waits for a silent host shows it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import FoundMachine, MachinesFound
from bus.contracts.moves import MoveKind
from bus.faults import Fault, RequestTimeout
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.table import question_of
from cell_conductor.domain.way_back import (
    SOURCE_LOST,
    SOURCE_SILENT,
    SOURCE_UNREPORTED,
    SourceQuery,
    answer_about,
)
from tests.unit.conductor.move_scenario import OTHER, Scenario, begun, claimed, request, seen, to_resized
from tests.unit.conductor.scenario import PATIENCE, UUID, host, selection, spawned

QUERIED = SourceQuery(host(1), "s1", 1, OTHER)
DOWN = replace(PATIENCE, down={"s2": Lease(service="s2", epoch=1, state=LeaseState.SILENT)})


def reverting(**fields: object) -> Scenario:
    made = to_resized(**fields)
    made.commands.clear()
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    return made


# --- a revert


def test_a_revert_queries_for_its_source_first_and_gives_nothing_up() -> None:
    made = reverting()
    assert (made.instance.state, made.commands) == (State.RESIZED, [])
    assert question_of(made.instance) == QUERIED
    made.apply(seen())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.REVERTING), [(2, host(2))])
    assert question_of(made.instance) is None


# --- what waits shows it


def test_time_alone_does_not_give_the_source_up_for_a_destination_that_is_down() -> None:
    there = replace(selection(2), service="s2")
    made = begun(MoveKind.MIGRATE, selections=(there,), auto_confirm_s=5.0)
    made.apply(claimed())
    made.apply(e.ChangeEnded(at=202.0, attempt=2, order=_order(made), host_uuid=host(2), service="s2", done=True))
    made.end(1, 1)
    made.apply(replace(spawned(attempt=2, at=210.0), service="s2"))
    made.context = DOWN
    made.commands.clear()
    made.apply(e.TimedOut(at=215.0))
    assert (made.instance.state, made.commands, made.instance.deadline) == (State.RESIZED, [], 245.0)
    made.context = PATIENCE
    made.apply(e.TimedOut(at=245.0))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE)


def _order(made: Scenario) -> int:
    assert made.instance.move is not None
    return made.instance.move.order


# --- the answers of the services


def found(service: str = "s1", *machines: int, hosts: tuple[int, ...] = (1,)) -> MachinesFound:
    """An answer: the attempts that it has on host 1, and the hosts that it has looked at."""
    return MachinesFound(
        service=service,
        machines=tuple(
            FoundMachine(instance_uuid=UUID, host_uuid=host(1), host="host-1", service=service, attempt=one)
            for one in machines
        ),
        hosts=tuple(map(host, hosts)),
    )


NONE = RequestTimeout("no answer")


@pytest.mark.parametrize(
    ("answers", "code", "service"),
    [
        ([("s1", found("s1", 1))], "", "s1"),
        ([("s1", NONE), ("s9", found("s9", 1))], "", "s9"),
        ([("s1", found("s1", hosts=())), ("s9", found("s9", 1))], "", "s9"),
        ([("s1", found("s1", 2))], SOURCE_LOST, ""),
        ([("s1", found("s1"))], SOURCE_LOST, ""),
        ([("s1", found("s1", hosts=())), ("s9", found("s9"))], SOURCE_LOST, ""),
        ([("s1", found("s1", hosts=()))], SOURCE_UNREPORTED, ""),
        ([("s1", found("s1", hosts=(2,))), ("s9", NONE)], SOURCE_UNREPORTED, ""),
        ([("s1", NONE)], SOURCE_SILENT, ""),
        ([("s1", NONE), ("s9", found("s9"))], SOURCE_SILENT, ""),
        ([("s9", found("s9")), ("s1", NONE)], SOURCE_SILENT, ""),
        ([("s9", found("s9"))], SOURCE_SILENT, ""),
        ([("s1", found("s1", 1, hosts=()))], SOURCE_UNREPORTED, ""),  # by its record, which proves nothing
    ],
)
def test_the_source_is_seen_only_where_its_host_lists_that_very_machine(
    answers: list[tuple[str, MachinesFound | Fault]], code: str, service: str
) -> None:
    answered = answer_about(UUID, QUERIED, answers, 211.0)
    assert (answered.by, answered.code, answered.service) == (OTHER, code, service)
