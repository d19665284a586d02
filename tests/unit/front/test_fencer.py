"""The fencer after a mass silence, its bound over time, and which machine it switches off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from berth.fencing.fencer import TOO_MANY, Fencer, plan
from berth.fencing.plugin import FencingFailed, IronicPower
from berth.settings import FencingSettings
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState, HostAdminState, ServiceRecord

SETTINGS = FencingSettings(after_s=60.0, max_hosts=3)
OTHERS = ServiceRecord(name="others", cell="c1", up=True, hosts=9)


def host(n: int, **more: Any) -> HostRecord:
    fields: dict[str, Any] = {"cell": "c1", "service": f"s{n}", "resources": {"VCPU": (4.0, 16.0)}, **more}
    return HostRecord(uuid=f"00000000-0000-4000-8000-0000000000{n:02d}", name=f"h{n}", **fields)


def service(n: int) -> ServiceRecord:
    return ServiceRecord(name=f"s{n}", cell="c1", up=False, code="service.silent", hosts=1)


@pytest.mark.xfail(strict=True, reason="Found A2")
def test_a_network_that_comes_back_switches_no_host_off() -> None:
    """Ten hosts are cut off for five minutes. They come back within a few seconds, one after the other, as their
    clients reconnect. The last three that have not reported yet are switched off at once."""
    all_of = range(1, 11)
    first = plan([host(n) for n in all_of], [*map(service, all_of), OTHERS], {}, SETTINGS, 0.0)
    cut = plan([host(n) for n in all_of], [*map(service, all_of), OTHERS], first.suspects, SETTINGS, 300.0)
    assert cut.due == () and set(cut.held.values()) == {TOO_MANY}
    last = (8, 9, 10)
    heals = plan([host(n) for n in last], [*map(service, last), OTHERS], cut.suspects, SETTINGS, 302.0)
    assert heals.due == (), f"switched off 2 s after the network came back: {[one.name for one in heals.due]}"


@pytest.mark.xfail(strict=True, reason="Found A2")
def test_a_rolling_fault_does_not_switch_the_whole_fleet_off() -> None:
    """A broken release of the compute service, rolled out at one host a minute: never more than three are suspects."""
    off: set[int] = set()
    suspects: dict[str, float] = {}
    for minute in range(30):
        broken = [n for n in range(1, minute + 2) if n not in off]
        found = plan([host(n) for n in broken], [*map(service, broken), OTHERS], suspects, SETTINGS, 60.0 * minute)
        suspects = dict(found.suspects)
        off |= {int(one.name[1:]) for one in found.due}  # fenced: no suspect any more
    assert len(off) <= SETTINGS.max_hosts, f"{len(off)} hosts were switched off without a person"


class FakeIronic:
    """Ironic with one node, of another machine, whose name or uuid is what a host calls itself."""

    def __init__(self) -> None:
        self.node = {"uuid": "aaaaaaaa-0000-4000-8000-000000000001", "power_state": "power on"}
        self.off: list[str] = []

    async def raw_node(self, ident: str) -> dict[str, Any] | None:
        return dict(self.node) if ident in (self.node["uuid"], "tenant-metal-7") else None

    async def power(self, ident: str, target: str) -> None:
        self.off.append(ident)
        self.node["power_state"] = target


@pytest.mark.parametrize("name", ["aaaaaaaa-0000-4000-8000-000000000001", "tenant-metal-7"])
@pytest.mark.xfail(strict=True, reason="Found A2")
async def test_a_host_cannot_name_another_machine_to_be_switched_off(name: str) -> None:
    """A compute service of one cell announces its host under the uuid, or name, of a customer's bare-metal node, and
    falls silent. The fencer powers that node off."""
    power = IronicPower.__new__(IronicPower)
    ironic = FakeIronic()
    power._nodes, power._poll_s, power._api, power._clock = {}, 0.01, cast(Any, ironic), None  # type: ignore
    with pytest.raises(FencingFailed):
        await power.switch_off(replace(host(1), name=name))
    assert ironic.off == []


@pytest.mark.xfail(strict=True, reason="Found A2")
async def test_the_fencer_itself_switches_hosts_off_two_seconds_after_the_network_is_back() -> None:
    """The same by `Fencer.look`: three looks, and a machine that was up all the time is off."""

    silent: list[int] = list(range(1, 11))
    off: list[str] = []
    now = [0.0]

    class Client:
        async def services(self, **_: Any) -> Any:
            return SimpleNamespace(services=[*map(service, silent), OTHERS])

        async def hosts(self, **_: Any) -> Any:
            return SimpleNamespace(hosts=[host(n) for n in silent])

        async def set_admin_state(self, command: Any, **_: Any) -> HostAdminState:
            return HostAdminState(host_uuid=command.host, host=command.host, state=AdminState.FENCED)

    class Plugin:
        async def switch_off(self, one: HostRecord) -> str:
            off.append(one.name)
            return "off"

    clock = cast(Any, SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    fencer = Fencer(cast(Any, Client()), cast(Any, Plugin()), SETTINGS, clock=clock)
    for now[0] in range(0, 300, 2):
        await fencer.look()
    assert off == []  # a mass outage: held
    silent[:] = [8, 9, 10]  # the others' services have reconnected already
    now[0] += 2
    await fencer.look()
    assert off == []


@pytest.mark.xfail(strict=True, reason="Found A2")
def test_the_first_service_of_a_silent_cell_that_is_back_does_not_cost_the_others() -> None:
    """A cell of three hosts is cut off; h1 is back first. CELL_SILENT had held h2 and h3: due at once now."""
    first = plan([host(n) for n in (1, 2, 3)], [*map(service, (1, 2, 3))], {}, SETTINGS, 0.0)
    cut = plan([host(n) for n in (1, 2, 3)], [*map(service, (1, 2, 3))], first.suspects, SETTINGS, 300.0)
    assert cut.due == ()
    back = ServiceRecord(name="s1", cell="c1", up=True, hosts=1)
    heals = plan([host(n) for n in (2, 3)], [back, *map(service, (2, 3))], cut.suspects, SETTINGS, 302.0)
    assert heals.due == ()
