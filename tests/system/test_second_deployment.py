"""A second deployment as a careless operator starts it: its own database, and the buses of the first."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from berth.trial.servers import variables
from bus.service.main import EXIT_SETTINGS
from tests.kit import servers
from tests.kit.forks import run_berth
from tests.system.small import Small, small_processes

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
ROLES = {
    "scheduler": ("scheduler",),
    "placement": ("placement",),
    "conductor": ("conductor", "--cell", "cell1"),
}


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with small_processes() as made:
        yield made


def berth(small: Small, *arguments: str, database: str = "") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    other = {"BERTH_DATABASE__URL": database} if database else {}
    return run_berth(*arguments, env={**kept, **variables(small.settings), **other}, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("role", ROLES)
def test_no_worker_of_it_starts_and_each_gives_its_reason(small: Small, role: str) -> None:
    with servers.fresh_database(small.settings.database.url) as other:
        ended = berth(small, "run", *ROLES[role], database=other)
    output = ended.stdout + ended.stderr
    assert ended.returncode == EXIT_SETTINGS, output
    assert "bus.owned_by_another" in output and "belongs to another deployment" in output, output
    assert "berth bus release" in output and "Traceback" not in output


def test_the_first_goes_on(small: Small) -> None:
    small.ready()
    built = berth(small, "boot", "--flavor", "m1.small", "--count", "3", "--wait")
    assert built.returncode == 0, built.stdout + built.stderr
    owner = berth(small, "bus", "owner")
    assert owner.returncode == 0, owner.stderr
    found = [line.split()[:2] for line in owner.stdout.splitlines()[1:]]
    roles = {(bus, role) for bus, role, *_ in found}
    assert roles >= {("api", "placement"), ("api", "scheduler"), ("cell1", "conductor"), ("cell1", "scheduler")}


def test_a_bus_is_taken_over_by_an_operators_word(small: Small) -> None:
    """The last of this module: the first deployment has gone."""
    small.processes.stop()
    assert berth(small, "bus", "release", "api").returncode == EXIT_SETTINGS  # not without --yes
    released = berth(small, "bus", "release", "api", "--yes")
    assert released.returncode == 0, released.stderr
    assert {"placement", "scheduler"} <= set(released.stdout.split())
    again = berth(small, "bus", "release", "api", "--yes")
    assert (again.returncode, "bus.unowned" in again.stderr) == (1, True)
    assert "bus.unknown" in berth(small, "bus", "owner", "--bus", "mars").stderr
