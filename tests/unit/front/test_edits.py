"""`berth quotas|rules|cells set`: what an operator names is done, or refused with a word."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from typer.testing import CliRunner

from berth.cli import app
from berth.commands import objects
from bus.contracts.objects import (
    CellState,
    ObjectKind,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    StoredObject,
)


class Bus:
    """The objects on record, and the changes that are requested."""

    def __init__(self) -> None:
        self.stored: StoredObject | None = None
        self.changes: list[ObjectsChange] = []

    @property
    def bus(self) -> Bus:
        return self

    async def request(self, message: Any, reply: Any, *, timeout_s: float) -> Any:
        if isinstance(message, ObjectsQuery):
            return ObjectsPage(revision=1, objects=() if self.stored is None else (self.stored,), more=False)
        self.changes.append(message)
        return ObjectsChanged(revision=2, changed=())

    def put(self, kind: ObjectKind, name: str, body: dict[str, Any]) -> None:
        self.stored = StoredObject(kind=kind, name=name, body=body, version=1, changed_at=0.0, changed_by="t")


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    made = Bus()

    @contextlib.asynccontextmanager
    async def client(settings: Any) -> AsyncIterator[Bus]:
        yield made

    monkeypatch.setattr(objects, "client", client)
    return made


def berth(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, arguments)
    return ran.exit_code, " ".join(ran.output.replace("\u2502", " ").split())


def test_the_last_limit_of_a_quota_is_not_removed_in_silence(bus: Bus) -> None:
    bus.put(ObjectKind.QUOTA, "demo", {"limits": {"VCPU": 4}})
    status, output = berth("quotas", "set", "demo", "--remove", "VCPU")
    assert (status, bus.changes) == (2, [])
    assert "(quota.last_limit)" in output and "berth quotas delete demo" in output
    assert berth("quotas", "set", "demo", "MEMORY_MB=1", "--remove", "VCPU")[0] == 0
    assert bus.changes[0].changes[0].body == {"limits": {"MEMORY_MB": 1}}


@pytest.mark.parametrize("state", ["disable", "enable"])
def test_a_repeated_decision_about_a_cell_does_not_put_a_removed_one_back(bus: Bus, state: str) -> None:
    bus.put(ObjectKind.CELL, "cell2", {"state": CellState.REMOVED.value, "bus": {"prefix": "new."}})
    status, output = berth("cells", state, "cell2", "--reason", "works")
    assert (status, "(cell.removed)" in output, bus.changes) == (1, True, [])
    assert berth("cells", "set", "cell2", f"{state}d")[0] == 1
    assert berth("cells", "remove", "cell2", "--reason", "again")[0] == 0
    assert berth("cells", "add", "cell2")[0] == 0
    assert bus.changes[-1].changes[0].body == {"state": "enabled", "reason": "", "bus": {"prefix": "new."}}


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--filter", "ram", "filters"),
        ("--weigher", "ram", "weighers"),
        ("--host-subset-size", "3", "host-subset-size"),
        ("--multiplier", "ram=1", "multipliers"),
        ("--remove-multiplier", "ram", "multipliers"),
    ],
)
def test_a_rule_that_is_set_and_unset_at_once_is_refused(bus: Bus, option: str, value: str, field: str) -> None:
    bus.put(ObjectKind.SCHEDULING, "default", {"multipliers": {"ram": 2.0}})
    status, output = berth("rules", "set", option, value, "--unset", field)
    assert (status, bus.changes) == (2, [])
    assert "set and removed" in output
