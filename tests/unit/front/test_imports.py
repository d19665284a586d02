"""The imports of a process before it does anything: each worker and each command pays for it at its start."""

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
    "berth.trial.up",
    "berth.web",
    "httpx",
}
DATABASE = {"alembic", "sqlalchemy"}  # most of what a start costs; only what has a database needs them


def imported_by(program: str) -> set[str]:
    """The imports of a new process after a program."""
    program = f"import json, sys; {program}; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("command", ["run", "boot"])
def test_a_command_imports_no_worker_and_nothing_of_other_commands(command: str) -> None:
    assert (OTHERS | DATABASE) & imported_by(f"from berth.cli import load; load({command!r})") == set()


def test_a_compute_service_has_no_database() -> None:
    assert DATABASE & imported_by("import compute_sim.app") == set()


def test_only_a_migration_needs_alembic() -> None:
    assert DATABASE & imported_by("import bus.persistence.database") == {"sqlalchemy"}
