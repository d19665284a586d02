"""`select_destinations` against the real placer and a real replica: which hosts, what is claimed, how it is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.cell import ServiceDown, ServiceRemoved, ServiceStates
from bus.contracts.placement import MAX_NAMED, Claim, ClaimResult, Release
from bus.faults import Fault
from nova_scheduler.cloud.host_facts import HostHardware
from nova_scheduler.cloud.state import DOWN, ComputeNode
from nova_scheduler.config import NovaConfig, PrefilterSettings
from nova_scheduler.request.request_spec import NotDecided, SpecRefused
from nova_scheduler.wire.envelope import Call, RemoteFault
from nova_scheduler.wire.versioned import Primitive, versioned
from placement_worker.domain.allocations import Replace
from placement_worker.domain.claim_ledger import ConsumerWrite
from scheduler_worker.hosts.service_directory import DOWN_HOLD_S
from scheduler_worker.placement_client import PlacementUnavailable
from tests.unit.nova_scheduler.world import CELLS, FLAVOR, PLENTY, Cloud, destination, group, hosts_of, request_spec

MANY = [f"d0000000-0000-4000-8000-{n:012}" for n in range(MAX_NAMED + 1)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(40)]
ASKED: Any = {"message_id": "1", "reply_queue": "reply"}  # a call whose client waits
ONE = {"VCPU": 1, "MEMORY_MB": 65536, "DISK_GB": 1000}


async def cloud(hosts: int = 3, *, each: Mapping[str, int] = PLENTY, **fields: Any) -> Cloud:
    return await Cloud([each] * hosts, **fields).open()


async def test_a_boot_is_claimed_and_answered_with_alternates_of_its_cell() -> None:
    here = await cloud(5, cells=[CELLS[0], CELLS[0], CELLS[0], CELLS[1], CELLS[1]])
    (selections,) = await here.select(VMS[0], availability_zone="nova")
    first = selections[0]
    data = first["nova_object.data"]
    at = int(data["service_host"][1:])
    assert (first["nova_object.name"], first["nova_object.version"]) == ("Selection", "1.1")
    assert (data["nodename"], data["compute_node_uuid"]) == (f"h{at}.local", here.uuids[at])
    assert data["availability_zone"] == "nova" and data["allocation_request_version"] == "1.36"
    assert json.loads(data["allocation_request"]) == {
        "allocations": {here.uuids[at]: {"resources": {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}}},
        "mappings": {"": [here.uuids[at]]},
    }
    assert await here.held(VMS[0]) == [at]
    assert len(selections) == (3 if data["cell_uuid"] == CELLS[0] else 2)
    assert {one["nova_object.data"]["cell_uuid"] for one in selections} == {data["cell_uuid"]}


async def test_conductors_that_ask_for_less_get_less() -> None:
    here = await cloud()
    arguments = {"spec_obj": request_spec(), "instance_uuids": [VMS[0]]}
    call = Call(method="select_destinations", arguments=arguments, unique_id="r", **ASKED)
    (plain,) = await here.destinations.call(call)  # type: ignore[misc]
    assert plain.keys() == {"host", "nodename", "limits"}
    call = Call(method="select_destinations", arguments=arguments | {"return_objects": True}, unique_id="r", **ASKED)
    (selections,) = await here.destinations.call(call)  # type: ignore[misc]
    assert hosts_of([selections]) == [[plain["host"]]], "the same call adopts its claim"


@pytest.mark.parametrize("is_told", [False, True], ids=["its node", "its service"])
async def test_a_host_that_leaves_nova_while_it_is_claimed_is_answered(
    monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """No valid host would leave the claim for ever. Nova answers with what it has chosen from."""
    here = await cloud(2)
    submit = here.claims.submit

    async def left_meanwhile(claims: Sequence[Claim]) -> list[ClaimResult | Fault]:
        answers = await submit(claims)
        if is_told:
            here.table.delete_service(ServiceRemoved(service="h0", cell=CELLS[0]), 1.0)
        here.facts.nodes.clear()
        here.facts.cells.clear()
        return answers

    monkeypatch.setattr(here.claims, "submit", left_meanwhile)
    ((chosen, *_),) = await here.select(VMS[0], requested_destination=destination(host="h0"))
    data = chosen["nova_object.data"]
    assert (data["service_host"], data["nodename"], data["cell_uuid"]) == ("h0", "h0.local", CELLS[0])
    assert await here.held(VMS[0]) == [0]


async def test_nothing_is_claimed_on_a_host_whose_service_is_gone() -> None:
    """Its compute node is listed for a while, and no filter is run where a host is forced."""
    here = await cloud(2)
    here.table.delete_service(ServiceRemoved(service="h0", cell=CELLS[0]), 1.0)
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0], force_hosts=["h0"])
    assert caught.value.class_name == "NoValidHost" and await here.held(VMS[0]) == []


async def test_a_redelivered_call_adopts_what_it_has_claimed() -> None:
    here = await cloud(2, each=ONE)
    first = await here.select(VMS[0])
    again = await here.select(VMS[0], front=here.front())
    assert hosts_of(first) == hosts_of(again), "with its alternates"
    assert len(await here.held(VMS[0])) == 1


async def test_a_redelivered_call_takes_nothing_from_those_that_run_by_now() -> None:
    """One of its instances was deleted meanwhile, and another one has its place."""
    here = await cloud(2, each=ONE)
    await here.select(*VMS[:2])
    kept = await here.held(VMS[0])
    await here.claims.placement.apply([Release(consumer=VMS[1], owner="call1")])
    await here.refresh(timeout_s=1.0)
    await here.select(VMS[2], run="call2")
    await here.refresh(timeout_s=1.0)
    with pytest.raises(RemoteFault):
        await here.select(*VMS[:2], front=here.front())
    assert await here.held(VMS[0]) == kept


def mappings_of(answer: Any) -> list[dict[str, list[str]]]:
    """Of the chosen host of each instance."""
    chosen = (selections[0]["nova_object.data"] for selections in answer)
    return [json.loads(one["allocation_request"])["mappings"] for one in chosen]


GROUPED = {"resources_A:CUSTOM_VF": "1", "resources_B:CUSTOM_VF": "2", "group_policy": "none"}


async def test_what_is_adopted_names_the_provider_of_each_group() -> None:
    """Nova binds a port or a device by it: without one it fails."""
    here = await cloud(1, children=[{"CUSTOM_VF": 2}, {"CUSTOM_VF": 1}, {"CUSTOM_VF": 2}])
    flavor = versioned("Flavor", "1.2", {**FLAVOR, "extra_specs": GROUPED})
    first = await here.select(VMS[0], flavor=flavor)
    await here.refresh(timeout_s=1.0)
    again = await here.select(VMS[0], flavor=flavor, front=here.front())
    (mappings,) = mappings_of(again)
    assert mappings == mappings_of(first)[0] and mappings.keys() == {"", "_A", "_B"}


async def test_a_call_that_is_made_again_claims_beside_the_first() -> None:
    """As of a stock nova-scheduler: what another call has left may be on no host that this one may have."""
    here = await cloud(2)
    await here.select(VMS[0], run="call1", force_hosts=["h0"])
    again = await here.select(VMS[0], run="call2", force_hosts=["h1"])
    assert hosts_of(again)[0][0] == "h1"
    assert await here.held(VMS[0]) == [0, 1]
    same = await here.select(VMS[0], run="call3", force_hosts=["h1"])
    assert hosts_of(same)[0][0] == "h1" and await here.held(VMS[0]) == [0, 1], "what is there counts once"


@pytest.mark.parametrize(
    "fields",
    [{"force_hosts": ["h1"]}, {"requested_destination": destination(host="h1")}, {"ignore_hosts": ["h2"]}],
    ids=["forced", "its destination", "any but one"],
)
async def test_a_redelivered_call_adopts_beside_what_another_call_has_left_on_a_host_that_is_up(
    fields: dict[str, Any],
) -> None:
    here = await cloud(3)
    await here.hold(VMS[0], 0)  # less than the request asks for
    first = hosts_of(await here.select(VMS[0], run="call2", **fields))
    await here.refresh(timeout_s=1.0)
    held = await here.held(VMS[0])
    again = await here.select(VMS[0], run="call2", front=here.front(), **fields)
    assert hosts_of(again)[0][0] == first[0][0] and await here.held(VMS[0]) == held
    chosen = again[0][0]["nova_object.data"]
    assert json.loads(chosen["allocation_request"])["allocations"].keys() == {chosen["compute_node_uuid"]}


async def test_without_a_host_what_another_call_has_left_is_none() -> None:
    here = await cloud(2, each=ONE)
    await here.select(VMS[0], run="call1", force_hosts=["h0"])
    await here.select(VMS[1], run="call2", force_hosts=["h1"])
    await here.refresh(timeout_s=1.0)
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0], run="call3", force_hosts=["h1"])
    assert caught.value.class_name == "NoValidHost" and await here.held(VMS[0]) == [0]


async def test_a_call_that_nobody_waits_for_any_more_claims_nothing() -> None:
    """It was answered, and the frontend was killed before it acknowledged the call; the server was deleted since."""
    here = await cloud(2)
    here.waiting = set()
    assert await here.select(VMS[0]), "a new call is not asked about"
    await here.claims.placement.apply([Release(consumer=VMS[0], owner="call1")])
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0], redelivered=True)
    assert caught.value.class_name == "NoValidHost" and await here.held(VMS[0]) == []
    here.waiting = {VMS[1]}
    assert len(await here.select(*VMS[:2], redelivered=True)) == 2


@pytest.mark.parametrize(("ago_s", "is_asked_about"), [(0, False), (3600, True)])
async def test_of_a_request_older_than_its_clients_patience_nova_is_asked_whether_it_waits(
    ago_s: float, is_asked_about: bool
) -> None:
    """It may have waited in the topic until its client gave up."""
    here = await cloud()
    here.waiting = set()
    requested = datetime.now(UTC) - timedelta(seconds=ago_s)
    with pytest.raises(RemoteFault) if is_asked_about else contextlib.nullcontext():
        await here.select(VMS[0], requested_at=requested.replace(tzinfo=None).isoformat())
    assert bool(await here.held(VMS[0])) is not is_asked_about


@pytest.mark.parametrize("told", [None, 7, "long ago", "9999-12-31T23", "0001-01-01", ["x"]])
async def test_a_time_that_is_none_is_not_read(told: object) -> None:
    assert await (await cloud()).select(VMS[0], requested_at=told)


@pytest.mark.parametrize("fields", [{}, {"instance_group": group("anti-affinity", VMS[:3])}], ids=["alone", "apart"])
async def test_no_alternate_is_the_host_of_another_instance_of_the_call(fields: dict[str, Any]) -> None:
    """Nova's conductor claims an alternate without a look at the server group."""
    here = await cloud(6, each=ONE)
    answer = hosts_of(await here.select(*VMS[:3], **fields))
    chosen = {hosts[0] for hosts in answer}
    assert len(chosen) == 3 and not any(chosen.intersection(hosts[1:]) for hosts in answer)
    assert [len(hosts) for hosts in answer] == [3, 3, 3], "there are as many as of a call for one"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ignore_hosts": ["h0", "h2"]}, {"h1"}),
        ({"force_hosts": ["h2"]}, {"h2"}),
        ({"force_nodes": ["h1.local"]}, {"h1"}),
        ({"force_hosts": ["h1"], "force_nodes": ["h1.local"]}, {"h1"}),
        ({"force_hosts": ["h1"], "force_nodes": ["h2.local"]}, set()),
        ({"requested_destination": destination(host="h2")}, {"h2"}),
        ({"requested_destination": destination(host="h2", node="h1.local")}, set()),
        ({"requested_destination": destination(host="nowhere")}, set()),
        ({"requested_destination": destination(host=None)}, {"h0", "h1", "h2"}),
        ({"scheduler_hints": {"different_host": [VMS[9]]}}, {"h1", "h2"}),
        ({"scheduler_hints": {"same_host": [VMS[9]]}}, {"h0"}),
        ({"scheduler_hints": {"same_host": [VMS[9].upper().replace("-", "")]}}, {"h0"}),
        ({"scheduler_hints": {"same_host": ["x"]}}, set()),
        ({"scheduler_hints": {"same_host": ["x", VMS[9]], "different_host": ["y"]}}, {"h0"}),
        ({"scheduler_hints": {"different_host": ["y", VMS[9]]}}, {"h1", "h2"}),
    ],
)
async def test_where_a_request_may_go(fields: dict[str, Any], expected: set[str]) -> None:
    here = await cloud()
    await here.hold(VMS[9], 0)
    if not expected:
        with pytest.raises(RemoteFault) as caught:
            await here.select(VMS[0], **fields)
        assert caught.value.class_name == "NoValidHost"
        return
    (hosts,) = hosts_of(await here.select(VMS[0], **fields))
    assert set(hosts) == expected


async def test_only_hosts_of_the_requested_cell() -> None:
    here = await cloud(4, cells=[CELLS[0], CELLS[0], CELLS[0], CELLS[1]])
    cell = {"nova_object.name": "CellMapping", "nova_object.namespace": "nova", "nova_object.version": "1.1"}
    wanted = destination(cell=cell | {"nova_object.data": {"uuid": CELLS[1]}})
    assert hosts_of(await here.select(VMS[0], requested_destination=wanted)) == [["h3"]]
    crossing = destination(cell=cell | {"nova_object.data": {"uuid": CELLS[1]}}, allow_cross_cell_move=True)
    assert hosts_of(await here.select(VMS[1], requested_destination=crossing))


@pytest.mark.parametrize(("free", "disabled", "chosen"), [(2, (), "h1"), (1, (), "h0"), (2, CELLS[1:], "h0")])
async def test_a_server_that_may_leave_its_cell_does_when_that_has_no_host(
    free: int, disabled: tuple[str, ...], chosen: str
) -> None:
    """It takes a snapshot, and the server is off. Nova weighs the own cell above all."""
    here = await Cloud([PLENTY, {**PLENTY, "VCPU": free}], cells=CELLS).open()
    here.table.disabled_cells = frozenset(disabled)
    await here.hold(VMS[9], 1)
    own = versioned("CellMapping", "1.1", {"uuid": CELLS[1]})
    crossing = destination(cell=own, allow_cross_cell_move=True)
    assert hosts_of(await here.select(VMS[0], requested_destination=crossing)) == [[chosen]]


async def test_servers_of_a_disabled_cell_move_within_it_and_none_is_built_there() -> None:
    """So an operator empties it: Nova looks at disabled cells where a request names its cell."""
    here = await cloud(2)
    here.table.disabled_cells = frozenset(CELLS[:1])
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0])
    assert caught.value.class_name == "NoValidHost"
    within = destination(cell=versioned("CellMapping", "1.1", {"uuid": CELLS[0]}))
    (hosts,) = hosts_of(await here.select(VMS[0], requested_destination=within, ignore_hosts=["h0"]))
    assert hosts == ["h1"]
    assert hosts_of(await here.select(VMS[1], **REBUILD)) == [["h1"]]


# --- pinned CPUs


PINNED = {"flavor": versioned("Flavor", "1.2", {**FLAVOR, "extra_specs": {"hw:cpu_policy": "dedicated"}})}
OF_PINS = {"PCPU": 1, "MEMORY_MB": 65536, "DISK_GB": 1000}


async def pinning(*hosts: Mapping[str, int], alone: bool = False) -> Cloud:
    settings = PrefilterSettings(disable_fallback_pcpu_query=alone)
    return await Cloud(hosts, nova=NovaConfig(prefilters=settings)).open()


async def test_pinned_cpus_are_taken_of_hosts_that_offer_them_apart_and_of_others() -> None:
    """Nova asks twice, and chooses from the hosts of both answers."""
    here = await pinning(OF_PINS, PLENTY, {**OF_PINS, **PLENTY})
    ((first, *others),) = await here.select(VMS[0], **PINNED)
    requested = [json.loads(one["nova_object.data"]["allocation_request"])["allocations"] for one in (first, *others)]
    classes = {uuid: set(one["resources"]) - {"MEMORY_MB", "DISK_GB"} for one in requested for uuid, one in one.items()}
    assert classes == dict(zip(here.uuids, ({"PCPU"}, {"VCPU"}, {"PCPU"}), strict=True))


async def test_a_group_with_pinned_cpus_stays_together_on_a_host_without_pins() -> None:
    here = await pinning(OF_PINS, PLENTY)
    answer = await here.select(*VMS[:2], instance_group=group("affinity", VMS[:2]), **PINNED)
    assert [hosts[0] for hosts in hosts_of(answer)] == ["h1", "h1"]


# --- server groups


async def test_a_cell_that_the_settings_do_not_name_is_noticed() -> None:
    """Nova's API names no cells, so that a wrong uuid in `nova.api.cells` is first seen by a server that moves."""
    here = await cloud(1)
    for named, events in ((CELLS[0], []), (CELLS[1], ["nova.cell_unknown"])):
        cell = versioned("CellMapping", "1.1", {"uuid": named})
        with capture_logs() as lines, contextlib.suppress(RemoteFault):
            await here.select(VMS[0], requested_destination=destination(cell=cell))
        assert [one["event"] for one in lines if one["log_level"] == "warning"] == events


async def test_members_that_berth_never_claimed_keep_their_hosts_to_themselves() -> None:
    here = await cloud(3)
    await here.hold(VMS[8], 0)
    await here.hold(VMS[9], 1)
    apart = group("anti-affinity", [VMS[8], VMS[9], VMS[0]])
    assert hosts_of(await here.select(VMS[0], instance_group=apart)) == [["h2"]]
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[1], run="other", instance_group=apart)
    assert "server group" in caught.value.message
    together = group("affinity", [VMS[8], VMS[2]])
    assert hosts_of(await here.select(VMS[2], run="third", instance_group=together)) == [["h0"]]


async def test_members_beyond_those_that_one_question_may_name_count() -> None:
    here = await cloud(3)
    await here.hold(VMS[8], 2)
    (hosts,) = hosts_of(await here.select(VMS[0], instance_group=group("soft-affinity", [*MANY, VMS[8]])))
    assert hosts[0] == "h2"
    assert hosts_of(await here.select(VMS[1], instance_group=group("affinity", [*MANY, VMS[8]]))) == [["h2"]]
    assert len(here.claims.submitted) == 2, "no claim is lost to the rule"
    assert all(len(one.consumers) <= MAX_NAMED for one in here.claims.located)


async def test_a_group_on_two_hosts_takes_a_member_on_either() -> None:
    """As stock does: after an evacuation, or a forced move."""
    here = await cloud(3)
    await here.hold(VMS[8], 0)
    await here.hold(VMS[9], 1)
    together = group("affinity", [VMS[8], VMS[9]])
    (hosts,) = hosts_of(await here.select(VMS[0], instance_group=together))
    assert sorted(hosts) == ["h0", "h1"]


async def test_members_booted_at_once_by_several_fronts_stay_apart() -> None:
    here = await cloud(4)
    apart = group("anti-affinity", VMS[:4])
    answers = await asyncio.gather(
        *(here.select(vm, run=f"r{n}", front=here.front(), instance_group=apart) for n, vm in enumerate(VMS[:4]))
    )
    assert sorted(hosts_of(answer)[0][0] for answer in answers) == ["h0", "h1", "h2", "h3"]


@pytest.mark.parametrize("free", [0, 1, 2, None])
async def test_a_group_that_stays_together_goes_on_from_a_host_that_is_full_by_now(free: int | None) -> None:
    """The replica does not know yet what others have claimed."""
    here = await cloud(3, each={**PLENTY, "VCPU": 2})
    for at in {0, 1, 2} - {free}:
        write = ConsumerWrite(VMS[20 + at], {here.uuids[at]: {"VCPU": 1}}, "p", "u", "INSTANCE", None)
        assert await here.claims.placement.write_allocations([Replace((write,))]) == [None]
    answer = here.select(*VMS[:2], instance_group=group("affinity", VMS[:2]))
    if free is None:
        with pytest.raises(RemoteFault) as caught:
            await answer
        assert caught.value.class_name == "NoValidHost"
    else:
        assert {hosts[0] for hosts in hosts_of(await answer)} == {f"h{free}"}
    assert len(here.claims.submitted) <= 2 * 3, "each host is claimed once for each"


# --- evacuations


async def test_an_evacuation_holds_its_source_beside_its_new_host() -> None:
    here = await cloud(3)
    await here.hold(VMS[0], 0)
    (hosts,) = hosts_of(await here.select(VMS[0], ignore_hosts=["h0"]))
    assert "h0" not in hosts
    assert await here.held(VMS[0]) == [0, int(hosts[0][1:])]
    (again,) = hosts_of(await here.select(VMS[0], ignore_hosts=["h0"]))
    assert again[0] == hosts[0], "delivered again it adopts the new host alone"
    assert await here.held(VMS[0]) == [0, int(hosts[0][1:])]


async def test_an_evacuation_without_a_host_leaves_what_is_held() -> None:
    here = await cloud(1)
    await here.hold(VMS[0], 0)
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0], ignore_hosts=["h0"])
    assert caught.value.class_name == "NoValidHost"
    assert await here.held(VMS[0]) == [0]


# --- a host that is down


def is_down(host: str, number: int = 1) -> ServiceStates:
    """The service of this host is down, and the others are up."""
    down = ServiceDown(service=host, epoch=1, code=DOWN, reason="")
    return ServiceStates(cell=CELLS[0], term=1, number=number, down=(down,), up=2)


async def test_an_evacuation_after_another_one_adopts_its_new_host_alone() -> None:
    """The first host is still down. What the server holds there nova-compute gives back when it starts."""
    here = await cloud(3)
    here.table.apply(is_down("h0"), 1.0)
    await here.hold(VMS[0], 0)
    await here.select(VMS[0], run="call1", ignore_hosts=["h0", "h2"])
    assert hosts_of(await here.select(VMS[0], run="call2", ignore_hosts=["h1"])) == [["h2"]]
    again = await here.select(VMS[0], run="call2", ignore_hosts=["h1"], front=here.front(), redelivered=True)
    assert hosts_of(again) == [["h2"]] and await here.held(VMS[0]) == [0, 1, 2]


async def test_a_host_that_was_down_for_hours_is_forced_all_the_same() -> None:
    """As by Nova, which runs no filter then: what is claimed there is the server's, and not left behind."""
    here = await cloud(1)
    for number, now_s in enumerate((1.0, DOWN_HOLD_S + 2)):
        here.table.apply(is_down("h0", number), now_s)
    assert hosts_of(await here.select(VMS[0], force_hosts=["h0"])) == [["h0"]]
    with pytest.raises(RemoteFault):
        await here.select(VMS[1], run="call2")
    assert await here.held(VMS[1]) == []


# --- no host, and no answer


async def test_an_unknown_host_is_asked_for_before_there_is_none() -> None:
    here = await cloud(1, late={0})
    assert hosts_of(await here.select(VMS[0])) == [["h0"]]
    assert here.asked == [(here.uuids[0],)]


async def test_a_new_host_is_met_before_it_is_needed() -> None:
    here = await cloud(2, late={1})
    assert len(hosts_of(await here.select(VMS[0]))[0]) == 2
    await here.select(VMS[1], run="call2")
    assert here.asked == [(here.uuids[1],)], "once"


async def test_there_is_no_host_only_by_the_newest_state_of_the_book() -> None:
    """A root that came just now may be not in the replica yet; nor may room that was made just now."""
    here = await cloud(1, each=ONE)
    await here.select(VMS[0])
    await here.arrive(ONE)
    assert hosts_of(await here.select(VMS[1], run="call2")) == [["h1"]]
    await here.claims.placement.apply([Release(consumer=VMS[0], owner="call1")])
    assert hosts_of(await here.select(VMS[2], run="call3")) == [["h0"]]


async def test_no_answer_of_placement_is_never_no_host() -> None:
    here = await cloud()
    here.claims.unavailable = True
    with pytest.raises(PlacementUnavailable):
        await here.select(VMS[0])
    here.claims.unavailable = False
    assert await here.select(VMS[0])


@pytest.mark.parametrize("fields", [{}, {"force_hosts": ["h9"]}], ids=["it is full", "it is another one"])
async def test_there_is_no_host_by_no_older_state(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here = await cloud(1, each=ONE)
    await here.hold(VMS[0], 0)

    async def silent(*, timeout_s: float) -> bool:
        return False

    monkeypatch.setattr(here, "refresh", silent)
    with pytest.raises(PlacementUnavailable):
        await here.select(VMS[1], **fields)
    monkeypatch.undo()
    with pytest.raises(RemoteFault):
        await here.select(VMS[1], **fields)


async def test_a_host_that_is_to_be_ignored_is_asked_for_before_it_can_be_chosen() -> None:
    here = await cloud(2, late={1})
    here.deaf = True
    await here.select(VMS[0])
    here.deaf = False
    assert hosts_of(await here.select(VMS[1], run="call2", ignore_hosts=["h1"])) == [["h0"]]
    assert len(here.asked) == 2


async def test_hints_of_filters_that_are_not_enabled_are_ignored() -> None:
    here = await cloud(nova=NovaConfig())
    hints = {"same_host": MANY, "different_host": [VMS[9]], "query": ["[]"], "cidr": ["/24"]}
    assert await here.select(VMS[0], scheduler_hints=hints)
    assert here.claims.located == []
    here = await cloud(nova=NovaConfig(enabled_filters=("ComputeFilter", "JsonFilter")))
    with pytest.raises(NotDecided):
        await here.select(VMS[0], scheduler_hints={"query": ["[]"]})


async def test_every_call_is_left_to_the_fallback_while_a_filter_is_lacking() -> None:
    here = await cloud()
    here.lacking = ("IoOpsFilter",)
    here.destinations = here.front()
    with pytest.raises(NotDecided) as left:
        await here.select(VMS[0])
    assert left.value.reason == "filter"
    here.lacking = ()
    here.destinations = here.front()
    assert await here.select(VMS[0])


async def test_every_call_is_left_to_the_fallback_while_a_cells_database_is_away() -> None:
    """Only if a filter reads it; where there is no fallback, that filter rejects the cell's hosts."""
    counting = NovaConfig(enabled_filters=("ComputeFilter", "NumInstancesFilter"), fallback_url="amqp://stock")
    here = await cloud(nova=counting)
    here.outdated = (CELLS[0],)
    with pytest.raises(NotDecided) as left:
        await here.select(VMS[0])
    assert left.value.reason == "host_facts"
    here = await cloud(nova=replace(counting, fallback_url=""))
    here.outdated = (CELLS[0],)
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0])
    assert caught.value.class_name == "NoValidHost"
    here = await cloud(nova=replace(counting, enabled_filters=("ComputeFilter",)))
    here.outdated = (CELLS[0],)
    assert await here.select(VMS[0])


async def test_hosts_that_are_chosen_count_until_their_rows_do() -> None:
    rows = [HostHardware(host=f"h{at}", nodename=f"h{at}.local") for at in range(3)]
    here = await cloud(rows=rows)
    answer = await here.select(*VMS[:2])
    counts = {f"h{at}": here.in_flight.count(uuid) for at, uuid in enumerate(here.uuids)}
    assert {host for host, count in counts.items() if count} == {one[0] for one in hosts_of(answer)}
    assert sum(counts.values()) == 2
    here = await cloud(rows=rows, nova=NovaConfig(shadow=True))
    await here.select(VMS[0])
    assert not any(map(here.in_flight.count, here.uuids)), "another scheduler chooses"


async def test_images_are_isolated_on_hosts() -> None:
    enabled = NovaConfig(enabled_filters=("ComputeFilter", "IsolatedHostsFilter"))
    here = await cloud(nova=enabled, settings={"isolated_images": (VMS[8],), "isolated_hosts": ("h1",)})
    for at, (named, expected) in enumerate(((VMS[8], {"h1"}), (VMS[9], {"h0", "h2"}))):
        answer = await here.select(VMS[at], run=f"call{at}", image=versioned("ImageMeta", "1.8", {"id": named}))
        assert set(hosts_of(answer)[0]) <= expected
    with pytest.raises(RemoteFault):
        await here.select(VMS[0], image=versioned("ImageMeta", "1.8", {"id": VMS[9]}), **REBUILD)
    assert await here.select(VMS[0], image=versioned("ImageMeta", "1.8", {"id": VMS[8]}), **REBUILD)


async def test_a_call_that_has_claimed_is_not_left_to_the_fallback() -> None:
    """The frontend that had claimed for it was killed, and this one has a filter that is lacking: a stock
    nova-scheduler claimed a second host beside the first.
    """
    here = await cloud()
    await here.select(VMS[0])
    held = await here.held(VMS[0])
    here.lacking = ("IoOpsFilter",)
    front = here.front()
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0], front=front)
    assert caught.value.class_name == "NoValidHost" and await here.held(VMS[0]) == held
    with pytest.raises(NotDecided):
        await here.select(VMS[0], run="call2", front=front)  # as after a move: what it holds is of another call


async def test_a_call_that_may_have_claimed_is_not_left_to_the_fallback() -> None:
    here = await cloud()
    here.lacking = ("IoOpsFilter",)
    here.claims.unavailable = True
    with pytest.raises(PlacementUnavailable):
        await here.select(VMS[0], front=here.front())


def image(**properties: Any) -> Primitive:
    """ImageMeta 1.8."""
    return versioned("ImageMeta", "1.8", {"properties": versioned("ImageMetaProps", "1.40", properties)})


ARCHITECTURES = [
    ComputeNode(uuid="", host="", nodename="", hypervisor_type="QEMU", hypervisor_version=version, cpu_info=info)
    for version, info in ((8_002_000, {"arch": "x86_64"}), (7_000_000, {"arch": "aarch64"}))
]


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, {"h0", "h1"}),
        ({"hw_architecture": "aarch64"}, {"h1"}),
        ({"hw_architecture": "i686"}, {"h0"}),
        ({"hw_architecture": "s390x"}, set()),
        ({"img_hv_type": "kvm"}, {"h0", "h1"}),
        ({"img_hv_type": "vmware"}, set()),
        ({"hw_vm_mode": "exe"}, set()),
        ({"img_hv_type": "kvm", "img_hv_requested_version": ">=8.2, <9"}, {"h0"}),
        ({"img_hv_type": "kvm", "img_hv_requested_version": "!=8.2"}, {"h1"}),
        ({"img_hv_type": "kvm", "img_hv_requested_version": "about 8"}, set()),
        ({"img_hv_requested_version": ">=9"}, {"h0", "h1"}),
    ],
)
async def test_only_hosts_that_run_the_image(properties: dict[str, str], expected: set[str]) -> None:
    here = await cloud(2, nova=NovaConfig(), told=ARCHITECTURES)
    if expected:
        assert set(hosts_of(await here.select(VMS[0], image=image(**properties)))[0]) == expected
    else:
        with pytest.raises(RemoteFault) as caught:
            await here.select(VMS[0], image=image(**properties))
        assert "do not support the image's properties" in caught.value.message
    stays = here.select(VMS[1], image=image(**properties), **REBUILD)
    if "h1" in expected:
        assert hosts_of(await stays) == [["h1"]]
    else:
        with pytest.raises(RemoteFault):
            await stays


async def test_an_architecture_that_images_have_by_default() -> None:
    here = await cloud(2, nova=NovaConfig(image_properties_default_architecture="aarch64"), told=ARCHITECTURES)
    assert hosts_of(await here.select(VMS[0])) == [["h1"]]
    assert hosts_of(await here.select(VMS[1], run="call2", image=image(hw_architecture="x86_64"))) == [["h0"]]


async def test_an_architecture_that_no_processor_has_may_be_emulated() -> None:
    here = await cloud(2, nova=NovaConfig(fallback_url="amqp://stock"), told=ARCHITECTURES)
    here.facts.put_nodes(
        [replace(one, uuid=uuid) for one, uuid in zip(ARCHITECTURES, VMS, strict=False)], complete=True
    )
    with pytest.raises(NotDecided):
        await here.select(VMS[0], image=image(hw_architecture="s390x"))
    assert await here.select(VMS[0], image=image(hw_architecture="i686"))


REBUILD = {"scheduler_hints": {"_nova_check_type": ["rebuild"]}, "force_hosts": ["h1"], "force_nodes": ["h1.local"]}


async def test_a_rebuild_is_checked_on_its_host_and_claims_nothing() -> None:
    here = await cloud()
    answer = await here.select(VMS[0], **REBUILD)
    assert hosts_of(answer) == [["h1"]]
    assert answer[0][0]["nova_object.data"]["allocation_request"] == "null"
    assert await here.held(VMS[0]) == []
    with pytest.raises(RemoteFault) as caught:
        await here.select(VMS[0], image=image(traits_required=["CUSTOM_MAGIC"]), **REBUILD)
    assert caught.value.class_name == "NoValidHost"


# --- hostile calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, SpecRefused),
        ({"spec_obj": 1}, SpecRefused),
        ({"spec_obj": request_spec(), "instance_uuids": [1]}, SpecRefused),
        ({"spec_obj": request_spec(), "instance_uuids": []}, SpecRefused),
        ({"spec_obj": request_spec(), "instance_uuids": ["x" * 36]}, SpecRefused),
        ({"spec_obj": request_spec(), "instance_uuids": VMS[:1] * 1001}, SpecRefused),
        ({"spec_obj": request_spec(project_id="a b"), "instance_uuids": VMS[:1]}, NotDecided),
        ({"spec_obj": request_spec(user_id="jane.doe@example.org"), "instance_uuids": VMS[:1]}, NotDecided),
        ({"spec_obj": request_spec(project_id=None), "instance_uuids": VMS[:1]}, SpecRefused),
        ({"spec_obj": request_spec(), "instance_uuids": None}, NotDecided),
        ({"spec_obj": request_spec(instance_group=group("odd", [])), "instance_uuids": VMS[:1]}, NotDecided),
        ({"spec_obj": request_spec(instance_group=group("affinity", ["x"])), "instance_uuids": VMS[:1]}, SpecRefused),
        (
            {
                "spec_obj": request_spec(instance_group=group("anti-affinity", [], max_server_per_host="x")),
                "instance_uuids": VMS[:1],
            },
            NotDecided,
        ),
        ({"spec_obj": request_spec(scheduler_hints={"same_host": MANY}), "instance_uuids": VMS[:1]}, NotDecided),
    ],
)
async def test_what_is_no_request_is_refused_and_claims_nothing(
    arguments: dict[str, Any], expected: type[Fault | NotDecided]
) -> None:
    here = await cloud()
    with pytest.raises(expected):
        await here.destinations.call(Call(method="select_destinations", arguments=arguments, unique_id="r", **ASKED))
    assert here.claims.submitted == []


async def test_casts_go_to_the_facts_and_other_methods_nowhere() -> None:
    here = await cloud()
    await here.destinations.call(Call(method="update_aggregates", fanout=True))
    assert here.casts == ["update_aggregates"]
    with pytest.raises(RemoteFault) as caught:
        await here.destinations.call(Call(method="run_instance", **ASKED))
    assert caught.value.class_name == "NoSuchMethod"


@pytest.mark.parametrize("asked", [{}, {**ASKED, "fanout": True}], ids=["cast", "to_each_server"])
async def test_nothing_is_claimed_for_a_call_that_nobody_answers(asked: dict[str, Any]) -> None:
    here = await cloud()
    arguments = {"spec_obj": request_spec(), "instance_uuids": VMS[:1]}
    with pytest.raises(RemoteFault) as caught:
        await here.destinations.call(Call(method="select_destinations", arguments=arguments, unique_id="r", **asked))
    assert caught.value.class_name == "NoSuchMethod" and here.claims.submitted == []
