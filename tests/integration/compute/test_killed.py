"""A real process, killed with SIGKILL in the middle of its work, and its successor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bus.contracts.cell import ComputeOutcome
from compute_sim.domain.attempts import Phase
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import CELL, Cell, spawn
from tests.integration.compute.victim import SERVICE, config

ROOT = Path(__file__).parents[3]
ANSWERS_BEFORE_DEATH = 300


def kill_one(state_dir: Path) -> list[list[str]]:
    """Start a victim, let it work, kill it; what it printed."""
    lines: list[str] = []
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.compute.victim", str(state_dir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    with victim:
        answers = 0
        for line in victim.stdout:
            lines.append(line)
            answers += line.startswith("reported")
            if answers == ANSWERS_BEFORE_DEATH:
                victim.kill()
    assert victim.returncode == -9
    return [line.split() for line in lines if line.endswith("\n")]


async def test_what_was_accepted_outlives_the_process(cell: Cell, tmp_path: Path) -> None:
    reported: dict[tuple[str, str], str] = {}
    took: dict[tuple[str, str], str] = {}
    for what, host, instance, *rest in kill_one(tmp_path):
        if what == "took":
            took[host, instance] = rest[0]
        else:
            reported[host, instance] = rest[1]
    settings = config(str(tmp_path))
    fleet = Fleet.planned(settings, CELL, SERVICE)
    fleet.open()
    before = dict(fleet.records.entries())
    machines = {(host, guest.instance_uuid) for host, guest in fleet.guests()}
    assert set(took) <= set(before), "accepted, and forgotten"
    assert any(entry.phase is Phase.BUILDING for entry in before.values()), "killed too late to show anything"
    for key, outcome in reported.items():
        if outcome == "active" and took[key] == "spawn":
            assert key in machines, "reported as running, and does not"
        if outcome == "destroyed":
            assert key not in machines, "reported as gone, and is there"
    fleet.close()

    life = await cell.compute(settings, Fleet.planned(settings, CELL, SERVICE))
    for (host, instance), command in took.items():
        if command == "destroy":
            await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
            await cell.spawn(host, instance)  # a late copy
            assert (await cell.ended(instance, 1, ComputeOutcome.FAILED)).code == "spawn.fenced"
    # Each build ends as it would have; those that hang do so again, until they are destroyed.
    for (host, instance), command in took.items():
        if command == "spawn":
            await cell.bus.publish(spawn(host, instance))
            await cell.destroy(host, instance)
            await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    await life.stop()
    after = Fleet.planned(settings, CELL, SERVICE)
    after.open()
    assert list(after.guests()) == []
    assert {entry.phase for _, entry in after.records.entries()} == {Phase.GONE}
    after.close()
