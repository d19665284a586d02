"""What a process imports before it does anything: each worker and each command pays for it at its start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND_TIMEOUT_S = 120.0

# The workers, and what only the commands of a load, of the pages or of `berth up` need.
OTHERS = {
    "cell_conductor.app",
    "compute_sim.app",
    "ironic_sync.app",
    "placement_worker.app",
    "scheduler_worker.app",
    "berth.load",
    "berth.up",
    "berth.web",
}


@pytest.mark.parametrize("command", ["run", "boot"])
def test_a_command_imports_no_worker_and_nothing_of_other_commands(command: str) -> None:
    program = (
        f"import json, sys; from berth.cli import COMMANDS, load; load({command!r}); print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S
    )
    assert OTHERS & set(json.loads(done.stdout)) == set()
