"""The fencing plug-in `ironic` before an API over HTTP; how plug-ins are found; what an unproved one leads to."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from berth.client import BuildClient
from berth.fencing.fencer import Fencer
from berth.fencing.plugin import FencingFailed, FencingPlugin, IronicPower, load
from berth.settings import FencingSettings
from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, Silent
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.service.settings import SettingsError
from compute_sim.config import IronicConfig

HOST = HostRecord(uuid="00000000-0000-4000-8000-000000000001", name="rack1-h1")
PLUGIN = """
class Switch:
    @classmethod
    def from_settings(cls, settings, clock):
        made = cls()
        made.option = settings.options["pdu"]
        return made

    async def switch_off(self, host):
        return f"{self.option} is off for {host.name}"

    async def close(self):
        pass
"""


@asynccontextmanager
async def ironic(behaviour: Behaviour | None = None, **node: Any) -> AsyncIterator[tuple[dict[str, Any], IronicPower]]:
    """A node that is on, and the plug-in."""
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=behaviour)
    made = stand_in.pool.add(**{"name": HOST.name, "power_state": "power on", "provision_state": "active", **node})
    config = IronicConfig(url=await stand_in.start(), poll_interval_s=0.01)
    settings = FencingSettings(plugin="ironic", ironic=config, nodes={"other": made["name"]})
    power = IronicPower.from_settings(settings, SystemClock())
    try:
        yield made, power
    finally:
        await power.close()
        await stand_in.stop()


@pytest.mark.parametrize("power_s", [0.0, 0.3])
async def test_it_returns_when_the_node_is_reported_off(power_s: float) -> None:
    async with ironic(Behaviour(power_s=power_s)) as (node, power):
        assert HOST.name in await power.switch_off(HOST)
        assert node["power_state"] == "power off"
        assert await power.switch_off(HOST)  # it may be called again


async def test_what_ironic_knew_before_is_no_proof() -> None:
    """It was seen off before a person switched it on by hand; Ironic reads the power state again in a minute."""
    async with ironic(Behaviour(power_s=0.3), power_state="power off") as (node, power):
        switching = asyncio.create_task(power.switch_off(HOST))
        async with asyncio.timeout(30.0):
            while node["reservation"] is None:  # noqa: ASYNC110  (the stand-in has no event for it)
                await asyncio.sleep(0.01)
            node["power_state"] = "power off"
            await switching
        assert node["reservation"] is None


async def test_a_node_that_stays_on_is_a_failure_with_ironics_words() -> None:
    async with ironic(Behaviour(power_fails=True)) as (_, power):
        with pytest.raises(FencingFailed, match="Failed to set node power state"):
            await power.switch_off(HOST)


async def test_a_locked_node_is_tried_again() -> None:
    async with ironic(reservation="other") as (node, power):
        switching = asyncio.create_task(power.switch_off(HOST))
        await asyncio.sleep(0.05)
        assert not switching.done()
        node["reservation"] = None
        await switching
        assert node["power_state"] == "power off"


async def test_the_node_may_have_another_name_than_the_host() -> None:
    async with ironic() as (node, power):
        await power.switch_off(HostRecord(uuid=HOST.uuid, name="other"))
        assert node["power_state"] == "power off"
        with pytest.raises(FencingFailed, match="no node"):
            await power.switch_off(HostRecord(uuid=HOST.uuid, name="../unknown"))


async def test_a_bare_metal_host_is_not_switched_off() -> None:
    async with ironic(uuid=HOST.uuid) as (node, power):
        with pytest.raises(FencingFailed, match="bare-metal"):
            await power.switch_off(HOST)
        assert node["power_state"] == "power on"


async def test_an_unavailable_ironic_is_a_failure() -> None:
    async with ironic() as (_, power):
        pass
    with pytest.raises(FencingFailed):
        await power.switch_off(HOST)


async def test_nothing_is_decided_of_a_host_that_is_not_proved_to_be_off() -> None:
    """The client has no connection: a decision would fail in another way."""
    client = cast("BuildClient", None)
    async with ironic(reservation="for ever") as (_, power):
        fencer = Fencer(client, power, FencingSettings(timeout_s=0.1), clock=SystemClock())
        with pytest.raises(FencingFailed, match="within"):
            await fencer.fence(HOST, "dead", by="ann")
        running = HostRecord(uuid=HOST.uuid, name=HOST.name, up=True)
        with pytest.raises(FencingFailed) as fault:
            await fencer.fence(running, "dead", by="ann")
        assert fault.value.code == "host.service_up"

    class Broken:
        async def switch_off(self, host: HostRecord) -> str:
            raise ZeroDivisionError

        async def close(self) -> None: ...

    plugin: FencingPlugin = Broken()
    with pytest.raises(FencingFailed, match="ZeroDivisionError"):
        await Fencer(client, plugin, FencingSettings(), clock=SystemClock()).fence(HOST, "dead", by="ann")


async def test_a_plug_in_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rack_switch.py").write_text(PLUGIN)
    about = tmp_path / "rack_switch-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rack-switch\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[berth.fencing]\npdu = rack_switch:Switch\nbroken = rack_switch:None_\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "rack_switch", None)
    monkeypatch.delitem(sys.modules, "rack_switch")
    plugin = load(FencingSettings(plugin="pdu", options={"pdu": "outlet 7"}), clock=SystemClock())
    assert await plugin.switch_off(HOST) == "outlet 7 is off for rack1-h1"
    for name, words in (("other", "ironic, pdu"), ("broken", "AttributeError"), ("", "no plug-in")):
        with pytest.raises(SettingsError, match=words):
            load(FencingSettings(plugin=name), clock=SystemClock())
