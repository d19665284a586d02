"""A service's driver by its name: an entry point, and the settings that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Struct

from berth.config.settings import ComputeSettings, Settings
from berth.config.site import Brokers, Site
from bus.clock import SystemClock
from bus.service.settings import SettingsError
from compute_agent.app import build
from compute_agent.driver_plugin import load

PLUGIN = """
from msgspec import Struct
from compute_agent.driver_plugin import DriverPlugin
class Racks(Struct, forbid_unknown_fields=True):
    racks: int = 1
def make(context):
    raise RuntimeError(context.config.racks)
racks = DriverPlugin(config_type=Racks, make=make)
other = 1
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with drivers of its own."""
    about = tmp_path / "rack_driver-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rack-driver\nVersion: 1\n")
    points = "[berth.drivers]\nracks = rack_driver:racks\nother = rack_driver:other\nabsent = rack_driver:absent\n"
    (about / "entry_points.txt").write_text(points)
    (tmp_path / "rack_driver.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "there is no driver nothing (there are: absent, ironic, other, racks, simulated)"),
        ("other", "other: not a DriverPlugin but int"),
        ("absent", "absent: AttributeError: module 'rack_driver' has no attribute 'absent'"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_driver_that_cannot_be_loaded_is_refused(name: str, reason: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(name)
    assert (refused.value.code, refused.value.reason) == ("compute.driver", reason)


@pytest.mark.usefixtures("installed")
async def test_a_driver_takes_the_options_that_its_struct_has() -> None:
    clock = SystemClock()
    here = Site(Settings(), brokers=Brokers(clock), database_url="", clock=clock, seed=1)
    config = ComputeSettings(driver="racks", options={"racks": "3"}, state_dir="")
    with pytest.raises(RuntimeError, match=r"^3$"):
        build(here.environment("c1", "compute"), config, "cell1", "c1")
    config = ComputeSettings(driver="racks", options={"rack": "3"}, state_dir="")
    with pytest.raises(SettingsError, match=r"compute\.options of racks: .*unknown field `rack`"):
        build(here.environment("c2", "compute"), config, "cell1", "c1")


@pytest.mark.parametrize("name", ["ironic", "simulated"])
def test_the_drivers_that_come_with_berth_have_tables_of_their_names(name: str) -> None:
    table: Struct = getattr(ComputeSettings(), name)
    assert isinstance(table, load(name).config_type)
