"""`berth baremetal` against the stand-in: which nodes serve nothing and why, and holding one back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from berth.cli import app
from berth.trial.ironic_stand_in import IronicStandIn, Silent
from bus.clock import SystemClock

FOREIGN = "90000000-0000-4000-8000-000000000000"


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1))
    await stand_in.start()
    yield stand_in
    await stand_in.stop()


@pytest.fixture
def berth(ironic: IronicStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("BERTH_COMPUTE__IRONIC__URL", ironic.url)
    monkeypatch.setenv("BERTH_STATE_DIR", str(tmp_path))

    async def command(*arguments: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, ["baremetal", *arguments])

    return command


async def test_what_is_wrong_with_each_node_is_printed_in_ironics_words(ironic: IronicStandIn, berth: Any) -> None:
    ironic.pool.plan(2)  # gold and silver: both are served, and nothing is wrong with them
    wrong = {
        "classless": {"resource_class": None, "provision_state": "available"},
        "lead": {"resource_class": "lead", "provision_state": "available"},
        "dark": {"resource_class": "baremetal-gold", "provision_state": "available", "power_state": None},
        "broken": {
            "resource_class": "baremetal-gold",
            "provision_state": "clean failed",
            "last_error": "disk 0 is dead",
        },
        "away": {
            "resource_class": "baremetal-gold",
            "provision_state": "available",
            "maintenance": True,
            "maintenance_reason": "a new fan",
        },
    }
    for name, fields in wrong.items():
        ironic.pool.add(**{"name": name, "power_state": "power off", **fields})
    result = await berth("problems", "--json")
    assert result.exit_code == 1, result.output
    answer = json.loads(result.output)
    assert {node["name"]: node["problems"] for node in answer["nodes"]} == {
        "classless": ["it has no resource class"],
        "lead": ["no flavor requests CUSTOM_LEAD"],
        "dark": ["its power state is not known"],
        "broken": ["it is in clean failed"],
        "away": ["it is in maintenance: a new fan"],
    }
    assert {node["name"]: node["ironic_reason"] for node in answer["nodes"]}["broken"] == "disk 0 is dead"
    assert answer["flavors"] == []
    assert "disk 0 is dead" in (await berth("problems")).output
    assert "disk 0 is dead" in (await berth("show", "broken")).output


async def test_nothing_wrong_prints_nothing(ironic: IronicStandIn, berth: Any) -> None:
    ironic.pool.plan(2)
    result = await berth("problems")
    assert (result.exit_code, result.output) == (0, "")


async def test_flavors_that_no_node_serves_are_named(ironic: IronicStandIn, berth: Any) -> None:
    ironic.pool.plan(1, ("baremetal-gold",))
    result = await berth("problems", "--json")
    assert result.exit_code == 1 and json.loads(result.output)["flavors"] == ["bm.silver"]


async def test_a_node_is_held_back_and_released_and_anothers_maintenance_is_left(
    ironic: IronicStandIn, berth: Any
) -> None:
    node = ironic.pool.add(name="one", provision_state="available", power_state="power off", resource_class="gold")
    assert (await berth("quarantine", "one", "--reason", "it flaps")).exit_code == 0
    assert (node["maintenance"], node["maintenance_reason"]) == (True, "berth quarantine: it flaps")
    assert (await berth("release", "one")).exit_code == 0
    assert node["maintenance"] is False
    node.update(maintenance=True, maintenance_reason="a new fan")
    result = await berth("release", "one")
    assert result.exit_code == 1 and node["maintenance"] is True


async def test_a_foreign_instance_is_called_so(ironic: IronicStandIn, berth: Any) -> None:
    ironic.pool.add(name="theirs", provision_state="active", resource_class="baremetal-gold", instance_uuid=FOREIGN)
    assert f"{FOREIGN} (foreign)" in (await berth("show", "theirs")).output
    assert (await berth("show", "nobodys")).exit_code == 1


async def test_an_unreachable_ironic_is_exit_status_three(berth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_COMPUTE__IRONIC__URL", "http://127.0.0.1:9")
    assert (await berth("list")).exit_code == 3
