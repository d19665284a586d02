"""Where a compute service keeps its machines and records."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

import compute_sim.app
from berth.settings import Settings
from berth.site import Brokers, Site
from bus.clock import SystemClock
from compute_sim.config import ComputeConfig
from compute_sim.fleet import Fleet


@pytest.mark.parametrize("driver", ["ironic", "hypervisor"])
@pytest.mark.parametrize(("given", "expected"), [(None, "machines"), ("elsewhere", "elsewhere"), ("", "")])
def test_a_service_keeps_its_machines_and_records_by_default(
    tmp_path: Path, driver: str, given: str | None, expected: str
) -> None:
    """After a restart of one without them its instances were lost. Empty: in memory."""
    directory = str(tmp_path / given) if given else given
    compute = ComputeConfig(driver=driver, state_dir=directory)  # type: ignore[arg-type]
    kept = Settings(state_dir=str(tmp_path), compute=compute).kept_compute.state_dir
    assert kept == (str(tmp_path / expected) if expected else "")


@pytest.mark.parametrize(
    ("state_dir", "is_given", "warned"), [("", False, True), (None, False, True), ("", True, False)]
)
async def test_a_service_in_memory_warns(state_dir: str | None, is_given: bool, warned: bool) -> None:
    """Not one whose machines another keeps for it, as `berth up` and the simulation do."""
    clock = SystemClock()
    here = Site(Settings(), brokers=Brokers(clock), database_url="", clock=clock, seed=1)
    config = ComputeConfig(hosts=1, state_dir=state_dir)
    fleet = Fleet.planned(config, "cell1", "c1") if is_given else None
    with capture_logs() as logs:
        compute_sim.app.build(here.environment("c1", "compute"), config, "cell1", "c1", fleet=fleet)
    assert [one["log_level"] for one in logs if one["event"] == "compute.in_memory"] == ["warning"] * warned


def test_no_file_is_made_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Fleet.planned(ComputeConfig(hosts=1, state_dir=""), "cell1", "c1").open()
    assert list(tmp_path.iterdir()) == []


def test_two_services_of_one_machine_share_no_journal(tmp_path: Path) -> None:
    config = Settings(state_dir=str(tmp_path)).kept_compute
    fleets = [Fleet.planned(config, cell, name) for cell, name in (("a", "c1"), ("b", "c1"), ("a", "c2"))]
    for one in fleets:
        one.open()
    assert len(list((tmp_path / "machines").glob("*.machines"))) == len(fleets)
    for one in fleets:
        one.close()
