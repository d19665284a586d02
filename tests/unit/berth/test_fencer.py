"""The fencer after a mass silence, its bound over time, and which machine it switches off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from berth.config.settings import FencingSettings
from berth.fencing.fencer import AMBIGUOUS, FENCER, TOO_OFTEN, Fencer, plan
from berth.fencing.plugin import FencingFailed, IronicPower
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.contracts.objects import ObjectKind, ObjectsPage, ObjectsQuery, StoredObject
from bus.contracts.operations import AdminState, HostAdminState, ServiceRecord, SetAdminState

SETTINGS = FencingSettings(after_s=60.0, max_hosts=3)
OTHERS = ServiceRecord(name="others", cell="c1", up=True, hosts=9)


def host(n: int, **more: Any) -> HostRecord:
    fields: dict[str, Any] = {"cell": "c1", "service": f"s{n}", "resources": {"VCPU": (4.0, 16.0)}, **more}
    return HostRecord(uuid=f"00000000-0000-4000-8000-0000000000{n:02d}", name=f"h{n}", **fields)


def service(n: int) -> ServiceRecord:
    return ServiceRecord(name=f"s{n}", cell="c1", up=False, code="service.silent", hosts=1)


def fenced(n: int, at: float, *, by: str = FENCER, cell: str = "c1") -> list[StoredObject]:
    """What a fence leaves on record."""
    decision = {"host": f"h{n}", "state": "fenced", "reason": "silent"}
    fence = {"host": f"h{n}", "cell": cell, "version": 1}
    return [
        StoredObject(kind=ObjectKind.HOST, name=host(n).uuid, body=decision, version=1, changed_at=at, changed_by=by),
        StoredObject(kind=ObjectKind.FENCE, name=host(n).uuid, body=fence, version=1),
    ]


class Fleet(SystemClock):
    """A fleet as a client sees it, a plug-in, the record, and the clock of all."""

    def __init__(self, *silent: int) -> None:
        self.now_s = 0.0
        self.silent = list(silent)
        self.others: list[HostRecord] = []
        self.off: list[str] = []
        self.record: list[StoredObject] = []
        self.bus = self

    def monotonic(self) -> float:
        return self.now_s

    async def services(self, **_: Any) -> Any:
        return SimpleNamespace(services=[*map(service, self.silent), OTHERS])

    async def hosts(self, *, up: bool | None = None, **_: Any) -> Any:
        return SimpleNamespace(hosts=[*map(host, self.silent), *(() if up is False else self.others)])

    async def request(self, query: ObjectsQuery, *_: Any, **__: Any) -> ObjectsPage:
        found = [one for one in self.record if one.kind is query.kind]
        left = [one for one in found if query.after is None or one.name > query.after[1]]
        return ObjectsPage(revision=1, objects=tuple(left[:2]), more=len(left) > 2)

    async def switch_off(self, one: HostRecord) -> str:
        self.off.append(one.name)
        return "off"

    async def set_admin_state(self, command: SetAdminState, **_: Any) -> HostAdminState:
        (n,) = [n for n in self.silent if host(n).uuid == command.host]
        self.silent.remove(n)
        self.record += fenced(n, self.now_s, by=command.by)
        return HostAdminState(host_uuid=command.host, host=command.host, state=AdminState.FENCED)

    def fencer(self, settings: FencingSettings = SETTINGS) -> Fencer:
        return Fencer(cast(Any, self), cast(Any, self), settings, clock=self)


async def look_until(fleet: Fleet, fencer: Fencer, until_s: float, *, dry_run: bool = False) -> None:
    while fleet.now_s < until_s:
        fleet.now_s += 2.0
        await fencer.look(dry_run=dry_run)


async def test_a_rolling_fault_does_not_switch_the_whole_fleet_off() -> None:
    """A broken release of the compute service, rolled out at one host a minute: never more than three are suspects. The
    fencer is restarted each ten minutes, and goes by what is on record.
    """
    fleet = Fleet()
    for n in range(1, 31):
        if n % 10 == 1:
            fencer = fleet.fencer()
        fleet.silent.append(n)
        await look_until(fleet, fencer, 60.0 * n)
    assert fleet.off == ["h1", "h2", "h3"]


async def test_hosts_that_fail_slowly_are_left_to_a_person_for_good() -> None:
    """After an hour it would be three hosts an hour. A person who decides about one of them lets it go on."""
    fleet = Fleet(9)
    fleet.record = [*fenced(1, 0.0), *fenced(2, 100.0), *fenced(3, 3599.0)]
    fleet.now_s = 90_000.0
    fencer = fleet.fencer()
    await look_until(fleet, fencer, fleet.now_s + 200.0)
    assert (await fencer.look()).held in ({}, {"h9": TOO_OFTEN}) and fleet.off == []
    fleet.record[4] = replace(fleet.record[4], changed_by="ann")  # fenced it once more
    await look_until(fleet, fencer, fleet.now_s + 100.0)
    assert fleet.off == ["h9"]


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ([*fenced(1, 0.0), *fenced(2, 0.0), *fenced(3, 3600.0)], ""),  # not within an hour
        ([*fenced(1, 0.0), *fenced(2, 0.0), *fenced(3, 0.0, by="ann")], ""),
        ([*fenced(1, 0.0), *fenced(2, 0.0), *fenced(3, 0.0, cell="c2")], ""),
        ([*fenced(1, 0.0), *fenced(2, 0.0), fenced(3, 0.0)[0]], TOO_OFTEN),  # its cell is not known
        ([*fenced(1, 7200.0), *fenced(2, 7200.0), *fenced(3, 7200.0)], TOO_OFTEN),
    ],
)
async def test_which_fences_on_record_count(record: list[StoredObject], code: str) -> None:
    fleet = Fleet(9)
    fleet.record, fencer = record, fleet.fencer()
    await fencer.look()
    fleet.now_s = 60.0
    assert (await fencer.look()).held == ({"h9": code} if code else {})
    assert fleet.off == ([] if code else ["h9"])


async def test_a_name_that_two_hosts_have_is_left_to_a_person() -> None:
    """A plug-in may know machines by their names alone."""
    fleet = Fleet(1)
    fleet.others = [replace(host(2), name="h1", cell="c2", up=True)]
    fencer = fleet.fencer()
    await fencer.look()
    fleet.now_s = 60.0
    assert (await fencer.look()).held == {"h1": AMBIGUOUS} and fleet.off == []


async def test_what_was_left_to_a_person_is_suspected_anew() -> None:
    """It was switched off in the look after that in which nothing held it any more."""
    fleet = Fleet(1)
    fleet.others = [replace(host(2), name="h1", cell="c2", up=True)]
    fencer = fleet.fencer()
    await fencer.look()
    fleet.now_s = 60.0
    assert (await fencer.look()).held == {"h1": AMBIGUOUS}
    fleet.others = []
    await look_until(fleet, fencer, 118.0)
    assert fleet.off == []
    await look_until(fleet, fencer, 122.0)
    assert fleet.off == ["h1"]


async def test_a_dry_run_logs_a_host_once() -> None:
    fleet = Fleet(1)
    with capture_logs() as logged:
        await look_until(fleet, fleet.fencer(), 120.0, dry_run=True)
    assert fleet.off == [] and [one["event"] for one in logged].count("fencing.due") == 1


class FakeIronic:
    """Ironic with one node, of another machine, whose name or uuid is what a host calls itself."""

    def __init__(self, **more: Any) -> None:
        self.node = {"uuid": "aaaaaaaa-0000-4000-8000-000000000001", "power_state": "power on", **more}
        self.nodes = [self.node]
        self.off: list[str] = []

    async def raw_nodes(self) -> list[dict[str, Any]]:
        return [dict(one) for one in self.nodes]

    async def raw_node(self, ident: str) -> dict[str, Any] | None:
        return dict(self.node) if ident in (self.node["uuid"], "tenant-metal-7") else None

    async def power(self, ident: str, target: str) -> None:
        self.off.append(ident)
        self.node["power_state"] = target


def power_of(ironic: FakeIronic, nodes: dict[str, dict[str, str]] | None = None) -> IronicPower:
    power = IronicPower.__new__(IronicPower)
    power._nodes, power._poll_s, power._api, power._clock = nodes or {}, 0.01, cast(Any, ironic), SystemClock()
    return power


@pytest.mark.parametrize("name", ["aaaaaaaa-0000-4000-8000-000000000001", "tenant-metal-7"])
async def test_a_host_cannot_name_another_machine_to_be_switched_off(name: str) -> None:
    """A compute service of one cell announces its host under the uuid, or name, of a customer's bare-metal node, and
    falls silent. The fencer powers that node off."""
    ironic = FakeIronic()
    with pytest.raises(FencingFailed):
        await power_of(ironic).switch_off(replace(host(1), name=name))
    assert ironic.off == []


OURS = {"properties": {"berth_host": f"c1/{host(1).uuid}"}}


@pytest.mark.parametrize(
    ("node", "one", "off"),
    [
        (OURS, host(1), True),
        (OURS, host(2), False),
        (OURS, replace(host(1), cell="c2"), False),  # another cell's host may have any uuid
        (OURS, replace(host(1), cell=None), False),
        ({**OURS, "instance_uuid": host(3).uuid}, host(1), False),
        ({**OURS, "lessee": "p"}, host(1), False),
        (
            {**OURS, "owner": "p"},
            host(1),
            False,
        ),  # who may have written the property
        ({"properties": None}, host(1), False),
        ({"properties": 7}, host(1), False),
    ],
)
async def test_a_node_is_found_by_the_cell_and_uuid_that_its_property_names(
    node: dict[str, Any], one: HostRecord, off: bool
) -> None:
    ironic = FakeIronic(**node)
    if off:
        assert await power_of(ironic).switch_off(one)
    else:
        with pytest.raises(FencingFailed):
            await power_of(ironic).switch_off(one)
    assert bool(ironic.off) is off


async def test_two_nodes_that_name_one_host_are_none() -> None:
    ironic = FakeIronic(**OURS)
    ironic.nodes.append({**ironic.node, "uuid": "aaaaaaaa-0000-4000-8000-000000000002"})
    with pytest.raises(FencingFailed):
        await power_of(ironic).switch_off(host(1))
    assert ironic.off == []


@pytest.mark.parametrize(("cell", "off"), [("c1", True), ("c2", False)])
async def test_settings_name_a_node_by_cell_and_uuid(cell: str, off: bool) -> None:
    ironic = FakeIronic(owner="p")
    power = power_of(ironic, {cell: {host(1).uuid: "tenant-metal-7"}})
    if off:
        await power.switch_off(host(1))
    else:
        with pytest.raises(FencingFailed):
            await power.switch_off(host(1))
    assert bool(ironic.off) is off


async def test_the_fencer_itself_switches_hosts_off_two_seconds_after_the_network_is_back() -> None:
    """The same by `Fencer.look`: three looks, and a machine that was up all the time is off."""
    fleet = Fleet(*range(1, 11))
    fencer = fleet.fencer()
    await look_until(fleet, fencer, 300.0)
    assert fleet.off == []  # a mass outage: held
    fleet.silent = [8, 9, 10]  # the others' services have reconnected already
    await look_until(fleet, fencer, 302.0)
    assert fleet.off == []
    await look_until(fleet, fencer, 358.0)
    assert fleet.off == []
    await look_until(fleet, fencer, 364.0)
    assert fleet.off == ["h8", "h9", "h10"]  # they never came back


def test_the_first_service_of_a_silent_cell_that_is_back_does_not_cost_the_others() -> None:
    """A cell of three hosts is cut off; h1 is back first. CELL_SILENT had held h2 and h3: due at once now."""
    first = plan([host(n) for n in (1, 2, 3)], [*map(service, (1, 2, 3))], {}, SETTINGS, 0.0)
    cut = plan([host(n) for n in (1, 2, 3)], [*map(service, (1, 2, 3))], first.suspects, SETTINGS, 300.0)
    assert cut.due == ()
    back = ServiceRecord(name="s1", cell="c1", up=True, hosts=1)
    heals = plan([host(n) for n in (2, 3)], [back, *map(service, (2, 3))], cut.suspects, SETTINGS, 302.0)
    assert heals.due == ()
