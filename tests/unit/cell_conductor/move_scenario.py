"""Parts of the scenarios of moves: requests, answers, and an instance with all that was commanded since."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionKind, ActionState, CellAction, ChangeMachine
from bus.contracts.base import Message, Refusal
from bus.contracts.cell import Destroy, Spawn
from bus.contracts.placement import ClaimOutcome
from cell_conductor.state import events as e
from cell_conductor.state.instance import Instance
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.step import Step
from cell_conductor.transition import step
from tests.unit.cell_conductor.scenario import PATIENCE, UUID, answering, host, queried, run, selection, spawned

ACTION = "d0000000-0000-4000-8000-000000000001"
OTHER = "d0000000-0000-4000-8000-000000000002"
SERVICE_DOWN = replace(PATIENCE, down={"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT)})


def request(
    kind: ActionKind = ActionKind.MIGRATE, *hosts: int, request_id: str = ACTION, **fields: object
) -> e.ActionRequested:
    message = CellAction(
        request_id=request_id,
        instance_uuid=UUID,
        project_id="p",
        kind=kind,
        **{"selections": tuple(selection(n) for n in hosts), **fields},  # type: ignore[arg-type]
    )
    return e.action_event(message, 200.0, request_id)


def unbegun(requested: e.ActionRequested, reason: Refusal | None = None) -> e.ActionRequested:
    """The same of which nothing is to be begun: a query of it, or its message was given up."""
    return e.action_event(requested.request, 300.0, requested.cause, dead_letter_reason=reason, is_query=reason is None)


def active() -> Instance:
    """On host 1, attempt 1."""
    return run(queried(hosts=1), spawned()).instance


def claimed(attempt: int = 2, option: int = 0) -> e.Claimed:
    return e.Claimed(at=201.0, attempt=attempt, option=option, consumer_generation=9)


def refused(attempt: int = 2) -> e.ClaimRefused:
    return e.ClaimRefused(at=201.0, attempt=attempt, outcomes=(ClaimOutcome.NO_CAPACITY,))


def changes(stepped: Step) -> list[ChangeMachine]:
    return [one for one in stepped.commands if isinstance(one, ChangeMachine)]


def ended(instance: Instance, n: int, attempt: int, *, done: bool = True, **fields: object) -> e.ChangeEnded:
    assert instance.action is not None
    known = (*instance.selections, *filter(None, (instance.action.source,)))
    return e.ChangeEnded(
        at=202.0,
        attempt=attempt,
        change_number=instance.action.change_number,
        host_uuid=host(n),
        service=next(one.service for one in known if one.host_uuid == host(n)),
        done=done,
        **fields,  # type: ignore[arg-type]
    )


def seen(query: Any = ANY, service: str = "s1") -> e.SourceAnswered:
    """The source is where the record has it. query: that was asked (ANY: what is asked now)."""
    return e.SourceAnswered(at=211.0, query=query, service=service)


def announced(*commands: Message) -> list[tuple[ActionKind, ActionState, bool, str]]:
    return [(m.kind, m.state, m.terminal, m.code) for m in commands if isinstance(m, ActionEvent)]


class Scenario:
    """An instance, and everything that was commanded and announced since."""

    def __init__(self, instance: Instance, context: object = PATIENCE) -> None:
        self.instance = instance
        self.commands: list[Message] = []
        self.context = context

    def apply(self, *happened: e.Event) -> Step:
        stepped = Step(self.instance)
        for event in happened:
            stepped = step(self.instance, answering(self.instance, event), self.context)  # type: ignore[arg-type]
            self.instance = stepped.instance
            self.commands += stepped.commands
        return stepped

    def end(self, n: int, attempt: int, *, done: bool = True, **fields: object) -> Step:
        return self.apply(ended(self.instance, n, attempt, done=done, **fields))

    @property
    def terminals(self) -> list[tuple[ActionKind, ActionState, str]]:
        return [(m.kind, m.state, m.code) for m in self.commands if isinstance(m, ActionEvent) and m.terminal]

    @property
    def destroys(self) -> list[tuple[int, str]]:
        return [(m.attempt, m.host_uuid) for m in self.commands if isinstance(m, Destroy)]

    @property
    def spawns(self) -> list[Spawn]:
        return [m for m in self.commands if isinstance(m, Spawn)]


def begun(kind: ActionKind = ActionKind.MIGRATE, *hosts: int, **fields: object) -> Scenario:
    made = Scenario(active())
    made.apply(request(kind, *hosts, **fields))
    return made


def to_resized(kind: ActionKind = ActionKind.MIGRATE, **fields: object) -> Scenario:
    made = begun(kind, 2, 3, **fields)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(spawned(attempt=2, at=210.0))
    return made
